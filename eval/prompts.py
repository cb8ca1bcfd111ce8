"""Prompts for the verifier, rendered by the target's own chat template with the generation prompt.

A row is ``{"turns": [...]}`` (MT-bench, Spec-Bench), a line of a text file, or whatever else `data.chats.prompts`
reads. Its questions are asked one after the other, each after the verifier's own answer to the one before. A target
without a chat template (a base model) is given the text of the first question as it stands.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice
from pathlib import Path
from typing import Any, Protocol

from transformers import PreTrainedTokenizerBase

from data.chats.conversations import Dialect, Message, RejectLog
from data.chats.prompts import Questions, read_questions
from data.masks.template import ChatTemplate
from data.prepare import TargetFiles, chat_template
from eval.numbers.metrics import NO_CATEGORY
from models.errors import EyasError
from models.visible import visible

log = logging.getLogger(__name__)


class Template(Protocol):
    """Turns to the ids that the target answers: a ChatTemplate or PlainText. Raises EyasError if it refuses them."""

    def prompt_ids(self, messages: Sequence[Message]) -> list[int]: ...


@dataclass(frozen=True)
class PlainText:
    """For a target without chat template: the turns' texts, a blank line between them, with what its tokenizer puts
    before a text (BOS) and without the end token that some put behind it."""

    tokenizer: PreTrainedTokenizerBase

    def prompt_ids(self, messages: Sequence[Message]) -> list[int]:
        text = "\n\n".join(message.content for message in messages)
        bare = self.tokenizer(text, add_special_tokens=False).input_ids
        ids = list(self.tokenizer(text).input_ids)
        end = [self.tokenizer.eos_token_id]
        return ids[:-1] if ids[-1:] == end and bare[-1:] != end else ids


@dataclass(frozen=True)
class Prompt:
    """A question as token ids with the generation prompt, and the questions that are asked after its answer.

    id: the row's own, or file:row; category: as the file has it (Spec-Bench: the sub-category), None if it has none.
    """

    ids: list[int]
    messages: tuple[Message, ...] = ()
    later: tuple[str, ...] = ()
    template: Template | None = None
    id: str = ""
    category: str | None = None

    def next(self, answer: str, context: int | None = None) -> Prompt | None:
        """The next question behind this answer; None if there is none, or no room for it in the context."""
        if not self.later or self.template is None:
            return None
        messages = (*self.messages, Message("assistant", answer), Message("user", self.later[0]))
        try:
            ids = self.template.prompt_ids(messages)
        except EyasError as refused:  # an answer that the template does not take, such as an empty one
            log.warning("prompt %s: a further question is not asked: %s", self.id, refused)
            return None
        if context is not None and len(ids) >= context:
            log.warning(
                "prompt %s: a further question is not asked: %d tokens fill the target's context of %d",
                *(self.id, len(ids), context),
            )
            return None
        return replace(self, ids=ids, messages=messages, later=self.later[1:])


def prompt_template(files: TargetFiles, target: Mapping[str, Any], data: Mapping[str, Any]) -> ChatTemplate | PlainText:
    """How the target is asked: by its chat template or target.chat_template, without either as plain text."""
    if files.tokenizer.chat_template:
        return chat_template(files, target, data)
    log.warning("target.path=%s: no chat template; first questions are asked, as plain text", target["path"])
    return PlainText(files.tokenizer)


def describe(template: ChatTemplate | PlainText) -> str:
    """The template in a report: its fingerprint, or that there is none."""
    return template.fingerprint()[:16] if isinstance(template, ChatTemplate) else "none: plain text"


# --- from a file ---------------------------------------------------------------------------------------------------


def read_prompts(
    path: str,
    template: Template,
    *,
    limit: int,
    context: int | None = None,
    dialect: Dialect | None = None,
    tuning: int = 0,
) -> list[Prompt]:
    """``limit`` usable prompts of a file, the last ``tuning`` of them for verify.tune; says how many, and why other
    rows are not used.

    Where any of the first ``limit`` rows has a category, the categories take turns: benchmarks list them in blocks, so
    that the first rows would be of one kind. Of each category, and of a file without any, prompts come in the order of
    the file.
    context: the target's context length, which a prompt must leave room in. Raises EyasError if none is usable.
    """
    if not Path(path).exists():
        raise EyasError(f"verify.prompts={path}: no such file (looked in {Path.cwd()})")
    rejects, fitting = RejectLog(), Fitting(context)
    questions = read_questions(path, dialect=dialect or Dialect.of(), rejects=rejects, key="verify.prompts")
    streams = [_asked(shelf, template, rejects, fitting) for shelf in shelves_of(questions, limit)]
    found = list(islice(in_turn(streams), limit))
    fitting.say()
    if rejects.rejected:
        log.warning("verify.prompts: %s", rejects.table())
    if not found:
        raise EyasError(f"verify.prompts={path}: no usable prompt" + _why_none(rejects, fitting))
    _say_chosen(found, rejects.rows, limit, tuning)
    return found


def _why_none(rejects: RejectLog, fitting: Fitting) -> str:
    why = f"; {fitting.told()}" if fitting.passed else ""
    if rejects.rejected or not fitting.passed:
        why += '; rows are {"turns": [...]} or conversations'
    return why + "".join(f"\n{place.file}, row {place.row}: {place.reason}" for place in rejects.first.values())


def shelves_of(questions: Iterator[Questions], limit: int) -> list[Iterable[Questions]]:
    """The questions of each category, in file order; the categories in the order of their first.

    Where none of the first ``limit`` has a category there is one shelf, read only as far as it is asked for.
    """
    head = list(islice(questions, limit))
    if not any(asked.category for asked in head):
        return [chain(head, questions)]
    shelves: dict[str, list[Questions]] = {}
    for asked in chain(head, questions):
        shelves.setdefault(asked.category, []).append(asked)
    return list(shelves.values())


def in_turn(streams: Sequence[Iterator[Prompt]]) -> Iterator[Prompt]:
    """One of each stream after the other, until all are empty."""
    left = list(streams)
    while left:
        for stream in list(left):
            try:
                yield next(stream)
            except StopIteration:
                left.remove(stream)


def _asked(shelf: Iterable[Questions], template: Template, rejects: RejectLog, fitting: Fitting) -> Iterator[Prompt]:
    """The usable prompts of a shelf."""
    for asked in shelf:
        messages = first_question(asked)
        try:
            ids = template.prompt_ids(messages)
        except EyasError as refused:  # a system prompt where the template knows none, for instance
            rejects.add(asked.source_file, asked.row, asked.id, "template_error", str(refused))
            continue
        later = () if isinstance(template, PlainText) else asked.turns[1:]  # no sign would tell answer from question
        name = asked.id or f"{Path(asked.source_file).name}:{asked.row}"
        prompt = Prompt(ids, tuple(messages), later, template, name, asked.category or None)
        if fitting(prompt):
            yield prompt


def _say_chosen(prompts: Sequence[Prompt], rows: int, limit: int, tuning: int) -> None:
    asked = sum(1 + len(prompt.later) for prompt in prompts)
    categories = Counter(prompt.category for prompt in prompts)
    plain = set(categories) == {None}
    stopped = f", where reading stopped: {limit} were wanted" if plain and len(prompts) == limit else ""
    log.info("verify.prompts: %d questions of %d rows, of %d rows read%s", asked, len(prompts), rows, stopped)
    if tuning:
        measured = min(len(prompts), limit - tuning)
        log.info("verify.prompts: %d to measure on, %d for verify.tune", measured, len(prompts) - measured)
    if not plain:
        told = (f"{count} of {name or NO_CATEGORY}" for name, count in categories.items())
        log.info("verify.prompts: %s", visible(", ".join(told), kept=""))


def first_question(questions: Questions) -> list[Message]:
    """The turns that the target answers first."""
    system = [Message("system", questions.system)] if questions.system else []
    return [*system, Message("user", questions.turns[0])]


# --- what can be asked ---------------------------------------------------------------------------------------------


@dataclass
class Fitting:
    """Whether a prompt is not empty and fits into the context; counts those that are passed over."""

    context: int | None
    passed: int = 0

    def __call__(self, prompt: Prompt) -> bool:
        fits = bool(prompt.ids) and (self.context is None or len(prompt.ids) < self.context)
        self.passed += not fits
        return fits

    def told(self) -> str:
        one = self.passed == 1
        empty = "1 prompt is empty" if one else f"{self.passed} prompts are empty"
        full = "" if self.context is None else f" or fill{'s' * one} the target's context of {self.context} tokens"
        return empty + full

    def say(self) -> None:
        if self.passed:
            log.warning("%s: passed over", self.told())


def usable(prompts: Iterable[Prompt], *, limit: int, context: int | None) -> list[Prompt]:
    """The first ``limit`` prompts that are not empty and fit into the context; says how many were passed over."""
    fitting = Fitting(context)
    found = list(islice(filter(fitting, prompts), limit))
    fitting.say()
    return found
