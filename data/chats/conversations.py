"""Conversations out of raw rows: the policy for every irregular row, in one place.

`dialects` finds a row's raw turns whatever its columns are called, `turns` reads each of them; this module decides
what becomes of their order. What is repaired and what is rejected, under which name, is `data.chats.policy`:

* the system prompt comes first: a top-level one, then leading system turns, joined by a blank line; a system turn
  further down rejects the row;
* what precedes the first user turn and what follows the last answer is left out, and all that follows an answer cut
  off at its token limit;
* consecutive user turns are joined by a blank line; two answers in a row and empty turns reject the row;
* a text and the tool calls after it are one assistant turn, calls in a row are parallel calls. Every call needs a
  result and every result a call. Neither is ever supervised; whether they are rendered is the template's business.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from data.chats.calls import merge_calls, pair_results, tools_of
from data.chats.dialects import Dialect, Layout, id_of, layout_of
from data.chats.messages import Conversation, Message, ToolCall
from data.chats.policy import RowRejected
from data.chats.rejects import Reject, RejectLog
from data.chats.rows import Row, read_rows
from data.chats.turns import is_cut, messages_of, text_of

__all__ = [
    "Conversation",
    "Dialect",
    "Message",
    "Reject",
    "RejectLog",
    "ToolCall",
    "conversation_of",
    "id_of",
    "read_conversations",
    "turns_of",
]


def read_conversations(
    paths: str | Path | Iterable[str | Path],
    *,
    dialect: Dialect | None = None,
    split: str = "train",
    rejects: RejectLog,
    key: str = "data.path",
) -> Iterator[Conversation]:
    """Usable conversations of the given files, folders or `datasets` names, streaming, in order.

    Every row is counted in ``rejects``: either yielded, or listed there under a named reason. EyasError only where
    no row can be told from another (missing file, wrong top level, broken JSON in the middle of an array).
    """
    dialect = dialect or Dialect.of()
    for row in read_rows(paths, split=split, key=key):
        rejects.rows += 1
        try:
            conversation, repairs = conversation_of(row, dialect)
        except RowRejected as rejected:
            rejects.add(row.file, row.row, id_of(row.value, dialect), rejected.reason, rejected.detail)
            continue
        for repair in repairs:
            rejects.repair(repair)
        yield conversation


def conversation_of(row: Row, dialect: Dialect) -> tuple[Conversation, list[str]]:
    """The conversation of a raw row and the names of the repairs made. Raises RowRejected."""
    system, turns, layout, repairs = turns_of(row, dialect)
    if is_cut(layout.finish_reason):
        turns = _cut_last_answer(turns)
    turns, reordered = _order_turns(turns)
    if not any(message.is_answer and message.supervised for message in turns):
        raise RowRejected("nothing_supervised", "every answer is marked as not to be trained on")
    tools = tools_of(layout.tools)
    conversation = Conversation(id_of(row.value, dialect), (*system, *turns), row.file, row.row, tools)
    return conversation, list(dict.fromkeys(repairs + reordered))


def turns_of(row: Row, dialect: Dialect) -> tuple[list[Message], list[Message], Layout, list[str]]:
    """(system prompt: none or one turn, the other turns as they stand, the row's layout, repairs).

    Raises RowRejected.
    """
    if row.problem:
        raise RowRejected(row.problem, row.detail)
    layout = layout_of(row.value, dialect)
    repairs = ["chosen_taken"] if layout.preference else []
    versions = [messages_of(turns, column, dialect, repairs) for column, turns in layout.versions]
    if any(version != versions[0] for version in versions[1:]):
        raise RowRejected("columns_disagree", " and ".join(column for column, _ in layout.versions))
    if not versions[0]:
        raise RowRejected("empty_conversation", layout.versions[0][0])
    system, turns, more = _lift_system(layout.system, versions[0])
    return system, turns, layout, repairs + more


def _lift_system(given: Sequence[Any], messages: list[Message]) -> tuple[list[Message], list[Message], list[str]]:
    """(system prompt: none or one turn, the other turns, repairs)."""
    lead = 0
    while lead < len(messages) and messages[lead].role == "system":
        lead += 1
    if any(message.role == "system" for message in messages[lead:]):
        raise RowRejected("system_in_middle")
    if not given and not lead:
        return [], messages, []
    prompts = [text_of(text) for text in given] + [message.content for message in messages[:lead]]
    texts = list(dict.fromkeys(text for text in prompts if text.strip()))
    repairs = ["empty_system_dropped"] if any(not text.strip() for text in prompts) else []
    repairs += ["system_turns_joined"] if len(texts) > 1 else []
    system = [Message("system", "\n\n".join(texts))] if texts else []
    return system, messages[lead:], repairs


def _cut_last_answer(messages: list[Message]) -> list[Message]:
    """A finish reason of the whole row is that of its last answer."""
    last = max((i for i, message in enumerate(messages) if message.role == "assistant"), default=None)
    return [replace(message, ended=False) if i == last else message for i, message in enumerate(messages)]


def _order_turns(messages: list[Message]) -> tuple[list[Message], list[str]]:
    """From a user turn to an answer, user and assistant in turn, calls with their results between them."""
    calling = any(message.tool_calls or message.role == "tool" for message in messages)
    if calling:
        messages = merge_calls(messages)
    first, stop, repairs = _ends(messages)
    ordered: list[Message] = []
    for place, message in enumerate(messages[first:stop], start=first):
        if message.role in ("user", "assistant") and not message.tool_calls and not message.content.strip():
            raise RowRejected("empty_turn", f"turn {place} ({message.role})")
        before = ordered[-1] if ordered else None
        if before is None or before.role != message.role or message.role == "tool" or before.tool_calls:
            ordered.append(message)
        elif message.role == "assistant":
            raise RowRejected("consecutive_assistant", f"turn {place}")
        else:
            ordered[-1] = replace(before, content=f"{before.content}\n\n{message.content}")
            repairs.append("user_turns_joined")
    return (pair_results(ordered) if calling else ordered), repairs


def _ends(messages: Sequence[Message]) -> tuple[int, int, list[str]]:
    """(first user turn, past the last answer that counts, repairs)."""
    repairs: list[str] = []
    roles = [message.role for message in messages]
    if "user" not in roles:
        raise RowRejected("no_user_turn" if any(m.is_answer for m in messages) else "no_assistant_turn")
    first, stop = roles.index("user"), len(messages)
    if first > 0:
        repairs.append("leading_assistant_dropped")
    cut = next((place for place in range(first, stop) if not messages[place].ended), None)
    if cut is not None and cut + 1 < stop:
        stop = cut + 1
        repairs.append("turns_after_cut_dropped")
    last = stop
    while last > first and not messages[last - 1].is_answer:
        last -= 1
    if last == first:
        raise RowRejected("no_assistant_turn")
    if last < stop:
        repairs.append("trailing_turns_dropped")
    return first, last, repairs
