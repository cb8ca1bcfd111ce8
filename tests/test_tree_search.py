"""The grown tree is the best one: by hand, and against every tree there is on tiny counts."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eval.costs.ranks import RankPath, Ranks, path_counts
from eval.costs.tree_search import chain_paths, drafted_widths, grow, levels

COUNTS = {(): 10, (0,): 6, (1,): 2, (7,): 1, (0, 0): 3, (0, 1): 2, (1, 0): 2, (0, 0, 0): 1, (0, 0, 4): 2}


def ranks_from(rows: list[list[int]]) -> Ranks:
    """Ranks of slots given one by one; all valid."""
    table = np.array(rows, dtype=np.int64).T
    return Ranks(np.arange(table.shape[1]), np.ones(table.shape, dtype=np.bool_), table)


def expected_accepted(counts: Mapping[RankPath, int], slots: int, paths: Sequence[RankPath]) -> float:
    """Accepted tokens per pass of a tree, were passes to begin at all slots alike."""
    return sum(counts.get(path, 0) for path in paths) / slots


def is_tree(paths: Sequence[RankPath]) -> bool:
    """Whether every path is there once, behind its parent."""
    seen: set[RankPath] = {()}
    for path in paths:
        if path in seen or path[:-1] not in seen:
            return False
        seen.add(path)
    return True


def all_trees(nodes: set[RankPath], size: int) -> Iterator[tuple[RankPath, ...]]:
    """Every set of ``size`` paths that holds the parent of each of its paths."""
    for chosen in itertools.combinations(sorted(nodes), size):
        if all(len(path) == 1 or path[:-1] in chosen for path in chosen):
            yield chosen


def test_by_hand() -> None:
    """Counts 6, 3, then four nodes with 2 (shallow ones first, low ranks first), then two with 1."""
    found = grow(COUNTS, 10, 20, 3)
    order = [(0,), (0, 0), (1,), (0, 1), (1, 0), (0, 0, 4), (7,), (0, 0, 0)]
    assert [node.path for node in found] == order
    assert [node.gain for node in found] == [0.6, 0.3, 0.2, 0.2, 0.2, 0.2, 0.1, 0.1]
    assert grow(COUNTS, 10, 3, 3) == found[:3]
    assert [n.path for n in grow(COUNTS, 10, 20, 1)] == [(0,), (1,), (7,)]
    assert [n.path for n in grow(COUNTS, 10, 20, 3, max_rank=1)] == [p for p in order if max(p) <= 1]
    assert grow(COUNTS, 10, 0, 3) == grow({(): 4}, 4, 9, 3) == grow({}, 0, 9, 3) == []


def test_shapes_by_hand() -> None:
    """(0,), (1,), (2,) at level 1, of which 0 and 1 have children; (0, 0) of the second level has one."""
    tree: list[RankPath] = [(0,), (1,), (2,), (0, 0), (1, 0), (1, 1), (0, 0, 0)]
    assert drafted_widths(tree) == [2, 1] and levels(tree) == 3
    assert drafted_widths(chain_paths(4)) == [1, 1, 1] and levels(chain_paths(4)) == 4
    assert drafted_widths([(0,), (1,)]) == drafted_widths([]) == [] and levels([]) == 0


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(st.integers(-1, 2), min_size=3, max_size=3), min_size=1, max_size=12), st.integers(1, 3))
def test_the_best_of_all_trees(rows: list[list[int]], max_levels: int) -> None:
    ranks = ranks_from(rows)
    counts = path_counts(ranks)
    grown = grow(counts, len(ranks), 7, max_levels)
    paths = [node.path for node in grown]
    assert is_tree(paths)
    nodes = {path for path in counts if path and len(path) <= max_levels}
    for size in range(1, min(5, len(nodes)) + 1):
        best = max(expected_accepted(counts, len(ranks), tree) for tree in all_trees(nodes, size))
        assert sum(node.gain for node in grown[:size]) == pytest.approx(best)
        assert expected_accepted(counts, len(ranks), paths[:size]) == pytest.approx(best)


def test_expected_accepted_is_the_mean_over_slots() -> None:
    """Against a walk down the tree at every slot, on random ranks with tokens outside the draft vocabulary."""
    rng = np.random.default_rng(0)
    ranks = ranks_from(rng.integers(-1, 4, (200, 4)).tolist())
    paths = [node.path for node in grow(path_counts(ranks), 200, 25, 4)]
    total = 0
    for column in ranks.rank.T.tolist():
        depth = 0
        while depth < 4 and tuple(column[: depth + 1]) in paths:
            depth += 1
        total += depth
    assert expected_accepted(path_counts(ranks), 200, paths) == pytest.approx(total / 200)


def test_joint_counts_see_what_marginals_cannot() -> None:
    """Two kinds of slots: always (0, 1) or always (1, 0). Marginals call all four paths alike; two never occur."""
    counts = path_counts(ranks_from([[0, 1], [1, 0]] * 20))
    joint = [node.path for node in grow(counts, 40, 4, 2)]
    assert joint == [(0,), (1,), (0, 1), (1, 0)] and expected_accepted(counts, 40, joint) == 2.0
    assert expected_accepted(counts, 40, [(0,), (1,), (0, 0), (0, 1)]) == 1.5
