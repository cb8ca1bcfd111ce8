"""The draft vocabulary: the subset of the target's tokens that a drafter's own head can predict."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from models.errors import EyasError


@dataclass(frozen=True)
class DraftVocab:
    """ids [Vd] int64: ascending target ids of the draft tokens; ``size`` = V of the target.

    ``d2t`` is the serving form, an offset: target_id = j + d2t[j]. ``t2d`` [V] bool marks members.
    """

    ids: Tensor
    size: int

    def __post_init__(self) -> None:
        ids = self.ids
        if ids.ndim != 1 or ids.numel() == 0 or ids.dtype != torch.int64:
            raise EyasError("draft vocabulary: ids must be a non-empty 1-D int64 tensor")
        if bool((ids.diff() <= 0).any()) or int(ids[0]) < 0 or int(ids[-1]) >= self.size:
            raise EyasError(f"draft vocabulary: ids must ascend within 0..{self.size - 1}")

    @classmethod
    def full(cls, size: int) -> DraftVocab:
        return cls(torch.arange(size), size)

    @classmethod
    def from_counts(cls, counts: Tensor, size: int, always: Iterable[int] = ()) -> DraftVocab:
        """The ``size`` most frequent supervised tokens.

        counts [V] int64: occurrences of each token among supervised tokens. ``always`` (special and EOS ids)
        are members whatever their count; ties and tokens never seen are filled up from the lowest id, so the
        result does not depend on the corpus order and always has exactly ``size`` members.
        """
        vocab = counts.numel()
        forced = torch.tensor(sorted({i for i in always if 0 <= i < vocab}), dtype=torch.int64)
        if size <= 0 or size > vocab:
            raise EyasError(f"drafter.draft_vocab_size={size}: must be between 1 and the target's {vocab}")
        if size == vocab:
            return cls.full(vocab)
        if forced.numel() > size:
            raise EyasError(f"drafter.draft_vocab_size={size} cannot hold the target's {forced.numel()} special tokens")
        rank = counts.to(torch.int64).clone()
        rank[forced] = int(rank.max()) + 1
        chosen = torch.argsort(rank, descending=True, stable=True)[:size]
        return cls(chosen.sort().values, vocab)

    def __len__(self) -> int:
        return int(self.ids.numel())

    @property
    def is_full(self) -> bool:
        return len(self) == self.size

    @property
    def d2t(self) -> Tensor:
        return self.ids - torch.arange(len(self), device=self.ids.device)

    @property
    def t2d(self) -> Tensor:
        member = torch.zeros(self.size, dtype=torch.bool, device=self.ids.device)
        member[self.ids] = True
        return member
