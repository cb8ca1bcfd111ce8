"""The one objective of all methods: exact teacher, every depth, scored in chunks in one pass.

States of all depths are unrolled first (a [rows, H] tensor, small beside logits); then slots are visited in chunks:
the teacher is formed once per position, all depths are scored against it, and the gradients of states and head are
produced in the same visit, so at most one chunk of logits exists at a time.

Every loss is a function of a few numbers of a (slot, depth), over the draft vocabulary, with p the target's exact
*full-vocabulary* probabilities, q the draft's softmax and x the document's own next token:

    ce = -sum_v p(v) log q(v)      alpha = sum_v min(p(v), q(v))
    nll = -log q(x)                top = -sum over the K draft tokens of largest p of p(v) log q(v)   (HASS)

(nll is 0 where x is no draft token). With slopes a, b, c, d of the loss in ce, alpha, nll and top, and the weights
w = a p + c [v = x] + d p [v in top]: dL/dlogits = (sum_v w) q - w + b q (m - <q, m>), with m = [q < p].
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from models.batch import Slots
from models.errors import EyasError
from models.frozen import Teacher
from models.heads import DraftHead

LOSSES = ("ce", "kl", "lk", "tv", "expected_length", "nll")
OVERLAP_ONLY = ("tv", "expected_length")  # their gradient vanishes where draft and target hardly overlap
DEPTH_WEIGHTS = ("decay", "dpace")
DPACE_FLOOR = 0.5
NUMBERS_AT_ONCE = 1 << 24  # of a table beside the draft's own (64 MiB of float32)


@dataclass
class Score:
    """What a pass over a batch yields. Sums, so that they add over batches and processes.

    loss_sum: 0-d, differentiable; weighted loss summed over slots and depths, what a method adds included.
    Per depth [K] float64: ce (unweighted), kl, alpha, match (draft argmax = the target's full-vocabulary
    argmax), mass (target probability inside the draft vocabulary), count (valid slots).
    extra [K] float64: a method's own term, unweighted; None: it has none. lm [2] float64: sum of -log p and number of
    the supervised tokens under a target that is trained along, else None.
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
    extra: Tensor | None = None
    lm: Tensor | None = None


class Columns(NamedTuple):
    """The numbers of valid (depth, slot) pairs [R], or of a chunk [K, c] with zeros where invalid."""

    ce: Tensor
    kl: Tensor
    alpha: Tensor
    match: Tensor
    mass: Tensor
    nll: Tensor
    top: Tensor


@dataclass(frozen=True)
class Objective:
    """loss, depth weights and the number of slots scored at a time; formulas in :meth:`weighted`, :meth:`weights`."""

    loss: str = "ce"
    depth_weights: str = "decay"
    decay: float = 0.8
    chunk: int = 256
    depth_keep: float = 1.0  # share of slots kept from one depth to the next; the weights make up for it
    top_k: int = 0  # tokens in HASS's top-K term; 0: no such term
    top_k_weight: float = 1.0
    lk_eta: float = 3.0  # how fast lk leaves KL behind as the overlap grows

    def __post_init__(self) -> None:
        if self.loss not in LOSSES:
            raise EyasError(f"train.loss={self.loss}: must be one of {', '.join(LOSSES)}")
        if self.depth_weights not in DEPTH_WEIGHTS:
            raise EyasError(f"train.depth_weights={self.depth_weights}: must be one of {', '.join(DEPTH_WEIGHTS)}")
        if self.chunk < 1:
            raise EyasError(f"train.chunk={self.chunk}: must be at least 1")
        if self.top_k < 0:
            raise EyasError(f"train.top_k={self.top_k}: must be 0 or more")
        if not 0 < self.depth_keep <= 1:
            raise EyasError(f"train.depth_keep={self.depth_keep}: must be above 0 and at most 1")

    def __call__(
        self, states: Tensor, head: DraftHead, slots: Slots, teacher: Teacher, *, per_slot: bool = False
    ) -> Score:
        """Score states [R, H] (rows as ``slots.rows()``) under the draft head; see :class:`Score`."""
        learns = torch.is_grad_enabled()  # which a custom function can't see from inside
        loss, stats = _ScoreChunks.apply(states, head.weight, head, slots, teacher, self, learns)
        table = Columns(*stats)
        ce, kl, alpha, match, mass = (s.double().sum(1) for s in table[:5])
        count = slots.valid.sum(1).double()
        kept = (table.alpha, table.match) if per_slot else (None, None)
        return Score(loss, ce, kl, alpha, match, mass, count, slots, *kept)

    def weighted(self, table: Columns, valid: Tensor) -> Tensor:
        """The scalar loss of a chunk from its numbers, all [K, c] (zero where invalid)."""
        alpha, depths = table.alpha, table.alpha.shape[0]
        weights = self.weights(alpha.detach(), valid) * valid
        ranked = (self.top_k_weight * table.top * weights).sum() if self.top_k else 0.0
        if self.loss == "expected_length":  # 1 - E[accepted] / K: depth weights are implied by the products
            kept = torch.cumprod(alpha, 0) / self.depth_keep ** _depths_of(alpha)
            gone = 1.0 - kept.sum(0) / depths
            return (gone * valid[0]).sum() + ranked
        if self.loss == "lk":  # hybrid: lean on KL while the overlap is small
            lam = torch.exp(-self.lk_eta * alpha.detach())
            loss = lam * table.kl + (1.0 - lam) * (1.0 - alpha)
        elif self.loss == "tv":
            loss = 1.0 - alpha
        else:
            loss = {"ce": table.ce, "kl": table.kl, "nll": table.nll}[self.loss]
        return (loss * weights).sum() + ranked

    def weights(self, alpha: Tensor, valid: Tensor) -> Tensor:
        """Depth weights [K, c] or [K, 1]: decay^k, or D-PACE (how much of the expected length hangs on depth k)."""
        k = _depths_of(alpha)
        if self.depth_weights == "decay":
            return self.fixed_weights(k)
        survive = torch.cumprod((1.0 - DPACE_FLOOR) * alpha + DPACE_FLOOR, 0) * valid
        return (survive / self.depth_keep**k).flip(0).cumsum(0).flip(0)

    def fixed_weights(self, depth: Tensor) -> Tensor:
        """decay^k, made up for the slots that are left out: also what a method's own term is weighted with."""
        return (self.decay / self.depth_keep) ** depth


class Slopes(NamedTuple):
    """Slopes of a loss in the numbers of :class:`Columns`, alike; None where it does not hang on one."""

    ce: Tensor | None
    kl: Tensor | None
    alpha: Tensor | None
    match: Tensor | None
    mass: Tensor | None
    nll: Tensor | None
    top: Tensor | None


def _depths_of(table: Tensor) -> Tensor:
    """[K, 1]: 0 .. K-1, beside a table [K, c]."""
    return torch.arange(table.shape[0], device=table.device, dtype=torch.float32)[:, None]


class _ScoreChunks(torch.autograd.Function):
    """Forward scores all chunks and, when gradients are wanted, keeps d(loss)/d(states) and d(loss)/d(head).

    Under autocast only the products of states and head are in its dtype; probabilities and sums stay float32.
    """

    @staticmethod
    def forward(
        ctx: Any,
        states: Tensor,
        weight: Tensor,
        head: DraftHead,
        slots: Slots,
        teacher: Teacher,
        objective: Objective,
        learns: bool,
    ) -> tuple[Tensor, Tensor]:
        depths, total = slots.valid.shape
        stats = states.new_zeros(len(Columns._fields), depths, total, dtype=torch.float32)
        loss = states.new_zeros((), dtype=torch.float32)
        of_states, of_head = (needed and learns for needed in ctx.needs_input_grad[:2])
        dstates = torch.zeros_like(states if of_states else states[:0])
        dhead = torch.zeros_like(weight, dtype=torch.float32) if of_head else None
        kind = states.device.type
        mixed = torch.is_autocast_enabled(kind)
        weight = weight.to(torch.get_autocast_dtype(kind) if mixed else states.dtype)  # once, not in every chunk
        row_of = slots.valid.flatten().long().cumsum(0).view(depths, total) - 1
        with torch.autocast(kind, enabled=False):
            for a in range(0, total, objective.chunk):
                part = slice(a, min(a + objective.chunk, total))
                valid = slots.valid[:, part]
                counts = valid.sum(1).tolist()
                k, s = valid.nonzero(as_tuple=True)
                row = row_of[k, a + s]
                positions = slots.index[a + s] + 1 + k
                rows = _Rows.make(
                    states[row].to(weight.dtype), weight, head, counts, positions, teacher, objective.top_k
                )
                table = Columns(*stats[:, :, part])
                for column, found in zip(table, rows.columns, strict=True):
                    column[k, s] = found.to(column.dtype)
                chunk_loss, slopes = _loss_and_slopes(objective, table, valid)
                loss += chunk_loss
                if of_states or of_head:
                    dlogits = rows.gradient(Slopes(*(None if t is None else t[k, s] for t in slopes)), head)
                    found = head.backward(dlogits.to(weight.dtype), rows.states, counts, weight, dhead)
                    if of_states:
                        dstates[row] = found.to(states.dtype)
                    del dlogits
                del rows  # before the next chunk's tables are made
        ctx.save_for_backward(dstates, None if dhead is None else dhead.to(head.weight.dtype))
        ctx.mark_non_differentiable(stats)
        return loss, stats

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        dstates, dhead = ctx.saved_tensors
        of_states = dstates * grad.to(dstates.dtype) if ctx.needs_input_grad[0] else None
        of_head = None if dhead is None else dhead * grad.to(dhead.dtype)
        return of_states, of_head, None, None, None, None, None


def _loss_and_slopes(objective: Objective, table: Columns, valid: Tensor) -> tuple[Tensor, Slopes]:
    """Loss of a chunk and its slopes [K, c] in its numbers; None where it does not hang on them."""
    with torch.enable_grad():
        leaves = Columns(*(t.detach().clone().requires_grad_() for t in table))
        loss = objective.weighted(leaves, valid.float())
        slopes = torch.autograd.grad(loss, leaves, allow_unused=True)
    return loss.detach(), Slopes(*slopes)


@dataclass
class _Rows:
    """The valid (depth, slot) pairs of a chunk as R rows: draft and teacher side by side.

    Whole tables [R, Vd] are those of the draft alone; the teacher's rows are looked up for a few rows at a time.
    """

    states: Tensor  # [R, H]
    logits: Tensor | None  # [R, Vd], kept only under a soft cap
    q: Tensor  # [R, Vd] draft probabilities
    p: Tensor  # [U, Vd] teacher probabilities of the U distinct positions
    where: Tensor  # [R] row of p
    labels: Tensor  # [R] draft id of the document's own token, -1 where it has none
    likeliest: Tensor | None  # [U, K] draft ids of the target's likeliest tokens
    columns: Columns

    @classmethod
    def make(
        cls,
        states: Tensor,
        weight: Tensor,
        head: DraftHead,
        counts: list[int],
        positions: Tensor,
        teacher: Teacher,
        top_k: int,
    ) -> _Rows:
        distinct, where = torch.unique(positions, return_inverse=True)
        logp = teacher.log_probs(distinct)
        p = logp.exp()
        mass = p.sum(-1)
        entropy = -(p * logp.clamp_min(-1e4)).sum(-1)  # 0 log 0 = 0
        del logp
        logits = head.logits(states, counts, weight).float()
        kept = logits.clone() if head.softcap else None
        labels, top1 = teacher.labels[positions], teacher.top1[positions]
        likeliest = p.topk(min(top_k, p.shape[1]), -1).indices if top_k else None
        columns = Columns(*logits.new_zeros(len(Columns._fields), len(states)))
        for part in _parts(logits):
            at, z = where[part], logits[part]
            p_rows = p[at]
            lse = torch.logsumexp(z, -1)
            columns.mass[part] = mass[at]
            columns.match[part] = (z.argmax(-1) == top1[part]).float()
            columns.ce[part] = mass[at] * lse - torch.linalg.vecdot(p_rows, z)
            own = z.gather(1, labels[part].clamp_min(0)[:, None])[:, 0]
            columns.nll[part] = torch.where(labels[part] >= 0, lse - own, 0.0)
            if likeliest is not None:
                chosen = likeliest[at]
                shares = p_rows.gather(1, chosen)
                columns.top[part] = shares.sum(-1) * lse - (shares * z.gather(1, chosen)).sum(-1)
            q = z.sub_(lse[:, None]).exp_()
            columns.alpha[part] = torch.minimum(p_rows, q).sum(-1)
        columns = columns._replace(kl=columns.ce - entropy[where])
        return cls(states, kept, logits, p, where, labels, likeliest, columns)

    def gradient(self, slopes: Slopes, head: DraftHead) -> Tensor:
        """d(loss)/d(states @ weight.T) [R, Vd]; reuses q's memory."""
        for part in _parts(self.q):
            self._slopes(part, Slopes(*(None if t is None else t[part] for t in slopes)), head)
        return self.q

    def _slopes(self, part: slice, slopes: Slopes, head: DraftHead) -> None:
        """Put the gradient of some rows in the place of their q."""
        at, labels, q = self.where[part], self.labels[part], self.q[part]
        p_rows, mass = self.p[at], self.columns.mass[part]
        a = slopes.ce if slopes.kl is None else slopes.kl if slopes.ce is None else slopes.ce + slopes.kl
        whole = torch.zeros_like(mass) if a is None else a * mass  # what q is multiplied with
        single: list[tuple[Tensor, Tensor]] = []  # weights of a few tokens of each row: [R, n] draft ids and values
        if slopes.nll is not None:
            own = torch.where(labels >= 0, slopes.nll, 0.0)
            single.append((labels.clamp_min(0)[:, None], own[:, None]))
        if slopes.top is not None and self.likeliest is not None:
            chosen = self.likeliest[at]
            single.append((chosen, p_rows.gather(1, chosen) * slopes.top[:, None]))
        for _, values in single:
            whole = whole + values.sum(-1)
        if slopes.alpha is None:
            grad = q.mul_(whole[:, None])
        else:
            below = (q < p_rows).to(q.dtype)
            whole = whole - slopes.alpha * torch.linalg.vecdot(q, below)
            grad = q.mul_(below.mul_(slopes.alpha[:, None]).add_(whole[:, None]))
        if a is not None:
            grad.addcmul_(p_rows, a[:, None], value=-1)
        for ids, values in single:
            grad.scatter_add_(1, ids, -values)
        if head.softcap and self.logits is not None:  # slope of softcap * tanh(z / softcap)
            grad.mul_(1 - (self.logits[part] / head.softcap).square_())
        if head.scale != 1.0:
            grad.mul_(head.scale)


def _parts(table: Tensor) -> list[slice]:
    """A few rows of [R, Vd] at a time."""
    rows = max(1, NUMBERS_AT_ONCE // table.shape[1])
    return [slice(begin, begin + rows) for begin in range(0, table.shape[0], rows)]
