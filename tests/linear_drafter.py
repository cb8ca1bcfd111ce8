"""The smallest drafter there is: enough to test the training loop without any real method."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from models.batch import Batch, Slots
from models.drafter import Drafter, DraftSession, Serving
from models.frozen import FrozenTarget
from models.heads import DraftHead
from models.recompute import Run, plainly
from models.vocab import DraftVocab


class LinearDrafter(Drafter):
    """Depth 0 is a linear map of the taps; depth k one of depth k-1 and the embedding of x[p+1+k]."""

    def __init__(self, taps_width: int, hidden: int, vocab: DraftVocab, tap_ids: tuple[int, ...]) -> None:
        super().__init__()
        self.vocab, self.tap_ids = vocab, tap_ids
        self.mix, self.next = nn.Linear(taps_width, hidden, bias=False), nn.Linear(2 * hidden, hidden, bias=False)
        self.norm, self.lm_head = nn.RMSNorm(hidden), nn.Linear(hidden, len(vocab), bias=False)
        self.fixed = nn.Parameter(torch.ones(2, 2), requires_grad=False)

    @classmethod
    def create(cls, frozen: FrozenTarget, vocab: DraftVocab, tap_ids: tuple[int, ...], **options: Any) -> LinearDrafter:
        torch.manual_seed(options.get("seed", 0))
        return cls(len(tap_ids) * frozen.hidden_size, frozen.hidden_size, vocab, tap_ids)

    def unroll(self, batch: Batch, slots: Slots, frozen: FrozenTarget, run: Run = plainly) -> Tensor:
        states = [self.mix(batch.taps[slots.index])]
        for k in range(1, slots.depths):
            ahead = (slots.index + 1 + k).clamp_max(batch.num_tokens - 1)
            states.append(torch.tanh(self.next(torch.cat([states[-1], frozen.embed(batch.input_ids[ahead])], -1))))
        out: Tensor = self.norm(torch.stack(states)[slots.rows()])
        return out

    def head(self, frozen: FrozenTarget) -> DraftHead:
        return DraftHead(self.lm_head.weight)

    @property
    def target_hidden_size(self) -> int:
        return self.mix.in_features // len(self.tap_ids)

    def session(self, frozen: FrozenTarget, slots: int = 1) -> DraftSession:
        raise NotImplementedError("trained only")

    def serving(self, frozen: FrozenTarget, layout: str | None = None) -> Serving:
        raise NotImplementedError("trained only")

    def architecture(self) -> dict[str, Any]:
        width, hidden = self.mix.in_features, self.mix.out_features
        return {"taps_width": width, "hidden": hidden, "tap_ids": list(self.tap_ids)}

    @classmethod
    def from_architecture(cls, architecture: dict[str, Any], vocab: DraftVocab) -> LinearDrafter:
        return cls(architecture["taps_width"], architecture["hidden"], vocab, tuple(architecture["tap_ids"]))
