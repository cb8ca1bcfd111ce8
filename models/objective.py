"""The one objective of all methods: exact teacher, every depth, scored in chunks in one pass.

States of all depths are unrolled first (a [rows, H] tensor, small beside logits); then slots are visited in chunks:
the teacher is formed once per position, all depths are scored against it, and the gradients of states and head are
produced in the same visit, so at most one chunk of logits exists at a time.

Every loss is a function of two numbers of a (slot, depth): ce = -sum_v p(v) log q(v) and
alpha = sum_v min(p(v), q(v)), over the draft vocabulary, with p the target's exact *full-vocabulary*
probabilities and q the draft's softmax. So with a = dL/dce, b = dL/dalpha, P = sum_v p(v), m = [q < p]:
dL/dlogits = a (P q - p) + b q (m - <q, m>).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from models.batch import Slots
from models.errors import EyasError
from models.frozen import Teacher

LOSSES = ("ce", "kl", "lk", "tv", "expected_length")
DEPTH_WEIGHTS = ("decay", "dpace")
LK_ETA = 3.0
DPACE_FLOOR = 0.5


@dataclass
class Score:
    """What a pass over a batch yields. Sums, so that they add over batches and processes.

    loss_sum: 0-d, differentiable; weighted loss summed over slots and depths.
    Per depth [K] float64: ce (unweighted), kl, alpha, match (draft argmax = the target's full-vocabulary
    argmax), mass (target probability inside the draft vocabulary), count (valid slots).
    alpha_slots, match_slots [K, S]: the same per slot, zero where invalid (only when asked for).
    """

    loss_sum: Tensor
    ce: Tensor
    kl: Tensor
    alpha: Tensor
    match: Tensor
    mass: Tensor
    count: Tensor
    slots: Slots
    alpha_slots: Tensor | None = None
    match_slots: Tensor | None = None


@dataclass(frozen=True)
class Objective:
    """loss, depth weights and the number of slots scored at a time; formulas in :meth:`weighted`, :meth:`weights`."""

    loss: str = "ce"
    depth_weights: str = "decay"
    decay: float = 0.8
    chunk: int = 256
    depth_keep: float = 1.0  # share of slots kept from one depth to the next; the weights make up for it

    def __post_init__(self) -> None:
        if self.loss not in LOSSES:
            raise EyasError(f"train.loss={self.loss}: must be one of {', '.join(LOSSES)}")
        if self.depth_weights not in DEPTH_WEIGHTS:
            raise EyasError(f"train.depth_weights={self.depth_weights}: must be one of {', '.join(DEPTH_WEIGHTS)}")
        if self.chunk < 1:
            raise EyasError(f"train.chunk={self.chunk}: must be at least 1")
        if not 0 < self.depth_keep <= 1:
            raise EyasError(f"train.depth_keep={self.depth_keep}: must be above 0 and at most 1")

    def __call__(
        self, states: Tensor, head: Tensor, slots: Slots, teacher: Teacher, *, per_slot: bool = False
    ) -> Score:
        """Score states [R, H] (rows as ``slots.rows()``) under head [Vd, H]; see :class:`Score`."""
        loss, stats = _ScoreChunks.apply(states, head, slots, teacher, self, torch.is_grad_enabled())
        ce, kl, alpha, match, mass = (s.double().sum(1) for s in stats)
        count = slots.valid.sum(1).double()
        kept = (stats[2], stats[3]) if per_slot else (None, None)
        return Score(loss, ce, kl, alpha, match, mass, count, slots, *kept)

    def weighted(self, ce: Tensor, kl: Tensor, alpha: Tensor, valid: Tensor) -> Tensor:
        """The scalar loss of a chunk from its per-depth numbers, all [K, c] (zero where invalid)."""
        depths = ce.shape[0]
        if self.loss == "expected_length":  # 1 - E[accepted] / K: depth weights are implied by the products
            gone = 1.0 - torch.cumprod(alpha, 0).sum(0) / depths
            return (gone * valid[0]).sum()
        if self.loss == "ce":
            loss = ce
        elif self.loss == "kl":
            loss = kl
        elif self.loss == "tv":
            loss = 1.0 - alpha
        else:  # LK hybrid: lean on KL while the overlap is small
            lam = torch.exp(-LK_ETA * alpha.detach())
            loss = lam * kl + (1.0 - lam) * (1.0 - alpha)
        return (loss * self.weights(alpha.detach(), valid) * valid).sum()

    def weights(self, alpha: Tensor, valid: Tensor) -> Tensor:
        """Depth weights [K, c] or [K, 1]: decay^k, or D-PACE (how much of the expected length hangs on depth k)."""
        k = torch.arange(alpha.shape[0], device=alpha.device, dtype=torch.float32)[:, None]
        if self.depth_weights == "decay":
            return (self.decay / self.depth_keep) ** k
        survive = torch.cumprod((1.0 - DPACE_FLOOR) * alpha + DPACE_FLOOR, 0) * valid
        return survive.flip(0).cumsum(0).flip(0) / self.depth_keep**k


class _ScoreChunks(torch.autograd.Function):
    """Forward scores all chunks and, when gradients are wanted, keeps d(loss)/d(states) and d(loss)/d(head)."""

    @staticmethod
    def forward(
        ctx: Any, states: Tensor, head: Tensor, slots: Slots, teacher: Teacher, objective: Objective, wants: bool
    ) -> tuple[Tensor, Tensor]:
        depths, total = slots.valid.shape
        stats = states.new_zeros(5, depths, total, dtype=torch.float32)
        loss = states.new_zeros((), dtype=torch.float32)
        dstates = torch.zeros_like(states if wants else states[:0])
        dhead = torch.zeros_like(head if wants else head[:0], dtype=torch.float32)
        weight = head.to(states.dtype)
        row_of = slots.valid.flatten().long().cumsum(0).view(depths, total) - 1
        for a in range(0, total, objective.chunk):
            part = slice(a, min(a + objective.chunk, total))
            valid = slots.valid[:, part]
            k, s = valid.nonzero(as_tuple=True)
            row = row_of[k, a + s]
            rows = _Rows.make(states[row], weight, slots.index[a + s] + 1 + k, teacher)
            table = stats[:, :, part]
            for i, column in enumerate((rows.ce, rows.kl, rows.alpha, rows.match.float(), rows.mass)):
                table[i][k, s] = column
            chunk_loss, da, db = _loss_and_slopes(objective, table[0], table[1], table[2], valid)
            loss += chunk_loss
            if wants:
                dlogits = rows.gradient(da[k, s], None if db is None else db[k, s]).to(weight.dtype)
                dstates[row] = (dlogits @ weight).to(states.dtype)
                dhead += dlogits.T @ rows.states
        if wants:
            ctx.save_for_backward(dstates, dhead.to(head.dtype))
        ctx.mark_non_differentiable(stats)
        return loss, stats

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        dstates, dhead = ctx.saved_tensors
        return dstates * grad.to(dstates.dtype), dhead * grad.to(dhead.dtype), None, None, None, None


def _loss_and_slopes(
    objective: Objective, ce: Tensor, kl: Tensor, alpha: Tensor, valid: Tensor
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Loss of a chunk, its slope in ce (that of kl included: both move with q alike) and in alpha, all [K, c]."""
    with torch.enable_grad():
        ce, kl, alpha = (t.detach().clone().requires_grad_() for t in (ce, kl, alpha))
        loss = objective.weighted(ce, kl, alpha, valid.float())
        by_ce, by_kl, by_alpha = torch.autograd.grad(loss, (ce, kl, alpha), allow_unused=True)
    slope = sum((t for t in (by_ce, by_kl) if t is not None), torch.zeros_like(ce))
    return loss.detach(), slope, by_alpha


@dataclass
class _Rows:
    """The valid (depth, slot) pairs of a chunk as R rows: draft and teacher side by side."""

    states: Tensor  # [R, H]
    q: Tensor  # [R, Vd] draft probabilities
    p: Tensor  # [U, Vd] teacher probabilities of the U distinct positions
    where: Tensor  # [R] row of p
    ce: Tensor
    kl: Tensor
    alpha: Tensor
    match: Tensor
    mass: Tensor

    @classmethod
    def make(cls, states: Tensor, head: Tensor, positions: Tensor, teacher: Teacher) -> _Rows:
        distinct, where = torch.unique(positions, return_inverse=True)
        logp = teacher.log_probs(distinct)
        p = logp.exp()
        mass = p.sum(-1)
        entropy = -(p * logp.clamp_min(-1e4)).sum(-1)  # 0 log 0 = 0
        logits = (states @ head.T).float()
        match = logits.argmax(-1) == teacher.top1[positions]
        lse = torch.logsumexp(logits, -1)
        p_rows = p[where]
        ce = mass[where] * lse - torch.linalg.vecdot(p_rows, logits)
        q = logits.sub_(lse[:, None]).exp_()
        alpha = torch.minimum(p_rows, q).sum(-1)
        return cls(states, q, p, where, ce, ce - entropy[where], alpha, match, mass[where])

    def gradient(self, a: Tensor, b: Tensor | None) -> Tensor:
        """d(loss)/d(logits) [R, Vd]; reuses q's memory."""
        p_rows = self.p[self.where]
        if b is None:
            return self.q.mul_((a * self.mass)[:, None]).sub_(p_rows.mul_(a[:, None]))
        below = (self.q < p_rows).to(self.q.dtype)
        overlap = torch.linalg.vecdot(self.q, below)
        inner = (a * self.mass - b * overlap)[:, None] + b[:, None] * below
        return self.q.mul_(inner).sub_(p_rows.mul_(a[:, None]))
