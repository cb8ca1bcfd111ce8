"""How tokens are chosen: one list of logits processors, applied alike to target and drafter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from models.errors import EyasError

# Below this temperature the choice is the argmax, as in vLLM: nothing is ever divided by (nearly) zero.
GREEDY_BELOW = 1e-5


@dataclass(frozen=True)
class Sampling:
    """temperature (0 = argmax), top_k (0 = off), top_p (1 = off).

    ``extra`` processors (penalties, bans, ...) run first, as in ``generate``, and see the tokens so far.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    extra: tuple[LogitsProcessor, ...] = ()

    def __post_init__(self) -> None:
        if self.temperature < 0:
            raise EyasError(f"verify.temperatures: {self.temperature} is negative")
        if self.top_k < 0:
            raise EyasError(f"verify.top_k={self.top_k}: must be 0 (off) or positive")
        if not 0 < self.top_p <= 1:
            raise EyasError(f"verify.top_p={self.top_p}: must lie in (0, 1]")

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW

    @property
    def plain(self) -> bool:
        """Whether the probabilities are the model's own: T = 1 and no processor."""
        return self.temperature == 1.0 and not self.top_k and self.top_p == 1.0 and not self.extra

    @cached_property
    def processors(self) -> LogitsProcessorList:
        processors = LogitsProcessorList(self.extra)
        if not self.greedy:  # none of the warpers moves the argmax
            if self.temperature != 1.0:
                processors.append(TemperatureLogitsWarper(float(self.temperature)))
            if self.top_k:
                processors.append(TopKLogitsWarper(self.top_k))
            if self.top_p < 1.0:
                processors.append(TopPLogitsWarper(self.top_p))
        return processors

    def process(self, logits: Tensor, context: Sequence[int]) -> Tensor:
        """Processed logits [V] of one position over the full vocabulary; ``context`` holds the tokens before it."""
        if not self.processors:
            return logits
        # The warpers ignore the context: don't copy it to a tensor for them.
        ids: Any = torch.tensor([list(context) if self.extra else []], dtype=torch.int64, device=logits.device)
        processed: Tensor = self.processors(ids, logits[None])[0]
        return processed

    def probs(self, logits: Tensor, context: Sequence[int]) -> Tensor:
        """The distribution [V] that plain decoding samples from (T > 0), float32."""
        return self.process(logits.float(), context).softmax(-1)

    def argmax(self, logits: Tensor, context: Sequence[int]) -> Tensor:
        """The token plain decoding takes at T = 0: 0-d int64."""
        return self.process(logits, context).argmax(-1)


def draw(probs: Tensor, uniform: float) -> Tensor:
    """One token from ``probs`` [V] by inversion, 0-d int64 on its device; ``uniform`` in [0, 1).

    A single random number per draw and a float64 running sum: a token of probability zero is never drawn.
    """
    total = probs.cumsum(-1, dtype=torch.float64)
    return torch.searchsorted(total, total[-1:] * uniform, right=True).clamp_(max=probs.numel() - 1)[0]
