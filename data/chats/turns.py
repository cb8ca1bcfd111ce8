"""Raw turns to messages: role, content, reasoning, tool calls, what is trained on and what was cut off."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from data.chats.calls import calls_of
from data.chats.clean import clean_html
from data.chats.dialects import ROLE_KEYS, SPOKEN_KEYS, TEXT_KEYS, Dialect
from data.chats.messages import Message, checked, kind
from data.chats.policy import RowRejected

REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
WEIGHT_KEYS = ("loss_weight", "weight", "loss", "train")  # 0 or false: this answer is not trained on
CUT = ("length", "max_tokens", "max_length")  # finish reasons of an answer that reached its token limit


def messages_of(turns: Sequence[Any], column: str, dialect: Dialect, repairs: list[str]) -> list[Message]:
    """The turns as they stand; names of repairs are appended. Raises RowRejected, naming column and turn."""
    roles = dialect.roles
    messages: list[Message] = []
    place = -1
    try:
        for place, turn in enumerate(turns):  # noqa: B007 - the except clause names it
            # Nearly all turns are a role and a text: these two keys, nothing to look up besides.
            if type(turn) is dict and len(turn) == 2 and not dialect.clean_html:
                name = turn.get("from") or turn.get("role")
                text = turn.get("value") or turn.get("content")
                if type(name) is str and type(text) is str:
                    role = roles.get(name)
                    if role == "user" or role == "assistant":
                        messages.append(Message(role, checked(text)))
                        continue
            messages += [_message(turn, dialect, repairs) for turn in _spelt_out(turn, dialect)]
    except RowRejected as rejected:
        raise RowRejected(rejected.reason, f"{column}[{place}]: {rejected.detail}") from None
    return messages


def text_of(content: Any) -> str:
    """Text of a content: a string, null (empty) or a list of text parts. Raises RowRejected."""
    if content is None:
        return ""
    if isinstance(content, str):
        return checked(content)
    if not isinstance(content, list | tuple):
        raise RowRejected("bad_content", f"expected text, found {kind(content)}")
    return "".join(checked(_part(part)) for part in content)


def is_cut(finish_reason: Any) -> bool:
    """Whether an answer with this finish reason was cut off at a token limit."""
    return isinstance(finish_reason, str) and finish_reason.lower() in CUT


def _spelt_out(turn: Any, dialect: Dialect) -> list[Any]:
    """The turn, or the turns of an exchange keyed by role: ``{"user": "hi", "assistant": "hello"}``."""
    if not isinstance(turn, dict):
        raise RowRejected("bad_turn", f"expected an object, found {kind(turn)}")
    if any(turn.get(key) is not None for key in (*ROLE_KEYS, SPOKEN_KEYS[0])):
        return [turn]
    if not turn or any(not isinstance(key, str) or dialect.role(key) is None for key in turn):
        raise RowRejected("bad_turn", f"no role (keys {', '.join(map(str, list(turn)[:8])) or 'none'})")
    return [{"role": key, "content": value} for key, value in turn.items() if value is not None]


def _message(turn: dict[str, Any], dialect: Dialect, repairs: list[str]) -> Message:
    role = _role(turn, dialect)
    content = _only(turn, TEXT_KEYS)
    if content is None:
        content = turn.get(SPOKEN_KEYS[1])
    if role == "tool_call":
        return Message("assistant", "", supervised=False, tool_calls=calls_of(content))
    text = text_of(content)
    if role == "tool":
        name, call_id = (checked(str(turn.get(key) or "")) for key in ("name", "tool_call_id"))
        return Message("tool", text, supervised=False, name=name, call_id=call_id)
    if dialect.clean_html and role != "system":
        text = _cleaned(text, repairs)
    if role != "assistant":
        return Message(role, text)
    ended = not is_cut(turn.get("finish_reason")) and turn.get("ended") not in (0, False)
    text, reasoning = _reasoning(turn, text, ended)
    calls = turn.get("tool_calls") or turn.get("function_call")
    if calls:
        return Message(role, text, supervised=False, ended=ended, tool_calls=calls_of(calls), reasoning=reasoning)
    return Message(role, text, supervised=_is_trained_on(turn), ended=ended, reasoning=reasoning)


def _cleaned(text: str, repairs: list[str]) -> str:
    try:
        cleaned = clean_html(text)
    except RecursionError:
        raise RowRejected("bad_content", "data.clean_html: elements nested too deeply") from None
    repairs += ["html_cleaned"] if cleaned != text else []
    return cleaned


def _role(turn: Mapping[str, Any], dialect: Dialect) -> str:
    names = [turn[key] for key in ROLE_KEYS if turn.get(key) is not None] or [turn[SPOKEN_KEYS[0]]]
    roles = []
    for name in names:
        if not isinstance(name, str):
            raise RowRejected("bad_turn", f"a role that is {kind(name)}, not text")
        roles.append(dialect.role(name))
        if roles[-1] is None:
            raise RowRejected("unknown_role", f"role {name[:60]!r}")
    if roles[0] is None or roles.count(roles[0]) < len(roles):
        raise RowRejected("bad_turn", f"{' and '.join(ROLE_KEYS)} disagree")
    return roles[0]


def _reasoning(turn: Mapping[str, Any], text: str, ended: bool) -> tuple[str, str]:
    """The text, and the reasoning that the turn gives in a field of its own, "" if none."""
    given = next((turn[key] for key in REASONING_KEYS if turn.get(key) is not None), None)
    reasoning = "" if isinstance(given, bool | int | float) else text_of(given)
    if not reasoning.strip() or text.lstrip().startswith("<think>"):
        return text, ""
    if not text.strip() and not ended:  # cut off before the reasoning's end: that is all of the answer
        return f"<think>\n{reasoning.strip()}", ""
    return text, reasoning


def _is_trained_on(turn: Mapping[str, Any]) -> bool:
    weights = [turn[key] for key in WEIGHT_KEYS if turn.get(key) is not None]
    if any(not isinstance(weight, bool | int | float) for weight in weights):
        raise RowRejected("bad_turn", f"a loss weight that is no number: {weights[0]!r:.60}")
    return all(weights)


def _part(part: Any) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, dict):
        raise RowRejected("bad_content", f"expected a text part, found {kind(part)}")
    if part.get("type", "text") != "text":
        raise RowRejected("non_text_part", f"a part of type {str(part['type'])[:60]!r}")
    text = next((part[key] for key in ("text", *TEXT_KEYS) if part.get(key) is not None), None)
    if not isinstance(text, str):
        raise RowRejected("bad_content", "a text part without text")
    return text


def _only(turn: Mapping[str, Any], keys: tuple[str, str]) -> Any:
    """The value under one of two keys that mean the same; both may be there if they agree."""
    one, other = turn.get(keys[0]), turn.get(keys[1])
    if one is not None and other is not None and one != other:
        raise RowRejected("bad_turn", f"{keys[0]} and {keys[1]} disagree")
    return one if one is not None else other
