"""The chunked objective against a naive float64 one: loss, gradients and every statistic."""

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from models.batch import Batch, Slots, slots_of
from models.errors import EyasError
from models.frozen import FrozenTarget
from models.heads import DraftHead
from models.objective import DEPTH_WEIGHTS, LOSSES, Objective, Score
from models.vocab import DraftVocab
from tests.drafters import random_batch, random_frozen, random_vocab

DEPTHS = 4


def plainly(states: Tensor, heads: Tensor, row: int, depth: int) -> Tensor:
    return states[row] @ (heads[depth] if heads.ndim == 3 else heads).T


@dataclass
class Naive:
    """The objective by plain autograd, one slot and depth at a time, in float64.

    probs [T, V]: the target's full softmax; ids [T]: the document; logits(row, depth) [Vd]: what the draft says.
    """

    probs: Tensor
    ids: Tensor
    vocab: DraftVocab
    slots: Slots
    loss: str = "ce"
    weights: str = "decay"
    top_k: int = 0
    top_k_weight: float = 1.0
    eta: float = 3.0

    def __call__(self, logits: Callable[[int, int], Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        total = torch.zeros((), dtype=torch.float64)
        number = {pair: i for i, pair in enumerate(zip(*(t.tolist() for t in self.slots.rows()), strict=True))}
        sums = {n: torch.zeros(self.slots.depths, dtype=torch.float64) for n in ("ce", "kl", "alpha", "match", "mass")}
        for s, p in enumerate(self.slots.index.tolist()):
            found = []
            for k in range(self.slots.depths):
                if self.slots.valid[k, s]:
                    found.append(self.numbers(logits(number[k, s], k), p + 1 + k))
                    for name, column in sums.items():
                        column[k] += found[k][name].detach()
            total = total + self.of_slot(found)
        return total, sums

    def numbers(self, logits: Tensor, position: int) -> dict[str, Tensor]:
        teacher = self.probs[position]
        inside, logq = teacher[self.vocab.ids], torch.log_softmax(logits, -1)
        ce = -(inside * logq).sum()
        label = (self.vocab.ids == int(self.ids[position + 1])).nonzero().flatten().tolist()
        best = sorted(range(len(inside)), key=lambda j: float(inside[j]))[len(inside) - self.top_k :]
        return {
            "ce": ce,
            "kl": ce + (inside * inside.log()).sum(),
            "alpha": torch.minimum(inside, logq.exp()).sum(),
            "mass": inside.sum(),
            "match": torch.tensor(float(int(self.vocab.ids[int(logq.argmax())]) == int(teacher.argmax()))),
            "nll": -logq[label[0]] if label else torch.zeros(()),
            "top": -sum((inside[j] * logq[j] for j in best if self.top_k), torch.zeros(())),
        }

    def of_slot(self, found: list[dict[str, Tensor]]) -> Tensor:
        """The weighted loss of one slot, all of its depths."""
        alphas = [numbers["alpha"] for numbers in found]
        soft = [0.5 * float(a.detach()) + 0.5 for a in alphas]
        total = torch.zeros((), dtype=torch.float64)
        if self.loss == "expected_length":
            length = sum(torch.stack(alphas[: j + 1]).prod() for j in range(len(alphas)))
            total = total + 1 - length / self.slots.depths
        for k, numbers in enumerate(found):
            paced = sum(torch.tensor(soft[: m + 1]).double().prod().item() for m in range(k, len(soft)))
            weight = 0.7**k if self.weights == "decay" else paced
            lam = torch.exp(-self.eta * alphas[k].detach())
            value = {
                "tv": 1 - alphas[k],
                "lk": lam * numbers["kl"] + (1 - lam) * (1 - alphas[k]),
                "expected_length": torch.zeros(()),
            }.get(self.loss, numbers.get(self.loss, torch.zeros(())))
            total = total + weight * (value + self.top_k_weight * numbers["top"])
        return total


class Case(NamedTuple):
    """A batch whose slots lose their deeper depths here and there, and states and head to score, in float64."""

    batch: Batch
    frozen: FrozenTarget
    vocab: DraftVocab
    slots: Slots
    states: Tensor
    heads: Tensor

    @property
    def probs(self) -> Tensor:
        return torch.softmax(self.batch.final.double() @ self.frozen.head.double().T, -1)

    def naive(self, **settings: Any) -> Naive:
        return Naive(self.probs, self.batch.input_ids, self.vocab, self.slots, **settings)

    def score(self, objective: Objective, head: DraftHead, states: Tensor) -> Score:
        return objective(states, head, self.slots, self.frozen.teacher(self.batch, self.vocab), per_slot=True)

    def single(self) -> tuple[Tensor, Tensor]:
        """States and head in float32, leaves of their own."""
        return self.states.detach().float().requires_grad_(), self.heads.detach().float().requires_grad_()


def case(heads: int | None = None) -> Case:
    frozen, vocab = random_frozen(1), random_vocab(40, 17)
    batch = random_batch(frozen, [9, 1, 23], seed=2)
    slots = slots_of(batch, DEPTHS)
    assert len(slots) > 8 and not slots.valid.all() and slots.counts[-1] > 0
    generator = torch.Generator().manual_seed(3)
    states = torch.randn(int(slots.valid.sum()), 32, generator=generator, dtype=torch.float64).requires_grad_()
    shape = (17, 32) if heads is None else (heads, 17, 32)
    weight = torch.randn(shape, generator=generator, dtype=torch.float64).mul(0.3).requires_grad_()
    return Case(batch, frozen, vocab, slots, states, weight)


def close(got: Tensor | None, exact: Tensor | None, rtol: float = 1e-4) -> None:
    assert got is not None and exact is not None
    torch.testing.assert_close(got.double(), exact, rtol=rtol, atol=1e-5)


@pytest.mark.parametrize(("loss", "weights", "chunk"), list(itertools.product(LOSSES, DEPTH_WEIGHTS, [1, 5, 1000])))
def test_loss_gradients_and_statistics(loss: str, weights: str, chunk: int) -> None:
    of = case()
    want, sums = of.naive(loss=loss, weights=weights)(lambda row, k: plainly(of.states, of.heads, row, k))
    want.backward()
    states, weight = of.single()
    score = of.score(Objective(loss, weights, 0.7, chunk), DraftHead(weight), states)
    (2 * score.loss_sum).backward()
    close(score.loss_sum, want, 1e-5)
    for got, exact in ((states, of.states), (weight, of.heads)):
        assert got.grad is not None
        close(got.grad / 2, exact.grad)
    for name, value in sums.items():
        close(getattr(score, name), value, 1e-5)
    assert score.count.tolist() == of.slots.valid.sum(1).tolist()
    assert score.alpha_slots is not None and score.match_slots is not None
    close(score.alpha_slots.sum(1), sums["alpha"], 1e-5)
    close(score.match_slots.sum(1), sums["match"])


@pytest.mark.parametrize("loss", ["ce", "nll", "lk", "tv", "expected_length"])
@pytest.mark.parametrize(("weights", "top_k", "chunk"), [("decay", 3, 5), ("dpace", 3, 5), ("decay", 50, 1000)])
def test_top_k_term_beside_every_loss(loss: str, weights: str, top_k: int, chunk: int) -> None:
    """HASS's term, 0.5 of it; more tokens than there are in the draft vocabulary make it the cross-entropy itself."""
    of = case()
    naive = of.naive(loss=loss, weights=weights, top_k=min(top_k, 17), top_k_weight=0.5)
    want, _ = naive(lambda row, k: plainly(of.states, of.heads, row, k))
    want.backward()
    states, weight = of.single()
    objective = Objective(loss, weights, 0.7, chunk, top_k=top_k, top_k_weight=0.5)
    score = of.score(objective, DraftHead(weight), states)
    score.loss_sum.backward()
    close(score.loss_sum, want, 1e-5)
    close(states.grad, of.states.grad)
    close(weight.grad, of.heads.grad)


def test_own_tokens_outside_the_draft_vocabulary_teach_nothing() -> None:
    of = case()
    states, weight = of.single()
    of.score(Objective("nll", chunk=5), DraftHead(weight), states).loss_sum.backward()
    k, s = of.slots.rows()
    labels = of.batch.input_ids[of.slots.index[s] + 2 + k]
    known = torch.isin(labels, of.vocab.ids)
    assert known.any() and not known.all() and states.grad is not None
    assert torch.equal(states.grad.abs().sum(1) > 0, known)


def test_lk_eta() -> None:
    of = case()
    want, _ = of.naive(loss="lk", eta=10.0)(lambda row, k: plainly(of.states, of.heads, row, k))
    states, weight = of.single()
    close(of.score(Objective("lk", decay=0.7, lk_eta=10.0), DraftHead(weight), states).loss_sum, want, 1e-5)


@pytest.mark.parametrize("loss", ["ce", "nll", "lk"])
def test_a_head_for_every_depth(loss: str) -> None:
    """Five heads, of which four depths use the first four: the fifth gets no gradient."""
    of = case(heads=5)
    want, _ = of.naive(loss=loss, top_k=2)(lambda row, k: plainly(of.states, of.heads, row, k))
    want.backward()
    states, weight = of.single()
    of.score(Objective(loss, decay=0.7, chunk=5, top_k=2), DraftHead(weight), states).loss_sum.backward()
    close(states.grad, of.states.grad)
    close(weight.grad, of.heads.grad)
    assert weight.grad is not None and not weight.grad[4].any()
    assert all(weight.grad[k].any() for k in range(4))


@pytest.mark.parametrize("loss", ["ce", "nll", "lk", "tv"])
@pytest.mark.parametrize(("scale", "softcap"), [(1.0, None), (0.6, None), (1.0, 1.5), (0.6, 1.5)])
def test_bias_scale_and_softcap_of_the_head(loss: str, scale: float, softcap: float | None) -> None:
    of = case()
    bias = torch.randn(17, generator=torch.Generator().manual_seed(4), dtype=torch.float64)

    def logits(row: int, depth: int) -> Tensor:
        z = scale * (plainly(of.states, of.heads, row, depth) + bias)
        return z if softcap is None else softcap * torch.tanh(z / softcap)

    want, sums = of.naive(loss=loss, top_k=2)(logits)
    want.backward()
    states, weight = of.single()
    head = DraftHead(weight, bias.float(), scale, softcap)
    score = of.score(Objective(loss, decay=0.7, chunk=5, top_k=2), head, states)
    score.loss_sum.backward()
    close(score.loss_sum, want, 1e-5)
    close(states.grad, of.states.grad)
    close(weight.grad, of.heads.grad)
    for name, value in sums.items():
        close(getattr(score, name), value, 1e-5)


@pytest.mark.parametrize("heads", [None, 4])
def test_a_frozen_head_takes_no_gradient_and_passes_it_on(heads: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    of = case(heads=heads)
    want, _ = of.naive()(lambda row, k: plainly(of.states, of.heads, row, k))
    want.backward()
    given, backward = [], DraftHead.backward

    def spy(head: DraftHead, grad: Tensor, states: Tensor, counts: Any, weight: Tensor, into: Tensor | None) -> Tensor:
        given.append(into)
        return backward(head, grad, states, counts, weight, into)

    monkeypatch.setattr(DraftHead, "backward", spy)
    states, weight = of.single()
    weight.requires_grad_(False)
    of.score(Objective(decay=0.7, chunk=5), DraftHead(weight), states).loss_sum.backward()
    close(states.grad, of.states.grad)
    assert weight.grad is None
    assert given and all(into is None for into in given)  # the product for the weight was not even made


def test_nothing_is_differentiated_where_no_gradient_is_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    of = case()
    states, weight = of.single()
    learned = of.score(Objective("lk"), DraftHead(weight), states)
    monkeypatch.setattr(DraftHead, "backward", lambda *_: pytest.fail("made a gradient"))
    with torch.no_grad():
        read = of.score(Objective("lk"), DraftHead(weight), states)
    assert torch.equal(read.loss_sum, learned.loss_sum.detach()) and torch.equal(read.alpha, learned.alpha)
    with pytest.raises(pytest.fail.Exception):
        of.score(Objective("lk"), DraftHead(weight), states)


def test_one_chunk_of_logits_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many slots there are, no more than chunk of them, at all depths, have logits."""
    of = case()
    rows, logits = [], DraftHead.logits

    def spy(head: DraftHead, states: Tensor, *rest: Any) -> Tensor:
        rows.append(len(states))
        return logits(head, states, *rest)

    monkeypatch.setattr(DraftHead, "logits", spy)
    states, weight = of.single()
    of.score(Objective(chunk=3), DraftHead(weight), states)
    assert max(rows) <= 3 * DEPTHS and sum(rows) == len(states) and len(rows) == math.ceil(len(of.slots) / 3)


@pytest.mark.parametrize("loss", LOSSES)
def test_the_teachers_rows_are_looked_up_a_few_at_a_time(loss: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And what a row says does not hang on the rows beside it."""
    of, rows, minimum = case(), list[int](), torch.minimum

    def spy(p: Tensor, q: Tensor) -> Tensor:
        rows.append(len(p))
        return minimum(p, q)

    found = []
    for numbers in (1 << 24, 3 * 17 + 1):
        monkeypatch.setattr("models.objective.NUMBERS_AT_ONCE", numbers)
        with monkeypatch.context() as patch:
            patch.setattr(torch, "minimum", spy)
            states, weight = of.single()
            score = of.score(Objective(loss, top_k=2), DraftHead(weight, softcap=1.5), states)
        score.loss_sum.backward()
        found.append((score.loss_sum, score.ce, score.alpha, score.match, score.mass, states.grad, weight.grad))
    assert rows[0] == len(of.states) and rows[1:] == [3] * (rows[0] // 3) + [rows[0] % 3] * bool(rows[0] % 3)
    for whole, parts in zip(*found, strict=True):
        assert whole is not None and parts is not None and torch.equal(whole, parts)


def test_teacher_is_the_full_softmax_not_one_inside_the_draft_vocabulary() -> None:
    frozen, vocab = random_frozen(4), random_vocab(40, 10)
    batch = random_batch(frozen, [6])
    got = frozen.teacher(batch, vocab).log_probs(torch.arange(6)).exp()
    want = torch.softmax(batch.final.double() @ frozen.head.double().T, -1)[:, vocab.ids]
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-7)
    assert float(got.sum(-1).max()) < 0.9


def test_softcapped_and_scaled_targets() -> None:
    frozen, vocab = random_frozen(4), random_vocab(40, 10)
    frozen.scale, frozen.softcap = 0.5, 3.0
    batch = random_batch(frozen, [6])
    logits = 3.0 * torch.tanh(0.5 * (batch.final.double() @ frozen.head.double().T) / 3.0)
    batch.lse.copy_(logits.logsumexp(-1))
    got = frozen.teacher(batch, vocab).log_probs(torch.arange(6)).exp()
    torch.testing.assert_close(got.double(), torch.softmax(logits, -1)[:, vocab.ids], rtol=1e-5, atol=1e-7)


def test_perfect_drafter_has_alpha_one_and_zero_kl() -> None:
    frozen = random_frozen(5)
    batch = random_batch(frozen, [12], supervised=torch.ones(12, dtype=torch.bool))
    slots = slots_of(batch, 3)
    k, s = slots.rows()
    states = batch.final[slots.index[s] + 1 + k]
    score = Objective("kl")(states, DraftHead(frozen.head), slots, frozen.teacher(batch, DraftVocab.full(40)))
    torch.testing.assert_close(score.alpha, score.count, rtol=1e-5, atol=0.0)
    assert score.match.tolist() == score.count.tolist() == [10, 9, 8]
    assert float(score.loss_sum.abs()) < 1e-4


def test_no_slot_gives_zero_loss_and_gradient() -> None:
    frozen, vocab = random_frozen(), random_vocab(40, 10)
    batch = random_batch(frozen, [5], supervised=torch.zeros(5, dtype=torch.bool))
    states = torch.zeros(0, 32, requires_grad=True)
    head = torch.ones(10, 32, requires_grad=True)
    score = Objective()(states, DraftHead(head), slots_of(batch, 2), frozen.teacher(batch, vocab))
    score.loss_sum.backward()
    assert float(score.loss_sum.detach()) == 0.0 and head.grad is not None and not head.grad.any()


@pytest.mark.parametrize("bad", [{"loss": "mse"}, {"depth_weights": "linear"}, {"chunk": 0}, {"depth_keep": 0.0}])
def test_unknown_settings_name_their_key(bad: dict[str, object]) -> None:
    with pytest.raises(EyasError, match=f"train.{next(iter(bad))}="):
        Objective(**bad)  # type: ignore[arg-type]


THINNED: list[dict[str, Any]] = [
    {"decay": 0.8},
    {"depth_weights": "dpace"},
    {"loss": "expected_length"},
    {"loss": "lk", "depth_weights": "dpace", "top_k": 3},
]


@pytest.mark.parametrize("options", THINNED)
def test_thinned_slots_give_an_unbiased_gradient(options: dict[str, Any]) -> None:
    """Keeping a slot at depth k with probability r^k and weighting it by r^-k leaves loss and gradients, summed by
    depth, as expected."""
    frozen, vocab = random_frozen(1), random_vocab(40, 17)
    batch = random_batch(frozen, [60], supervised=torch.ones(60, dtype=torch.bool))
    slots, draws = slots_of(batch, DEPTHS), 300
    states = torch.randn(int(slots.valid.sum()), 32, generator=torch.Generator().manual_seed(0))
    head, teacher = DraftHead(frozen.head[vocab.ids]), frozen.teacher(batch, vocab)
    direction = torch.randn(32, generator=torch.Generator().manual_seed(1))

    def found(objective: Objective, some: Slots) -> Tensor:
        """The loss, and the gradient along a direction summed over the slots of each depth."""
        kept = states[some.valid[slots.valid]].requires_grad_()
        loss = objective(kept, head, some, teacher).loss_sum
        loss.backward()
        assert kept.grad is not None
        along = kept.grad @ direction
        return torch.cat([loss.detach()[None], torch.stack([part.sum() for part in along.split(some.counts)])])

    whole = found(Objective(**options), slots)
    objective, rows = Objective(**options, depth_keep=0.6), []
    for seed in range(draws):
        some = slots.thinned(0.6, seed)
        assert bool((some.valid[1:] <= some.valid[:-1]).all()) and torch.equal(some.valid[0], slots.valid[0])
        rows.append(found(objective, some))
    table = torch.stack(rows)
    error = table.std(0) / draws**0.5
    assert error[0] < 0.02 * whole[0].abs()
    assert bool(((table.mean(0) - whole).abs() < 4 * error + 1e-5).all())  # false alarm 6e-5 a number, 20 numbers
