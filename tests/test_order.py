"""Bins and steps: every document once, tight, pure, and independent of the number of processes."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.features.order import StepPlan, plan_epoch
from models.errors import EyasError

FROZEN = [0, 5, 3, 8, 9, 4, 6, 1, 7, 2]
LENGTHS = st.lists(st.integers(1, 300), min_size=1, max_size=200)


def tokens(members: list[int], lengths: list[int]) -> int:
    return sum(lengths[document] for document in members)


@settings(max_examples=60, deadline=None)
@given(LENGTHS, st.integers(0, 5), st.integers(0, 5), st.integers(1, 200))
def test_each_document_once_and_no_bin_too_full(lengths: list[int], seed: int, epoch: int, bin_tokens: int) -> None:
    bins = plan_epoch(lengths, seed=seed, epoch=epoch, bin_tokens=bin_tokens)
    assert sorted(d for members in bins for d in members) == list(range(len(lengths)))
    for members in bins:
        assert tokens(members, lengths) <= bin_tokens or len(members) == 1
    assert bins == plan_epoch(tuple(lengths), seed=seed, epoch=epoch, bin_tokens=bin_tokens)


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from(["uniform", "short", "skewed"]))
def test_waste_below_five_percent(seed: int, kind: str) -> None:
    draw = random.Random(seed)
    lengths = [
        {
            "uniform": draw.randint(1, 2048),
            "short": draw.randint(1, 300),
            "skewed": min(2048, int(draw.lognormvariate(5.5, 1.0)) + 1),
        }[kind]
        for _ in range(2000)
    ]
    bins = plan_epoch(lengths, seed=seed, epoch=0, bin_tokens=2048)
    assert 1 - sum(lengths) / (2048 * len(bins)) < 0.05


def test_packing_by_hand() -> None:
    # 6+4, 5+5, 7+3 fill three bins of 10 exactly; 12 is too long for any and stands alone.
    lengths = [6, 4, 5, 5, 7, 3, 12]
    bins = plan_epoch(lengths, seed=3, epoch=0, bin_tokens=10)
    assert sorted(sorted(members) for members in bins) == [[0, 1], [2, 3], [4, 5], [6]]


def test_epochs_and_seeds_differ_and_long_documents_do_not_come_first() -> None:
    lengths = [1 + i % 1000 for i in range(3000)]
    plans = [plan_epoch(lengths, seed=s, epoch=e, bin_tokens=1000) for s, e in [(0, 0), (0, 1), (1, 0)]]
    assert plans[0] != plans[1] != plans[2] != plans[0]
    for bins in plans:
        half = len(bins) // 2
        longest = [max(lengths[d] for d in members) for members in bins]
        first, second = sum(longest[:half]) / half, sum(longest[half:]) / (len(bins) - half)
        assert abs(first - second) < 60


def test_the_order_never_changes_between_versions() -> None:
    """A changed permutation would break the resuming of runs begun with an older Eyas."""
    assert plan_epoch([1] * 10, seed=7, epoch=2, bin_tokens=1) == [[d] for d in FROZEN]


@settings(max_examples=40, deadline=None)
@given(LENGTHS, st.integers(1, 5), st.floats(0.1, 3.5))
def test_same_steps_for_any_number_of_processes(lengths: list[int], bins_per_step: int, epochs: float) -> None:
    plan = StepPlan(lengths, seed=1, bin_tokens=256, bins_per_step=bins_per_step, epochs=epochs)
    steps = [plan.bins(step) for step in range(plan.total_steps)]
    assert all(len(bins) == bins_per_step for bins in steps[:-1]) and 1 <= len(steps[-1]) <= bins_per_step
    for world in (1, 2, 4):
        other = StepPlan(lengths, seed=1, bin_tokens=256, bins_per_step=bins_per_step, epochs=epochs)
        for step, bins in reversed(list(enumerate(steps))):  # a resumed run starts anywhere
            shares = [other.bins(step)[rank::world] for rank in range(world)]
            assert sorted(m for share in shares for m in share) == sorted(bins)
    # Laid end to end the steps are whole epochs, and the last one as far as it goes.
    row = [members for bins in steps for members in bins]
    for epoch in range(int(epochs)):
        whole = plan_epoch(lengths, seed=1, epoch=epoch, bin_tokens=256)
        assert row[: len(whole)] == whole
        row = row[len(whole) :]
    assert row == plan_epoch(lengths, seed=1, epoch=int(epochs), bin_tokens=256)[: len(row)]


def test_numbers_of_steps() -> None:
    lengths = [4] * 10  # ten bins of one document

    def plan(**options: float) -> StepPlan:
        return StepPlan(lengths, seed=0, bin_tokens=4, bins_per_step=4, **options)  # type: ignore[arg-type]

    assert plan(epochs=1).total_steps == 3  # 4 + 4 + 2 bins
    assert [len(plan(epochs=1).bins(step)) for step in range(3)] == [4, 4, 2]
    assert plan(epochs=1.5).total_steps == 4  # 15 bins
    assert plan(epochs=1.1).total_bins == 11  # not 12 for the sake of rounding
    assert plan(steps=7).total_steps == 7 and all(len(plan(steps=7).bins(step)) == 4 for step in range(7))
    assert plan(steps=7, epochs=1).total_steps == 7
    assert [plan(steps=7).epoch(step) for step in (0, 1, 5)] == [0.0, 0.4, 2.0]
    with pytest.raises(IndexError):
        plan(steps=7).bins(7)
    with pytest.raises(EyasError, match="train.epochs"):
        plan(epochs=0.0)
    with pytest.raises(EyasError, match="no document"):
        StepPlan([], seed=0, bin_tokens=4, epochs=1)
    with pytest.raises(EyasError, match="document 1 has no tokens"):
        plan_epoch([3, 0], seed=0, epoch=0, bin_tokens=4)


def test_weights_by_hand() -> None:
    """Weight 2 comes twice an epoch, 0.5 in every second one, 1.5 once or twice; 0.25 once in four epochs."""
    weights = [1.0, 2.0, 0.5, 0.5, 1.5, 0.25]
    counts = [[0] * 6 for _ in range(4)]
    for epoch in range(4):
        for members in plan_epoch([3] * 6, seed=0, epoch=epoch, bin_tokens=6, weights=weights):
            for document in members:
                counts[epoch][document] += 1
    totals = [sum(column) for column in zip(*counts, strict=True)]
    assert totals == [4, 8, 2, 2, 6, 1]
    assert all(row[0] == 1 and row[1] == 2 and row[2] + row[3] == 1 for row in counts)
    plan = StepPlan([3] * 6, seed=0, bin_tokens=6, epochs=4, weights=weights)
    seen = [d for step in range(plan.total_steps) for members in plan.bins(step) for d in members]
    assert [seen.count(d) for d in range(6)] == totals


def test_weights_of_one_change_nothing() -> None:
    lengths = [7, 3, 5, 2, 9, 4]
    plain = plan_epoch(lengths, seed=3, epoch=1, bin_tokens=12)
    assert plan_epoch(lengths, seed=3, epoch=1, bin_tokens=12, weights=[1.0] * 6) == plain


def test_weights_that_leave_an_epoch_empty() -> None:
    with pytest.raises(EyasError, match="weights are so small"):
        StepPlan([3], seed=0, bin_tokens=6, epochs=1, weights=[0.01])
    plan = StepPlan([3], seed=0, bin_tokens=6, steps=2, weights=[0.5])  # goes on to the epochs that hold it
    assert [plan.bins(step) for step in range(2)] == [[[0]], [[0]]]
