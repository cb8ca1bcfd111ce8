"""The draft head: what turns the states of a drafter into logits over its draft vocabulary."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from models.packed import packed_linear


def cap_logits(logits: Tensor, scale: float = 1.0, softcap: float | None = None) -> Tensor:
    """Logit scale (Granite, Cohere) and tanh soft cap (Gemma-2) of the target's output."""
    logits = logits * scale if scale != 1.0 else logits
    return softcap * torch.tanh(logits / softcap) if softcap else logits


@dataclass(frozen=True)
class DraftHead:
    """weight [Vd, H], shared by all depths, or [K, Vd, H] with one head for each depth; bias [Vd] (never trained).

    scale and softcap: the target's transform of logits, where the head is the target's own.
    """

    weight: Tensor
    bias: Tensor | None = None
    scale: float = 1.0
    softcap: float | None = None

    @property
    def per_depth(self) -> bool:
        return self.weight.ndim == 3

    def of(self, depth: int) -> Tensor:
        """The weight [Vd, H] that depth k uses."""
        return self.weight[depth] if self.per_depth else self.weight

    def logits(self, states: Tensor, counts: Sequence[int], weight: Tensor | None = None) -> Tensor:
        """Logits [R, Vd] of states [R, H], of which the first counts[0] are of depth 0, the next counts[1] of depth 1,
        and so on. ``weight``: the weight in the dtype to compute in, which must be the states'."""
        weight = self.weight.to(states.dtype) if weight is None else weight
        if self.per_depth:
            parts = states.split(list(counts))
            logits = torch.cat([part @ own.T for part, own in zip(parts, weight[: len(parts)], strict=True)])
        else:
            logits = states @ weight.T
        return self.finish(logits)

    def finish(self, product: Tensor) -> Tensor:
        """Logits from the product of states and weight, [..., Vd]."""
        product = product if self.bias is None else product + self.bias.to(product.dtype)
        return cap_logits(product, self.scale, self.softcap)

    def backward(
        self, grad: Tensor, states: Tensor, counts: Sequence[int], weight: Tensor, into: Tensor | None
    ) -> Tensor:
        """d(loss)/d(states) [R, H] from the slopes ``grad`` [R, Vd] in the product states @ weight.T; the weight's own
        is added to ``into`` [like weight], unless that is None."""
        if not self.per_depth:
            if into is not None:
                into += grad.T @ states
            return grad @ weight
        found = []
        for depth, (slopes, part) in enumerate(zip(grad.split(list(counts)), states.split(list(counts)), strict=True)):
            if into is not None:
                into[depth] += slopes.T @ part
            found.append(slopes @ weight[depth])
        return torch.cat(found)


class SessionHead:
    """A draft head to draft with: nothing is trained any more, so its weight is laid out for few rows at a time."""

    def __init__(self, head: DraftHead, dtype: torch.dtype) -> None:
        self.head = head
        self.linears = [
            packed_linear(weight.to(dtype)) for weight in (head.weight if head.per_depth else [head.weight])
        ]

    def __call__(self, states: Tensor, depth: int = 0) -> Tensor:
        """Logits [n, Vd] of states [n, H] of one depth."""
        return self.head.finish(self.linears[depth if self.head.per_depth else 0](states))
