"""What a pass costs on this hardware, and the speed-up that follows from it.

Measured: the target's forward for n tokens after a cache of ``past`` (a verification pass of n - 1 drafted tokens; a
chain or a tree, which differ only in the mask), and the drafter's calls. Predicted, with E tokens per pass:

    speed-up = E * T_target(1) / (T_target(1 + drafted) + T_draft)

For a chain of gamma with constant acceptance a, verification as cheap as one step and a draft at c steps, this is
Leviathan et al. (arXiv 2211.17192), theorem 3.8: (1 - a^(gamma+1)) / ((1 - a)(gamma c + 1)).
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from models.blocks import Block
from models.drafter import DraftSession
from models.target import Target

SIZES = (1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32, 48, 64)
POSITIONS = (1, 2, 4, 8)  # confirmed at a time
WIDTHS = (1, 2, 4, 8, 16)  # nodes of a level
REPEATS = 15
BUDGET = 20.0  # seconds

Key = TypeVar("Key")


# --- formulas ------------------------------------------------------------------------------------------------


def chain_speed_up(alpha: float, gamma: int, c: float) -> float:
    """Leviathan's theorem 3.8. alpha: acceptance 0..1 of every depth; c: cost of a draft in target steps, >= 0."""
    if not 0 <= alpha <= 1 or c < 0 or gamma < 0:
        raise ValueError(f"alpha={alpha} within 0..1, c={c} and gamma={gamma} from 0")
    return sum(alpha**depth for depth in range(gamma + 1)) / (gamma * c + 1)


def best_gamma(alpha: float, c: float, largest: int = 16) -> int:
    """The shortest of the best chains up to ``largest``; 0, no speculation, wherever alpha <= c (corollary 3.9)."""
    return max(range(largest + 1), key=lambda gamma: (chain_speed_up(alpha, gamma, c), -gamma))


def theory(accepted: Sequence[int], drafted_levels: Sequence[int], c: float | None) -> dict[str, float] | None:
    """What the formula says of a measured chain, for report.json: {alpha, gamma, speed_up}.

    accepted, drafted_levels: of each pass, the drafts that the rule accepted and those drafted. alpha: the share
    accepted of the drafts that were tried, all up to the first rejected one. gamma: the best one at that alpha and c.
    None where nothing was drafted or c, a draft's cost in plain forwards, is not known.
    """
    tried = sum(min(one + 1, drafted) for one, drafted in zip(accepted, drafted_levels, strict=True))
    if not tried or c is None:
        return None
    alpha = sum(accepted) / tried
    gamma = best_gamma(alpha, c)
    return {"alpha": alpha, "gamma": gamma, "speed_up": chain_speed_up(alpha, gamma, c)}


# --- the model -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Curve:
    """Milliseconds by size, as measured; called with a size: the non-decreasing fit, linear between the sizes.

    More never costs less, so sizes that were measured out of order are averaged (least squares). Beyond the largest
    size the last slope goes on.
    """

    sizes: tuple[int, ...]
    ms: tuple[float, ...]

    def __post_init__(self) -> None:
        ascending = all(a < b for a, b in zip(self.sizes, self.sizes[1:], strict=False))
        if not self.sizes or len(self.sizes) != len(self.ms) or not ascending:
            raise ValueError(f"sizes {self.sizes} must ascend, each with its time")

    @classmethod
    def of(cls, points: Mapping[int, float]) -> Curve:
        return cls(tuple(sorted(points)), tuple(points[size] for size in sorted(points)))

    @cached_property
    def fit(self) -> list[float]:
        """Pooled adjacent violators."""
        blocks = list[tuple[float, int]]()  # mean, number of sizes
        for value in self.ms:
            mean, count = value, 1
            while blocks and blocks[-1][0] > mean:
                before, more = blocks.pop()
                mean, count = (before * more + mean * count) / (more + count), more + count
            blocks.append((mean, count))
        return [mean for mean, count in blocks for _ in range(count)]

    def __call__(self, size: float) -> float:
        sizes, fit = self.sizes, self.fit
        if size <= sizes[0] or len(sizes) == 1:
            return fit[0]
        above = next((i for i, measured in enumerate(sizes) if measured >= size), len(sizes) - 1)
        share = (size - sizes[above - 1]) / (sizes[above] - sizes[above - 1])
        return fit[above - 1] + share * (fit[above] - fit[above - 1])


@dataclass(frozen=True)
class DraftCost:
    """Curves by level. Level 0: confirming n positions, which also gives the first level's drafts; level d: drafting
    on from n nodes at depth d. No curves: drafts for free (n-grams)."""

    levels: Mapping[int, Curve] = field(default_factory=dict)

    def ms(self, widths: Sequence[int], confirmed: float) -> float:
        """Of one pass that confirms so many positions and then drafts on from widths[i] nodes at depth i + 1."""
        total = self.levels[0](confirmed) if 0 in self.levels else 0.0
        deepest = max(self.levels, default=0)
        for depth, width in enumerate(widths, 1):
            if deepest and width:
                total += self.levels[min(depth, deepest)](width)
        return total


@dataclass(frozen=True)
class CostModel:
    """Costs behind ``past`` cached tokens, ``slots`` sequences at a time (sizes are those of each sequence)."""

    past: int
    target: Curve
    draft: Mapping[str, DraftCost] = field(default_factory=dict)
    slots: int = 1

    def pass_ms(self, drafter: str, nodes: int, widths: Sequence[int], tokens_per_pass: float) -> float:
        """One pass that verifies ``nodes`` drafts; widths as in ``tree_search.drafted_widths``."""
        if not nodes:
            return self.target(1)
        draft = self.draft.get(drafter, DraftCost())
        return self.target(1 + nodes) + draft.ms(widths, tokens_per_pass)

    def speed_up(self, drafter: str, nodes: int, widths: Sequence[int], tokens_per_pass: float) -> float:
        """Against plain decoding with this target on this hardware, bookkeeping apart."""
        return tokens_per_pass * self.target(1) / self.pass_ms(drafter, nodes, widths, tokens_per_pass)

    def to_dict(self) -> dict[str, Any]:
        """As in report.json's cost_model, which is about one sequence at a time; others say so under ``slots``."""
        several = {} if self.slots == 1 else {"slots": self.slots}
        return several | {
            "past": self.past,
            "target": [{"tokens": n, "ms": ms} for n, ms in zip(self.target.sizes, self.target.ms, strict=True)],
            "draft": {
                name: [
                    {"level": level, "nodes": n, "ms": ms}
                    for level, curve in sorted(cost.levels.items())
                    for n, ms in zip(curve.sizes, curve.ms, strict=True)
                ]
                for name, cost in self.draft.items()
            },
        }


def draft_cost(measured: Mapping[tuple[int, int], float]) -> DraftCost:
    """From ms by (level, nodes)."""
    levels: dict[int, dict[int, float]] = {}
    for (level, nodes), ms in measured.items():
        levels.setdefault(level, {})[nodes] = ms
    return DraftCost({level: Curve.of(points) for level, points in levels.items()})


# --- the measurement -----------------------------------------------------------------------------------------


def measure_target(
    target: Target,
    past: int,
    sizes: Sequence[int] = SIZES,
    slots: int = 1,
    *,
    repeats: int = REPEATS,
    budget: float = BUDGET,
    seed: int = 0,
) -> Curve:
    """ms of one ``Target.step`` in which each of the slots reads n tokens behind ``past`` random ones.

    Medians over the repeats; every repeat visits all sizes, in an order of its own, so that a machine that slows down
    slows all sizes alike. Ends early, after at least one repeat, when ``budget`` seconds are gone. ``past`` and the
    largest size must fit into the context.
    """
    cache = target.new_cache(slots)
    ids = random_ids(target, max(past, *sizes), seed)
    if past:
        target.step([Block(ids[:past])] * slots, cache, last_only=True)
        for slot in range(slots):
            cache.keep(slot, range(past))
    order, shuffle = sorted(sizes, reverse=True), random.Random(seed).shuffle  # the longest first: room is made once

    def repeat() -> dict[int, float]:
        taken = {}
        for n in order:
            taken[n] = timed(partial(target.step, [Block(ids[:n])] * slots, cache), target.device)
            for slot in range(slots):
                cache.keep(slot, [])
        shuffle(order)
        return taken

    return Curve.of(medians(repeat, repeats, budget))


def measure_draft(
    session: DraftSession,
    target: Target,
    past: int,
    *,
    positions: Sequence[int] = POSITIONS,
    widths: Sequence[int] = WIDTHS,
    levels: int = 4,
    slots: int = 1,
    repeats: int = REPEATS,
    budget: float = BUDGET,
    seed: int = 0,
) -> DraftCost:
    """ms of a drafter's calls on a random text of ``past`` tokens: confirming n positions in each of the slots (level
    0), and drafting on from n nodes at depths 1 .. levels, all of them continued. Medians as in measure_target; a
    text grows by the positions confirmed in one repeat."""
    length = past + sum(positions) + len(widths) + 1
    ids = random_ids(target, length, seed)
    states = target.features([ids])[0]
    everyone, at = list(range(slots)), 0

    def confirm(n: int) -> Tensor:
        nonlocal at
        part = slice(at, at + n)
        at += n
        taps, final, following = states.taps[part], states.final[part], ids[1:][part]
        many = taps.repeat(slots, 1), final.repeat(slots, 1), following.repeat(slots)
        return session.extend(everyone, [n] * slots, *many)

    def repeat() -> dict[tuple[int, int], float]:
        nonlocal at
        taken = dict[tuple[int, int], float]()
        at = 0
        for slot in everyone:
            session.reset(slot, int(ids[0]))
        confirm(max(1, past))
        for n in positions:
            taken[0, n] = timed(partial(confirm, n), target.device)
        for n in widths:
            confirm(1)
            for depth in range(1, levels + 1):
                taken[depth, n] = timed(partial(draft_on, session, ids, slots, n, depth), target.device)
        return taken

    return draft_cost(medians(repeat, repeats, budget))


def draft_on(session: DraftSession, ids: Tensor, slots: int, width: int, depth: int) -> Tensor:
    """Draft on from ``width`` nodes of each slot, each the only child of one of the level before."""
    owners = [slot for slot in range(slots) for _ in range(width)]
    first = (depth - 2) * width  # nodes are numbered in the order of expansion
    parents = torch.tensor([-1 if depth == 1 else first + i for i in range(width)] * slots)
    tokens = ids.repeat(-(-width // len(ids)))[:width].repeat(slots)
    return session.expand(owners, parents, tokens, depth)


def random_ids(target: Target, size: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(target.vocab_size, (max(1, size),), generator=generator).to(target.device)


def timed(run: Callable[[], Any], device: torch.device) -> float:
    """Milliseconds until the device has done it."""
    wait(device)
    start = time.perf_counter()
    run()
    wait(device)
    return (time.perf_counter() - start) * 1e3


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def medians(repeat: Callable[[], dict[Key, float]], repeats: int, budget: float) -> dict[Key, float]:
    """Median of every entry over the repeats, after one that doesn't count."""
    stop = time.perf_counter() + budget
    repeat()
    taken = [repeat()]
    while len(taken) < repeats and time.perf_counter() < stop:
        taken.append(repeat())
    return {key: statistics.median(one[key] for one in taken) for key in taken[0]}
