"""The target's frozen tensors that a drafter reads: embedding table and output head.

They live outside the trained module: never parameters, never buffers, never in a checkpoint.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from models.batch import Batch
from models.heads import DraftHead, cap_logits
from models.vocab import DraftVocab


@dataclass
class Teacher:
    """The target's exact distribution over the draft vocabulary, for any position of a batch.

    weight [Vd, H] (and bias [Vd]) are the head rows of the draft vocabulary; final [T, H]; lse [T] float32 the
    log-sum-exp over the *full* vocabulary, so ``exp(logits - lse)`` are full-vocabulary probabilities;
    top1 [T] the target's argmax as a draft id, or -1 where it lies outside the draft vocabulary; labels [T] the same of
    the token that follows in the text.
    """

    weight: Tensor
    bias: Tensor | None
    final: Tensor
    lse: Tensor
    top1: Tensor
    labels: Tensor
    scale: float = 1.0
    softcap: float | None = None

    def log_probs(self, positions: Tensor) -> Tensor:
        """log p(v) of the draft tokens at these positions, [n, Vd] float32 (sums to <= 1 after exp)."""
        with torch.autocast(self.weight.device.type, enabled=False):  # rounded logits would not match the exact lse
            logits = linear_f32(self.final[positions], self.weight)
        if self.bias is not None:
            logits += self.bias
        return cap_logits(logits, self.scale, self.softcap) - self.lse[positions, None]


def linear_f32(x: Tensor, weight: Tensor) -> Tensor:
    """x @ weight.T in float32, accumulated and returned so also for half-precision weights."""
    if weight.dtype != torch.float32 and weight.device.type == "cuda":
        return torch.mm(x.to(weight.dtype), weight.T, out_dtype=torch.float32)
    return F.linear(x.float(), weight.float())


@dataclass
class FrozenTarget:
    """embedding [V, H], head [V, H] (the same tensor when tied), head_bias [V] or None.

    ``config`` is the target's text config as a plain dict (rope, dimensions, eos ids); scale and softcap
    describe its logits. ``final_norm`` [H] and ``last_layer`` (state dict of the last decoder layer, names
    relative to it) are what a drafter may be initialised from; ``folder``: where the target's files lie.
    """

    embedding: Tensor
    head: Tensor
    config: dict[str, Any]
    head_bias: Tensor | None = None
    scale: float = 1.0
    softcap: float | None = None
    final_norm: Tensor | None = None
    last_layer: dict[str, Tensor] = field(default_factory=dict)
    folder: Path | None = None
    _rows: tuple[DraftVocab, Tensor, Tensor | None, Tensor] | None = field(default=None, repr=False)

    @property
    def hidden_size(self) -> int:
        return int(self.head.shape[1])

    @property
    def vocab_size(self) -> int:
        return int(self.head.shape[0])

    def trainable_parameters(self) -> int:
        """Trainable numbers among these tensors: always 0, and shown to be."""
        tensors = [self.embedding, self.head, self.head_bias, self.final_norm, *self.last_layer.values()]
        return sum(t.numel() for t in tensors if t is not None and t.requires_grad)

    def embed(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self.embedding)

    def teacher(self, batch: Batch, vocab: DraftVocab) -> Teacher:
        """The teacher of a batch, restricted to the rows of the draft vocabulary."""
        weight, bias, to_draft = self.rows(vocab)
        ahead = batch.input_ids.roll(-1)  # the last token of a document has no label, and no slot asks for it
        kept = (to_draft[batch.top1], to_draft[ahead], self.scale, self.softcap)
        return Teacher(weight, bias, batch.final, batch.lse, *kept)

    def draft_head(self, vocab: DraftVocab) -> DraftHead:
        """The target's own head as a draft head over the draft vocabulary."""
        weight, bias, _ = self.rows(vocab)
        return DraftHead(weight, bias, self.scale, self.softcap)

    def rows(self, vocab: DraftVocab) -> tuple[Tensor, Tensor | None, Tensor]:
        """The head's weight [Vd, H] and bias [Vd] of the draft vocabulary, and the draft id of every token [V] or -1
        (gathered once)."""
        if self._rows is None or self._rows[0] is not vocab:
            ids = vocab.ids.to(self.head.device)
            to_draft = torch.full((self.vocab_size,), -1, dtype=torch.int64, device=ids.device)
            to_draft[ids] = torch.arange(len(vocab), device=ids.device)
            bias = None if self.head_bias is None else self.head_bias[ids]
            self._rows = (vocab, self.head if vocab.is_full else self.head[ids], bias, to_draft)
        return self._rows[1:]

    def to(self, device: torch.device | str, dtype: torch.dtype | None = None) -> FrozenTarget:
        def move(t: Tensor | None) -> Tensor | None:
            return None if t is None else t.to(device, dtype)

        embedding = self.embedding.to(device, dtype)
        head = embedding if self.head is self.embedding else self.head.to(device, dtype)
        layer = {k: v.to(device, dtype) for k, v in self.last_layer.items()}
        return replace(
            self,
            embedding=embedding,
            head=head,
            head_bias=move(self.head_bias),
            final_norm=move(self.final_norm),
            last_layer=layer,
            _rows=None,
        )
