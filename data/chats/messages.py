"""The types of a conversation, and which text may stand in one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from data.chats.policy import RowRejected

# Some scanners mark places in a text with these two noncharacters (see data.masks.render), so no text may hold them.
NONCHARACTERS = ("\ufdd0", "\ufdd1")


@dataclass(frozen=True)
class ToolCall:
    """A call of a tool by the assistant. id: what its result refers to, "" if not said."""

    name: str
    arguments: Mapping[str, Any]
    id: str = ""


@dataclass(frozen=True)
class Message:
    """One turn. ``role`` is ``system``, ``user``, ``assistant`` or ``tool``.

    supervised: false for an answer that the data says not to train on, or that calls tools, and for tool results.
    ended: false for an answer cut off at a token limit, which has no end-of-turn token of its own.
    tool_calls: of an assistant turn. name: the tool that a tool turn is the result of, "" if not said.
    call_id: the id of that call, "" if not said. reasoning: of an assistant turn, if the data has it in its own field.
    """

    role: str
    content: str
    supervised: bool = True
    ended: bool = True
    tool_calls: tuple[ToolCall, ...] = ()
    name: str = ""
    call_id: str = ""
    reasoning: str = ""

    @property
    def is_answer(self) -> bool:
        """An assistant turn that speaks to the user, not to a tool."""
        return self.role == "assistant" and not self.tool_calls


@dataclass(frozen=True)
class Conversation:
    """Turns in order: perhaps a system prompt, then from a user turn to an answer.

    User and assistant take turns; between them may stand tool-calling assistant turns, each followed by its results.
    """

    id: str
    messages: tuple[Message, ...]
    source_file: str
    row: int
    tools: tuple[Mapping[str, Any], ...] = ()  # {"type": "function", "function": {...}}, as chat templates take them

    @property
    def source(self) -> str:
        """``file:row:id``, for messages."""
        return f"{self.source_file}:{self.row}:{self.id}"


def checked(text: str) -> str:
    """The text itself. Raises RowRejected if it is not clean Unicode."""
    if "\x00" in text:
        raise RowRejected("nul_character", f"character {text.index(chr(0))}")
    if text.isascii():  # known without a look at the characters
        return text
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise RowRejected("invalid_unicode", f"lone surrogate at character {error.start}") from None
    if any(mark in text for mark in NONCHARACTERS):
        raise RowRejected("invalid_unicode", "a noncharacter U+FDD0 or U+FDD1")
    return text


def kind(value: Any) -> str:
    """What a value is, in JSON's words."""
    names = {dict: "an object", list: "a list", str: "text", bool: "a boolean", int: "a number", float: "a number"}
    return "null" if value is None else names.get(type(value), type(value).__name__)
