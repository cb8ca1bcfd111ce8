"""Turns as chat templates take them, tool calls and results included, if the template shows these by itself.

Whether it does is seen by rendering a call with a stand-in for its name, argument and result. Templates differ in what
they expect of a call (a content that is empty or none, arguments as an object or as JSON text); the first form in which
everything is shown is the one used.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any, NamedTuple

from data.chats.conversations import Message, ToolCall
from data.chats.policy import RowRejected
from data.masks.probe import stand_in
from data.masks.render import Renderer


class CallForm(NamedTuple):
    """How a template takes calls. content: of a call without text. as_text: arguments as JSON text."""

    content: str | None
    as_text: bool


FORMS = [CallForm(content, as_text) for as_text, content in product((False, True), ("", None))]


def is_plain(messages: Sequence[Message | Mapping[str, Any]]) -> bool:
    """Whether no turn calls a tool or is a result."""
    return not any(isinstance(m, Message) and (m.tool_calls or m.role == "tool") for m in messages)


def turns_of(
    messages: Sequence[Message | Mapping[str, Any]], form: CallForm | None, reasoning: str = ""
) -> list[dict[str, Any]]:
    """Turns for the template; mappings are taken as they are. ``form`` None: there are no calls. reasoning: the field
    that it goes into."""
    turns: list[dict[str, Any]] = []
    calls: list[tuple[str, ToolCall]] = []  # those of the last calling turn that have no result yet, with their ids
    made = 0
    for message in messages:
        if not isinstance(message, Message):
            turns.append(dict(message))
        elif message.tool_calls and form is not None:
            # Nine letters and digits, which is what the strictest templates ask for.
            calls = [(f"call{made + i:05d}", call) for i, call in enumerate(message.tool_calls)]
            made += len(calls)
            given = [_call(id, call, form) for id, call in calls]
            turns.append({"role": "assistant", "content": message.content or form.content, "tool_calls": given})
        elif message.role == "tool":
            id, call = _take(calls, message)
            name = message.name or call.name
            turns.append({"role": "tool", "name": name, "tool_call_id": id, "content": message.content})
        else:
            turns.append({"role": message.role, "content": message.content})
        if isinstance(message, Message) and message.reasoning:
            turns[-1][reasoning] = message.reasoning
    return turns


def find_form(render: Renderer) -> CallForm | None:
    """The form in which the template shows calls and results, None if it shows them in none."""
    result, argument = stand_in(1), stand_in(2)
    call = ToolCall(stand_in(0), {stand_in(4): argument})
    messages = [
        Message("user", "ok"),
        Message("assistant", "", supervised=False, tool_calls=(call,)),
        Message("tool", result, supervised=False, name="ok"),
        Message("assistant", "ok"),
    ]
    shown = [call.name, argument, stand_in(4), result]
    for form in FORMS:
        try:
            text = render(turns_of(messages, form)).text
        except RowRejected:
            continue
        if all(word in text for word in shown):
            return form
    return None


def offers_tools(render: Renderer) -> bool:
    """Whether the template shows the tools on offer."""
    name = stand_in(0)
    properties = {"ok": {"type": "string", "description": "ok"}}
    parameters = {"type": "object", "properties": properties, "required": ["ok"]}
    tool = {"type": "function", "function": {"name": name, "description": "ok", "parameters": parameters}}
    try:
        return name in render([{"role": "user", "content": "ok"}], True, [tool]).text
    except RowRejected:
        return False


def _call(id: str, call: ToolCall, form: CallForm) -> dict[str, Any]:
    arguments = json.dumps(call.arguments, ensure_ascii=False) if form.as_text else dict(call.arguments)
    return {"id": id, "type": "function", "function": {"name": call.name, "arguments": arguments}}


def _take(calls: list[tuple[str, ToolCall]], result: Message) -> tuple[str, ToolCall]:
    """The call that a result belongs to: by its id if it gives one, otherwise the next."""
    number = next((i for i, (_, call) in enumerate(calls) if result.call_id and call.id == result.call_id), 0)
    if not calls:
        raise RowRejected("tool_turns", "a tool result without a call")
    return calls.pop(number)
