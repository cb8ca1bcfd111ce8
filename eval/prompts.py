"""Prompts for the verifier, rendered by the target's own chat template with the generation prompt.

A row is ``{"turns": [...]}`` (MT-bench, Spec-Bench; the first turn is asked) or a conversation in any dialect that
training reads (its turns before the first answer are asked).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path

from data.conversations import Message, conversation_of, role_table
from data.policy import RowRejected
from data.rows import Row, read_rows
from data.template import ChatTemplate
from models.errors import EyasError

log = logging.getLogger(__name__)


def read_prompts(
    path: str,
    template: ChatTemplate,
    *,
    limit: int,
    context: int | None = None,
    roles: Mapping[str, str] | None = None,
) -> list[list[int]]:
    """Token ids of the first ``limit`` usable prompts of a file; unusable rows are logged with their reason.

    context: the target's context length, which a prompt must leave room in. Raises EyasError if none is usable.
    """
    if not Path(path).exists():
        raise EyasError(f"verify.prompts={path}: no such file (looked in {Path.cwd()})")
    table = role_table(roles)
    ids = (template.prompt_ids(messages) for messages in _questions(path, table))
    prompts = usable(ids, limit=limit, context=context)
    if not prompts:
        raise EyasError(f'verify.prompts={path}: no usable prompt; rows are {{"turns": [...]}} or conversations')
    return prompts


def usable(prompts: Iterator[list[int]], *, limit: int, context: int | None) -> list[list[int]]:
    """The first ``limit`` prompts that are not empty and fit into the context; says how many were passed over."""
    passed = 0

    def fitting() -> Iterator[list[int]]:
        nonlocal passed
        for prompt in prompts:
            if prompt and (context is None or len(prompt) < context):
                yield prompt
            else:
                passed += 1

    found = list(islice(fitting(), limit))
    if passed:
        log.warning("%d prompts are empty or fill the target's context of %s tokens: passed over", passed, context)
    return found


def _questions(path: str, roles: Mapping[str, str]) -> Iterator[Sequence[Message]]:
    for row in read_rows(path, key="verify.prompts"):
        try:
            yield question(row, roles)
        except RowRejected as rejected:
            log.warning("%s: row %s is no prompt: %s %s", row.file, row.row, rejected.reason, rejected.detail)


def question(row: Row, roles: Mapping[str, str]) -> Sequence[Message]:
    """The turns that are asked. Raises RowRejected."""
    if row.problem:
        raise RowRejected(row.problem, row.detail)
    turns = row.value.get("turns") if isinstance(row.value, dict) else None
    if turns is None:
        messages = conversation_of(row, dict(roles))[0].messages
        return messages[: next(i for i, message in enumerate(messages) if message.role == "assistant")]
    if not isinstance(turns, list) or not turns or not isinstance(turns[0], str):
        raise RowRejected("bad_turn", "turns: expected a list of texts")
    if not turns[0].strip():
        raise RowRejected("empty_turn", "turns[0]")
    return [Message("user", turns[0])]
