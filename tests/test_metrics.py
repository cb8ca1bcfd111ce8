"""Acceptance length and rates on examples worked by hand."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eval.numbers.metrics import Acceptance, Round, acceptance, by_category, by_position, counted, uncut


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
    """2 of 1 pass, 0 of 3 passes and 1 of 1: pooled 1 + 3/5, not the mean of 3, 1 and 2."""
    found = acceptance([[2], [0, 0, 0], [], [1]], 2)
    assert found.tau == 1 + 3 / 5
    assert found.per_prompt_mean == 2.0
    assert found.interval == (1.0, 3.0)  # one in 27 draws is thrice the same prompt


def test_too_few_prompts_have_no_interval() -> None:
    """Two prompts with passes, and one without; of three, only two accepted a draft at depth 0."""
    found = acceptance([[2], [0, 0, 0], []], 2)
    assert (found.tau, found.interval) == (1.5, None)
    assert found.rate_interval == found.conditional_interval == [None, None]
    found = acceptance([[2], [0, 0, 0], [1]], 2)
    assert None not in (found.interval, *found.rate_interval, found.conditional_interval[0])
    assert (found.conditional[1], found.conditional_interval[1]) == (0.5, None)


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


def test_trees_count_levels_not_nodes() -> None:
    """A tree of 3 nodes and 2 levels: a pass accepts at most 2, whatever the number of nodes."""
    tree = {"tokens": (7, 8, 9), "parents": (-1, -1, 1)}
    rounds = [[Round(2, 2, 3, path=(1, 2), **tree), Round(2, 1, 2, path=(0,), **tree), Round(2, 0, 1, **tree)]]
    found = acceptance(counted(rounds), 2)
    assert (found.tau, found.histogram) == (2.0, [1, 1, 1])
    assert found.rate == pytest.approx([2 / 3, 1 / 3])
    assert found.conditional == pytest.approx([2 / 3, 1 / 2])


def test_what_is_only_shown_does_not_make_passes_differ() -> None:
    assert Round(1, 1, 2, (5,), (-1,), (0,)) == Round(1, 1, 2)


def test_categories_are_pooled_apart() -> None:
    """writing: 2, 0, 1 of one pass each: 1 + 3/3. math: 1, 1, 3 of one prompt: 1 + 5/3. One prompt without a name."""
    accepted = [[2], [1, 1, 3], [0], [4], [1]]
    found = by_category(accepted, ["writing", "math", "writing", None, "writing"], 4)
    assert list(found) == ["math", "none", "writing"]
    assert {name: one.tau for name, one in found.items()} == pytest.approx({"math": 8 / 3, "none": 5, "writing": 2})
    assert (found["writing"].passes, found["writing"].histogram) == (3, [1, 1, 1, 0, 0])
    assert found["writing"].interval == (1.0, 3.0)  # thrice the prompt without an accepted draft, thrice that with two
    assert found["math"].interval is found["none"].interval is None  # one prompt is always itself
    assert by_category([[1]], [None], 2) == {} == by_category([], [], 2)


def test_tau_by_position() -> None:
    """Prompt of 3 tokens, so the first pass begins at 4; edges 0, 6, 8, 20.

    Confirmed lengths: 4 (kept 3), 7 (kept 1), 8 (kept 4, of 5 accepted and a bonus: cut), of a second generation
    5 (kept 2), 7 (kept 2), of a third as of the first 4 (kept 3), 7 (kept 1). Buckets: 0-6: accepted 2, 1, 2;
    6-8: 0, 1, 0; 8-20: 3, too few for an interval; none beyond. From 6 on: 0 and 3 (5 tokens of 2 passes), 1, 0.
    """
    rounds = [[Round(5, 2, 3), Round(5, 0, 1), Round(5, 5, 4)], [Round(5, 1, 2)] * 2, [Round(5, 2, 3), Round(5, 0, 1)]]
    first = {"from": 0, "to": 6, "passes": 3, "accepted": 5, "tau": pytest.approx(8 / 3), "interval": (2.0, 3.0)}
    assert by_position(rounds, [4, 5, 4], (0, 6, 8, 20)) == [
        first,
        {"from": 6, "to": 8, "passes": 3, "accepted": 1, "tau": pytest.approx(4 / 3), "interval": (1.0, 2.0)},
        {"from": 8, "to": 20, "passes": 1, "accepted": 3, "tau": 4.0, "interval": None},
    ]
    assert by_position(rounds, [4, 5, 4], (0, 6)) == [
        first,
        {"from": 6, "to": None, "passes": 4, "accepted": 4, "tau": 2.0, "interval": (1.0, 2.5)},
    ]


def test_intervals_by_position_draw_prompts_not_answers() -> None:
    """Two answers to one prompt (2 and 0 accepted), one each to two others (1).

    As prompts all draws have tau 2. Each answer by itself: the sum of four draws from 2, 0, 1, 1 is that of eight
    coins; 0 has probability 1/256, up to 1 9/256: the bounds of 95% are 1 and 7 accepted in four passes.
    """
    rounds = [[Round(2, 2, 3)], [Round(2, 0, 1)], [Round(2, 1, 2)], [Round(2, 1, 2)]]
    ways = None, [4, 4, 7, 8], [4, 4, 7, 7]
    (apart,), (joined,), (two,) = (by_position(rounds, [9] * 4, prompts=prompts) for prompts in ways)
    assert apart["interval"] == (1.25, 2.75)
    assert joined["interval"] == (2.0, 2.0) and two["interval"] is None and joined["tau"] == two["tau"] == 2.0
    rounds[2:] = [[Round(2, 0, 1)]] * 2
    assert by_position(rounds, [9] * 4, prompts=[4, 4, 7, 8])[0]["interval"] == (1.0, 2.0)


def test_intervals_of_rates_by_hand() -> None:
    """Prompt a: 2 accepted of one pass, b and c: 1 and 0 of two. 1 of 27 draws is aaa, 8 have no a.

    Depth 0: a 1 of 1, b 1 of 2: from 1/2 to 1. Depth 1, of all passes and of those that accepted depth 0: from 0 to 1.
    Depth 2: never; of those that accepted depth 1, which only a did: no interval.
    """
    found = acceptance([[2], [1, 0], [1, 0]], 3)
    assert found.rate_interval == [(0.5, 1.0), (0.0, 1.0), (0.0, 0.0)]
    assert found.conditional_interval == [(0.5, 1.0), (0.0, 1.0), None] and found.conditional[2] == 0.0
    never = acceptance([[0], [0], [0]], 2)
    assert never.rate_interval == [(0.0, 0.0)] * 2 and never.conditional_interval == [(0.0, 0.0), None]
    assert acceptance([], 1).rate_interval == acceptance([], 1).conditional_interval == [None]
    assert (acceptance([[0]], 0).rate, acceptance([[0]], 0).rate_interval) == ([], [])


def test_intervals_of_rates_are_those_of_proportions() -> None:
    """One pass a prompt, 400 prompts: 200 accept nothing, 160 one draft, 40 both: shares 0.5, 0.1, 0.2 of 200.

    Standard errors sqrt(p (1 - p) / n); a bound may be off by a tenth of the interval's width.
    """
    found = acceptance([[0]] * 200 + [[1]] * 160 + [[2]] * 40, 2)
    for bounds, share, passes in (
        (found.rate_interval[0], 0.5, 400),
        (found.rate_interval[1], 0.1, 400),
        (found.conditional_interval[1], 0.2, 200),
    ):
        reach = 1.96 * math.sqrt(share * (1 - share) / passes)
        assert bounds == pytest.approx((share - reach, share + reach), abs=0.2 * reach)


def test_default_buckets_double_and_are_closed_below() -> None:
    rounds = [[Round(1, 1, 2)] for _ in range(7)]
    found = by_position(rounds, [511, 512, 1023, 1024, 2048, 65535, 70000])
    edges = [(b["from"], b["to"], b["passes"]) for b in found]
    assert edges == [(0, 512, 1), (512, 1024, 2), (1024, 2048, 1), (2048, 4096, 1), (32768, 65536, 1), (65536, None, 1)]
    assert by_position([], []) == [] == by_position([[]], [9])


@given(
    st.lists(
        st.tuples(st.integers(0, 40), st.lists(st.tuples(st.integers(0, 4), st.booleans()), max_size=6)), max_size=5
    )
)
def test_positions_and_categories_partition_the_passes(drawn: list[tuple[int, list[tuple[int, bool]]]]) -> None:
    rounds = [[Round(4, a, 1 if cut else a + 1) for a, cut in passes] for _, passes in drawn]
    whole = acceptance(counted(rounds), 4, resamples=10)
    buckets = by_position(rounds, [start for start, _ in drawn], (0, 7, 20))
    groups = by_category(counted(rounds), [("even", "odd")[start % 2] for start, _ in drawn], 4, resamples=10)
    parts: list[list[tuple[int, int]]] = [
        [(b["passes"], b["accepted"]) for b in buckets],
        [(g.passes, g.accepted) for g in groups.values()],
    ]
    for part in parts:
        assert sum(p for p, _ in part) == whole.passes and sum(a for _, a in part) == whole.accepted
    kept = sum(r.kept for prompt in rounds for r in prompt)
    assert kept == pytest.approx((whole.tau or 0) * whole.passes)
    check_identities(whole)


def check_identities(found: Acceptance) -> None:
    assert sum(found.histogram) == found.passes
    assert sum(i * n for i, n in enumerate(found.histogram)) == found.accepted
    if found.passes:
        assert found.tau == pytest.approx(1 + sum(r or 0.0 for r in found.rate))


@given(st.lists(st.lists(st.integers(0, 4), max_size=6), min_size=1, max_size=6).filter(any))
def test_identities(accepted: list[list[int]]) -> None:
    found = acceptance(accepted, 4, resamples=50)
    rates = [r for r in found.rate if r is not None]
    check_identities(found)
    for depth, rate in enumerate(rates):  # unconditional = product of the conditional ones
        chain = [c if c is not None else 0.0 for c in found.conditional[: depth + 1]]
        assert rate == pytest.approx(math.prod(chain))
    able = [sum(any(drafts >= depth for drafts in prompt) for prompt in accepted) for depth in range(4)]
    assert (found.interval is not None) is (able[0] >= 3)
    assert found.interval is None or found.interval[0] <= found.interval[1]
    assert [bounds is not None for bounds in found.rate_interval] == [able[0] >= 3] * 4
    assert [bounds is not None for bounds in found.conditional_interval] == [prompts >= 3 for prompts in able]
