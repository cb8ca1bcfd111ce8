"""Every prompt decoded in every way, side by side: the texts and timings that a measurement is made of.

Ways take turns over small portions of the prompts, so that all of them see the same state of the machine.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from tqdm import tqdm

from eval.drafts.proposers import Proposer
from eval.processes import Processes
from eval.prompts import Prompt
from eval.verify.speculate import Decoder, Generation, Request, Seconds, generate_all, output_text

T = TypeVar("T")

PLAIN = ""  # the way without drafts
WARM_UP = 8  # tokens decoded before the clock counts
PORTION = 4  # prompts of a portion for each sequence decoded at a time, where that is more than one


@dataclass(frozen=True)
class Answer:
    """A question as it was asked, and what was generated. number: its prompt's; turn: 0 for the first question."""

    number: int
    turn: int
    prompt: list[int]
    out: Generation


@dataclass
class Decoded:
    """All answers of one way of decoding, in the order of prompts and turns; wall time of its portions, summed up."""

    answers: list[Answer] = field(default_factory=list)
    seconds: Seconds = field(default_factory=Seconds)

    def add(self, other: Decoded) -> None:
        self.answers = sorted([*self.answers, *other.answers], key=lambda answer: (answer.number, answer.turn))
        for name, value in vars(other.seconds).items():
            setattr(self.seconds, name, getattr(self.seconds, name) + value)

    def of_prompts(self, values: Sequence[Sequence[T]], prompts: int) -> list[list[T]]:
        """Values of all answers, put together for each prompt: an interval is taken over prompts."""
        joined: list[list[T]] = [[] for _ in range(prompts)]
        for answer, part in zip(self.answers, values, strict=True):
            joined[answer.number].extend(part)
        return joined


def decode_portion(
    decoder: Decoder, proposer: Proposer, prompts: Sequence[tuple[int, Prompt]], slots: int, seed: str
) -> Decoded:
    """Ask the numbered prompts, ``slots`` at a time; a prompt's next question comes behind the answer before it.

    Random numbers depend on ``seed`` and on the question's number and turn, not on its company.
    """
    found = Decoded()

    def request(number: int, turn: int, prompt: Prompt) -> Request:
        return Request(prompt.ids, random.Random(f"{seed} {number} {turn}").random, (number, turn, prompt))

    waiting = deque(request(number, 0, prompt) for number, prompt in prompts)

    def done(asked: Request, out: Generation) -> None:
        number, turn, prompt = asked.about
        found.answers.append(Answer(number, turn, prompt.ids, out))
        following = prompt.next(output_text(decoder, out), decoder.limits.context)
        if following is not None:
            waiting.appendleft(request(number, turn + 1, following))

    seconds = generate_all(decoder, proposer, waiting, slots, done=done)
    return Decoded(sorted(found.answers, key=lambda answer: (answer.number, answer.turn)), seconds)


def decode_all(
    decoder: Decoder,
    ways: Mapping[str, Proposer],
    prompts: Sequence[Prompt],
    slots: int,
    *,
    seed: int = 0,
    processes: Processes | None = None,
    quiet: bool = False,
) -> dict[str, Decoded]:
    """All prompts in all ways (by name; PLAIN without drafts); several processes take a share of them each."""
    processes = processes or Processes()
    short = decoder._replace(limits=replace(decoder.limits, max_new_tokens=WARM_UP))
    first = replace(prompts[0], later=())
    for proposer in ways.values():
        decode_portion(short, proposer, [(0, first)] * min(slots, 2), slots, f"{seed} warm-up")
    found = {name: Decoded() for name in ways}
    size = 1 if slots == 1 else PORTION * slots
    portions = [list(enumerate(prompts))[start : start + size] for start in range(0, len(prompts), size)]
    title = f"T = {decoder.sampling.temperature:g}" + (f", {slots} at a time" if slots > 1 else "")
    for portion in tqdm(processes.share(portions), desc=title, disable=quiet, leave=False):
        for name, proposer in ways.items():
            found[name].add(decode_portion(decoder, proposer, portion, slots, f"{seed} {name == PLAIN}"))
    for part in processes.of_others(found):
        for name, decoded in part.items():
            found[name].add(decoded)
    return found
