"""Questions put to the target again, turn by turn, and what becomes of each kind of answer.

The engines (`engine`, `server`) only say what the target answered; every rule about answers is here, in
:meth:`Replay.take`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

from data.chats.messages import checked
from data.chats.policy import REJECTS, RowRejected
from data.chats.prompts import Questions

# What servers call an answer that the target itself ended.
ENDED = ("stop", "eos_token")


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn. Every answer has its own random stream, named by `seed`, the row's id and the turn."""

    temperature: float = 0.7  # 0: greedy
    top_p: float = 1.0  # 1: off
    max_new_tokens: int = 1024  # of one answer
    seed: int = 0

    def stream(self, id: str, turn: int) -> str:
        """The name of one answer's random stream."""
        return f"{self.seed}:{id}:{turn}"

    def settings(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Asked:
    """The questions of one row. index: place in the input, from 0. id: unlike that of any other row."""

    index: int
    id: str
    questions: Questions

    @property
    def source(self) -> str:
        return f"{self.questions.source_file}:{self.questions.row}"

    @property
    def digest(self) -> int:
        """64 bits that tell whether a row is still the one that was answered."""
        questions = self.questions
        return _digest(json.dumps([self.id, questions.category, questions.system, *questions.turns]))


def ask(questions: Iterable[Questions], limit: int | None = None) -> Iterator[Asked]:
    """Number the rows (the first ``limit``) and give those without an id, or with a repeated one, ``file:row``."""
    taken: set[int] = set()
    for index, row in enumerate(islice(questions, limit)):
        name, times = row.id, 1
        while not name or _digest(name) in taken:
            place = f"{Path(row.source_file).name}:{row.row}"
            name, times = place if times == 1 else f"{place}#{times}", times + 1
        taken.add(_digest(name))
        yield Asked(index, name, row)


def _digest(text: str) -> int:
    encoded = text.encode("utf-8", "backslashreplace")
    return int.from_bytes(hashlib.blake2b(encoded, digest_size=8).digest())


@dataclass(frozen=True)
class Answer:
    """One answer. finish_reason: stop, length (cut at a token limit) or what else a server says of it.

    reasoning: what a server's parser took out of the text; an engine without a parser leaves it in ``text``.
    """

    text: str
    finish_reason: str
    reasoning: str = ""


@dataclass(frozen=True)
class Outcome:
    """What one row has become: a ShareGPT row, or a reason out of `data.chats.policy.REJECTS` with a detail."""

    asked: Asked
    row: dict[str, Any] | None
    reason: str = ""
    detail: str = ""


@dataclass
class Replay:
    """The conversation of one row so far. cut: what becomes of a cut answer, drop | keep (unended)."""

    asked: Asked
    cut: str = "drop"
    answers: list[Answer] = field(default_factory=list)
    reason: str = ""  # why no further turn is asked, out of `data.chats.policy.REJECTS`
    detail: str = ""

    @property
    def open(self) -> bool:
        return not self.reason and len(self.answers) < len(self.asked.questions.turns)

    def messages(self) -> list[dict[str, str]]:
        """The turns so far and the next question, as chat templates and servers take them.

        Reasoning that a server told apart stays out: that is how such servers are used from turn to turn.
        """
        questions = self.asked.questions
        messages = [{"role": "system", "content": questions.system}] if questions.system else []
        for turn, answer in zip(questions.turns, self.answers, strict=False):
            messages += [{"role": "user", "content": turn}, {"role": "assistant", "content": answer.text}]
        return [*messages, {"role": "user", "content": questions.turns[len(self.answers)]}]

    def take(self, answer: Answer) -> None:
        """Add the answer to the next question, or end the conversation before (or with) it."""
        turn, ended = f"turn {len(self.answers) + 1}", answer.finish_reason in ENDED
        # Cut inside its reasoning, an answer has no text that could be kept.
        keeps = ended or (self.cut == "keep" and answer.finish_reason == "length" and bool(answer.text.strip()))
        try:
            if keeps:
                _check(answer)
        except RowRejected as rejected:
            self.end(rejected.reason, f"{turn} {rejected.detail}".strip())
            return
        if keeps:
            self.answers.append(answer)
        if not ended:
            self.end("answer_cut", f"{turn}: finish_reason {answer.finish_reason!r}")

    def end(self, reason: str, detail: str = "") -> None:
        """Ask no further turn."""
        assert reason in REJECTS, reason
        self.reason, self.detail = reason, detail

    def outcome(self, settings: Mapping[str, Any]) -> Outcome:
        """The row with its provenance if there is an answer, else why there is none. User turns without an answer are
        left out, and ``left_out`` says why.
        """
        if not self.answers:
            return Outcome(self.asked, None, self.reason, self.detail)
        questions = self.asked.questions
        turns = [{"from": "system", "value": questions.system}] if questions.system else []
        for question, answer in zip(questions.turns, self.answers, strict=False):
            reasoning = {"reasoning_content": answer.reasoning} if answer.reasoning else {}
            ended = "stop" if answer.finish_reason in ENDED else answer.finish_reason
            turns.append({"from": "human", "value": question})
            turns.append({"from": "gpt", "value": answer.text, **reasoning, "finish_reason": ended})
        left_out = {"left_out": self.reason} if len(self.answers) < len(questions.turns) else {}
        category = {"category": questions.category} if questions.category else {}
        provenance = {"provenance": {**settings, "source": self.asked.source, **left_out}}
        return Outcome(self.asked, {"id": self.asked.id, **category, "conversations": turns, **provenance})


def _check(answer: Answer) -> None:
    """Raises RowRejected if no one could train on this text; nothing is written that reading would reject."""
    if not answer.text.strip():
        raise RowRejected("empty_answer")
    checked(answer.text + answer.reasoning)


class Engine(Protocol):
    """Whatever answers questions. settings: what determines its answers, for the provenance of every row."""

    settings: dict[str, Any]

    def answer(
        self,
        asked: Iterable[Asked],
        done: Container[int],
        emit: Callable[[Outcome], None],
        count: Callable[[int], None],
    ) -> None:
        """Answer every row whose index is not ``done``: each outcome goes to ``emit``, in any order, and the number
        of tokens generated since to ``count``. Raises EyasError if the run can't go on; it can be started again.
        """
        ...
