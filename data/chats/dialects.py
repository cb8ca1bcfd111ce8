"""The column layouts that rows come in, and the names that roles go by: a raw row to its raw turns.

Nothing is judged here but the layout; `turns` reads each raw turn, `conversations` holds the policy. The layouts, by
the first that fits:

* a list of turns under one of CONVERSATION (several such columns must agree), or a list of objects under ``turns``;
* ``turns``: a list of texts, the questions of one conversation;
* a prompt and a response under one of PROMPT, INPUT and RESPONSE, each a text or a list of turns, after the pairs of
  ``history``; a prompt alone is a question without an answer;
* ``chosen`` (of a preference pair) is a response, or the whole conversation if it holds a user turn.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from data.chats.messages import kind
from data.chats.policy import RowRejected
from models.errors import EyasError

ALIASES = {
    "system": ("system", "developer"),
    "user": ("user", "human", "prompter", "asker", "question"),
    "assistant": (
        *("assistant", "gpt", "chatgpt", "gpt4", "gpt-4", "bot", "chatbot", "bard", "bing", "gemini", "claude"),
        *("llama", "model", "ai", "answer"),
    ),
    "tool_call": ("tool_call", "tool_calls", "function_call", "function_calls"),
    "tool": ("tool", "function", "observation", "tool_response", "tool_result", "function_response", "ipython"),
}
ROLES = tuple(ALIASES)
ROLE_KEYS = ("role", "from")
TEXT_KEYS = ("content", "value")
SPOKEN_KEYS = ("speaker", "text")  # a second choice: beside the keys above they hold other things

CONVERSATION = ("conversations", "messages", "conversation", "dialogue", "dialog")
PROMPT = ("prompt", "question", "query", "instruction")
INPUT = ("input", "context")
RESPONSE = ("response", "completion", "answer", "output", "chosen")
SYSTEM = ("system", "system_prompt", "system_message")
TOOLS = ("tools", "functions")
ID = ("id", "conversation_id", "conv_id", "question_id", "uuid")
CATEGORY = ("category",)
IGNORE = "ignore"  # what data.columns calls a column that is not to be read
KNOWN = (*CONVERSATION, "turns", *PROMPT, *INPUT, "history", *RESPONSE, *SYSTEM, *TOOLS, "id", "category", IGNORE)


@dataclass(frozen=True)
class Dialect:
    """How rows are read. Made by `Dialect.of`.

    roles: role name in lower case -> one of ROLES. columns: further column name -> the known one it stands for.
    clean_html: take page furniture out of questions and answers (see `data.chats.clean`).
    """

    roles: Mapping[str, str]
    columns: Mapping[str, str]
    clean_html: bool = False

    @classmethod
    def of(
        cls, roles: Mapping[str, str] | None = None, columns: Mapping[str, str] | None = None, clean_html: bool = False
    ) -> Dialect:
        """``data.roles`` and ``data.columns`` on top of the built-in names. Raises EyasError for an unknown value."""
        table = {alias: role for role, aliases in ALIASES.items() for alias in aliases}
        for alias, role in (roles or {}).items():
            if role not in ROLES:
                raise EyasError(f"data.roles.{alias}={role}: must be one of {', '.join(ROLES)}")
            table[str(alias).strip().lower()] = role
        for name, column in (columns or {}).items():
            if column not in KNOWN:
                raise EyasError(f"data.columns.{name}={column}: must be one of {', '.join(KNOWN)}")
        return cls(table, dict(columns or {}), clean_html)

    @classmethod
    def of_section(cls, data: Mapping[str, Any]) -> Dialect:
        """:meth:`of` for the ``data`` section of the configuration as a dict."""
        return cls.of(data["roles"], data["columns"], data["clean_html"])

    def role(self, name: str) -> str | None:
        """One of ROLES, None if the name is unknown."""
        return self.roles.get(name) or self.roles.get(name.strip().lower())


@dataclass(frozen=True)
class Layout:
    """A row's raw parts. versions: (column, raw turns), at least one; all must come to the same turns."""

    versions: list[tuple[str, list[Any]]]
    system: list[Any]
    tools: Any
    finish_reason: Any  # of the last answer
    preference: bool  # the chosen one of two answers was taken


def layout_of(value: Any, dialect: Dialect) -> Layout:
    """The raw turns of a raw row. Raises RowRejected."""
    if not isinstance(value, dict):
        raise RowRejected("not_an_object", f"expected an object, found {kind(value)}")
    row = _renamed(value, dialect)
    versions = [(column, _listed(row[column], column)) for column in CONVERSATION if row.get(column) is not None]
    turns = row.get("turns")
    if isinstance(turns, list | tuple) and turns and isinstance(turns[0], dict):
        versions.append(("turns", list(turns)))
    chosen = row.get("chosen")
    if chosen is not None:
        versions = _with_chosen(versions, chosen, dialect)
    if not versions:
        versions = [_questions(row) or _exchange(row) or _no_conversation(row)]
    return Layout(
        versions,
        [row[name] for name in SYSTEM if row.get(name) is not None],
        _agreed(row, TOOLS),
        row.get("finish_reason"),
        chosen is not None,
    )


def id_of(value: Any, dialect: Dialect | None = None) -> str:
    """The id that a raw row gives itself, "" if none."""
    found = _label(value, "id", ID, dialect)
    return "" if found is None else str(found).encode("utf-8", "backslashreplace").decode()[:200]


def category_of(value: Any, dialect: Dialect) -> str:
    """The category that a raw row gives itself, without blanks around it; "" if none."""
    found = _label(value, "category", CATEGORY, dialect)
    return found.strip() if isinstance(found, str) else ""


def _label(value: Any, column: str, names: tuple[str, ...], dialect: Dialect | None) -> Any:
    """What stands under a column that says something about the row, None if nothing; ``data.columns`` goes first."""
    if not isinstance(value, dict):
        return None
    if dialect is not None and dialect.columns:
        own = [name for name, known in dialect.columns.items() if known == column]
        names = (*own, *(name for name in names if name not in dialect.columns))
    return next((value[name] for name in names if value.get(name) is not None), None)


# --- layouts -----------------------------------------------------------------------------------------------------


def _renamed(row: dict[str, Any], dialect: Dialect) -> dict[str, Any]:
    """The row with the names of ``data.columns`` replaced. Raises RowRejected if two such columns disagree."""
    if not dialect.columns:
        return row
    result: dict[str, Any] = {}
    for name, value in row.items():
        column = dialect.columns.get(name, name)
        if result.get(column) is None or column in (IGNORE, "id", "category"):  # the last two: see `_label`
            result[column] = value
        elif value is not None and value != result[column]:
            raise RowRejected("columns_disagree", f"{name} and another {column}")
    return result


def _agreed(row: Mapping[str, Any], names: Iterable[str]) -> Any:
    """The value of the columns that mean the same, None if there is none. Raises RowRejected if they disagree."""
    found = [(name, row[name]) for name in names if row.get(name) is not None]
    found = [item for item in found if item[1] != ""] or found[:1]
    if any(value != found[0][1] for _, value in found[1:]):
        raise RowRejected("columns_disagree", " and ".join(name for name, _ in found))
    return found[0][1] if found else None


def _listed(turns: Any, column: str) -> list[Any]:
    """A list of turns, also as JSON text and as the object of lists that `datasets` makes of a sequence of objects."""
    if isinstance(turns, str) and turns.lstrip()[:1] == "[":
        try:
            turns = json.loads(turns)
        except (ValueError, RecursionError) as error:
            raise RowRejected("bad_turn", f"{column}: text that is not a JSON list of turns: {error}") from None
    if isinstance(turns, dict) and turns and all(isinstance(value, list) for value in turns.values()):
        if len({len(value) for value in turns.values()}) > 1:
            raise RowRejected("bad_turn", f"{column}: an object of lists of different lengths")
        return [dict(zip(turns, values, strict=True)) for values in zip(*turns.values(), strict=True)]
    if not isinstance(turns, list | tuple):
        raise RowRejected("bad_turn", f"{column}: expected a list of turns, found {kind(turns)}")
    return list(turns)


def _with_chosen(versions: list[tuple[str, list[Any]]], chosen: Any, dialect: Dialect) -> list[tuple[str, list[Any]]]:
    """The chosen answer as a conversation of its own, or after a conversation that lacks its answer."""
    turns = _spoken("assistant", chosen)
    if any(_role_of(turn, dialect) == "user" for turn in turns):
        return [*versions, ("chosen", turns)]
    return [
        (column, asked if asked and _role_of(asked[-1], dialect) == "assistant" else asked + turns)
        for column, asked in versions
    ]


def _role_of(turn: Any, dialect: Dialect) -> str | None:
    names = [turn[key] for key in (*ROLE_KEYS, SPOKEN_KEYS[0]) if turn.get(key)] if isinstance(turn, dict) else []
    return dialect.role(names[0]) if names and isinstance(names[0], str) else None


def _questions(row: Mapping[str, Any]) -> tuple[str, list[Any]] | None:
    turns = row.get("turns")
    if not isinstance(turns, list | tuple):
        return None
    return "turns", [{"role": "user", "content": turn} if isinstance(turn, str) else turn for turn in turns]


def _exchange(row: Mapping[str, Any]) -> tuple[str, list[Any]] | None:
    """``history`` pairs, prompt and response."""
    asked, more, answer = (_agreed(row, names) for names in (PROMPT, INPUT, RESPONSE))
    if asked is None:
        asked, more = row.get("input"), None
    if asked is None:
        return None
    if isinstance(asked, str) and isinstance(more, str):
        asked = "\n\n".join(text for text in (asked, more) if text.strip())
    elif more is not None:
        raise RowRejected("bad_content", f"a prompt with a further input: expected two texts, found {kind(more)}")
    turns = _history(row.get("history")) + _spoken("user", asked)
    return "prompt", turns if answer is None else turns + _spoken("assistant", answer)


def _spoken(role: str, value: Any) -> list[Any]:
    """A column that holds what a role says: a content, one turn or a list of turns."""
    items = [value] if isinstance(value, dict) else value
    if not isinstance(items, list | tuple):
        return [{"role": role, "content": value}]
    parts = (
        items and isinstance(items[0], dict) and "type" in items[0] and not any(key in items[0] for key in ROLE_KEYS)
    )
    return [{"role": role, "content": list(items)}] if parts else list(items)


def _history(history: Any) -> list[Any]:
    if history is None:
        return []
    turns: list[Any] = []
    for pair in _listed(history, "history"):
        if isinstance(pair, dict):
            turns.append(pair)
        elif isinstance(pair, list | tuple) and len(pair) == 2:
            turns += [{"role": role, "content": text} for role, text in zip(("user", "assistant"), pair, strict=True)]
        else:
            raise RowRejected("bad_turn", "history: expected pairs of a question and an answer")
    return turns


def _no_conversation(row: Mapping[str, Any]) -> tuple[str, list[Any]]:
    if any(row.get(key) is not None for key in ROLE_KEYS) and any(row.get(key) is not None for key in TEXT_KEYS):
        raise RowRejected("bare_turn", "expected an object with a list of turns, found one turn")
    if row.get("turns") is not None:
        raise RowRejected("bad_turn", f"turns: expected a list of questions or turns, found {kind(row['turns'])}")
    raise RowRejected("no_conversation_column", f"found the keys {', '.join(map(str, list(row)[:8])) or 'none'}")
