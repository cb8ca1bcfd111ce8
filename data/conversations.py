"""Conversations out of raw rows: columns, roles, contents and the policy for every irregular row, in one place.

ShareGPT (``conversations`` of from/value) and OpenAI style (``messages`` of role/content) in any mix. What is
repaired and what is rejected, and under which name, is listed in `data.rejects`; this module does it:

* leading assistant turns and trailing user turns are left out; consecutive user turns are joined by a blank line;
* the system prompt comes first: a top-level ``system``, then leading system turns, joined by a blank line;
* a system turn further down, two answers in a row, empty turns, tool turns, unknown roles and text that is not
  clean Unicode reject the row.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from data.policy import RowRejected
from data.rejects import Reject, RejectLog
from data.rows import Row, read_rows
from models.errors import EyasError

__all__ = ["Conversation", "Message", "Reject", "RejectLog", "conversation_of", "read_conversations", "role_table"]

ROLES = ("system", "user", "assistant", "tool")
ALIASES = {
    "system": ("system", "developer"),
    "user": ("user", "human", "prompter"),
    "assistant": ("assistant", "gpt", "chatgpt", "bot", "bard", "bing", "model", "ai"),
    "tool": ("tool", "function", "function_call", "observation", "tool_call", "tool_calls", "tool_response"),
}
COLUMNS = ("conversations", "messages", "conversation")
ROLE_KEYS = ("role", "from")
TEXT_KEYS = ("content", "value")
REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
WEIGHT_KEYS = ("loss_weight", "weight", "loss", "train")  # 0 or false: this answer is not trained on
ID_KEYS = ("id", "conversation_id", "conv_id", "uuid")
# Some scanners mark places in a text with these two noncharacters (see data.render), so no text may hold them.
NONCHARACTERS = ("\ufdd0", "\ufdd1")


@dataclass(frozen=True)
class ToolCall:
    """A call of a tool by the assistant."""

    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True)
class Message:
    """One turn. ``role`` is one of ROLES.

    supervised: false for an answer that the data says not to train on, or that calls tools.
    ended: false for an answer cut off at a token limit, which has no end-of-turn token of its own.
    tool_calls: of an assistant turn. name: the tool that a tool turn is the result of, "" if not said.
    """

    role: str
    content: str
    supervised: bool = True
    ended: bool = True
    tool_calls: tuple[ToolCall, ...] = ()
    name: str = ""


@dataclass(frozen=True)
class Conversation:
    """Turns in order: perhaps a system prompt, then user and assistant in turn, ending with an answer."""

    id: str
    messages: tuple[Message, ...]
    source_file: str
    row: int
    tools: tuple[Mapping[str, Any], ...] = ()  # {"type": "function", "function": {...}}, as chat templates take them

    @property
    def source(self) -> str:
        """``file:row:id``, for messages."""
        return f"{self.source_file}:{self.row}:{self.id}"


def role_table(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """Alias in lower case -> role; ``extra`` (``data.roles``) adds to or overrides the built-in aliases."""
    table = {alias: role for role, aliases in ALIASES.items() for alias in aliases}
    for alias, role in (extra or {}).items():
        if role not in ROLES:
            raise EyasError(f"data.roles.{alias}={role}: must be one of {', '.join(ROLES)}")
        table[alias.strip().lower()] = role
    return table


def read_conversations(
    paths: str | Path | Iterable[str | Path],
    *,
    roles: Mapping[str, str] | None = None,
    split: str = "train",
    rejects: RejectLog,
    key: str = "data.path",
) -> Iterator[Conversation]:
    """Usable conversations of the given files, folders or `datasets` names, streaming, in order.

    Every row is counted in ``rejects``: either yielded, or listed there under a named reason. EyasError only where
    no row can be told from another (missing file, wrong top level, broken JSON in the middle of an array).
    """
    table = role_table(roles)
    for row in read_rows(paths, split=split, key=key):
        rejects.rows += 1
        try:
            if row.problem:
                raise RowRejected(row.problem, row.detail)
            conversation, repairs = conversation_of(row, table)
        except RowRejected as rejected:
            rejects.add(row.file, row.row, _id_of(row.value), rejected.reason, rejected.detail)
            continue
        for repair in repairs:
            rejects.repair(repair)
        yield conversation


def conversation_of(row: Row, roles: Mapping[str, str]) -> tuple[Conversation, list[str]]:
    """The conversation of a raw row and the names of the repairs made. Raises RowRejected."""
    if not isinstance(row.value, dict):
        raise RowRejected("not_an_object", f"expected an object, found {_kind(row.value)}")
    messages, repairs = _messages(row.value, roles)
    system, messages, more = _lift_system(row.value, messages)
    repairs += more + (["tools_ignored"] if row.value.get("tools") not in (None, "", "[]", []) else [])
    messages, reordered = _order_turns(messages)
    conversation = Conversation(_id_of(row.value), (*system, *messages), row.file, row.row)
    return conversation, list(dict.fromkeys(repairs + reordered))


# --- columns and turns -------------------------------------------------------------------------------------------


def _messages(row: dict[str, Any], roles: Mapping[str, str]) -> tuple[list[Message], list[str]]:
    """The turns as they stand, roles mapped and contents made text."""
    found = [column for column in COLUMNS if row.get(column) is not None]
    if not found:
        if _first(row, ROLE_KEYS) is not None and _first(row, TEXT_KEYS) is not None:
            raise RowRejected("bare_turn", "expected an object with a list of turns, found one turn")
        raise RowRejected("no_conversation_column", f"found the keys {', '.join(map(str, list(row)[:8])) or 'none'}")
    repairs: list[str] = []
    versions = []
    for column in found:
        turns = row[column]
        if not isinstance(turns, list | tuple):
            raise RowRejected("bad_turn", f"{column}: expected a list of turns, found {_kind(turns)}")
        versions.append([_message(turn, f"{column}[{i}]", roles, repairs) for i, turn in enumerate(turns)])
    if any(version != versions[0] for version in versions[1:]):
        raise RowRejected("columns_disagree", " and ".join(found))
    if not versions[0]:
        raise RowRejected("empty_conversation", found[0])
    return versions[0], repairs


def _message(turn: Any, place: str, roles: Mapping[str, str], repairs: list[str]) -> Message:
    if not isinstance(turn, dict):
        raise RowRejected("bad_turn", f"{place}: expected an object, found {_kind(turn)}")
    name = _only(turn, ROLE_KEYS, place)
    if not isinstance(name, str):
        raise RowRejected("bad_turn", f"{place}: no role (keys {', '.join(map(str, list(turn)[:8])) or 'none'})")
    role = roles.get(name.strip().lower())
    if role is None:
        raise RowRejected("unknown_role", f"{place}: role {name[:60]!r}")
    if role == "tool" or turn.get("tool_calls"):
        raise RowRejected("tool_turns", f"{place}: role {name[:60]!r}")
    text = _text(_only(turn, TEXT_KEYS, place), place)
    reasoning = _first(turn, REASONING_KEYS)
    if role == "assistant" and isinstance(reasoning, str) and reasoning.strip():
        text = f"<think>\n{_clean(reasoning, place).strip()}\n</think>\n\n{text}"
        repairs.append("reasoning_folded")
    return Message(role, text, supervised=_first(turn, WEIGHT_KEYS) not in (0, False))


def _text(content: Any, place: str) -> str:
    """Text of a content: a string, null (empty) or a list of text parts."""
    if content is None:
        return ""
    if isinstance(content, str):
        return _clean(content, place)
    if not isinstance(content, list | tuple):
        raise RowRejected("bad_content", f"{place}: expected text, found {_kind(content)}")
    return "".join(_clean(_part(part, place), place) for part in content)


def _part(part: Any, place: str) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, dict):
        raise RowRejected("bad_content", f"{place}: expected a text part, found {_kind(part)}")
    if part.get("type", "text") != "text":
        raise RowRejected("non_text_part", f"{place}: a part of type {str(part['type'])[:60]!r}")
    text = _first(part, ("text", *TEXT_KEYS))
    if not isinstance(text, str):
        raise RowRejected("bad_content", f"{place}: a text part without text")
    return text


def _clean(text: str, place: str) -> str:
    if "\x00" in text:
        raise RowRejected("nul_character", f"{place}: character {text.index(chr(0))}")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise RowRejected("invalid_unicode", f"{place}: lone surrogate at character {error.start}") from None
    if any(mark in text for mark in NONCHARACTERS):
        raise RowRejected("invalid_unicode", f"{place}: a noncharacter U+FDD0 or U+FDD1")
    return text


# --- order of turns ----------------------------------------------------------------------------------------------


def _lift_system(row: dict[str, Any], messages: list[Message]) -> tuple[list[Message], list[Message], list[str]]:
    """(system prompt: none or one turn, the other turns, repairs)."""
    lead = 0
    while lead < len(messages) and messages[lead].role == "system":
        lead += 1
    for turn in messages[lead:]:
        if turn.role == "system":
            raise RowRejected("system_in_middle")
    given = [_text(row["system"], "system")] if row.get("system") is not None else []
    given += [message.content for message in messages[:lead]]
    texts = list(dict.fromkeys(text for text in given if text.strip()))
    repairs = ["empty_system_dropped"] if any(not text.strip() for text in given) else []
    repairs += ["system_turns_joined"] if len(texts) > 1 else []
    system = [Message("system", "\n\n".join(texts))] if texts else []
    return system, messages[lead:], repairs


def _order_turns(messages: list[Message]) -> tuple[list[Message], list[str]]:
    """User and assistant in turn, from a user to an answer."""
    repairs: list[str] = []
    first = next((i for i, message in enumerate(messages) if message.role == "user"), None)
    last = next((i for i, message in reversed(list(enumerate(messages))) if message.role == "assistant"), None)
    if first is None:
        raise RowRejected("no_user_turn" if last is not None else "no_assistant_turn")
    if last is None or last < first:
        raise RowRejected("no_assistant_turn")
    if first > 0:
        repairs.append("leading_assistant_dropped")
    if last + 1 < len(messages):
        repairs.append("trailing_user_dropped")
    ordered: list[Message] = []
    for place, message in enumerate(messages[first : last + 1], start=first):
        if not message.content.strip():
            raise RowRejected("empty_turn", f"turn {place} ({message.role})")
        if ordered and ordered[-1].role == message.role:
            if message.role == "assistant":
                raise RowRejected("consecutive_assistant", f"turn {place}")
            ordered[-1] = replace(ordered[-1], content=f"{ordered[-1].content}\n\n{message.content}")
            repairs.append("user_turns_joined")
        else:
            ordered.append(message)
    return ordered, repairs


# --- small helpers -----------------------------------------------------------------------------------------------


def _first(mapping: Mapping[str, Any], keys: Iterable[str]) -> Any:
    return next((mapping[key] for key in keys if mapping.get(key) is not None), None)


def _only(turn: Mapping[str, Any], keys: tuple[str, str], place: str) -> Any:
    """The value under one of two keys that mean the same; both may be there if they agree."""
    one, other = turn.get(keys[0]), turn.get(keys[1])
    if one is not None and other is not None and one != other:
        raise RowRejected("bad_turn", f"{place}: {keys[0]} and {keys[1]} disagree")
    return one if one is not None else other


def _id_of(value: Any) -> str:
    found = _first(value, ID_KEYS) if isinstance(value, dict) else None
    return "" if found is None else str(found).encode("utf-8", "backslashreplace").decode()[:200]


def _kind(value: Any) -> str:
    """What a value is, in JSON's words."""
    names = {dict: "an object", list: "a list", str: "text", bool: "a boolean", int: "a number", float: "a number"}
    return "null" if value is None else names.get(type(value), type(value).__name__)
