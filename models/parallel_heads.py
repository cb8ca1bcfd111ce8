"""Parallel multi-token prediction (Gloeckle et al. 2024, arXiv 2404.19737): head k for the token k+2 places ahead.

Every head is a decoder layer of the target's own family over the target's last states (after the final norm), causal in
each document, then a norm and the target's own head. Head k of slot p reads h[0] .. h[p] and no token, so all nodes of
one depth get the same logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, cast

import torch
from torch import Tensor, nn

from models.batch import Batch, Slots
from models.draft_session import Rows
from models.drafter import NotServed, Serving
from models.frozen import FrozenTarget
from models.layers import RMSNorm
from models.native import Attend, Causal, NativeLayer
from models.native_drafter import NativeConfig, NativeDrafter, NativeSession, NativeStep, cached
from models.recompute import Run, plainly
from models.vocab import DraftVocab


@dataclass(frozen=True)
class ParallelConfig(NativeConfig):
    """The head's layers: so many of them."""

    num_heads: int


class ParallelHead(NativeStep):
    def __init__(self, config: ParallelConfig) -> None:
        super().__init__()
        self.block = NativeLayer(config.config)
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)

    def forward(self, final: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """final [n, H] at positions [n] -> states [n, H], ready for the head."""
        out: Tensor = self.norm(self.block(final, positions, attend))
        return out


class ParallelHeadsDrafter(NativeDrafter):
    """See the module docstring; built by :meth:`create` or :meth:`from_architecture`. No engine serves it."""

    depths_option = "num_heads"
    config_class = ParallelConfig
    config: ParallelConfig

    def __init__(self, config: ParallelConfig, vocab: DraftVocab) -> None:
        super().__init__(config, vocab)
        self.heads = nn.ModuleList(ParallelHead(config) for _ in range(config.num_heads))

    @property
    def steps(self) -> list[ParallelHead]:
        """The heads, in the order of the depths."""
        return cast("list[ParallelHead]", list(self.heads))

    # --- construction ---

    @classmethod
    def create(  # type: ignore[override]
        cls,
        frozen: FrozenTarget,
        vocab: DraftVocab,
        tap_ids: tuple[int, ...],
        *,
        num_heads: int = 4,
        init: Literal["last_layer", "random"] = "last_layer",
        init_temper: float = 0.3,
        seed: int = 0,
    ) -> ParallelHeadsDrafter:
        """init: last_layer (every block is the target's last decoder layer, but writes nothing yet) | random.
        init_temper scales the norms, so that a fresh drafter isn't sure of itself. What is not initialised from the
        target is random from ``seed``."""
        drafter = cls.seeded(ParallelConfig(frozen.config, num_heads), vocab, seed)
        if init == "last_layer":
            drafter.start_from_last_layer(frozen)
        drafter.start_norms(frozen, init_temper)
        return drafter

    # --- training ---

    def unroll(self, batch: Batch, slots: Slots, frozen: FrozenTarget, run: Run = plainly) -> Tensor:
        self.check_depths(slots.depths)
        final, positions, attend = batch.final.to(self.dtype), batch.positions, Causal(batch.cu_seqlens)
        heads = zip(self.steps, slots.valid, strict=False)
        return torch.cat([run(head, final, positions, attend)[slots.index[valid]] for head, valid in heads])

    # --- drafting and serving ---

    def session(self, frozen: FrozenTarget, slots: int = 1) -> ParallelSession:
        return ParallelSession(self, frozen, slots)

    def serving(self, frozen: FrozenTarget, layout: str | None = None) -> Serving:
        raise NotServed("parallel MTP heads have no serving layout: no engine drafts with them (eval does)")


class ParallelSession(NativeSession):
    """Incremental drafting (see models/drafter.py): the heads run where positions are confirmed, and drafting only
    scores what they made of the last one."""

    def __init__(self, drafter: ParallelHeadsDrafter, frozen: FrozenTarget, slots: int = 1) -> None:
        super().__init__(drafter, frozen, slots, layers=len(drafter.steps))
        self.drafter = drafter

    def read(self, feature: Tensor, tokens: Tensor, rows: Rows) -> Tensor:
        heads = enumerate(self.drafter.steps)
        return torch.cat([head(feature, rows.positions, cached(rows, k))[rows.asked] for k, head in heads], -1)

    @torch.no_grad()
    def expand(self, slots: Sequence[int], parents: Tensor, tokens: Tensor, depth: int) -> Tensor:
        self.drafter.check_depths(depth + 1)
        return self.logits(self.states[list(slots), 0], depth)

    def logits(self, states: Tensor, depth: int = 0) -> Tensor:
        return self.head(states[:, depth * self.hidden : (depth + 1) * self.hidden])
