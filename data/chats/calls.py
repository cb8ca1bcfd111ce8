"""Tool calls and tools of a row, in OpenAI's and ShareGPT's layout, and which result belongs to which call."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from data.chats.messages import Message, ToolCall, checked, kind
from data.chats.policy import RowRejected


def calls_of(value: Any) -> tuple[ToolCall, ...]:
    """One call or a list of calls, as objects or JSON text: ``{"name", "arguments"}``, bare or under ``function``.

    Raises RowRejected if there is no call, or one without a name or with arguments that are no object.
    """
    value = _json(value, "bad_tool_call", "a tool call")
    items = value if isinstance(value, list | tuple) else [value]
    if not items:
        raise RowRejected("bad_tool_call", "an empty list of tool calls")
    return tuple(_call(item) for item in items)


def tools_of(value: Any) -> tuple[Mapping[str, Any], ...]:
    """The tools column: a list of function objects, bare or wrapped as chat templates take them, or JSON text of it.

    Raises RowRejected.
    """
    if value is None or (isinstance(value, str) and not value.strip()):
        return ()
    value = _json(value, "bad_tools", "the tools column")
    if value is None:
        return ()
    items = value if isinstance(value, list | tuple) else [value]
    tools = tuple(_tool(_json(item, "bad_tools", "a tool")) for item in items)
    _check_texts(tools)
    return tools


def merge_calls(messages: Sequence[Message]) -> list[Message]:
    """One assistant turn out of a text and the calls after it, and out of calls in a row (parallel calls)."""
    merged: list[Message] = []
    for message in messages:
        before = merged[-1] if merged else None
        if before is None or not message.tool_calls or before.role != "assistant" or not before.ended:
            merged.append(message)
            continue
        texts = [text for text in (before.content, message.content) if text.strip()]
        calls = before.tool_calls + message.tool_calls
        reasoning = before.reasoning or message.reasoning
        merged[-1] = replace(message, content="\n\n".join(texts), tool_calls=calls, reasoning=reasoning)
    return merged


def pair_results(messages: Sequence[Message]) -> list[Message]:
    """Tool results in the order of their calls where ids tell it, each with the name of its tool.

    Raises RowRejected for a result without a call, a call without any result, and an id that no call has.
    """
    paired: list[Message] = []
    place = 0
    while place < len(messages):
        message = messages[place]
        if message.role == "tool":
            raise RowRejected("tool_result_without_call", f"turn {place}")
        paired.append(message)
        place += 1
        if message.tool_calls:
            stop = place
            while stop < len(messages) and messages[stop].role == "tool":
                stop += 1
            paired += _results(message.tool_calls, messages[place:stop], place)
            place = stop
    return paired


def _results(calls: tuple[ToolCall, ...], results: Sequence[Message], place: int) -> list[Message]:
    if not results:
        raise RowRejected("tool_call_without_result", f"turn {place - 1}")
    if len(results) > len(calls):
        raise RowRejected("tool_result_without_call", f"turn {place + len(calls)}: more results than calls")
    numbers = {call.id: number for number, call in enumerate(calls) if call.id}
    if len(numbers) < len(calls) or any(not result.call_id for result in results):  # ids don't tell: by position
        pairs = list(zip(results, calls, strict=False))
    else:
        unknown = next((result.call_id for result in results if result.call_id not in numbers), None)
        if unknown is not None:
            raise RowRejected("tool_result_without_call", f"turn {place}: no call has the id {unknown[:60]!r}")
        ordered = sorted(results, key=lambda result: numbers[result.call_id])
        pairs = [(result, calls[numbers[result.call_id]]) for result in ordered]
    return [result if result.name else replace(result, name=call.name) for result, call in pairs]


def _call(item: Any) -> ToolCall:
    item = _json(item, "bad_tool_call", "a tool call")
    if not isinstance(item, dict):
        raise RowRejected("bad_tool_call", f"expected an object, found {kind(item)}")
    function = item["function"] if isinstance(item.get("function"), dict) else item
    name, arguments = function.get("name"), function.get("arguments", function.get("parameters"))
    if not isinstance(name, str) or not name.strip():
        raise RowRejected("bad_tool_call", "a call without a name")
    if arguments is None or (isinstance(arguments, str) and not arguments.strip()):
        arguments = {}
    arguments = _json(arguments, "bad_tool_call", f"the arguments of {name[:60]}")
    if not isinstance(arguments, dict):
        raise RowRejected("bad_tool_call", f"the arguments of {name[:60]} are {kind(arguments)}, not an object")
    _check_texts([name, arguments])
    return ToolCall(name, arguments, str(item.get("id") or ""))


def _tool(item: Any) -> Mapping[str, Any]:
    if isinstance(item, dict) and isinstance(item.get("function"), dict):
        item = item["function"]
    if not isinstance(item, dict) or not isinstance(item.get("name"), str):
        raise RowRejected("bad_tools", f"expected a function object with a name, found {kind(item)}")
    return {"type": "function", "function": item}


def _json(value: Any, reason: str, what: str) -> Any:
    """The value, decoded if it is JSON text."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value, strict=False)
    except (ValueError, RecursionError) as error:
        raise RowRejected(reason, f"{what} is not JSON: {error}") from None


def _check_texts(value: Any) -> None:
    """Every text inside must be clean Unicode; raises RowRejected."""
    rest = [value]  # a loop, since values may be nested as deeply as the JSON reader allows
    while rest:
        item = rest.pop()
        if isinstance(item, str):
            checked(item)
        elif isinstance(item, dict):
            rest += [*item.keys(), *item.values()]
        elif isinstance(item, list | tuple):
            rest += item
