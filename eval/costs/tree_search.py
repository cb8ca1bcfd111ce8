"""The best static tree for a drafter, from what its drafts were worth on calibration texts (eval/costs/ranks.py).

Medusa (arXiv 2401.10774, section 3.3) grows a tree node by node, always by the node that adds most to the expected
number of accepted tokens, with heads taken as independent. Joint counts need no such assumption: a tree
accepts, summed over the slots, the counts of its paths. A path's count is at most its parent's, so the nodes with the
n largest counts form a tree, and growing greedily gives, for every n, the best tree of n nodes on these texts.

A tree is a list of paths, parents first: path (0, 2) is the third choice after the first choice.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from eval.costs.ranks import RankPath


class Node(NamedTuple):
    path: RankPath
    gain: float  # expected accepted tokens that the node adds to any tree that holds its parent


def grow(
    counts: Mapping[RankPath, int], slots: int, max_nodes: int, max_levels: int, max_rank: int | None = None
) -> list[Node]:
    """Nodes in the order they are worth most: the first n are the best tree of n nodes with at most ``max_levels``.

    counts: of :func:`eval.costs.ranks.path_counts` over ``slots`` slots that are valid to the same depth (else a child
    could count as much as its parent and more). max_rank: no node takes the drafter's choices beyond that rank.
    Equal counts: the shallower node first, then the lower ranks. Fewer nodes where no other path ever occurred.
    """
    children: dict[RankPath, list[RankPath]] = {}
    for path, count in counts.items():
        if path and count and len(path) <= max_levels and (max_rank is None or path[-1] <= max_rank):
            children.setdefault(path[:-1], []).append(path)
    open_nodes: list[tuple[int, int, RankPath]] = []
    grown, parent = list[Node](), RankPath()
    while len(grown) < max_nodes:
        for path in children.get(parent, ()):
            heapq.heappush(open_nodes, (-counts[path], len(path), path))
        if not open_nodes:
            break
        count, _, parent = heapq.heappop(open_nodes)
        grown.append(Node(parent, -count / slots))
    return grown


def chain_paths(gamma: int) -> list[RankPath]:
    """A chain of ``gamma`` first choices."""
    return [(0,) * level for level in range(1, gamma + 1)]


def drafted_widths(paths: Sequence[RankPath]) -> list[int]:
    """[levels - 1] nodes that the drafter must continue at depth 1, 2, ...: those with children. The first level
    comes from the last confirmed position."""
    parents = {path[:-1] for path in paths} - {()}
    deepest = max(map(len, parents), default=0)
    return [sum(len(parent) == level for parent in parents) for level in range(1, deepest + 1)]


def levels(paths: Sequence[RankPath]) -> int:
    return max(map(len, paths), default=0)
