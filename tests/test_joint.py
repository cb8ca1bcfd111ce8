"""Training a drafter together with its target: the two terms, where gradient goes, and the tuned target on disk."""

from __future__ import annotations

import copy
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from conf.schema import JointConfig
from models.batch import Batch
from models.drafter import TrainSpec
from models.errors import EyasError
from models.joint import JointModel
from models.objective import Objective
from models.target import Target
from models.tuned import ABOUT, WEIGHTS, apply_tuned, restore_tuned, save_tuned, tuned, write_tuned
from models.vocab import DraftVocab
from tests.linear_drafter import LinearDrafter
from tests.tiny import tiny_target
from train.joint import JointTraining

LORA: dict[str, Any] = {"rank": 3, "alpha": 6, "dropout": 0.0}
LENGTHS = (7, 12, 3)
PROMPTS = (2, 5, 1)  # tokens of each document that are not supervised
DEPTHS = 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_target(tmp_path_factory.mktemp("joint") / "target", tied=True, layers=3)


def made(folder: Path, *, lora: dict[str, Any] | None = None, distill: bool = False) -> JointModel:
    target = Target.load(str(folder))
    vocab = DraftVocab(torch.arange(0, target.vocab_size, 3), target.vocab_size)
    drafter = LinearDrafter.create(target.frozen(), vocab, target.tap_ids)
    model = JointModel(target, drafter, lora=lora, distill=distill)
    if lora:
        stir(model)
    return model


def stir(model: JointModel) -> None:
    """Adapters as after some training: fresh ones change nothing."""
    generator = torch.Generator().manual_seed(5)
    for parameter in model.trained_backbone():
        parameter.data.copy_(0.2 * torch.randn(parameter.shape, generator=generator))


def tokens(seed: int = 0) -> Batch:
    """Three documents without features."""
    total = sum(LENGTHS)
    ids = torch.randint(5, 280, (total,), generator=torch.Generator().manual_seed(seed))
    supervised = torch.cat([torch.arange(n) >= first for n, first in zip(LENGTHS, PROMPTS, strict=True)])
    bounds, zeros = torch.tensor([0, *LENGTHS]).cumsum(0).int(), torch.zeros(total)
    return Batch(ids, supervised, bounds, zeros[:, None][:, :0], zeros[:, None][:, :0], zeros, zeros.long())


def fed(model: JointModel, batch: Batch) -> Batch:
    """The same batch with the features of the model as it is, as a store would hold them."""
    rows = model.target.features(batch.input_ids.split(list(LENGTHS)))
    parts = {name: torch.cat([getattr(row, name) for row in rows]) for name in ("taps", "final", "lse", "top1")}
    return replace(batch, **parts)


def spec(**options: Any) -> TrainSpec:
    return TrainSpec(Objective(), DEPTHS, **options)


def labels_of(batch: Batch) -> list[tuple[Tensor, Tensor]]:
    """Each document's ids and, as transformers wants them, labels: -100 where a token is not supervised."""
    sizes = list(LENGTHS)
    masked = torch.where(batch.supervised, batch.input_ids, -100)
    return list(zip(batch.input_ids.split(sizes), masked.split(sizes), strict=True))


def test_the_targets_own_term_is_a_plain_fine_tune(folder: Path) -> None:
    """lambda = 0: loss and gradient of every weight are those of transformers' own causal LM loss on all documents."""
    model, batch = made(folder), tokens()
    plain = AutoModelForCausalLM.from_pretrained(folder)
    total, count = torch.zeros(()), 0
    for ids, labels in labels_of(batch):
        logits = plain(ids[None]).logits[0, :-1]
        total = total + F.cross_entropy(logits, labels[1:], ignore_index=-100, reduction="sum")
        count += int((labels[1:] != -100).sum())
    (total / count).backward()

    score = model(batch, model.target.frozen(), spec(lm_weight=1.0 / count, draft_weight=0.0))
    score.loss_sum.backward()
    assert count == 5 + 7 + 2 and score.lm is not None and score.lm[1] == count
    torch.testing.assert_close(score.loss_sum, total / count)
    torch.testing.assert_close(score.lm[0].float(), total)
    theirs = dict(plain.named_parameters())
    for name, parameter in model.target.model.named_parameters():
        assert parameter.grad is not None and theirs[name].grad is not None
        torch.testing.assert_close(parameter.grad, theirs[name].grad, rtol=1e-3, atol=1e-6)
    assert all(p.grad is None or not p.grad.any() for p in model.drafter.parameters())


@pytest.mark.parametrize("lora", [None, LORA])
def test_the_drafter_learns_from_the_live_target(folder: Path, lora: dict[str, Any] | None) -> None:
    """Its score is the one on features of the same weights; its gradient reaches the target once that is trained."""
    model, batch = made(folder, lora=lora), tokens(1)
    frozen = Target.load(str(folder)).frozen()
    live = model(batch, frozen, spec(lm_weight=1.0, draft_weight=0.0))
    stored = model.drafter(fed(model, batch), frozen, spec())
    for name in ("ce", "kl", "alpha", "match", "count"):
        torch.testing.assert_close(getattr(live, name), getattr(stored, name), rtol=1e-4, atol=1e-5)

    model(batch, frozen, spec()).loss_sum.backward()  # the first stage
    assert all(p.grad is None for p in model.trained_backbone())
    assert all(p.grad is not None for p in model.drafter.parameters() if p.requires_grad)

    def grads(draft_weight: float) -> list[Tensor]:
        model.zero_grad()
        model(batch, frozen, spec(lm_weight=1.0, draft_weight=draft_weight)).loss_sum.backward()
        return [
            p.grad.clone() for n, p in model.backbone.named_parameters() if ".layers.0." in n and p.grad is not None
        ]

    apart = zip(grads(0.0), grads(1.0), strict=True)
    assert all(not torch.equal(without, with_drafter) for without, with_drafter in apart)


def test_self_distillation_is_kl_to_the_model_without_adapters(folder: Path) -> None:
    model, batch = made(folder, lora=LORA, distill=True), tokens(2)
    original = AutoModelForCausalLM.from_pretrained(folder)
    expected = 0.0
    with torch.no_grad():
        for ids, labels in labels_of(batch):
            before = original(ids[None]).logits[0, :-1].double().log_softmax(-1)
            after = model.target.logits(model.target.live([ids])[1])[:-1].double().log_softmax(-1)
            kl = (before.exp() * (before - after)).sum(-1)
            expected += float(kl[labels[1:] != -100].sum())
    score = model(batch, model.target.frozen(), spec(lm_weight=1.0, draft_weight=0.0))
    assert expected > 0.1
    assert float(score.loss_sum.detach()) == pytest.approx(expected, rel=1e-4)
    fresh = JointModel(Target.load(str(folder)), model.drafter, lora=LORA, distill=True)
    score = fresh(batch, model.target.frozen(), spec(lm_weight=1.0, draft_weight=0.0))
    assert abs(float(score.loss_sum.detach())) < 1e-4


@pytest.mark.parametrize("lora", [None, LORA])
def test_the_tuned_target_on_disk(folder: Path, lora: dict[str, Any] | None, tmp_path: Path) -> None:
    """Saved, restored into a fresh run, applied to the original target, written as an ordinary model: same logits."""
    model = made(folder, lora=lora)
    if lora is None:
        for parameter in model.trained_backbone():
            with torch.no_grad():
                parameter.mul_(1.1)
    save_tuned(model.backbone, tmp_path, lora, {"perplexity": {"before": 3.0, "after": 2.0}})
    ids = torch.randint(5, 280, (9,), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        wanted = model.target.logits(model.target.live([ids])[1])
        original = Target.load(str(folder))
        assert (original.logits(original.live([ids])[1]) - wanted).abs().max() > 0.01
        again = made(folder, lora=lora)
        restore_tuned(again.backbone, tmp_path, lora)
        assert torch.equal(again.target.logits(again.target.live([ids])[1]), wanted)
        apply_tuned(original, tmp_path)
        torch.testing.assert_close(original.logits(original.live([ids])[1]), wanted, rtol=1e-4, atol=1e-4)
        out = tmp_path / "model"
        out.mkdir()
        write_tuned(folder, tmp_path, out)
        ordinary = AutoModelForCausalLM.from_pretrained(out)
        torch.testing.assert_close(ordinary(ids[None]).logits[0], wanted, rtol=1e-4, atol=1e-4)
    about = tuned(tmp_path)
    assert about is not None and about["perplexity"] == {"before": 3.0, "after": 2.0}
    assert not any(p.requires_grad for p in original.model.parameters())
    assert {p.name for p in folder.iterdir()} <= {p.name for p in out.iterdir()}


def test_a_tuned_target_that_does_not_fit_is_told(folder: Path, tmp_path: Path) -> None:
    model = made(folder, lora=LORA)
    save_tuned(model.backbone, tmp_path, LORA, {})
    tensors = load_file(tmp_path / WEIGHTS)
    name = sorted(tensors)[0]
    missing = {key: value for key, value in tensors.items() if key != name}
    shorter, broken = tensors[name][:-1].clone(), tensors[name] * float("nan")
    for spoiled, word in (
        (missing, "missing"),
        (tensors | {name: shorter}, "shape"),
        (tensors | {name: broken}, "NaN"),
    ):
        save_file(spoiled, tmp_path / WEIGHTS)
        with pytest.raises(EyasError, match=f"{name}.*{word}"):
            apply_tuned(Target.load(str(folder)), tmp_path)
    (tmp_path / ABOUT).unlink()
    with pytest.raises(EyasError, match="target.json: missing"):
        tuned(tmp_path)
    wrong: list[dict[str, Any]] = [{"format": 7}, {"lora": {}}, {"lora": {"rank": "x"}}]
    for about in wrong:
        (tmp_path / ABOUT).write_text(json.dumps({"format": 1, "kind": "lora"} | about))
        with pytest.raises(EyasError, match="target.json"):
            tuned(tmp_path)


def test_impossible_wishes(folder: Path) -> None:
    target = Target.load(str(folder), dtype="bfloat16")
    drafter: Any = torch.nn.Linear(1, 1)
    with pytest.raises(EyasError, match=r"joint\.distill"):
        JointModel(target, drafter, lora=None, distill=True)
    with pytest.raises(EyasError, match=r"target\.dtype"):
        JointModel(target, drafter, lora=None)


@pytest.mark.parametrize(
    ("schedule", "warmup", "wanted"),
    [
        ("constant", 0.0, [(1.0, 0.2)] * 4),
        ("constant", 2, [(0.0, 1.0), (0.0, 1.0), (1.0, 0.2), (1.0, 0.2)]),
        ("constant", 0.25, [(0.0, 1.0), (1.0, 0.2), (1.0, 0.2), (1.0, 0.2)]),
        ("sine", 0.0, [(1.0, 0.2 * math.sin(math.pi * x / 8)) for x in (1, 2, 3, 4)]),
        ("sine", 2, [(0.0, 1.0), (0.0, 1.0), (1.0, 0.2 * math.sqrt(0.5)), (1.0, 0.2)]),
    ],
)
def test_weights_of_the_two_terms(schedule: str, warmup: float, wanted: list[tuple[float, float]]) -> None:
    model: Any = None
    joint = JointTraining(model, JointConfig(backbone="lora", weight=0.2, schedule=schedule, warmup=warmup))
    for step, pair in enumerate(wanted):
        assert joint.weights(step, 4) == pytest.approx(pair)


def test_dropout_only_while_training(folder: Path) -> None:
    model, batch = made(folder, lora=LORA | {"dropout": 0.5}), tokens(3)
    frozen = model.target.frozen()

    def loss(seed: int) -> float:
        torch.manual_seed(seed)
        with torch.no_grad():
            return float(model(batch, frozen, spec()).loss_sum)

    model.eval()
    assert loss(0) == loss(1)
    model.train()
    assert loss(0) != loss(1) and loss(0) == loss(0)


def test_what_is_read_without_gradient_are_the_weights_of_now(folder: Path) -> None:
    """Fused optimizers change weights behind autograd's back; a layout made before must not be read then."""
    model, batch = made(folder), tokens(4)
    frozen = model.target.frozen()
    optimizer = torch.optim.AdamW(model.trained_backbone(), lr=0.05, fused=True)
    for _ in range(2):
        with torch.no_grad():
            quietly = model(batch, frozen, spec())
        loud = model(batch, frozen, spec(lm_weight=1.0))
        torch.testing.assert_close(quietly.ce, loud.ce, rtol=1e-4, atol=1e-4)
        loud.loss_sum.backward()
        optimizer.step()


def test_the_teacher_is_exact_under_autocast(folder: Path) -> None:
    """The draft vocabulary is a third of the target's: the mass inside tells whether lse fits the teacher's logits."""
    model, batch = made(folder), tokens(5)
    frozen = model.target.frozen()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        score = model(batch, frozen, spec())
        taps, final = model.target.live(batch.input_ids.split(list(LENGTHS)))
    probs = (final.double() @ frozen.head.double().T).softmax(-1)[:, model.drafter.vocab.ids].sum(-1)
    k, s = score.slots.rows()
    wanted = torch.zeros(DEPTHS, dtype=torch.float64).index_add_(0, k, probs[score.slots.index[s] + 1 + k])
    torch.testing.assert_close(score.mass, wanted, rtol=1e-5, atol=1e-5)


def test_copies_of_a_drafter_leave_the_target_alone(folder: Path) -> None:
    """Measuring in the middle of training drafts with a copy, whose weights are frozen."""
    model = made(folder)
    copy.deepcopy(model.drafter).requires_grad_(False)
    assert any(p.requires_grad for p in model.drafter.parameters())
