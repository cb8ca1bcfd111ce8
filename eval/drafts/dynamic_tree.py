"""The dynamic draft tree of EAGLE-2 (arXiv:2406.16858, section 4): it grows where the drafter is sure of itself.

Expand: of every node in the frontier the ``branch`` likeliest children; a node's score is the sum of the log
probabilities on its path; the next frontier are the ``branch`` best of the new level. Rerank: of all the nodes so
found the ``nodes`` best, of equals the shallower. A child's score is never above its parent's, so that the parent of
every chosen node is chosen too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from eval.drafts.draws import Contexts, Draws, Start
from eval.drafts.tree import ROOT, DraftTree, Drawn
from models.errors import EyasError


@dataclass(frozen=True)
class DynamicTree:
    """``levels`` deep, ``branch`` children per node and nodes expanded per level, at most ``nodes`` drafted tokens.

    Drafts are fixed (a point mass) at every temperature, and scored by the drafter's own probabilities: before
    temperature and cuts, after penalties. What a penalty has banned is not drafted.
    """

    levels: int
    branch: int = 10
    nodes: int = 60

    def __post_init__(self) -> None:
        for key, value in (("gamma", self.levels), ("branch", self.branch), ("nodes", self.nodes)):
            if value < 1:
                raise EyasError(f"verify.{key}={value}: must be at least 1")

    @property
    def fixed(self) -> bool:
        return True

    @property
    def candidates(self) -> int:
        """Nodes among which the rerank chooses."""
        return self.branch + (self.levels - 1) * self.branch**2

    def trimmed(self, max_depth: int | None, vocab: int) -> tuple[DynamicTree, int]:
        """Fewer levels and a narrower branch, as the drafter's are; and how many candidates that takes away."""
        levels = self.levels if max_depth is None else min(self.levels, max_depth)
        fitted = replace(self, levels=levels, branch=min(self.branch, vocab))
        return fitted, self.candidates - fitted.candidates

    def draft(self, start: Start, draws: Draws) -> list[DraftTree]:
        found = Candidates(self.branch, len(start.limits))
        found.add(range(len(start.limits)), *draws.ranked(start.logits, self.branch, start.texts))
        for depth in range(1, self.levels):
            active = [slot for slot, limit in enumerate(start.limits) if limit > depth]
            if not active:
                break
            contexts = found.contexts(start.texts, active) if draws.needs_context else ()
            rows = [slot for slot in active for _ in range(self.branch)]
            logits = start.expand(rows, *found.frontier(active), depth)
            tokens, log_probs = draws.ranked(logits, self.branch, contexts)
            found.add(active, tokens.view(len(active), -1), log_probs.view(len(active), -1))
        return found.best(self.nodes)


class Candidates:
    """The nodes found for A sequences, numbered level by level: ``branch`` in the first, branch^2 in each other.

    Of every level [A, size]: tokens; scores; parents (candidate numbers or ROOT). Of the frontier [A, branch]: places
    in the newest level, best first; orders, the parents' numbers of expansion. A sequence that has no such level has
    scores of -inf there. All on the device: only :meth:`best` waits for it, and :meth:`contexts`.
    """

    def __init__(self, branch: int, slots: int) -> None:
        self.branch, self.slots = branch, slots
        self.tokens: list[Tensor] = []
        self.scores: list[Tensor] = []
        self.parents: list[Tensor] = []
        self.start = 0  # the first number of the newest level
        self.places = self.orders = torch.empty(0, dtype=torch.int64)

    def add(self, active: Sequence[int], tokens: Tensor, log_probs: Tensor) -> None:
        """One level more for the active sequences: children [len(active), size] of the frontier, side by side."""
        scores, parents = log_probs, torch.full_like(tokens, ROOT)
        if self.scores:
            scores = scores + self.score(active).repeat_interleave(self.branch, 1)
            parents = (self.start + self.of(self.places, active)).repeat_interleave(self.branch, 1)
        before = len(self.tokens)
        self.start = sum(level.shape[1] for level in self.tokens)
        self.tokens.append(self.spread(tokens, active, 0))
        self.scores.append(self.spread(scores, active, -math.inf))
        self.parents.append(self.spread(parents, active, ROOT))
        self.places = self.scores[-1].sort(dim=1, descending=True, stable=True).indices[:, : self.branch]
        above = self.places.div(self.branch, rounding_mode="floor") + (before - 1) * self.branch
        self.orders = above if before else torch.full_like(self.places, ROOT)

    def score(self, active: Sequence[int]) -> Tensor:
        return self.of(self.scores[-1].gather(1, self.places), active)

    def frontier(self, active: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Parents and tokens of the nodes to expand, as ``DraftSession.expand`` wants them."""
        tokens = self.tokens[-1].gather(1, self.places)
        return self.of(self.orders, active).flatten(), self.of(tokens, active).flatten()

    def contexts(self, texts: Contexts, active: Sequence[int]) -> list[list[int]]:
        """The tokens up to each node of the frontier, that included."""
        tokens, parents = torch.cat(self.tokens, 1).tolist(), torch.cat(self.parents, 1).tolist()
        places, found = self.places.tolist(), list[list[int]]()
        for slot in active:
            for place in places[slot]:
                path, node = list[int](), self.start + place
                while node != ROOT:
                    path.append(tokens[slot][node])
                    node = parents[slot][node]
                found.append([*texts[slot], *path[::-1]])
        return found

    def best(self, nodes: int) -> list[DraftTree]:
        tokens, scores, parents = (torch.cat(levels, 1) for levels in (self.tokens, self.scores, self.parents))
        chosen = scores.sort(dim=1, descending=True, stable=True).indices[:, :nodes].sort(1).values
        tokens, there = tokens.gather(1, chosen), scores.gather(1, chosen) > -math.inf
        trees = []
        for slot, rows in enumerate(torch.stack((chosen, parents.gather(1, chosen), there), 1).tolist()):
            kept = [i for i, flag in enumerate(rows[2]) if flag]
            number = {ROOT: ROOT, **{rows[0][i]: new for new, i in enumerate(kept)}}
            own = tokens[slot] if len(kept) == tokens.shape[1] else tokens[slot][kept]
            trees.append(DraftTree(own, tuple(number[rows[1][i]] for i in kept), (Drawn.FIXED,) * len(kept)))
        return trees

    def of(self, table: Tensor, active: Sequence[int]) -> Tensor:
        """The rows of the active sequences."""
        return table if len(active) == self.slots else table[list(active)]

    def spread(self, rows: Tensor, active: Sequence[int], fill: float) -> Tensor:
        """The inverse of :meth:`of`."""
        if len(active) == self.slots:
            return rows
        table = rows.new_full((self.slots, rows.shape[1]), fill)
        table[list(active)] = rows
        return table
