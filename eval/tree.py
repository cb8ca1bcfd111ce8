"""Draft trees: what a proposer hands to the verifier, and the verifier to the acceptance rule.

The root is the last confirmed token. It is not a node: a node whose parent is ``ROOT`` continues it. A chain
is a tree in which every node has one child. Topology lives on the host, tokens and probabilities stay on the
device, so that building and verifying a tree needs no synchronisation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property

import torch
from torch import Tensor

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

    def positions(self, root: int) -> Tensor:
        """Position ids [1 + N] of the root and the nodes: a node's depth counts, not its place in the list."""
        return torch.tensor([root, *(root + 1 + d for d in self.depths)], device=self.tokens.device)

    def attention_mask(self, past: int) -> Tensor:
        """[1 + N, past + 1 + N] bool: root and nodes see the cache, the root, their ancestors and themselves."""
        size = len(self) + 1
        seen = torch.zeros(size, size, dtype=torch.bool)
        seen[:, 0] = True
        for node, parent in enumerate(self.parents):
            seen[node + 1] |= seen[parent + 1]
            seen[node + 1, node + 1] = True
        return torch.cat([torch.ones(size, past, dtype=torch.bool), seen], 1).to(self.tokens.device)
