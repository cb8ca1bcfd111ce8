"""Prompts for the verifier, rendered by the target's own chat template with the generation prompt.

A row is ``{"turns": [...]}`` (MT-bench, Spec-Bench) or whatever `data.chats.prompts` reads. Its questions are asked one
after the other, each after the verifier's own answer to the one before.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from data.chats.conversations import Dialect, Message, RejectLog
from data.chats.prompts import Questions, read_questions
from data.masks.template import ChatTemplate
from models.errors import EyasError

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Prompt:
    """A question as token ids with the generation prompt, and the questions that are asked after its answer."""

    ids: list[int]
    messages: tuple[Message, ...] = ()
    later: tuple[str, ...] = ()
    template: ChatTemplate | None = None

    def next(self, answer: str, context: int | None = None) -> Prompt | None:
        """The next question behind this answer; None if there is none, or no room for it in the context."""
        if not self.later or self.template is None:
            return None
        messages = (*self.messages, Message("assistant", answer), Message("user", self.later[0]))
        try:
            ids = self.template.prompt_ids(messages)
        except EyasError as refused:  # an answer that the template does not take, such as an empty one
            log.warning("a further question is not asked: %s", refused)
            return None
        if context is not None and len(ids) >= context:
            log.warning("a further question is not asked: %d tokens fill the target's context of %d", len(ids), context)
            return None
        return Prompt(ids, messages, self.later[1:], self.template)


def read_prompts(
    path: str,
    template: ChatTemplate,
    *,
    limit: int,
    context: int | None = None,
    dialect: Dialect | None = None,
) -> list[Prompt]:
    """The first ``limit`` usable prompts of a file; says how many, and why other rows are not used.

    context: the target's context length, which a prompt must leave room in. Raises EyasError if none is usable.
    """
    if not Path(path).exists():
        raise EyasError(f"verify.prompts={path}: no such file (looked in {Path.cwd()})")
    rejects = RejectLog()
    questions = read_questions(path, dialect=dialect or Dialect.of(), rejects=rejects, key="verify.prompts")
    prompts = usable(_rendered(questions, template, rejects), limit=limit, context=context)
    if rejects.rejected:
        log.warning("verify.prompts: %s", rejects.table())
    if not prompts:
        raise EyasError(f'verify.prompts={path}: no usable prompt; rows are {{"turns": [...]}} or conversations')
    asked = sum(1 + len(prompt.later) for prompt in prompts)
    log.info("verify.prompts: %d questions of %d rows, of %d rows read", asked, len(prompts), rejects.rows)
    return prompts


def first_question(questions: Questions) -> list[Message]:
    """The turns that the target answers first."""
    system = [Message("system", questions.system)] if questions.system else []
    return [*system, Message("user", questions.turns[0])]


def usable(prompts: Iterator[Prompt], *, limit: int, context: int | None) -> list[Prompt]:
    """The first ``limit`` prompts that are not empty and fit into the context; says how many were passed over."""
    passed = 0

    def fitting() -> Iterator[Prompt]:
        nonlocal passed
        for prompt in prompts:
            if prompt.ids and (context is None or len(prompt.ids) < context):
                yield prompt
            else:
                passed += 1

    found = list(islice(fitting(), limit))
    if passed:
        log.warning("%d prompts are empty or fill the target's context of %s tokens: passed over", passed, context)
    return found


def _rendered(questions: Iterable[Questions], template: ChatTemplate, rejects: RejectLog) -> Iterator[Prompt]:
    for asked in questions:
        messages = first_question(asked)
        try:
            yield Prompt(template.prompt_ids(messages), tuple(messages), asked.turns[1:], template)
        except EyasError as refused:  # a system prompt where the template knows none, for instance
            rejects.add(asked.source_file, asked.row, asked.id, "template_error", str(refused))
