"""The training loop on a linear drafter: what a step computes, what is written, what is refused."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from conf.schema import Config, OptimConfig, TargetConfig, TrackerConfig, TrainConfig
from data.features.source import pack
from data.features.store import Stored
from models.batch import Batch
from models.checkpoint import drafter_class, load_drafter, save_drafter
from models.errors import EyasError
from models.frozen import FrozenTarget
from models.run_folder import best_checkpoint, is_whole
from tests.drafters import TAPS, random_batch, random_drafter, random_frozen, random_vocab
from tests.linear_drafter import LinearDrafter
from train.checkpoint import CheckpointDir, TrainState
from train.strategy import build_accelerator, pick_precision
from train.tracking import CLOCKED, read_metrics, truncate
from train.trainer import Fitted, Trainer

LENGTHS = [9, 17, 6, 12, 20, 5, 14, 8, 11, 3, 7, 13]


class InMemory:
    """A FeatureSource of random documents; document 9 (three tokens) has no slot."""

    def __init__(self, frozen: FrozenTarget, lengths: Sequence[int], seed: int = 0) -> None:
        documents = [random_batch(frozen, [n], seed=1000 * seed + i, supervised=mask(n)) for i, n in enumerate(lengths)]
        self.documents = documents
        self.lengths = list(lengths)
        self.supervised = [int(d.supervised.sum()) for d in documents]
        self.slots = [max(0, n - 4) for n in lengths]
        self.sources = [f"memory:{i}" for i in range(len(lengths))]

    def __len__(self) -> int:
        return len(self.lengths)

    def batch(self, documents: Sequence[int], dtype: torch.dtype | None = None) -> Batch:
        parts = [self.documents[d] for d in documents]
        rows = [Stored(p.taps, p.final, p.lse, p.top1, p.input_ids, p.supervised) for p in parts]
        return pack(rows, dtype or torch.float32)


def mask(length: int) -> Tensor:
    """The first three tokens are the prompt, so slots are p = 2 .. n-3: n - 4 of them."""
    return torch.arange(length) >= 3


def config(**train: Any) -> Config:
    options: dict[str, Any] = {"steps": 6, "bin_tokens": 24, "bins_per_step": 2, "depths": 3, "log_every": 1}
    return Config(
        name="tiny",
        target=TargetConfig(path="none"),
        optim=OptimConfig(lr=1e-2, warmup=2),
        train=TrainConfig(**(options | train)),
        tracker=TrackerConfig(tensorboard=False, wandb="disabled"),
    )


def make(run: Path, cfg: Config, content: dict[str, str] | None = None, **options: Any) -> Trainer:
    frozen = random_frozen()
    drafter = LinearDrafter.create(frozen, random_vocab(40, 17), TAPS, seed=cfg.seed)
    train, valid = InMemory(frozen, LENGTHS), InMemory(frozen, [15, 10], seed=7)
    accelerator = build_accelerator("cpu")
    given = content or {"features": "a"}
    return Trainer(cfg, run, accelerator, drafter, frozen, train=train, valid=valid, content=given, **options)


def fit(run: Path, cfg: Config | None = None, **options: Any) -> Fitted:
    return make(run, cfg or config(), **options).fit()


def weights(fitted: Fitted) -> dict[str, Tensor]:
    return load_file(fitted.checkpoint.parent / f"step_{fitted.steps:08d}" / "model.safetensors")


def test_first_step_equals_plain_pytorch(tmp_path: Path) -> None:
    """The documents of step 0 one by one in float64, divided by their slots, clipped, one AdamW step."""
    cfg = config(steps=1)
    cfg.optim = OptimConfig(lr=1e-2, warmup=0, schedule="constant", max_grad_norm=0.1)
    trainer = make(tmp_path, cfg)
    documents = [trainer.documents[d] for members in trainer.plan.bins(0) for d in members]
    frozen, source = trainer.frozen, trainer.train_source
    reference = LinearDrafter.create(frozen, random_vocab(40, 17), TAPS, seed=0)
    start = {name: tensor.detach().clone() for name, tensor in reference.named_parameters()}
    total = torch.zeros((), dtype=torch.float64)
    slots = 0
    ids = reference.vocab.ids
    for d in documents:
        batch = source.batch([d])
        p = torch.arange(2, batch.num_tokens - 2)
        logits_p = (batch.final.double() @ frozen.head.double().T).softmax(-1)[:, ids]
        state = batch.taps[p] @ reference.mix.weight.T
        for k in range(3):
            keep = p + 2 + k < batch.num_tokens
            if k:
                token = batch.input_ids[(p + 1 + k).clamp_max(batch.num_tokens - 1)]
                state = torch.tanh(torch.cat([state, frozen.embedding[token]], -1) @ reference.next.weight.T)
            logq = (reference.norm(state[keep]) @ reference.lm_head.weight.T).double().log_softmax(-1)
            total = total - 0.8**k * (logits_p[p[keep] + 1 + k] * logq).sum()
        slots += len(p)
    (total / slots).backward()
    optimizer = torch.optim.AdamW(reference.parameters(), lr=1e-2, betas=(0.9, 0.95), weight_decay=0.0)
    norm = torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.1)
    optimizer.step()
    found = weights(trainer.fit())
    row = read_metrics(tmp_path / "metrics.jsonl", "train")[0]
    assert row["loss"] == pytest.approx(total.item() / slots, rel=1e-5)
    assert row["grad_norm"] == pytest.approx(float(norm), rel=1e-4)
    assert row["slots"][0] == slots
    for name, parameter in reference.named_parameters():
        torch.testing.assert_close(found[name] - start[name], (parameter - start[name]).detach(), rtol=1e-3, atol=1e-4)


def test_accumulation_split_does_not_matter(tmp_path: Path) -> None:
    """Every document in each step: as one bin or as many, the weights come out the same."""
    one = weights(fit(tmp_path / "one", config(steps=4, bin_tokens=1000, bins_per_step=1)))
    bins = len(make(tmp_path / "n", config(bin_tokens=24, bins_per_step=1, steps=None)).plan.bins(0))
    assert bins == 1
    per_epoch = make(tmp_path / "m", config(bin_tokens=24, bins_per_step=1, steps=None)).total
    many = weights(fit(tmp_path / "many", config(steps=4, bin_tokens=24, bins_per_step=per_epoch)))
    assert per_epoch > 3
    for name, tensor in one.items():
        torch.testing.assert_close(many[name], tensor, rtol=1e-3, atol=1e-4)


def test_loss_falls_and_the_best_checkpoint_is_recorded(tmp_path: Path) -> None:
    fitted = fit(tmp_path, config(steps=40, keep_last=1, eval_every=5))
    train, valid = (read_metrics(tmp_path / "metrics.jsonl", kind) for kind in ("train", "valid"))
    assert [row["step"] for row in train] == list(range(1, 41))
    assert [row["step"] for row in valid] == list(range(5, 41, 5))
    assert train[-1]["loss"] < 0.9 * train[0]["loss"]
    best = max(valid, key=lambda row: (row["tau_t0"], -row["step"]))
    assert fitted.best is not None and fitted.best["step"] == best["step"]
    assert json.loads((tmp_path / "best.json").read_text())["tau_t0"] == best["tau_t0"]
    assert best_checkpoint(tmp_path) == fitted.checkpoint == tmp_path / f"checkpoints/step_{best['step']:08d}"
    kept = {path.name for path in (tmp_path / "checkpoints").iterdir()}
    assert kept == {fitted.checkpoint.name, "step_00000040"}
    assert 1.0 <= valid[-1]["tau_t1"] <= 4.0


class Stop(Exception):
    pass


@pytest.mark.parametrize("stop_at", [1, 3, 4])
def test_resume_is_bit_identical(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stop_at: int) -> None:
    """Broken off in the middle of a logging window (log_every 4, save_every 3) and run again: same weights and rows."""
    cfg = config(steps=7, save_every=3, eval_every=3, log_every=4)
    whole = fit(tmp_path / "whole", cfg)
    trainer = make(tmp_path / "broken", cfg)
    plain = trainer._train_step

    def step(number: int) -> None:
        if number == stop_at:
            raise Stop
        plain(number)

    monkeypatch.setattr(trainer, "_train_step", step)
    with pytest.raises(Stop):
        trainer.fit()
    again = fit(tmp_path / "broken", cfg)
    old, new = weights(whole), weights(again)
    assert old.keys() == new.keys() and all(torch.equal(old[name], new[name]) for name in old)
    rows = [
        [{k: v for k, v in row.items() if k not in CLOCKED} for row in read_metrics(run / "metrics.jsonl")]
        for run in (tmp_path / "whole", tmp_path / "broken")
    ]
    assert rows[0] == rows[1]
    assert again.best == whole.best


def test_a_finished_run_says_so_and_changes_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    first = fit(tmp_path)
    before = {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*") if p.is_file() and p.name != "best.json"}
    with caplog.at_level(logging.INFO):
        assert fit(tmp_path) == first
    assert "this run is finished: 6 of 6 steps" in caplog.text
    assert before == {p: p.stat().st_mtime_ns for p in before}


def test_plan_is_shown_before_the_first_step(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """11 of 12 documents have a slot; all but three tokens of each are supervised."""
    with caplog.at_level(logging.INFO):
        fit(tmp_path, config(steps=None, epochs=1, bins_per_step=1))
    plan = next(record.getMessage() for record in caplog.records if record.getMessage().startswith("plan"))
    tokens = sum(LENGTHS) - 3
    trained = 32 * 96 + 32 * 64 + 32 + 17 * 32
    assert "documents           11 (1 without" in plan
    assert f"{tokens:,}, of which {tokens - 33:,} supervised" in plan
    assert f"trainable, drafter  {trained:,} parameters" in plan
    assert "trainable, target   0 parameters" in plan
    assert "starts at step      0" in plan and "(1.00 epochs)" in plan


def test_other_content_or_length_is_refused(tmp_path: Path) -> None:
    fit(tmp_path)
    with pytest.raises(EyasError, match=r"begun with other input, features"):
        fit(tmp_path, content={"features": "b"})
    with pytest.raises(EyasError, match=r"number of steps \(6, now 9\)"):
        fit(tmp_path, config(steps=9))


def test_a_loss_that_is_not_finite_stops_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = make(tmp_path, config(steps=20, save_every=1, eval_every=1, keep_last=9))
    plain = trainer._train_step

    def step(number: int) -> None:
        if number == 2:
            with torch.no_grad():
                trainer.drafter.get_parameter("lm_head.weight")[0, 0] = float("nan")
        plain(number)

    monkeypatch.setattr(trainer, "_train_step", step)
    with pytest.raises(EyasError, match=r"step 3: .* not finite. Lower optim.lr .*step_00000002"):
        trainer.fit()
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == ["step_00000001", "step_00000002"]


def test_no_usable_document(tmp_path: Path) -> None:
    frozen = random_frozen()
    drafter = LinearDrafter.create(frozen, random_vocab(40, 17), TAPS)
    accelerator = build_accelerator("cpu")
    with pytest.raises(EyasError, match=r"data.path: no document has two supervised tokens"):
        Trainer(
            config(), tmp_path, accelerator, drafter, frozen, train=InMemory(frozen, [3, 4]), valid=None, content={}
        )


# --- checkpoints ---


@pytest.mark.parametrize("damage", ["truncate", "flip", "delete", "half state"])
def test_broken_newest_checkpoint_is_passed_over(tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: str) -> None:
    """And the run goes on from the one before it to the same weights."""
    cfg = config(steps=6, save_every=2, eval_every=2)
    expected = weights(fit(tmp_path / "whole", cfg))
    fit(tmp_path / "run", cfg)
    newest = tmp_path / "run/checkpoints/step_00000006"
    victim = newest / ("state.json" if damage == "half state" else "optimizer-00001.safetensors")
    data = bytearray(victim.read_bytes())
    data[len(data) // 2] ^= 1
    if damage == "delete":
        victim.unlink()
    else:
        victim.write_bytes(data if damage == "flip" else data[: len(data) // 2])
    assert not is_whole(newest)
    again = fit(tmp_path / "run", cfg)
    assert "step_00000006 is incomplete or damaged" in caplog.text
    assert is_whole(newest)
    found = weights(again)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_killed_while_saving_leaves_no_trace(tmp_path: Path) -> None:
    """A half-written folder under its temporary name is neither used nor kept."""
    cfg = config(steps=6, save_every=2, eval_every=2)
    fit(tmp_path, cfg)
    half = tmp_path / "checkpoints/.tmp-step_00000008-1"
    half.mkdir()
    (half / "model.safetensors").write_bytes(b"half")
    (tmp_path / ".tmp-metrics.jsonl").write_bytes(b"half")
    fit(tmp_path, cfg)
    assert not [path for path in tmp_path.rglob(".tmp-*")]


def test_saving_keeps_old_checkpoints_until_the_new_one_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cfg = config(steps=6, save_every=2, eval_every=2, keep_last=1)
    fit(tmp_path, cfg)
    trainer = make(tmp_path, cfg)
    monkeypatch.setattr("train.checkpoint.save_drafter", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
    checkpoints = CheckpointDir(tmp_path, keep_last=1)
    before = checkpoints.latest()
    with pytest.raises(OSError, match="disk full"):
        checkpoints.save(TrainState(step=8), trainer.drafter, trainer.drafter.state_dict(), [])
    assert before is not None and checkpoints.latest() == before


def test_truncate_drops_later_rows_and_a_torn_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    rows = [json.dumps({"step": s, "kind": "train", "loss": 1.0 / s}) for s in (1, 2, 3, 4)]
    path.write_text("\n".join(rows) + '\n{"step": 5, "ki')
    truncate(path, 3)
    assert [row["step"] for row in read_metrics(path)] == [1, 2, 3]


def test_drafter_on_disk(tmp_path: Path) -> None:
    """A saved EAGLE-3 loads with the same weights, vocabulary and states."""
    frozen, vocab = random_frozen(), random_vocab(40, 17)
    drafter = random_drafter(frozen, vocab)
    save_drafter(drafter, tmp_path)
    loaded = load_drafter(tmp_path)
    assert type(loaded) is type(drafter) and loaded.tap_ids == TAPS and not loaded.training
    assert torch.equal(loaded.vocab.ids, vocab.ids) and loaded.vocab.size == 40
    assert all(torch.equal(a, b) for a, b in zip(loaded.parameters(), drafter.parameters(), strict=True))
    names = set(load_file(tmp_path / "model.safetensors"))
    assert names == {*drafter.state_dict(), "draft_vocab.ids"}


@pytest.mark.parametrize(
    "path", ["os.system", "tests.linear_drafter.LinearDrafter", "models.batch.Batch", "models.x.Y"]
)
def test_only_drafters_of_the_models_package_are_built(path: str) -> None:
    with pytest.raises(EyasError, match=f"drafter._target_={path}"):
        drafter_class(path)


def test_folders_that_are_no_drafter_are_named(tmp_path: Path) -> None:
    with pytest.raises(EyasError, match=r"no drafter.json there"):
        load_drafter(tmp_path)
    save_drafter(random_drafter(random_frozen(), random_vocab(40, 17)), tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"not a tensor")
    with pytest.raises(EyasError, match=r"not a readable safetensors file"):
        load_drafter(tmp_path)


# --- strategies and trackers ---


def test_wrong_strategies_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(EyasError, match="train.precision=fp8"):
        pick_precision("fp8", "cpu")
    with pytest.raises(EyasError, match="device=tpu"):
        build_accelerator("tpu")


def test_bf16_trains_with_fp32_weights(tmp_path: Path) -> None:
    cfg = config(steps=30, precision="bf16")
    found = weights(fit(tmp_path, cfg))
    assert all(tensor.dtype == torch.float32 for name, tensor in found.items() if name != "draft_vocab.ids")
    rows = read_metrics(tmp_path / "metrics.jsonl", "train")
    assert rows[-1]["loss"] < 0.9 * rows[0]["loss"]


def test_tensorboard_and_wandb_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """TensorBoard files hold the curve; wandb (a stand-in: it starts a service) gets the same id after a resume."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    class FakeRun:
        def log(self, values: dict[str, float], step: int) -> None:
            calls.append(("log", step, values.get("train/loss")))

        def finish(self) -> None:
            calls.append(("finish",))

    def init(**options: Any) -> FakeRun:
        calls.append(("init", options))
        return FakeRun()

    calls: list[Any] = []
    monkeypatch.setattr("wandb.init", init)
    cfg = config(steps=4)
    cfg.tracker = TrackerConfig(tensorboard=True, wandb="offline", project="p")
    fit(tmp_path, cfg)
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    rows = read_metrics(tmp_path / "metrics.jsonl", "train")
    assert [e.step for e in events.Scalars("train/loss")] == [1, 2, 3, 4]
    assert [e.value for e in events.Scalars("train/alpha/2")] == pytest.approx([row["alpha"][2] for row in rows])
    options = calls[0][1]
    assert options["mode"] == "offline" and options["project"] == "p" and options["config"]["train"]["steps"] == 4
    assert (tmp_path / "wandb_run_id").read_text().strip() == options["id"]
    assert calls[-1] == ("finish",)
