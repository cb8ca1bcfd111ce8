"""How tokens are chosen: one list of logits processors, applied alike to target and drafter.

Order as in ``transformers.generate``: what looks at the text so far (repetition penalty, then ``extra``), temperature,
top-k, top-p, min-p. The three cuts are worked out here on a short list of the likeliest tokens and not by sorting the
whole vocabulary, which would cost as much as a drafter's forward. They keep what transformers' warpers keep.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList, RepetitionPenaltyLogitsProcessor

from models.errors import EyasError

# Below this temperature the choice is the argmax, as in vLLM: nothing is ever divided by (nearly) zero.
GREEDY_BELOW = 1e-5
SHORT_LIST = 256  # tokens looked at first for top-p; four times as many whenever they don't hold its whole mass


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen from the logits.

    temperature (0 = argmax), top_k (0 = off; more than the vocabulary has: all of it), top_p (1 = off) and min_p
    (0 = off) matter at T > 0 only. repetition_penalty (1 = off; prompt and output count) and ``extra`` processors
    (bans, other penalties, ...) are in force at any temperature and see the tokens so far. Raises EyasError.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    extra: tuple[LogitsProcessor, ...] = ()

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < math.inf:
            raise EyasError(f"verify.temperatures: {self.temperature} must be 0 or positive, and finite")
        if self.top_k < 0 or self.top_k != int(self.top_k):
            raise EyasError(f"verify.top_k={self.top_k}: must be 0 (off) or a positive whole number")
        if not 0 < self.top_p <= 1:
            raise EyasError(f"verify.top_p={self.top_p}: must lie in (0, 1]; 1 is off")
        if not 0 <= self.min_p <= 1:
            raise EyasError(f"verify.min_p={self.min_p}: must lie in [0, 1]; 0 is off")
        if not 0 < self.repetition_penalty < math.inf:
            raise EyasError(f"verify.repetition_penalty={self.repetition_penalty}: must be positive; 1 is off")

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW

    @property
    def needs_context(self) -> bool:
        """Whether the choice depends on the tokens so far and not on the logits alone."""
        return bool(self.extra) or self.repetition_penalty != 1.0

    @property
    def plain(self) -> bool:
        """Whether the probabilities are the model's own: T = 1 and no processor."""
        return self.temperature == 1.0 and not self.cuts and not self.needs_context

    @property
    def cuts(self) -> bool:
        """Whether tokens are cut off: top-k, top-p or min-p."""
        return bool(self.top_k) or self.top_p < 1.0 or self.min_p > 0.0

    def describe(self) -> dict[str, Any]:
        """The settings by name, for reports; ``extra`` by the names of its classes."""
        names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
        return {**{name: getattr(self, name) for name in names}, "extra": [type(e).__name__ for e in self.extra]}

    @cached_property
    def penalties(self) -> LogitsProcessorList:
        """The processors that read the context."""
        own = (
            [] if self.repetition_penalty == 1.0 else [RepetitionPenaltyLogitsProcessor(float(self.repetition_penalty))]
        )
        return LogitsProcessorList([*own, *self.extra])

    def penalised(self, logits: Tensor, context: Sequence[int]) -> Tensor:
        """Logits [V] of one position over the full vocabulary; ``context`` holds all the tokens before it."""
        if not self.needs_context:
            return logits
        ids: Any = torch.tensor([list(context)], dtype=torch.int64, device=logits.device)
        penalised: Tensor = self.penalties(ids, logits[None])[0]
        return penalised

    def probs(self, logits: Tensor, context: Sequence[int]) -> Tensor:
        """The distribution [V] that plain decoding samples from (T > 0), float32 (float64 for such logits)."""
        return self.probs_rows(logits[None], [context])[0]

    def probs_rows(self, logits: Tensor, contexts: Sequence[Sequence[int]] = ()) -> Tensor:
        """``probs`` of several positions, [n, V]; ``contexts``: one per row, needed only with ``needs_context``."""
        scores = logits if logits.dtype == torch.float64 else logits.float()
        if self.needs_context:
            scores = torch.stack([self.penalised(*row) for row in zip(scores, contexts, strict=True)])
        if self.temperature != 1.0:
            scores = scores / self.temperature
        return self._cut(scores) if self.cuts else scores.softmax(-1)

    def argmax(self, logits: Tensor, context: Sequence[int]) -> Tensor:
        """The token plain decoding takes at T = 0: 0-d int64."""
        return self.penalised(logits, context).argmax(-1)

    def _cut(self, scores: Tensor) -> Tensor:
        """Softmax [n, V] of the scores that top-k, top-p and min-p leave; the likeliest token always stays."""
        if not self.top_k and self.top_p == 1.0:  # min-p alone is a threshold
            return scores.masked_fill(~self._enough(scores), -math.inf).softmax(-1)
        size = scores.shape[-1]
        # Rounding hides which tokens tie with the last of top-k: a few more show them. On a GPU a full sort is cheap,
        # and there is no need to wait for it.
        count = size if scores.is_cuda else min(size, self.top_k + 16 if self.top_k else SHORT_LIST)
        while True:
            best, tokens = scores.topk(count)
            stays = self._stays(scores, best)
            if count == size or not bool(stays[:, -1].any()):
                break
            count = min(size, 4 * count)  # some row may go on beyond its short list
        kept = best.masked_fill(~stays, -math.inf).softmax(-1)
        return torch.zeros_like(scores).scatter_(-1, tokens, kept)

    def _stays(self, scores: Tensor, best: Tensor) -> Tensor:
        """Which of the ``best`` scores [n, m] (a descending short list of ``scores``) are not cut off."""
        stays = torch.ones_like(best, dtype=torch.bool)
        if self.top_k:
            stays = best >= best[:, min(self.top_k, best.shape[-1]) - 1, None]  # ties with the last one stay
        if self.top_p < 1.0:
            total = best.masked_fill(~stays, -math.inf) if self.top_k else scores
            mass = (best - total.logsumexp(-1, keepdim=True)).exp()
            stays &= mass.cumsum(-1) - mass < self.top_p  # what is likelier hasn't reached top_p yet
            stays[:, 0] = True
        return stays & self._enough(best) if self.min_p else stays

    def _enough(self, scores: Tensor) -> Tensor:
        """min-p: at least ``min_p`` times as likely as the likeliest."""
        return scores >= scores.amax(-1, keepdim=True) + (math.log(self.min_p) if self.min_p else -math.inf)


def draw(probs: Tensor, uniform: float) -> Tensor:
    """One token from ``probs`` [V] by inversion, 0-d int64 on its device; ``uniform`` in [0, 1).

    A single random number per draw and a float64 running sum: a token of probability zero is never drawn.
    """
    total = probs.cumsum(-1, dtype=torch.float64)
    return torch.searchsorted(total, total[-1:] * uniform, right=True).clamp_(max=probs.numel() - 1)[0]
