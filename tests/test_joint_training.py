"""The training loop with a target that learns along: stages, resume, what a run ends with, and stopping early."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from conf.schema import Config, JointConfig, OptimConfig, TargetConfig, TrackerConfig, TrainConfig
from data.features.source import TokensOnly
from data.masks.examples import Example
from models.errors import EyasError
from models.target import Target
from models.tuned import WEIGHTS, apply_tuned, tuned
from models.vocab import DraftVocab
from tests.linear_drafter import LinearDrafter
from tests.tiny import tiny_target
from train.joint import JointTraining
from train.optim import set_lr
from train.strategy import build_accelerator
from train.tracking import read_metrics
from train.trainer import Fitted, Trainer

STEPS = 6


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_target(tmp_path_factory.mktemp("joint_training") / "target", layers=3)


def documents(count: int, seed: int) -> list[Example]:
    """Random tokens, of which the last two thirds are supervised."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(6, 15, (count,), generator=generator).tolist()
    rows = [torch.randint(5, 280, (n,), generator=generator).tolist() for n in lengths]
    return [Example(ids, [i >= len(ids) // 3 for i in range(len(ids))], f"memory:{i}") for i, ids in enumerate(rows)]


def config(joint: JointConfig, **train: Any) -> Config:
    options: dict[str, Any] = {"steps": STEPS, "bin_tokens": 24, "bins_per_step": 2, "depths": 2, "log_every": 1}
    return Config(
        name="tiny",
        target=TargetConfig(path="none"),
        optim=OptimConfig(lr=1e-2, warmup=0, schedule="constant", max_grad_norm=1e9),
        train=TrainConfig(**(options | {"save_every": 2, "eval_every": 3} | train)),
        joint=joint,
        tracker=TrackerConfig(tensorboard=False, wandb="disabled"),
    )


def make(folder: Path, run: Path, cfg: Config, **options: Any) -> Trainer:
    target = Target.load(str(folder))
    vocab = DraftVocab(torch.arange(0, target.vocab_size, 3), target.vocab_size)
    frozen = target.frozen()
    drafter = LinearDrafter.create(frozen, vocab, target.tap_ids)
    accelerator = build_accelerator("cpu")
    train, valid = TokensOnly(documents(10, 1)), TokensOnly(documents(3, 2))
    given: dict[str, Any] = {"train": train, "valid": valid, "content": {"documents": "a"}}
    joint = JointTraining.of(target, drafter, cfg.joint)
    return Trainer(cfg, run, accelerator, drafter, frozen, joint=joint, **given, **options)


def tensors(fitted: Fitted, run: Path, step: int, name: str) -> dict[str, Tensor]:
    return load_file(run / f"checkpoints/step_{step:08d}" / name)


def test_lambda_zero_is_a_plain_fine_tune(folder: Path, tmp_path: Path) -> None:
    """Two steps of the trainer against two AdamW steps on transformers' own loss over the same documents."""
    cfg = config(JointConfig(backbone="full", weight=0.0, lr=3e-3), steps=2)
    trainer = make(folder, tmp_path, cfg)
    plain = AutoModelForCausalLM.from_pretrained(folder)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.0)
    examples, losses = documents(10, 1), []
    for step in range(2):
        total, count = torch.zeros(()), 0
        for d in [trainer.documents[d] for members in trainer.plan.bins(step) for d in members]:
            ids = torch.tensor(examples[d].input_ids)
            labels = torch.where(torch.tensor(examples[d].supervised), ids, -100)[1:]
            total = total + F.cross_entropy(plain(ids[None]).logits[0, :-1], labels, reduction="sum")
            count += int((labels >= 0).sum())
        optimizer.zero_grad()
        (total / count).backward()
        optimizer.step()
        losses.append(float(total.detach()) / count)
    fitted = trainer.fit()
    rows = read_metrics(tmp_path / "metrics.jsonl", "train")
    assert [row["loss"] for row in rows] == pytest.approx(losses, rel=1e-5)
    found = tensors(fitted, tmp_path, 2, WEIGHTS)
    for name, parameter in plain.named_parameters():
        # Adam's first steps are as long for a gradient of 1e-7 as for one of 1, and such are rounding errors in part.
        difference = (found[name] - parameter.detach()).abs()
        assert (difference > 1e-4).float().mean() < 2e-3 and difference.max() < 1e-3, name


def test_the_first_stage_leaves_the_target_alone(folder: Path, tmp_path: Path) -> None:
    cfg = config(JointConfig(backbone="full", warmup=4, lr=1e-2))
    fitted = make(folder, tmp_path, cfg).fit()
    original = dict(AutoModelForCausalLM.from_pretrained(folder).named_parameters())
    early, late = (tensors(fitted, tmp_path, step, WEIGHTS) for step in (4, 6))
    assert all(torch.equal(early[name], parameter) for name, parameter in original.items())
    assert all(not torch.equal(late[name], parameter) for name, parameter in original.items())
    perplexities = [row["perplexity"] for row in read_metrics(tmp_path / "metrics.jsonl", "valid")]
    about = tuned(fitted.checkpoint)
    assert about is not None and about["perplexity"]["before"] == pytest.approx(perplexities[0], rel=1e-6)


@pytest.mark.parametrize("joint", [JointConfig(backbone="full"), JointConfig(backbone="lora", rank=2, dropout=0.3)])
def test_broken_off_and_gone_on_with(
    joint: JointConfig, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit-equal drafter and target, whichever step it stops behind; the curves too."""
    joint.warmup, joint.schedule = 2, "sine"
    whole = make(folder, tmp_path / "whole", config(joint)).fit()
    step_of = Trainer._train_step
    for stop in (1, 3, 5):

        def breaking(self: Trainer, step: int, stop: int = stop) -> None:
            if step == stop:
                raise KeyboardInterrupt
            step_of(self, step)

        run = tmp_path / f"broken{stop}"
        monkeypatch.setattr(Trainer, "_train_step", breaking)
        with pytest.raises(KeyboardInterrupt):
            make(folder, run, config(joint)).fit()
        monkeypatch.setattr(Trainer, "_train_step", step_of)
        again = make(folder, run, config(joint)).fit()
        for name in ("model.safetensors", WEIGHTS):
            ours, theirs = (tensors(f, r, STEPS, name) for f, r in ((again, run), (whole, tmp_path / "whole")))
            assert ours.keys() == theirs.keys() and all(torch.equal(ours[k], theirs[k]) for k in ours)
        values = [
            [(row["step"], row["loss"], row.get("perplexity")) for row in read_metrics(r / "metrics.jsonl")]
            for r in (run, tmp_path / "whole")
        ]
        assert values[0] == values[1]


def test_the_checkpoint_holds_what_was_trained(folder: Path, tmp_path: Path) -> None:
    """The tuned target applied from the checkpoint has the perplexity that target.json tells."""
    joint = JointConfig(backbone="lora", rank=4, lr=2e-2, dropout=0.0)
    fitted = make(folder, tmp_path, config(joint, eval_every=STEPS)).fit()
    target = Target.load(str(folder))
    apply_tuned(target, fitted.checkpoint)
    total, count = 0.0, 0
    for example in documents(3, 2):
        ids, mask = torch.tensor(example.input_ids), torch.tensor(example.supervised)[1:]
        with torch.no_grad():
            logp = target.logits(target.live([ids])[1]).log_softmax(-1)[:-1]
        total -= float(logp.gather(1, ids[1:, None])[:, 0][mask].sum())
        count += int(mask.sum())
    about = tuned(fitted.checkpoint)
    assert about is not None and about["kind"] == "lora"
    assert about["perplexity"]["after"] == pytest.approx(torch.tensor(total / count).exp().item(), rel=1e-4)
    assert about["perplexity"]["after"] != pytest.approx(about["perplexity"]["before"], rel=1e-3)


def test_patience_counts_measured_tau(folder: Path, tmp_path: Path) -> None:
    """The verifier's numbers decide what is best and when to stop, not the simulated ones; also after a resume."""
    taus = iter([1.2, 1.5, 1.4, 1.5, 1.9])
    cfg = config(JointConfig(backbone="lora"), steps=30, eval_every=2, save_every=2, patience=2, tau="measured")
    fitted = make(folder, tmp_path, cfg, measure=lambda _: next(taus)).fit()
    assert fitted.steps == 8 and fitted.checkpoint.name == "step_00000004"
    assert fitted.best is not None and fitted.best["tau_measured"] == 1.5
    again = make(folder, tmp_path, cfg, measure=lambda _: 9.9).fit()
    assert again.steps == 8 and again.checkpoint == fitted.checkpoint
    assert [row["tau_measured"] for row in read_metrics(tmp_path / "metrics.jsonl", "valid")] == [1.2, 1.5, 1.4, 1.5]


def test_the_second_stage_has_a_learning_rate_schedule_of_its_own(folder: Path, tmp_path: Path) -> None:
    """2 of 6 steps for the drafter alone; then the target's warm-up of half of the other 4, and a fall to a tenth."""
    cfg = config(JointConfig(backbone="full", warmup=2, lr=1e-3))
    cfg.optim = OptimConfig(lr=1.0, warmup=0.5, schedule="wsd", decay=0.5, min_lr=0.1, max_grad_norm=1e9)
    trainer = make(folder, tmp_path, cfg)
    assert trainer.joint is not None
    factors = [trainer.joint.lr_factor(step, 6, cfg.optim) for step in range(6)]
    assert factors == pytest.approx([0.0, 0.0, 0.5, 1.0, 0.55, 0.1])
    trainer._set_up(None)
    groups = trainer.strategy.param_groups
    set_lr(groups, 0.25, 0.5)
    assert {(group["backbone"], group["lr"]) for group in groups} == {(False, 0.25), (True, 5e-4)}


def test_a_first_stage_that_leaves_nothing_is_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(EyasError, match=r"joint\.warmup=1000: as long as the whole run of 6 steps"):
        make(folder, tmp_path, config(JointConfig(backbone="lora", warmup=1000))).fit()


def test_a_target_that_diverges_stops_the_run(folder: Path, tmp_path: Path) -> None:
    """A perplexity beyond all numbers is told like any loss that is not finite, with the key that does it."""
    cfg = config(JointConfig(backbone="full", lr=1e30), steps=30, eval_every=1)
    with pytest.raises(EyasError, match=r"not finite.*joint\.lr \(now 1e\+30\)"):
        make(folder, tmp_path, cfg).fit()


def test_patience_is_judged_anew_when_a_run_goes_on(folder: Path, tmp_path: Path) -> None:
    taus = iter([1.5, 1.4, 1.3, 1.2, 1.1, 1.0])
    cfg = config(JointConfig(backbone="lora"), steps=8, eval_every=2, save_every=2, patience=2, tau="measured")
    assert make(folder, tmp_path, cfg, measure=lambda _: next(taus)).fit().steps == 6
    cfg.train.patience = None
    assert make(folder, tmp_path, cfg, measure=lambda _: next(taus)).fit().steps == 8
