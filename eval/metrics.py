"""Acceptance length and acceptance rates, by one stated definition.

tau = 1 + accepted / verification passes, pooled over prompts. The token that prefill yields belongs to no pass.
**Rule for a cut pass** (end of sequence, token limit or stop string inside the block): only kept tokens count, the
last kept one as the pass's own, so its ``accepted`` is kept - 1 and tau * passes = output tokens - prefill tokens.
The *uncut* variant is what engines' counters show: accepted drafts as the rule accepted them, even past an end,
and only passes that had drafts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

DEFINITION = (
    "tau = 1 + accepted / verification passes, pooled over prompts; bonus token included, prefill token excluded; "
    "a pass cut by an end of sequence, limit or stop string counts its kept tokens - 1 as accepted. "
    "uncut: accepted drafts past the end count and passes without drafts do not (vLLM's counters)."
)


@dataclass(frozen=True)
class Round:
    """One verification pass: tokens drafted along the deepest path, accepted by the rule, kept in the output."""

    drafted: int
    accepted: int
    kept: int

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


def acceptance(accepted: Sequence[Sequence[int]], depths: int, *, resamples: int = 2000, seed: int = 0) -> Acceptance:
    """Statistics of ``accepted[prompt][pass]``, each 0 .. depths."""
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
        interval=bootstrap(prompts, resamples, seed) if prompts else None,
        histogram=histogram.tolist(),
        rate=[ratio(n, passes) for n in at_least[1:]],
        conditional=[ratio(n, before) for before, n in zip(at_least, at_least[1:], strict=False)],
    )


def bootstrap(prompts: Sequence[np.ndarray], resamples: int, seed: int) -> tuple[float, float]:
    """95% percentile interval of the pooled tau when prompts are drawn again with replacement."""
    accepted = np.array([a.sum() for a in prompts])
    passes = np.array([len(a) for a in prompts])
    chosen = np.random.default_rng(seed).integers(len(prompts), size=(resamples, len(prompts)))
    taus = 1 + accepted[chosen].sum(1) / passes[chosen].sum(1)
    low, high = np.quantile(taus, [0.025, 0.975])
    return float(low), float(high)


def ratio(part: float, whole: float) -> float | None:
    return float(part / whole) if whole else None
