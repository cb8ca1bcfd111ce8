"""A drafter trained together with its target (Medusa-2, arXiv 2401.10774 section 2.3.2; MTP as in DeepSeek-V3).

The target runs in the training loop with gradient, so that any drafter can be trained on its live states. The loss is

    L = L_LM + lambda * L_drafter

with L_LM the mean -log p of the supervised tokens, or (self-distillation) the mean KL of the adapted target to itself
without its adapters, and L_drafter what the drafter alone is trained with, its teacher being the live target.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from models.batch import Batch
from models.drafter import Drafter, TrainSpec
from models.errors import EyasError
from models.frozen import FrozenTarget
from models.heads import cap_logits
from models.objective import Score
from models.packed import unpack_linears
from models.target import LOGITS_AT_ONCE, Target
from models.tuned import LORA_KEYS, with_adapters


@dataclass(frozen=True)
class Spoken:
    """What the target says about N tokens that follow others: the loss of its own term and the sum of -log p (0-d),
    lse [N] and top1 [N] of its logits."""

    loss: Tensor
    nll: Tensor
    lse: Tensor
    top1: Tensor


class JointModel(nn.Module):
    """The target's model as ``backbone`` beside the ``drafter``; called like a drafter.

    lora: rank, alpha and dropout of adapters on every linear layer inside the decoder layers (Hu et al. 2021), the rest
    staying frozen; None: all weights are trained. distill: the target's term is KL to itself without adapters.
    """

    def __init__(
        self, target: Target, drafter: Drafter, *, lora: Mapping[str, Any] | None, distill: bool = False
    ) -> None:
        super().__init__()
        if distill and lora is None:
            raise EyasError("joint.distill=true: needs joint.backbone=lora, whose adapters can be switched off")
        if lora is None and target.dtype != torch.float32:
            raise EyasError(f"joint.backbone=full: target.dtype={target.dtype} is too coarse to train; use float32")
        self.target, self.drafter, self.distill, self.is_full = target, drafter, distill, lora is None
        if lora is None:
            self.backbone: nn.Module = target.model.requires_grad_(True)
            unpack_linears(self.backbone)
        else:
            self.backbone = with_adapters(target.model, {key: lora[key] for key in LORA_KEYS})

    def forward(self, batch: Batch, frozen: FrozenTarget, spec: TrainSpec) -> Score:
        """Score of the drafter on the live target. ``spec.lm_weight`` 0: the target is only read (the first stage, and
        validation); ``loss_sum`` is otherwise the sum of both terms with the weights of ``spec``."""
        learns = torch.is_grad_enabled() and spec.lm_weight > 0
        documents = batch.input_ids.split(batch.cu_seqlens.diff().tolist())
        with torch.set_grad_enabled(learns):
            taps, final = self.target.live(documents, spec.run)
            follows = batch.supervised.roll(-1) & (batch.positions.roll(-1) > 0)
            at = follows.nonzero().squeeze(1)
            spoken = self._speak(documents, final, at, batch.input_ids.roll(-1)[at])
        lse = final.new_zeros(batch.num_tokens, dtype=torch.float32).index_copy(0, at, spoken.lse)
        top1 = torch.zeros_like(batch.input_ids).index_copy(0, at, spoken.top1)
        batch = replace(batch, taps=taps, final=final, lse=lse, top1=top1)
        score = self.drafter(batch, self._live(frozen, learns), spec)
        if spec.lm_weight:
            score.loss_sum = spec.draft_weight * score.loss_sum + spec.lm_weight * spoken.loss
        score.lm = torch.stack([spoken.nll.detach().double(), at.new_tensor(len(at)).double()])
        return score

    def trained_backbone(self) -> list[nn.Parameter]:
        return [p for p in self.backbone.parameters() if p.requires_grad]

    def read_whole(self) -> list[nn.Parameter]:
        """What a forward reads outside the layers that own it (see :meth:`Drafter.read_whole`): of the target, the head
        and, if the drafter shares the trained one, the embedding."""
        layers = (self.target.head, self.target.model.get_input_embeddings())[: 1 + self.is_full]
        found = [*self.drafter.read_whole(), *(p for layer in layers for p in layer.parameters())]
        return list(dict.fromkeys(found))  # a tied one once

    def _live(self, frozen: FrozenTarget, learns: bool) -> FrozenTarget:
        """The tensors that the drafter shares with the target, as they are now; trained by both if it ``learns``."""
        if not self.is_full:
            return frozen
        model = self.target.model
        shared = (model.get_input_embeddings().weight, self.target.head.weight, self.target.head.bias)
        embedding, head, bias = (t if t is None or learns else t.detach() for t in shared)
        assert embedding is not None and head is not None
        return replace(frozen, embedding=embedding, head=head, head_bias=bias, _rows=None)

    def _speak(self, documents: tuple[Tensor, ...], final: Tensor, at: Tensor, labels: Tensor) -> Spoken:
        """The target's own term, in chunks whose logits are made again in the backward pass."""
        before: Tensor | None = None
        if self.distill and torch.is_grad_enabled():
            with torch.no_grad(), self.backbone.disable_adapter():  # type: ignore[operator]
                before = self.target.live(documents)[1][at]
        states, rows = final[at], max(1, LOGITS_AT_ONCE // self.target.vocab_size)
        parts = []
        for begin in range(0, max(1, len(at)), rows):  # an empty one too: all processes build the same graph
            part = slice(begin, begin + rows)
            given = (states[part], labels[part], None if before is None else before[part])
            loss, nll, lse, top1 = checkpoint(self._chunk, *given, use_reentrant=False)
            parts.append((loss, nll, self._exact_lse(states[part].detach(), lse), top1))
        losses, nlls, lses, top1s = zip(*parts, strict=True)
        return Spoken(torch.stack(losses).sum(), torch.stack(nlls).sum(), torch.cat(lses), torch.cat(top1s))

    def _chunk(self, states: Tensor, labels: Tensor, before: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        logits = self._logits(states)
        lse = logits.logsumexp(-1)
        nll = (lse - logits.gather(1, labels[:, None])[:, 0]).sum()
        loss = nll
        if before is not None:
            teacher = self._logits(before).log_softmax(-1)
            loss = (teacher.exp() * (teacher - logits + lse[:, None])).sum()
        return loss, nll, lse.detach(), logits.argmax(-1)

    def _logits(self, states: Tensor) -> Tensor:
        """The target's logits without calling its head: the number of chunks hangs on the batch, and processes that
        share out a layer's weights must call it equally often."""
        head = self.target.head
        return cap_logits(F.linear(states, head.weight, head.bias).float(), self.target.scale, self.target.softcap)

    @torch.no_grad()
    def _exact_lse(self, states: Tensor, lse: Tensor) -> Tensor:
        """lse [n] of float32 products, which the teacher makes again; the given one where the logits were such."""
        kind = states.device.type
        if self.target.dtype == torch.float32 and not torch.is_autocast_enabled(kind):
            return lse
        with torch.autocast(kind, enabled=False):
            return self.target.score(states)[0]
