"""Questions out of raw rows of any dialect: what a verifier asks, and what regeneration lets the target answer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from data.chats.conversations import RejectLog, turns_of
from data.chats.dialects import Dialect, category_of, id_of
from data.chats.policy import RowRejected
from data.chats.rows import SUFFIXES, Given, Row, read_source, sources_of


@dataclass(frozen=True)
class Questions:
    """The user turns of one row, to be asked one after the other. ``row`` counts from 1; system: "" if none."""

    id: str
    category: str
    system: str
    turns: tuple[str, ...]
    source_file: str
    row: int


def questions_of(row: Row, dialect: Dialect) -> Questions:
    """The questions of a raw row, told by their roles. Raises RowRejected.

    Answers are not needed and not looked at; a question ends where an assistant turn begins, and user turns in a row
    are one question, joined by a blank line. Tool turns can't be asked again: such a row is rejected.
    """
    system, messages, layout, _ = turns_of(row, dialect)
    if any(message.role == "tool" or message.tool_calls for message in messages):
        raise RowRejected("tool_turns", "the tools that were called here can't be called again")
    # {"turns": [...]} lists questions to be asked one after the other, not one question in several turns.
    separate = layout.versions[0][0] == "turns" and all(message.role == "user" for message in messages)
    turns: list[str] = []
    asking = False
    for place, message in enumerate(messages):
        if message.role == "user":
            if not message.content.strip():
                raise RowRejected("empty_turn", f"turn {place} (user)")
            if asking and not separate:
                turns[-1] += f"\n\n{message.content}"
            else:
                turns.append(message.content)
        asking = message.role == "user"
    if not turns:
        raise RowRejected("no_user_turn")
    return Questions(
        id_of(row.value, dialect),
        category_of(row.value, dialect),
        system[0].content if system else "",
        tuple(turns),
        row.file,
        row.row,
    )


def read_questions(
    paths: Given | Iterable[Given], *, dialect: Dialect, rejects: RejectLog, key: str, split: str = "train"
) -> Iterator[Questions]:
    """Questions of all that `data.chats.rows.read_rows` reads, and of text files (.txt: a question a line), in order.

    Every row is counted in ``rejects``: either yielded, or listed there under a named reason.
    """
    for row in _rows(paths, split, key):
        rejects.rows += 1
        try:
            yield questions_of(row, dialect)
        except RowRejected as rejected:
            rejects.add(row.file, row.row, id_of(row.value, dialect), rejected.reason, rejected.detail)


def _rows(paths: Given | Iterable[Given], split: str, key: str) -> Iterator[Row]:
    for source in sources_of(paths, key, (*SUFFIXES, ".txt")):
        if source.kind == "file" and source.name.lower().endswith(".txt"):
            yield from _lines(Path(source.name))
        else:
            yield from read_source(source, split=split, key=key)


def _lines(path: Path) -> Iterator[Row]:
    empty = True
    # Broken UTF-8 becomes lone surrogates, which the text check rejects by name.
    with path.open(encoding="utf-8-sig", errors="surrogateescape") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                empty = False
                yield Row(str(path), number, {"prompt": line.strip()})
    if empty:
        yield Row(str(path), 1, problem="empty_file")
