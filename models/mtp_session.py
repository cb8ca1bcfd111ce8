"""Incremental drafting of MTP modules (models/mtp.py): one applied again and again, or several in a row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from models.draft_session import Rows
from models.frozen import FrozenTarget
from models.native_drafter import NativeSession, cached

if TYPE_CHECKING:
    from models.mtp import MtpDrafter


class RecursiveSession(NativeSession):
    """One module, whose own state is the feature of the next depth."""

    def __init__(self, drafter: MtpDrafter, frozen: FrozenTarget, slots: int = 1) -> None:
        super().__init__(drafter, frozen, slots, layers=1)
        self.module = drafter.steps[0]

    def read(self, feature: Tensor, tokens: Tensor, rows: Rows) -> Tensor:
        states: Tensor = self.module(self.frozen.embed(tokens).to(self.dtype), feature, rows.positions, cached(rows))
        return states[rows.asked]

    def logits(self, states: Tensor) -> Tensor:
        return self.head(states)


class SequentialSession(NativeSession):
    """D modules, ordered by the token they read, so that none waits for another at the same token.

    Module d reads at token x[t] the state that module d-1 made at the token before (its parent, in a tree); it stands
    at slot p = t-1-d, which is its position, as engines have it. Each has keys and values of its own, of which the
    first d places belong to no slot. A node of depth m needs modules m .. D-1 only: those before would need features
    that are not known yet, and nobody reads them. The logits after it are those of module m.
    """

    def __init__(self, drafter: MtpDrafter, frozen: FrozenTarget, slots: int = 1) -> None:
        super().__init__(drafter, frozen, slots, layers=len(drafter.steps))
        self.drafter = drafter
        self.depth = 0  # of the tokens of the call at hand

    def extend(
        self, slots: Sequence[int], counts: Sequence[int], taps: Tensor, final: Tensor, next_ids: Tensor
    ) -> Tensor:
        self.depth = 0
        return super().extend(slots, counts, taps, final, next_ids)

    def expand(self, slots: Sequence[int], parents: Tensor, tokens: Tensor, depth: int) -> Tensor:
        self.drafter.check_depths(depth + 1)
        self.depth = depth
        return super().expand(slots, parents, tokens, depth)

    def read(self, feature: Tensor, tokens: Tensor, rows: Rows) -> Tensor:
        """feature: true ones [N, H] of confirmed tokens, or the states [N, D*H] of the parents of drafted ones."""
        embedding = self.frozen.embed(tokens).to(self.dtype)
        modules, size = self.drafter.steps, self.hidden
        states = [embedding.new_zeros(embedding.shape)] * self.depth
        for d in range(self.depth, len(modules)):
            if self.depth:
                before = feature[:, (d - 1) * size : d * size]
            else:
                before = self._shifted(states[d - 1], d - 1, rows) if d else feature
            states.append(modules[d](embedding, before, rows.positions - d, cached(rows, d, d)))
        return torch.cat(states, -1)[rows.asked]

    def _shifted(self, states: Tensor, module: int, rows: Rows) -> Tensor:
        """For every confirmed token of the call the state of a module at the token before it, [N, H]."""
        kept = self.states[list(rows.slots), 0, module * self.hidden : (module + 1) * self.hidden]
        first = torch.tensor([0, *rows.counts[:-1]], device=states.device).cumsum(0)
        return states.roll(1, 0).index_copy(0, first, kept.to(states.dtype))

    def logits(self, states: Tensor) -> Tensor:
        return self.head(states[:, self.depth * self.hidden :][:, : self.hidden])
