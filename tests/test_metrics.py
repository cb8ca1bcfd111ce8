"""Acceptance length and rates on examples worked by hand."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eval.metrics import Round, acceptance, counted, uncut


def test_tau_counts_the_targets_own_token_of_every_pass() -> None:
    """Accepted per pass 2, 0, 3: tau = (3 + 1 + 4) / 3; the mean of accepted drafts alone goes by another name."""
    found = acceptance([[2, 0, 3]], 3)
    assert found.tau == pytest.approx(8 / 3)
    assert found.accepted_mean == pytest.approx(5 / 3)
    assert (found.passes, found.accepted, found.histogram) == (3, 5, [1, 0, 1, 1])
    assert found.rate == pytest.approx([2 / 3, 2 / 3, 1 / 3])
    assert found.conditional == pytest.approx([2 / 3, 1.0, 1 / 2])


def test_prefill_and_cut_tokens_are_not_counted() -> None:
    """13 output tokens, the first from prefill, 4 passes; the last accepted 3 but the length limit cut it after 1.

    The 12 tokens of the passes: blocks of 5, 4 and 2, and the cut one of 1. Cut: 12 / 4. Uncut, as engines count: the
    last pass was 3 accepted and a bonus, so (5 + 4 + 2 + 4) / 4.
    """
    rounds = [[Round(4, 4, 5), Round(4, 3, 4), Round(4, 1, 2), Round(4, 3, 1)]]
    headline, engine = acceptance(counted(rounds), 4), acceptance(uncut(rounds), 4)
    assert headline.tau == 3.0
    assert headline.tau * headline.passes == 13 - 1
    assert headline.histogram == [1, 1, 0, 1, 1]
    assert engine.tau == 15 / 4


def test_passes_without_drafts_count_in_tau_but_not_for_engines() -> None:
    rounds = [[Round(2, 2, 3), Round(0, 0, 1), Round(0, 0, 1)]]
    assert acceptance(counted(rounds), 2).tau == pytest.approx(5 / 3)
    assert acceptance(uncut(rounds), 2).tau == 3.0


def test_pooled_and_per_prompt_means_differ() -> None:
    """3 of 1 pass and 1 of 3 passes: pooled 1 + 3/4... not the mean of 3 and 1."""
    found = acceptance([[2], [0, 0, 0], []], 2)
    assert found.tau == 1 + 2 / 4
    assert found.per_prompt_mean == 2.0
    assert found.interval is not None
    low, high = found.interval  # resampled prompts are (a,a), (a,b), (b,a) or (b,b): tau 3, 1.5, 1.5, 1
    assert (low, high) == (1.0, 3.0)


def test_interval_shrinks_with_prompts_and_holds_tau() -> None:
    """Prompts with 0 or 1 accepted of 1 pass: tau is a proportion, its standard error sqrt(p q / n)."""
    found = acceptance([[i % 2] for i in range(400)], 1)
    assert found.tau == 1.5
    assert found.interval is not None
    assert found.interval == pytest.approx((1.5 - 1.96 * 0.025, 1.5 + 1.96 * 0.025), abs=0.006)


def test_nothing_measured_is_none_not_a_number() -> None:
    found = acceptance([[], []], 2)
    assert (found.tau, found.interval, found.per_prompt_mean, found.rate) == (None, None, None, [None, None])
    never = acceptance([[0, 0]], 2)
    assert never.conditional == [0.0, None]  # depth 1 was never reached


@given(st.lists(st.lists(st.integers(0, 4), max_size=6), min_size=1, max_size=6).filter(any))
def test_identities(accepted: list[list[int]]) -> None:
    found = acceptance(accepted, 4, resamples=50)
    rates = [r for r in found.rate if r is not None]
    assert sum(found.histogram) == found.passes
    assert sum(i * n for i, n in enumerate(found.histogram)) == found.accepted
    assert found.tau == pytest.approx(1 + sum(rates))
    for depth, rate in enumerate(rates):  # unconditional = product of the conditional ones
        chain = [c if c is not None else 0.0 for c in found.conditional[: depth + 1]]
        assert rate == pytest.approx(math.prod(chain))
    assert found.interval is not None
    assert found.interval[0] <= found.interval[1]
