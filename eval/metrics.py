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
from typing import Any

import numpy as np

from eval.intervals import RESAMPLES, estimate, tau_sums

POSITION_EDGES = (0, *(512 << i for i in range(8)))  # 0, 512, 1k, 2k, ... 64k tokens
NO_CATEGORY = "none"

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
    interval: 95% percentile bootstrap of tau over prompts. accepted_mean = tau - 1 (drafts only, no bonus).
    """

    passes: int
    accepted: int
    tau: float | None
    accepted_mean: float | None
    per_prompt_mean: float | None
    interval: tuple[float, float] | None
    histogram: list[int]
    rate: list[float | None]
    conditional: list[float | None]

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
    pooled = np.concatenate(prompts) if prompts else np.zeros(0, dtype=np.int64)
    histogram = np.bincount(pooled, minlength=depths + 1)
    assert len(histogram) == depths + 1, "more accepted than drafted"
    at_least = histogram[::-1].cumsum()[::-1]  # at_least[i]: passes that accepted i or more
    passes, total = len(pooled), int(pooled.sum())
    return Acceptance(
        passes=passes,
        accepted=total,
        tau=ratio(passes + total, passes),
        accepted_mean=ratio(total, passes),
        per_prompt_mean=float(np.mean([1 + a.mean() for a in prompts])) if prompts else None,
        interval=estimate(tau_sums([a.tolist() for a in prompts]), resamples=resamples, seed=seed).interval,
        histogram=histogram.tolist(),
        rate=[ratio(n, passes) for n in at_least[1:]],
        conditional=[ratio(n, before) for before, n in zip(at_least, at_least[1:], strict=False)],
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
    rounds: Sequence[Sequence[Round]], starts: Sequence[int], edges: Sequence[int] = POSITION_EDGES
) -> list[dict[str, Any]]:
    """tau by length of the confirmed text (prompt and output so far) when a pass begins.

    rounds[generation][pass]; starts: the confirmed length at each generation's first pass, its prompt and the token
    that prefill gave. Buckets begin at the ascending ``edges``, the last one is open; empty ones are left out. An
    entry: {from, to (excluded; None: open), passes, accepted, tau}, accepted by the rule for cut passes.
    """
    lengths, accepted = list[int](), list[int]()
    for passes, start in zip(rounds, starts, strict=True):
        for one in passes:
            lengths.append(start)
            accepted.append(one.counted)
            start += one.kept
    bucket = np.searchsorted(edges, lengths, side="right") - 1
    if (bucket < 0).any():
        raise ValueError(f"a pass began at {min(lengths)} tokens, before the first edge {edges[0]}")
    numbers = np.bincount(bucket, minlength=len(edges)).tolist()
    sums = np.bincount(bucket, weights=accepted, minlength=len(edges)).astype(np.int64).tolist()
    return [
        {"from": low, "to": high, "passes": passes, "accepted": total, "tau": 1 + total / passes}
        for low, high, passes, total in zip(edges, [*edges[1:], None], numbers, sums, strict=True)
        if passes
    ]


def ratio(part: float, whole: float) -> float | None:
    return float(part / whole) if whole else None
