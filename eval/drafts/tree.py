"""Draft trees: what a proposer hands to the verifier, and the verifier to the acceptance rule.

The root is the last confirmed token. It is not a node: a node whose parent is ``ROOT`` continues it. A chain
is a tree in which every node has one child. Topology lives on the host, tokens and probabilities stay on the
device, so that building and verifying a tree needs no synchronisation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property, lru_cache

import numpy as np
import torch
from torch import Tensor

from models.blocks import Block

ROOT = -1


class Drawn(Enum):
    """How a node's token came about, which decides the distribution that the acceptance rule divides by."""

    SAMPLED = "sampled"  # from q, independently of its siblings (siblings may repeat)
    DISTINCT = "distinct"  # from q without replacement: q with the earlier DISTINCT siblings taken out
    FIXED = "fixed"  # chosen by a rule (argmax, top-k, n-gram): a point mass


@dataclass(frozen=True)
class DraftTree:
    """N drafted tokens. Parents come before their children; siblings stand in the order they are to be tried.

    tokens [N] int64 target ids; parents: node number of each node's parent, or ROOT; drawn: see :class:`Drawn`;
    q: distributions [V] over the full vocabulary, after the logits processors; q_row: for each node the number
    of the distribution it was drawn from (any number for FIXED nodes).
    """

    tokens: Tensor
    parents: tuple[int, ...]
    drawn: tuple[Drawn, ...]
    q: tuple[Tensor, ...] = ()
    q_row: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        assert len(self.parents) == len(self.drawn) == self.tokens.numel(), "tree: one parent and kind per token"
        assert all(ROOT <= parent < node for node, parent in enumerate(self.parents)), "tree: parents come first"
        needs_q = any(kind is not Drawn.FIXED for kind in self.drawn)
        assert not needs_q or len(self.q_row) == len(self), "tree: sampled nodes need their distribution"

    @classmethod
    def empty(cls, device: torch.device | str = "cpu") -> DraftTree:
        return cls(torch.empty(0, dtype=torch.int64, device=device), (), ())

    @classmethod
    def chain(cls, tokens: Tensor | Sequence[int], q: Sequence[Tensor] = ()) -> DraftTree:
        """A chain; with ``q`` (one distribution per token) sampled from it, without a fixed choice."""
        tokens = torch.as_tensor(tokens, dtype=torch.int64)
        size = tokens.numel()
        kind = Drawn.SAMPLED if q else Drawn.FIXED
        assert len(q) in (0, size), "chain: one distribution per token"
        return cls(tokens, tuple(range(-1, size - 1)), (kind,) * size, tuple(q), tuple(range(len(q))))

    def __len__(self) -> int:
        return len(self.parents)

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """Draft depth of each node, 0 for children of the root."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(0 if parent == ROOT else depths[parent] + 1)
        return tuple(depths)

    @property
    def depth(self) -> int:
        """Number of levels: the most tokens that one pass can accept."""
        return max(self.depths, default=-1) + 1

    @cached_property
    def is_chain(self) -> bool:
        return self.parents == tuple(range(-1, len(self) - 1))

    @cached_property
    def _children(self) -> dict[int, list[int]]:
        children: dict[int, list[int]] = {}
        for node, parent in enumerate(self.parents):
            children.setdefault(parent, []).append(node)
        return children

    def children(self, node: int) -> list[int]:
        """Children of a node (or of ROOT) in the order they are to be tried."""
        return self._children.get(node, [])

    def path(self, node: int) -> list[int]:
        """Nodes from the root's child down to ``node``; empty for ROOT."""
        path: list[int] = []
        while node != ROOT:
            path.append(node)
            node = self.parents[node]
        return path[::-1]

    def only(self, nodes: Sequence[int]) -> DraftTree:
        """The tree of these nodes (ascending), which hold the parent of each."""
        if len(nodes) == len(self):
            return self
        number = {ROOT: ROOT, **{node: i for i, node in enumerate(nodes)}}
        return DraftTree(
            self.tokens[list(nodes)],
            tuple(number[self.parents[node]] for node in nodes),
            tuple(self.drawn[node] for node in nodes),
            self.q,
            tuple(self.q_row[node] for node in nodes) if self.q_row else (),
        )

    def block(self, root: int) -> Block:
        """What a verification pass reads: the last confirmed token ``root``, then the nodes.

        A node's position follows from its depth, not from its place in the list; it sees the root, its ancestors and
        itself.
        """
        first = torch.tensor([root], dtype=torch.int64, device=self.tokens.device)
        tokens = torch.cat([first, self.tokens])
        if self.is_chain:
            return Block(tokens)
        return Block(tokens, [0, *(1 + depth for depth in self.depths)], lineages(self.parents))


@lru_cache(maxsize=32)  # a static tree has the same parents in every pass
def lineages(parents: tuple[int, ...]) -> Tensor:
    """[1 + N, 1 + N] bool on the host: root and nodes see the root, their ancestors and themselves. Not to be changed:
    it is shared."""
    seen = np.eye(1 + len(parents), dtype=np.bool_)
    seen[:, 0] = True
    for node, parent in enumerate(parents, 1):
        seen[node] |= seen[parent + 1]
    return torch.from_numpy(seen)
