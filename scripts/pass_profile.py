"""Where the time of a verification pass goes: the two models' forwards, and everything else.

    python -m scripts.pass_profile conf=eagle3_smollm2 verify.max_prompts=8 verify.temperatures=[0.0,1.0]

Decodes the prompts that ``python -m eval`` would take with every drafter, and prints the share of the decoding time
that is spent in the target's forwards, in the drafter's, in drafting around them (choosing tokens, trees), in
preparing the target's forwards (masks), and in the rest (acceptance, roll-back, bookkeeping).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from random import Random
from typing import Any

from rich.console import Console
from rich.table import Table

from conf.cli import entry
from conf.schema import Config
from eval.candidates import Candidate
from eval.decode import WARM_UP
from eval.drafts.drafting import DraftingProposer
from eval.load import load_bench
from eval.measure import Bench
from eval.verify.speculate import Decoder, Limits, Request, Seconds, generate_all

FORWARDS = ("_forward", "_logits")  # of a target, and of a draft model
DRAFTERS = ("feature", "next_feature", "read", "logits")  # of a drafter's session
WHOLE = ("extend", "expand")  # of a session that has none of those


class Stopwatch:
    """Seconds inside watched calls; calls within calls count once."""

    def __init__(self) -> None:
        self.seconds, self.inside = 0.0, False

    @contextmanager
    def watching(self, owner: Any, names: tuple[str, ...]) -> Iterator[None]:
        """Watch methods of one object."""
        plain = {name: getattr(owner, name) for name in names}
        for name, method in plain.items():
            setattr(owner, name, self.timed(method))
        try:
            yield
        finally:
            for name in plain:
                delattr(owner, name)

    def timed(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            if self.inside:
                return method(*args, **kwargs)
            self.inside, start = True, time.perf_counter()
            try:
                return method(*args, **kwargs)
            finally:
                self.inside = False
                self.seconds += time.perf_counter() - start

        return run


def profile(bench: Bench, candidate: Candidate, decoder: Decoder, prompts: list[list[int]]) -> dict[str, float]:
    """Milliseconds of a pass by what they are spent on."""
    target = Stopwatch()
    proposer = candidate.proposer(bench.target, decoder.sampling, bench.verify, 1)
    drafter = Stopwatch()

    def decode(limits: Limits) -> Seconds:
        requests = deque(Request(ids, Random(str(i)).random) for i, ids in enumerate(prompts))
        return generate_all(decoder._replace(limits=limits), proposer, requests, done=lambda request, out: None)

    decode(Limits(WARM_UP))
    with target.watching(bench.target, FORWARDS), watching_drafts(drafter, proposer):
        decode(Limits(1))
        prefill = target.seconds, drafter.seconds
        seconds = decode(decoder.limits)
    forwards, drafts = target.seconds - 2 * prefill[0], drafter.seconds - 2 * prefill[1]
    parts = {
        "target": forwards,
        "drafter": drafts,
        "around drafts": max(seconds.draft - drafts, 0.0),
        "around target": max(seconds.verify - forwards, 0.0),
        "rest": seconds.other,
    }
    return {name: 1e3 * value / max(seconds.passes, 1) for name, value in parts.items()}


@contextmanager
def watching_drafts(watch: Stopwatch, proposer: Any) -> Iterator[None]:
    session = proposer.session if isinstance(proposer, DraftingProposer) else None
    session = getattr(session, "session", session)  # of OfTaps
    if session is None:
        yield
        return
    model = getattr(session, "model", None)
    owner, names = (session, DRAFTERS) if model is None else (model, FORWARDS)
    if not all(hasattr(owner, name) for name in names):
        names = WHOLE
    with watch.watching(owner, names):
        yield


@entry("profile")
def main(cfg: Config) -> None:
    bench, prompts = load_bench(cfg)
    table = Table(
        "drafter", "T", "ms a pass", "target", "drafter", "around drafts", "around target", "rest", "overhead"
    )
    for temperature in cfg.verify.temperatures:
        for candidate in bench.candidates:
            parts = profile(bench, candidate, bench.decoder(temperature), [prompt.ids for prompt in prompts])
            total = sum(parts.values())
            shares = [f"{value / total:.1%}" for value in parts.values()]
            overhead = f"{1 - (parts['target'] + parts['drafter']) / total:.1%}"
            table.add_row(candidate.name, f"{temperature:g}", f"{total:.1f}", *shares, overhead)
    Console().print(table)


if __name__ == "__main__":
    main()
