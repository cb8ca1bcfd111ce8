"""The chunked objective against a naive float64 one: loss, gradients and every statistic."""

import itertools

import pytest
import torch
from torch import Tensor

from models.batch import Slots, slots_of
from models.errors import EyasError
from models.objective import DEPTH_WEIGHTS, LOSSES, Objective
from models.vocab import DraftVocab
from tests.drafters import random_batch, random_frozen, random_vocab

DEPTHS = 4


def naive(
    states: Tensor, head: Tensor, probs: Tensor, vocab: DraftVocab, slots: Slots, loss: str, weights: str
) -> tuple[Tensor, dict[str, Tensor]]:
    """Plain autograd, one slot and depth at a time, float64; probs [T, V] = the target's full softmax."""
    total = torch.zeros((), dtype=torch.float64)
    number = {pair: i for i, pair in enumerate(zip(*(t.tolist() for t in slots.rows()), strict=True))}
    sums = {n: torch.zeros(DEPTHS, dtype=torch.float64) for n in ("ce", "kl", "alpha", "match", "mass")}
    for s, p in enumerate(slots.index.tolist()):
        ces, kls, alphas = list[Tensor](), list[Tensor](), list[Tensor]()
        for k in range(DEPTHS):
            if not slots.valid[k, s]:
                break
            teacher = probs[p + 1 + k]
            inside = teacher[vocab.ids]
            logq = torch.log_softmax(states[number[k, s]] @ head.T, -1)
            ce = -(inside * logq).sum()
            kl = ce + (inside * inside.log()).sum()
            alpha = torch.minimum(inside, logq.exp()).sum()
            guess = int(vocab.ids[int(logq.argmax())])
            for name, value in (("ce", ce), ("kl", kl), ("alpha", alpha), ("mass", inside.sum())):
                sums[name][k] += value.detach()
            sums["match"][k] += float(guess == int(teacher.argmax()))
            for column, value in ((ces, ce), (kls, kl), (alphas, alpha)):
                column.append(value)
        if loss == "expected_length":
            total = total + 1 - sum(torch.stack(alphas[: j + 1]).prod() for j in range(len(alphas))) / DEPTHS
            continue
        soft = [0.5 * float(a.detach()) + 0.5 for a in alphas]
        for k, (ce, kl, alpha) in enumerate(zip(ces, kls, alphas, strict=True)):
            if weights == "decay":
                weight = 0.7**k
            else:
                weight = sum(torch.tensor(soft[: m + 1]).double().prod().item() for m in range(k, len(soft)))
            lam = torch.exp(-3 * alpha.detach())
            value = {"ce": ce, "kl": kl, "tv": 1 - alpha, "lk": lam * kl + (1 - lam) * (1 - alpha)}[loss]
            total = total + weight * value
    return total, sums


@pytest.mark.parametrize(("loss", "weights", "chunk"), list(itertools.product(LOSSES, DEPTH_WEIGHTS, [1, 5, 1000])))
def test_loss_gradients_and_statistics(loss: str, weights: str, chunk: int) -> None:
    frozen, vocab = random_frozen(1), random_vocab(40, 17)
    batch = random_batch(frozen, [9, 1, 23], seed=2)
    slots = slots_of(batch, DEPTHS)
    assert len(slots) > 8 and not slots.valid.all()
    generator = torch.Generator().manual_seed(3)
    states = torch.randn(int(slots.valid.sum()), 32, generator=generator, dtype=torch.float64).requires_grad_()
    head = torch.randn(17, 32, generator=generator, dtype=torch.float64).mul(0.3).requires_grad_()
    probs = torch.softmax(batch.final.double() @ frozen.head.double().T, -1)
    want, sums = naive(states, head, probs, vocab, slots, loss, weights)
    want.backward()

    mine = states.detach().float().requires_grad_(), head.detach().float().requires_grad_()
    objective = Objective(loss, weights, 0.7, chunk)
    score = objective(*mine, slots, frozen.teacher(batch, vocab), per_slot=True)
    (2 * score.loss_sum).backward()
    torch.testing.assert_close(score.loss_sum.double(), want, rtol=1e-5, atol=1e-5)
    for got, exact in zip(mine, (states, head), strict=True):
        assert got.grad is not None and exact.grad is not None
        torch.testing.assert_close(got.grad.double() / 2, exact.grad, rtol=1e-4, atol=1e-5)
    for name, value in sums.items():
        torch.testing.assert_close(getattr(score, name), value, rtol=1e-5, atol=1e-5)
    assert score.count.tolist() == slots.valid.sum(1).tolist()
    assert score.alpha_slots is not None and score.match_slots is not None
    torch.testing.assert_close(score.alpha_slots.sum(1).double(), sums["alpha"], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(score.match_slots.sum(1).double(), sums["match"])


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
    score = Objective("kl")(states, frozen.head, slots, frozen.teacher(batch, DraftVocab.full(40)))
    torch.testing.assert_close(score.alpha, score.count, rtol=1e-5, atol=0.0)
    assert score.match.tolist() == score.count.tolist() == [10, 9, 8]
    assert float(score.loss_sum.abs()) < 1e-4


def test_no_slot_gives_zero_loss_and_gradient() -> None:
    frozen, vocab = random_frozen(), random_vocab(40, 10)
    batch = random_batch(frozen, [5], supervised=torch.zeros(5, dtype=torch.bool))
    states = torch.zeros(0, 32, requires_grad=True)
    head = torch.ones(10, 32, requires_grad=True)
    score = Objective()(states, head, slots_of(batch, 2), frozen.teacher(batch, vocab))
    score.loss_sum.backward()
    assert float(score.loss_sum.detach()) == 0.0 and head.grad is not None and not head.grad.any()


@pytest.mark.parametrize("bad", [{"loss": "mse"}, {"depth_weights": "linear"}, {"chunk": 0}, {"depth_keep": 0.0}])
def test_unknown_settings_name_their_key(bad: dict[str, object]) -> None:
    with pytest.raises(EyasError, match=f"train.{next(iter(bad))}="):
        Objective(**bad)  # type: ignore[arg-type]


def test_thinned_slots_give_an_unbiased_loss() -> None:
    """Keeping a slot at depth k with probability r^k and weighting it by r^-k leaves the expected loss as it is."""
    frozen, vocab = random_frozen(1), random_vocab(40, 17)
    batch = random_batch(frozen, [60], supervised=torch.ones(60, dtype=torch.bool))
    slots = slots_of(batch, DEPTHS)
    states = torch.randn(int(slots.valid.sum()), 32, generator=torch.Generator().manual_seed(0))
    teacher = frozen.teacher(batch, vocab)
    whole = float(Objective(decay=0.8)(states, frozen.head[vocab.ids], slots, teacher).loss_sum)
    objective, losses = Objective(decay=0.8, depth_keep=0.6), []
    for seed in range(300):
        some = slots.thinned(0.6, seed)
        assert bool((some.valid[1:] <= some.valid[:-1]).all()) and torch.equal(some.valid[0], slots.valid[0])
        kept = states[some.valid[slots.valid]]
        losses.append(float(objective(kept, frozen.head[vocab.ids], some, teacher).loss_sum))
    mean, error = float(torch.tensor(losses).mean()), float(torch.tensor(losses).std()) / 300**0.5
    assert error < 0.01 * whole and abs(mean - whole) < 4 * error  # 4 standard errors: false alarm 6e-5
