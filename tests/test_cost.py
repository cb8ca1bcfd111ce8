"""The cost model: formulas by hand, the fit against brute force, and measurements under a clock of our own."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from eval.costs import cost
from eval.costs.cost import (
    CostModel,
    Curve,
    DraftCost,
    best_gamma,
    chain_speed_up,
    draft_cost,
    measure_draft,
    measure_target,
    theory,
)
from models.target import Target
from tests.drafters import random_drafter, random_vocab
from tests.tiny import tiny_target

# --- formulas ---


@pytest.mark.parametrize(
    ("alpha", "gamma", "c", "expected"),
    [
        (0.5, 1, 0.0, 1.5),
        (0.5, 2, 0.1, 1.75 / 1.2),
        (0.8, 5, 0.05, (1 - 0.8**6) / (0.2 * 1.25)),
        (1.0, 4, 0.25, 5 / 2),  # 0/0 in the closed form
        (0.0, 3, 0.1, 1 / 1.3),
        (0.7, 0, 2.0, 1.0),
        (0.9, 2, 1.5, 2.71 / 4),  # drafts dearer than the target itself
    ],
)
def test_leviathan(alpha: float, gamma: int, c: float, expected: float) -> None:
    assert chain_speed_up(alpha, gamma, c) == pytest.approx(expected)
    if alpha < 1:
        closed = (1 - alpha ** (gamma + 1)) / ((1 - alpha) * (gamma * c + 1))
        assert chain_speed_up(alpha, gamma, c) == pytest.approx(closed)


@pytest.mark.parametrize(("alpha", "gamma", "c"), [(1.1, 1, 0.0), (-0.1, 1, 0.0), (0.5, -1, 0.0), (0.5, 1, -0.1)])
def test_impossible_numbers_are_refused(alpha: float, gamma: int, c: float) -> None:
    with pytest.raises(ValueError, match="alpha"):
        chain_speed_up(alpha, gamma, c)


@given(st.floats(0, 1), st.floats(0, 2))
def test_speculation_pays_exactly_where_acceptance_exceeds_cost(alpha: float, c: float) -> None:
    """Leviathan et al., corollary 3.9; at the border rounding decides."""
    if abs(alpha - c) > 1e-9:
        assert (best_gamma(alpha, c) > 0) == (alpha > c)


def test_best_gamma_by_hand() -> None:
    """a = .5, c = .1: 1.5/1.1 = 1.364, 1.75/1.2 = 1.458, 1.875/1.3 = 1.442: two."""
    assert best_gamma(0.5, 0.1) == 2
    assert best_gamma(0.9, 1.0) == best_gamma(0.0, 0.0) == 0
    assert best_gamma(1.0, 0.5, largest=7) == 7


def test_theory_of_a_measured_chain_by_hand() -> None:
    """Chains of 3 that accept 3, 1 and 0, and a pass without drafts: tried 3, 2, 1 and none, so alpha = 4/6.

    c = 1/4: speed-ups (1 + a)/1.25 = 1.333, (1 + a + a^2)/1.5 = 1.407, (1 + a + a^2 + a^3)/1.75 = 1.376: two.
    """
    assert theory([3, 1, 0, 0], [3, 3, 3, 0], 0.25) == {
        "alpha": pytest.approx(2 / 3),
        "gamma": 2,
        "speed_up": pytest.approx((1 + 2 / 3 + 4 / 9) / 1.5),
    }
    assert theory([0, 0], [4, 4], 0.1) == {"alpha": 0.0, "gamma": 0, "speed_up": 1.0}
    assert theory([], [], 0.1) is None and theory([0], [0], 0.1) is None and theory([1], [2], None) is None


def test_theory_finds_alpha_again() -> None:
    """20000 passes of a chain of 4 at alpha = 0.7: about 50000 tries, a standard error of 0.002; five of them."""
    rng = np.random.default_rng(0)
    accepted = np.cumprod(rng.random((20_000, 4)) < 0.7, axis=1).sum(1).tolist()
    found = theory(accepted, [4] * 20_000, 0.05)
    assert found is not None and found["alpha"] == pytest.approx(0.7, abs=0.01)


# --- curves ---


def test_curve_by_hand() -> None:
    """Sizes 1, 2, 4, 8: 10, 14, 12, 20. The middle two are out of order: 13 each."""
    curve = Curve.of({4: 12.0, 1: 10.0, 8: 20.0, 2: 14.0})
    assert curve.fit == [10, 13, 13, 20]
    assert [curve(n) for n in (0, 1, 1.5, 2, 3, 4, 6, 8)] == [10, 10, 11.5, 13, 13, 13, 16.5, 20]
    assert curve(12) == pytest.approx(20 + 4 * 7 / 4)
    assert Curve.of({5: 3.0})(1) == Curve.of({5: 3.0})(50) == 3.0
    assert Curve.of({1: 3.0, 2: 2.0, 3: 1.0}).fit == [2, 2, 2]
    with pytest.raises(ValueError, match="ascend"):
        Curve((2, 1), (1.0, 2.0))
    with pytest.raises(ValueError, match="ascend"):
        Curve.of({})


@given(st.lists(st.integers(0, 12), min_size=1, max_size=5))
def test_fit_is_the_least_squares_one(values: list[int]) -> None:
    """Against every way of cutting the sizes into blocks of equal values: the best non-decreasing one."""
    data = np.array(values, dtype=np.float64)
    found = np.array(Curve.of(dict(enumerate(map(float, values)))).fit)
    errors = []
    for cuts in itertools.product([False, True], repeat=len(data) - 1):
        block = np.cumsum([0, *cuts])
        means = np.array([data[block == b].mean() for b in range(block[-1] + 1)])
        if (np.diff(means) >= 0).all():
            errors.append(float(((means[block] - data) ** 2).sum()))
    assert (np.diff(found) >= -1e-12).all()
    assert ((found - data) ** 2).sum() == pytest.approx(min(errors))


# --- the model ---

MODEL = CostModel(
    256,
    Curve((1, 2, 4, 8), (10.0, 12.0, 14.0, 22.0)),
    {"eagle": draft_cost({(0, 1): 1.0, (0, 4): 2.5, (1, 1): 0.5, (1, 4): 2.0, (2, 1): 0.6, (2, 2): 0.8})},
)


def test_a_pass_by_hand() -> None:
    """A chain of 3, 2.5 tokens a pass: verification of 4 tokens 14; confirming 2.5 costs 1.75; depths 1, 2: .5 + .6."""
    assert MODEL.pass_ms("eagle", 3, [1, 1], 2.5) == pytest.approx(14 + 1.75 + 1.1)
    assert MODEL.speed_up("eagle", 3, [1, 1], 2.5) == pytest.approx(2.5 * 10 / 16.85)
    # 7 nodes in 4 levels, of which 2, 2 and 1 are drafted on from; the third level costs as the deepest measured
    assert MODEL.pass_ms("eagle", 7, [2, 2, 1], 4.0) == pytest.approx(22 + 2.5 + 1.0 + 0.8 + 0.6)
    assert MODEL.pass_ms("eagle", 1, [], 1.0) == pytest.approx(12 + 1.0)


def test_plain_decoding_and_free_drafts() -> None:
    assert MODEL.pass_ms("eagle", 0, [], 1.0) == 10.0 and MODEL.speed_up("eagle", 0, [], 1.0) == 1.0
    assert MODEL.pass_ms("ngram", 3, [1, 1], 2.0) == 14.0
    assert DraftCost({0: Curve.of({1: 2.0})}).ms([3, 3], 1.0) == 2.0  # heads that draft all levels in one go


def test_as_json() -> None:
    stored = json.loads(json.dumps(MODEL.to_dict()))
    assert stored["past"] == 256 and "slots" not in stored
    assert stored["target"][1] == {"tokens": 2, "ms": 12.0}
    assert stored["draft"]["eagle"][2] == {"level": 1, "nodes": 1, "ms": 0.5}
    assert CostModel(0, MODEL.target, slots=4).to_dict()["slots"] == 4


# --- measuring ---


class Clock:
    """Time that passes only where a script says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(cost, "time", clock)
    return clock


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    folder: Path = tiny_target(tmp_path_factory.mktemp("target"), "llama", layers=6)
    return Target.load(str(folder), taps=(2, 3, 5))


@pytest.mark.parametrize("slots", [1, 3])
def test_target_is_timed_behind_the_same_cache(
    target: Target, clock: Clock, monkeypatch: pytest.MonkeyPatch, slots: int
) -> None:
    """A step of n tokens takes 2 + n ms; three of them a second more, which no median shows."""
    seen = []
    step = Target.step

    def slow_step(self: Target, blocks: Any, cache: Any, *args: Any, **options: Any) -> Any:
        seen.append((list(cache.lengths), list(cache.pending), [b.tokens.numel() for b in blocks]))
        clock.now += (2 + blocks[0].tokens.numel()) * 1e-3 + (len(seen) in (8, 15, 20))
        return step(self, blocks, cache, *args, **options)

    monkeypatch.setattr(Target, "step", slow_step)
    curve = measure_target(target, 20, (1, 3, 7), slots, repeats=7, budget=1e9)
    assert curve.sizes == (1, 3, 7) and curve.ms == pytest.approx((3.0, 5.0, 9.0))
    assert seen[0] == ([0] * slots, [0] * slots, [20] * slots)
    assert all(lengths == [20] * slots and pending == [0] * slots for lengths, pending, _ in seen[1:])
    orders = [tuple(sizes[0] for _, _, sizes in seen[1 + 3 * i : 4 + 3 * i]) for i in range(8)]
    assert len(seen) == 1 + 3 * 8 and all(sorted(order) == [1, 3, 7] for order in orders) and len(set(orders)) > 1
    assert orders[0] == (7, 3, 1)  # the uncounted repeat makes the room


def test_budget_ends_a_measurement(target: Target, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    step = Target.step

    def slow_step(self: Target, *args: Any, **options: Any) -> Any:
        calls.append(0)
        clock.now += 1.0
        return step(self, *args, **options)

    monkeypatch.setattr(Target, "step", slow_step)
    assert measure_target(target, 0, (1, 2), repeats=50, budget=0.0).ms == (1000.0, 1000.0)
    assert len(calls) == 2 * 2  # one repeat uncounted, one counted, and no prompt
    calls.clear()
    measure_target(target, 0, (1, 2), repeats=50, budget=7.5)
    assert len(calls) == 2 * 4  # 2 seconds a repeat: 8 seconds are past the budget


class ScriptedSession:
    """A drafting session that takes 1 + n ms to confirm n positions and 10 d + w to continue w nodes at depth d."""

    def __init__(self, clock: Clock, slots: int) -> None:
        self.clock, self.slots = clock, slots
        self.confirmed = [0] * slots
        self.levels: list[list[int]] = []  # nodes of each slot's levels, by number
        self.pasts: set[int] = set()

    def reset(self, slot: int, first_token: int) -> None:
        self.confirmed[slot] = 0

    def move(self, source: int, to: int) -> None:
        raise AssertionError("nothing ends here")

    def extend(
        self, slots: Sequence[int], counts: Sequence[int], taps: Tensor, final: Tensor, next_ids: Tensor
    ) -> Tensor:
        assert list(slots) == list(range(self.slots)) and len(set(counts)) == 1
        assert len(taps) == len(final) == len(next_ids) == sum(counts)
        self.pasts.add(self.confirmed[0])
        self.confirmed = [length + counts[0] for length in self.confirmed]
        self.levels = []
        self.clock.now += (1 + counts[0]) * 1e-3
        return taps[:1]

    def expand(self, slots: Sequence[int], parents: Tensor, tokens: Tensor, depth: int) -> Tensor:
        width = len(slots) // self.slots
        assert (
            list(slots) == sorted(slots) and [list(slots).count(s) for s in range(self.slots)] == [width] * self.slots
        )
        assert depth == len(self.levels) + 1 and len(tokens) == len(parents) == len(slots)
        expected = self.levels[-1] if self.levels else [-1] * width
        assert parents.tolist() == expected * self.slots
        nodes = sum(map(len, self.levels))
        self.levels.append(list(range(nodes, nodes + width)))
        self.clock.now += (10 * depth + width) * 1e-3
        return tokens


@pytest.mark.parametrize("slots", [1, 2])
def test_drafter_is_timed_call_by_call(target: Target, clock: Clock, slots: int) -> None:
    session = ScriptedSession(clock, slots)
    found = measure_draft(
        session, target, 30, positions=(1, 3), widths=(1, 4), levels=3, slots=slots, repeats=3, budget=1e9
    )
    assert found.levels[0].sizes == (1, 3) and found.levels[0].ms == pytest.approx((2.0, 4.0))
    for depth in (1, 2, 3):
        assert found.levels[depth].ms == pytest.approx((10 * depth + 1, 10 * depth + 4))
    assert session.pasts == {0, 30, 31, 34, 35}  # never longer than that, however many repeats


@pytest.mark.parametrize("slots", [1, 2])
def test_a_real_drafter_can_be_timed(target: Target, slots: int) -> None:
    frozen = target.frozen()
    drafter = random_drafter(frozen, random_vocab(target.vocab_size, 50))
    session = drafter.session(frozen, slots)
    found = measure_draft(session, target, 12, positions=(1, 2), widths=(1, 2), levels=2, slots=slots, repeats=2)
    assert set(found.levels) == {0, 1, 2}
    assert all(ms > 0 for curve in found.levels.values() for ms in curve.ms)
    model = CostModel(12, measure_target(target, 12, (1, 2, 4), slots, repeats=2), {"eagle": found}, slots)
    assert model.speed_up("eagle", 3, [1, 1], 2.0) > 0
    assert torch.is_grad_enabled()
