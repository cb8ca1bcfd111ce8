"""Every pair of drafters on the same prompts: the entries of ``comparisons`` in report.json."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import combinations
from typing import Any, NamedTuple

from eval.numbers.intervals import Sums, difference, quotient


class PerPrompt(NamedTuple):
    """Of each prompt, one drafter's sums at one temperature. tau: tokens and passes; speed: tokens and seconds of its
    passes, None where several sequences shared them."""

    tau: Sums
    speed: Sums | None


def compare(sums: Mapping[tuple[str, float], PerPrompt], *, seed: int = 0) -> list[dict[str, Any]]:
    """By temperature, every pair in the order of ``sums``, which are by drafter and temperature.

    Prompt i must be the same for all; the targets need not be. Intervals are paired (see eval/numbers/intervals.py).
    """
    found = []
    for temperature in dict.fromkeys(temperature for _, temperature in sums):
        here = {name: one for (name, t), one in sums.items() if t == temperature}
        for (a, of_a), (b, of_b) in combinations(here.items(), 2):
            found.append({"a": a, "b": b, "temperature": temperature, **_pair(of_a, of_b, seed)})
    return found


def _pair(a: PerPrompt, b: PerPrompt, seed: int) -> dict[str, Any]:
    tau = difference(a.tau, b.tau, seed=seed)
    faster = quotient(a.speed, b.speed, seed=seed) if a.speed and b.speed else None
    return {
        "tau_difference": tau.value,
        "interval": tau.interval,
        "speed_ratio": faster.value if faster else None,
        "speed_interval": faster.interval if faster else None,
    }
