"""Packed batches and the one index rule that every method, loss and metric obeys.

Slot ``p`` at draft depth ``k`` reads ``h[p]`` and the tokens ``x[p+1] .. x[p+1+k]`` and predicts
``x[p+2+k]``; its teacher is the target's distribution at position ``p+1+k``. It counts only if every one of
``x[p+1] .. x[p+2+k]`` is supervised and inside the document.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

THINNING = 0x7E57  # draws of its own: a method's noise comes from the same seed


@dataclass(frozen=True)
class Batch:
    """Documents back to back, without padding. T tokens, D documents, A taps of width H.

    input_ids [T] int64; supervised [T] bool; cu_seqlens [D+1] int32 (0 .. T);
    taps [T, A*H] states entering the tapped layers, ascending; final [T, H] state after the final norm;
    lse [T] float32 log-sum-exp of the target's full-vocabulary logits; top1 [T] int64 their argmax.
    """

    input_ids: Tensor
    supervised: Tensor
    cu_seqlens: Tensor
    taps: Tensor
    final: Tensor
    lse: Tensor
    top1: Tensor

    @property
    def num_tokens(self) -> int:
        return int(self.input_ids.shape[0])

    @property
    def positions(self) -> Tensor:
        """Position of each token in its own document, [T] int64."""
        return torch.arange(self.num_tokens, device=self.input_ids.device) - self.doc_starts

    @property
    def doc_starts(self) -> Tensor:
        """Index of the first token of each token's document, [T] int64."""
        cu = self.cu_seqlens.long()
        return torch.repeat_interleave(cu[:-1], cu.diff(), output_size=self.num_tokens)  # else the host would wait

    def to(self, device: torch.device | str) -> Batch:
        return Batch(**{f.name: getattr(self, f.name).to(device, non_blocking=True) for f in fields(self)})


@dataclass(frozen=True)
class Slots:
    """The slots of a batch that carry loss. S slots, K draft depths, R rows = counted (depth, slot) pairs.

    index [S] int64: token index p of each slot, ascending, valid at depth 0.
    valid [K, S] bool: whether the slot counts at depth k (a prefix in k: true .. true false .. false).
    """

    index: Tensor
    valid: Tensor

    @property
    def depths(self) -> int:
        return int(self.valid.shape[0])

    def __len__(self) -> int:
        return int(self.index.shape[0])

    @property
    def counts(self) -> list[int]:
        """Rows of each depth."""
        return [int(n) for n in self.valid.sum(1).tolist()]

    def rows(self) -> tuple[Tensor, Tensor]:
        """(k [R], s [R]): depth and slot number of every row, depth by depth. The order of all states."""
        k, s = self.valid.nonzero(as_tuple=True)
        return k, s

    def thinned(self, keep: float, seed: int) -> Slots:
        """Keep a slot at depth k with probability keep^k, nested in k; pure in ``seed`` and device-independent."""
        if keep >= 1.0:
            return self
        generator = torch.Generator().manual_seed(seed ^ THINNING)
        draw = torch.rand(len(self), generator=generator).to(self.index.device)
        power = torch.arange(self.depths, device=self.index.device)
        return Slots(self.index, self.valid & (draw[None] < keep ** power[:, None]))


def valid_slots(supervised: Tensor, cu_seqlens: Tensor, depths: int) -> Tensor:
    """The index rule: [K, T] bool, true where slot p counts at depth k.

    supervised [T] bool, cu_seqlens [D+1]. With ``run[t]`` the number of consecutive supervised tokens of the
    same document starting at t, slot p counts at depth k iff p+1 is in the document and run[p+1] >= k+2.
    """
    total = supervised.shape[0]
    cu = cu_seqlens.long()
    last = torch.repeat_interleave(cu[1:], cu.diff(), output_size=total) - 1
    token = torch.arange(total, device=supervised.device)
    # The run that starts at t ends before the first unsupervised token or the document's end.
    stop = torch.where(supervised & (token != last), total, torch.where(supervised, token + 1, token))
    end = stop.flip(0).cummin(0).values.flip(0)
    run = torch.zeros(total + 1, dtype=torch.long, device=supervised.device)
    run[:-1] = end - token
    ahead = torch.where(token == last, 0, run[token + 1])
    need = torch.arange(2, depths + 2, device=supervised.device)
    return ahead[None, :] >= need[:, None]


def slots_of(batch: Batch, depths: int) -> Slots:
    """The loss-carrying slots of a packed batch (see :func:`valid_slots`)."""
    valid = valid_slots(batch.supervised, batch.cu_seqlens, depths)
    index = valid[0].nonzero().squeeze(1)
    return Slots(index, valid[:, index])
