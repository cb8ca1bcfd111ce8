"""Bootstrap intervals: cases small enough to enumerate, and how often they cover the truth."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from eval.numbers import intervals
from eval.numbers.intervals import Sums, difference, estimate, estimates, how_often, quotient, resampled, tau_sums


def test_two_prompts_have_four_draws() -> None:
    """Prompt a: 3 tokens in 1 pass; b: 3 in 3. Draws aa, ab, ba, bb: 3, 6/4, 6/4, 1, a quarter each."""
    sums = tau_sums([[2], [0, 0, 0]])
    assert sums.top.tolist() == [3, 3] and sums.bottom.tolist() == [1, 3]
    (drawn,) = resampled([sums], 4000, 0)
    found, times = np.unique(drawn, return_counts=True)
    assert found.tolist() == [1.0, 1.5, 3.0]
    # 4000 draws: the standard error of a quarter is 0.007, of a half 0.008; five of them
    assert times / 4000 == pytest.approx([0.25, 0.5, 0.25], abs=0.04)
    assert estimate(sums) == (1.5, None)  # two prompts are too few


def test_three_prompts_are_enough() -> None:
    """1 of 27 draws is thrice the same prompt, more than the 2.5% beyond a bound: 3, 1 and 2 tokens a pass."""
    assert estimate(tau_sums([[2], [0, 0, 0], [1]])) == (8 / 5, (1.0, 3.0))


def test_paired_difference_and_quotient_of_two_prompts() -> None:
    """Tokens / passes of drafter x: 6/2, 2/2; of y: 3/2, 4/4, on the same two prompts.

    Draws aa, ab, ba, bb: x 3, 2, 2, 1; y 1.5, 7/6, 7/6, 1; x - y: 1.5, 5/6, 5/6, 0; x / y: 2, 12/7, 12/7, 1. With a
    third prompt like b there are intervals: aaa is 1 of 27 draws, bbb and its like 8; the values 10/6 and 11/10.
    """
    x, y = Sums.of([6, 2], [2, 2]), Sums.of([3, 4], [2, 4])
    first, second = resampled([x, y], 1000, 3)
    pairs = {(round(a, 6), round(b, 6)) for a, b in zip(first, second, strict=True)}
    assert pairs == {(3.0, 1.5), (2.0, round(7 / 6, 6)), (1.0, 1.0)}
    assert (difference(x, y).value, quotient(x, y).value) == pytest.approx((5 / 6, 12 / 7))
    assert difference(x, y).interval is quotient(x, y).interval is None
    x, y = Sums.of([6, 2, 2], [2, 2, 2]), Sums.of([3, 4, 4], [2, 4, 4])
    for found, value, interval in ((difference(x, y), 17 / 30, (0.0, 1.5)), (quotient(x, y), 50 / 33, (1.0, 2.0))):
        assert found.value == pytest.approx(value)
        assert found.interval == pytest.approx(interval)


def test_both_sides_of_a_comparison_need_enough_of_the_same_prompts() -> None:
    x = Sums.of([2, 4, 6, 0], [2, 2, 2, 0])
    y = Sums.of([0, 2, 3, 4], [0, 1, 1, 1])
    assert (difference(x, y), quotient(x, y)) == ((-1.0, None), (2 / 3, None))
    y = Sums.of([2, 2, 3, 4], [1, 1, 1, 1])
    assert None not in (difference(x, y).interval, quotient(x, y).interval)


def test_four_prompts_percentiles_of_all_256_draws() -> None:
    """The interval of many draws is the percentiles of the 256 equally likely ones, where no step is near."""
    tops, bottoms = [5, 9, 4, 7], [2, 3, 4, 5]
    every = [
        sum(tops[i] for i in draw) / sum(bottoms[i] for i in draw) for draw in itertools.product(range(4), repeat=4)
    ]
    low, high = np.quantile(every, [0.025, 0.975], method="inverted_cdf")
    for bound, level in ((low, 0.025), (high, 0.975)):
        below, upto = np.mean(np.array(every) < bound - 1e-9), np.mean(np.array(every) < bound + 1e-9)
        assert below + 0.004 < level < upto - 0.004  # five standard errors of a share of 0.025 of 40000 draws
    found = estimate(Sums.of(tops, bottoms), resamples=40_000)
    assert found.value == 25 / 14
    assert found.interval == pytest.approx((low, high), abs=1e-9)


def test_prompts_without_passes() -> None:
    """A prompt that ended with its first token has no pass: draws of it alone can't tell and are left out."""
    assert estimate(tau_sums([[1], [1], [1], []])) == (2.0, (2.0, 2.0))
    assert estimate(tau_sums([[1], [1], []])) == (2.0, None)
    assert estimate(tau_sums([[], []])) == (None, None)
    assert estimate(tau_sums([])) == (None, None)
    assert difference(tau_sums([[1]]), tau_sums([[]])) == (None, None)
    assert quotient(Sums.of([1], [1]), Sums.of([0], [1])) == (None, None)


def test_measurements_that_do_not_match_are_refused() -> None:
    with pytest.raises(ValueError, match="same prompts"):
        difference(tau_sums([[1], [2]]), tau_sums([[1]]))
    with pytest.raises(ValueError, match="2 prompts above, 1 below"):
        Sums.of([1, 2], [1])


def test_seeded_and_alike_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(5)
    sums = Sums.of(rng.integers(1, 90, 30), rng.integers(1, 30, 30))
    whole = estimate(sums, seed=4)
    assert whole == estimate(sums, seed=4) != estimate(sums, seed=5)
    monkeypatch.setattr(intervals, "AT_ONCE", 300)  # ten draws at a time
    assert estimate(sums, seed=4) == whole


def test_several_ratios_are_drawn_together() -> None:
    """Each has the interval that it has alone, and their draws belong together."""
    a, b = Sums.of([3, 0, 5, 2], [4, 1, 5, 6]), Sums.of([1, 2, 3, 4], [4, 1, 5, 6])
    assert estimates([a, b], seed=2) == [estimate(a, seed=2), estimate(b, seed=2)] and estimates([]) == []
    total = Sums(a.top + b.top, a.bottom)
    first, second, both = resampled([a, b, total], 500, 2)
    assert first + second == pytest.approx(both)


def test_how_often_prompts_are_drawn() -> None:
    assert how_often(np.array([[2, 0, 2], [1, 1, 1]])).tolist() == [[1, 0, 2], [0, 3, 0]]


def test_a_drafter_against_itself_differs_by_nothing() -> None:
    sums = tau_sums([[1, 2], [0, 0, 3], [4]])
    assert difference(sums, sums) == (0.0, (0.0, 0.0))
    assert quotient(sums, sums) == (1.0, (1.0, 1.0))


def test_coverage() -> None:
    """400 experiments of 60 prompts; tau of each prompt is its own, so the pooled truth is the ratio of means.

    Prompts: passes 5..20, tokens per pass Poisson(prompt's rate) + 1 with rates uniform in 0..2: tau = 2. Nominal 95%;
    the percentile method is a little narrow at 60 prompts (about 94%). Binomial(400, .94) is below .905 or above .98
    with probability under 0.4%: and the seed is fixed.
    """
    rng = np.random.default_rng(11)
    inside = 0
    for seed in range(400):
        passes = rng.integers(5, 21, 60)
        tokens = passes + rng.poisson(rng.uniform(0, 2, 60) * passes)
        low, high = estimate(Sums.of(tokens, passes), resamples=400, seed=seed).interval or (0.0, 0.0)
        inside += low <= 2.0 <= high
    assert 0.905 <= inside / 400 <= 0.98


def test_coverage_of_the_paired_difference() -> None:
    """As above; drafter y accepts half as much as x on every prompt: the difference of the taus is 0.5."""
    rng = np.random.default_rng(12)
    inside = 0
    for seed in range(400):
        rate, passes = rng.uniform(0, 2, 60), rng.integers(5, 21, 60)
        x = Sums.of(passes + rng.poisson(rate * passes), passes)
        y = Sums.of(passes + rng.poisson(rate / 2 * passes), passes)
        low, high = difference(x, y, resamples=400, seed=seed).interval or (0.0, 0.0)
        inside += low <= 0.5 <= high
    assert 0.905 <= inside / 400 <= 0.98


def test_paired_is_narrower_than_unpaired_on_prompts_that_are_hard_for_both() -> None:
    rng = np.random.default_rng(13)
    rate, passes = rng.uniform(0, 2, 80), rng.integers(10, 30, 80)
    x = Sums.of(passes + rng.poisson(rate * passes), passes)
    y = Sums.of(passes + rng.poisson(0.9 * rate * passes), passes)
    paired = difference(x, y).interval
    apart = resampled([x], 2000, 1)[0] - resampled([y], 2000, 2)[0]
    low, high = np.quantile(apart, [0.025, 0.975])
    assert paired is not None
    assert paired[1] - paired[0] < 0.6 * (high - low)
