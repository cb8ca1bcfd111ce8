"""Acceptance length and acceptance rates, by one stated definition.

tau = 1 + accepted / verification passes, pooled over prompts. The token that prefill yields belongs to no pass.
**Rule for a cut pass** (end of sequence, token limit or stop string inside the block): only kept tokens count, the
last kept one as the pass's own, so its ``accepted`` is kept - 1 and tau * passes = output tokens - prefill tokens.
The *uncut* variant is what engines' counters show: accepted drafts as the rule accepted them, even past an end,
and only passes that had drafts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

from eval.numbers.intervals import RESAMPLES, Interval, Sums, estimate, estimates, tau_sums

POSITION_EDGES = (0, *(512 << i for i in range(8)))  # 0, 512, 1k, 2k, ... 64k tokens
NO_CATEGORY = "none"  # what reports call the prompts without a category, where others have one

DEFINITION = (
    "tau = 1 + accepted / verification passes, pooled over prompts; bonus token included, prefill token excluded; "
    "a pass cut by an end of sequence, limit or stop string counts its kept tokens - 1 as accepted. "
    "uncut: accepted drafts past the end count and passes without drafts do not (vLLM's counters)."
)


@dataclass(frozen=True)
class Round:
    """One verification pass: levels drafted (tokens along the deepest path), accepted by the rule, kept in the output.

    tokens, parents: the drafted tree (see ``DraftTree``); path: its accepted nodes. For showing only.
    """

    drafted: int
    accepted: int
    kept: int
    tokens: tuple[int, ...] = field(default=(), compare=False)
    parents: tuple[int, ...] = field(default=(), compare=False)
    path: tuple[int, ...] = field(default=(), compare=False)

    @property
    def counted(self) -> int:
        """Accepted tokens under the rule for cut passes."""
        return self.kept - 1


@dataclass(frozen=True)
class Acceptance:
    """Pooled statistics of a set of passes; None where no pass could tell.

    histogram[i]: passes that accepted exactly i, so sum(histogram) = passes and sum(i * histogram[i]) = accepted.
    rate[k]: share of all passes that accepted depth k (unconditional): tau = 1 + sum(rate).
    conditional[k]: the same among passes that accepted depth k - 1.
    interval, rate_interval[k], conditional_interval[k]: 95% percentile bootstrap over prompts of tau and of the rates,
    all from the same draws; None where fewer than `eval.numbers.intervals.MIN_PROMPTS` prompts can tell.
    accepted_mean = tau - 1 (drafts only, no bonus).
    """

    passes: int
    accepted: int
    tau: float | None
    accepted_mean: float | None
    per_prompt_mean: float | None
    interval: Interval | None
    histogram: list[int]
    rate: list[float | None]
    conditional: list[float | None]
    rate_interval: list[Interval | None]
    conditional_interval: list[Interval | None]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def counted(rounds: Sequence[Sequence[Round]]) -> list[list[int]]:
    """Accepted tokens per pass and prompt: the headline's."""
    return [[r.counted for r in prompt] for prompt in rounds]


def uncut(rounds: Sequence[Sequence[Round]]) -> list[list[int]]:
    """Accepted tokens per pass and prompt: the engines'."""
    return [[r.accepted for r in prompt if r.drafted] for prompt in rounds]


def acceptance(
    accepted: Sequence[Sequence[int]], depths: int, *, resamples: int = RESAMPLES, seed: int = 0
) -> Acceptance:
    """Statistics of ``accepted[prompt][pass]``, each 0 .. depths. depths: levels of the chain or tree."""
    prompts = [np.asarray(a, dtype=np.int64) for a in accepted if len(a)]
    assert all(a.max() <= depths for a in prompts), "more accepted than drafted"
    histograms = [np.bincount(a, minlength=depths + 1) for a in prompts]
    table = np.array(histograms, dtype=np.int64).reshape(-1, depths + 1)
    reached = table[:, ::-1].cumsum(1)[:, ::-1]  # [P, depths + 1] passes of a prompt that accepted i or more
    histogram, at_least = table.sum(0), reached.sum(0)
    passes, total = int(histogram.sum()), int(at_least[1:].sum())
    rates = [Sums.of(n, reached[:, 0]) for n in reached.T[1:]]
    conditional = [Sums.of(n, before) for before, n in pairwise(reached.T)]
    taus = tau_sums([a.tolist() for a in prompts])
    whole, *levels = estimates([taus, *rates, *conditional], resamples=resamples, seed=seed)
    return Acceptance(
        passes=passes,
        accepted=total,
        tau=ratio(passes + total, passes),
        accepted_mean=ratio(total, passes),
        per_prompt_mean=float(np.mean([1 + a.mean() for a in prompts])) if prompts else None,
        interval=whole.interval,
        histogram=histogram.tolist(),
        rate=[one.value for one in levels[:depths]],
        conditional=[one.value for one in levels[depths:]],
        rate_interval=[one.interval for one in levels[:depths]],
        conditional_interval=[one.interval for one in levels[depths:]],
    )


def by_category(
    accepted: Sequence[Sequence[int]],
    categories: Sequence[str | None],
    depths: int,
    *,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> dict[str, Acceptance]:
    """Statistics pooled over the prompts of each category, by name; those of prompts without one as NO_CATEGORY.

    Empty where no prompt has a category.
    """
    members: dict[str, list[Sequence[int]]] = {}
    for prompt, category in zip(accepted, categories, strict=True):
        members.setdefault(category or NO_CATEGORY, []).append(prompt)
    if members.keys() <= {NO_CATEGORY}:
        return {}
    return {
        name: acceptance(prompts, depths, resamples=resamples, seed=seed) for name, prompts in sorted(members.items())
    }


def by_position(
    rounds: Sequence[Sequence[Round]],
    starts: Sequence[int],
    edges: Sequence[int] = POSITION_EDGES,
    *,
    prompts: Sequence[int] | None = None,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> list[dict[str, Any]]:
    """tau by length of the confirmed text (prompt and output so far) when a pass begins.

    rounds[generation][pass]; starts: the confirmed length at each generation's first pass, its prompt and the token
    that prefill gave; prompts: the number of the prompt that each generation belongs to, None: one each. Buckets begin
    at the ascending ``edges``, the last one is open; empty ones are left out. An entry: {from, to (excluded; None:
    open), passes, accepted, tau, interval}, accepted by the rule for cut passes, the interval over prompts.
    """
    owners, lengths, accepted = list[int](), list[int](), list[int]()
    numbers = range(len(rounds)) if prompts is None else prompts
    for passes, start, number in zip(rounds, starts, numbers, strict=True):
        for one in passes:
            owners.append(number)
            lengths.append(start)
            accepted.append(one.counted)
            start += one.kept
    if lengths and min(lengths) < edges[0]:
        raise ValueError(f"a pass began at {min(lengths)} tokens, before the first edge {edges[0]}")
    owner, bucket = np.asarray(owners, dtype=np.int64), np.searchsorted(edges, lengths, side="right") - 1
    found = []
    for number, (low, high) in enumerate(zip(edges, [*edges[1:], None], strict=True)):
        inside = bucket == number
        if not inside.any():
            continue
        drafts = np.asarray(accepted, dtype=np.int64)[inside]
        total, count = int(drafts.sum()), len(drafts)
        _, own = np.unique(owner[inside], return_inverse=True)  # drawn from the prompts that have a pass here
        sums = Sums.of(np.bincount(own, weights=1 + drafts), np.bincount(own))
        tau, interval = estimate(sums, resamples=resamples, seed=seed)
        found.append({"from": low, "to": high, "passes": count, "accepted": total, "tau": tau, "interval": interval})
    return found


def ratio(part: float, whole: float) -> float | None:
    return float(part / whole) if whole else None
