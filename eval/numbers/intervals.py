"""95% percentile bootstrap intervals over prompts: of a pooled ratio, and of two ratios on the same prompts.

Prompts are drawn again with replacement (Efron's percentile method), never single passes: the passes of one answer are
alike. Two drafters measured on the same prompts are compared on the same draws, so that what makes a prompt easy or
hard for both cancels. Below MIN_PROMPTS there is no interval.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

RESAMPLES = 2000
BOUNDS = (0.025, 0.975)
# Prompts with something to divide by that an interval needs. Of one prompt every draw is the same. Of two the bounds
# are their own two values, on the same side of the truth half of the time: nothing like 95%.
MIN_PROMPTS = 3
AT_ONCE = 1 << 22  # drawn prompt numbers in memory at a time

Interval = tuple[float, float]


class Sums(NamedTuple):
    """Of each prompt, the two sums whose pooled ratio is of interest, float64 [P] each: tokens and passes, say."""

    top: np.ndarray
    bottom: np.ndarray

    @classmethod
    def of(cls, top: Iterable[float], bottom: Iterable[float]) -> Sums:
        sums = cls(np.asarray([*top], dtype=np.float64), np.asarray([*bottom], dtype=np.float64))
        if sums.top.shape != sums.bottom.shape:
            raise ValueError(f"{len(sums.top)} prompts above, {len(sums.bottom)} below")
        return sums

    @property
    def ratio(self) -> float | None:
        """The pooled ratio, None where there is nothing to divide by."""
        whole = float(self.bottom.sum())
        return float(self.top.sum()) / whole if whole else None


class Estimate(NamedTuple):
    """interval: None where too few prompts can tell."""

    value: float | None
    interval: Interval | None


def tau_sums(accepted: Iterable[Sequence[int]]) -> Sums:
    """Of ``accepted[prompt][pass]``: tokens (accepted and the pass's own) over passes. A prompt may have no pass."""
    prompts = [(sum(a) + len(a), len(a)) for a in accepted]
    return Sums.of((tokens for tokens, _ in prompts), (passes for _, passes in prompts))


def estimate(sums: Sums, *, resamples: int = RESAMPLES, seed: int = 0) -> Estimate:
    """The pooled ratio (tau, or tokens per second) and its interval."""
    return estimates([sums], resamples=resamples, seed=seed)[0]


def estimates(measured: Sequence[Sums], *, resamples: int = RESAMPLES, seed: int = 0) -> list[Estimate]:
    """Several pooled ratios on the same prompts, each with its interval, from the same draws."""
    drawn = resampled(measured, resamples, seed) if measured else []
    pairs = zip(measured, drawn, strict=True)
    return [Estimate(sums.ratio, percentiles(ratios) if enough(sums) else None) for sums, ratios in pairs]


def difference(a: Sums, b: Sums, *, resamples: int = RESAMPLES, seed: int = 0) -> Estimate:
    """Pooled ratio of ``a`` less that of ``b``, paired: prompt i is the same for both."""
    first, second = resampled([a, b], resamples, seed)
    if a.ratio is None or b.ratio is None:
        return Estimate(None, None)
    return Estimate(a.ratio - b.ratio, percentiles(first - second) if enough(a, b) else None)


def quotient(a: Sums, b: Sums, *, resamples: int = RESAMPLES, seed: int = 0) -> Estimate:
    """Pooled ratio of ``a`` over that of ``b``, paired; of tokens over seconds: the speed-up of a against b."""
    first, second = resampled([a, b], resamples, seed)
    if a.ratio is None or not b.ratio:
        return Estimate(None, None)
    with np.errstate(divide="ignore", invalid="ignore"):
        return Estimate(a.ratio / b.ratio, percentiles(first / second) if enough(a, b) else None)


def enough(*measured: Sums) -> bool:
    """Whether at least MIN_PROMPTS prompts can tell, in every one of the measurements."""
    able = np.logical_and.reduce([sums.bottom > 0 for sums in measured])
    return int(able.sum()) >= MIN_PROMPTS


def resampled(measured: Sequence[Sums], resamples: int, seed: int) -> list[np.ndarray]:
    """Pooled ratios [resamples] of each measurement, all on the same draws of prompts; NaN where nothing was drawn."""
    prompts = len(measured[0].top)
    if any(len(sums.top) != prompts for sums in measured):
        raise ValueError("paired measurements need the same prompts")
    found = np.full((resamples, len(measured)), np.nan)
    if not prompts:
        return [*found.T]
    tops, bottoms = (np.stack(part, 1) for part in zip(*measured, strict=True))  # [P, M]
    rng = np.random.default_rng(seed)
    step = max(1, AT_ONCE // prompts)
    for start in range(0, resamples, step):
        ratios = found[start : start + step]
        times = how_often(rng.integers(prompts, size=(len(ratios), prompts)))
        whole = times @ bottoms
        np.divide(times @ tops, whole, out=ratios, where=whole > 0)
    return [*found.T]


def how_often(drawn: np.ndarray) -> np.ndarray:
    """How often each of P prompts is among the prompt numbers drawn [n, P]: float64 [n, P]."""
    rows, prompts = drawn.shape
    flat = drawn + np.arange(rows)[:, None] * prompts
    return np.bincount(flat.ravel(), minlength=rows * prompts).reshape(rows, prompts).astype(np.float64)


def percentiles(drawn: np.ndarray) -> Interval | None:
    """The interval of the drawn values; those that could not be computed are left out."""
    usable = drawn[np.isfinite(drawn)]
    if not len(usable):
        return None
    low, high = np.quantile(usable, BOUNDS)
    return float(low), float(high)
