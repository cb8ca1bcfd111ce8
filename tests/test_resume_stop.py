"""Being asked to stop, at every place of a step: what is saved, and what the run ends as when it goes on."""

from __future__ import annotations

import errno
import json
import logging
import resource
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from models.drafter import Drafter
from models.errors import EyasError
from models.files import save_tensors
from models.signals import Interrupted, Stopped
from tests.test_trainer import InMemory, config, make
from train.tracking import CLOCKED, METRICS, read_metrics
from train.trainer import Trainer


def outcome(run: Path, step: int) -> dict[str, Any]:
    last = run / f"checkpoints/step_{step:08d}"
    state = json.loads((last / "state.json").read_text())
    del state["seconds"]
    return {
        "rows": [{k: v for k, v in row.items() if k not in CLOCKED} for row in read_metrics(run / METRICS)],
        "best": (run / "best.json").read_text(),
        "state": state,
        "weights": load_file(last / "model.safetensors"),
        "optimizer": load_file(last / "optimizer-00001.safetensors"),
    }


def same(found: Any, want: Any) -> bool:
    if isinstance(want, dict):
        return found.keys() == want.keys() and all(same(found[key], want[key]) for key in want)
    return torch.equal(found, want) if isinstance(want, torch.Tensor) else bool(found == want)


def ask(trainer: Trainer, monkeypatch: pytest.MonkeyPatch, where: str, step: int) -> None:
    """SIGTERM comes while the trainer does ``where`` at ``step``."""
    if where == "validation":
        assert trainer.validator is not None
        plain = trainer.validator.source.batch

        def batch(documents: Any, dtype: Any = None) -> Any:
            if trainer.state.step == step:
                trainer.stop.number = signal.SIGTERM
            return plain(documents, dtype)

        monkeypatch.setattr(trainer.validator.source, "batch", batch)
        return
    train_step = trainer._train_step

    def stepped(number: int) -> None:
        train_step(number)
        if number + 1 == step:
            trainer.stop.number = signal.SIGTERM

    monkeypatch.setattr(trainer, "_train_step", stepped)


@pytest.mark.parametrize("where", ["step", "validation"])
@pytest.mark.parametrize("step", [2, 3, 6])
def test_asked_to_stop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str, step: int) -> None:
    """Steps 3 and 6, the last one, are validated; nothing else is saved but at the stop. The run that goes on has every
    row once and ends as one that was never stopped."""
    cfg = config(steps=6, save_every=6, eval_every=3, bin_tokens=16, save_minutes=0.0)
    make(tmp_path / "whole", cfg).fit()
    run = tmp_path / "run"
    trainer = make(run, cfg)
    ask(trainer, monkeypatch, where, step)
    if where == "validation" and step == 2:  # there is none
        trainer.fit()
    else:
        with pytest.raises(Stopped, match=f"SIGTERM: step {step} is saved; the same command continues"):
            trainer.fit()
        assert (run / f"checkpoints/step_{step:08d}").exists()
        assert not [row for row in read_metrics(run / METRICS, "valid") if row["step"] == step]
        make(run, cfg).fit()
    assert same(outcome(run, 6), outcome(tmp_path / "whole", 6))
    finished = make(run, cfg)
    monkeypatch.setattr(finished, "_set_up", lambda _: pytest.fail("a finished run is taken up again"))
    finished.fit()


def test_asked_to_stop_while_tau_is_measured(tmp_path: Path) -> None:
    """The measurement is broken off, the step saved, and measured when the run goes on."""
    cfg = config(steps=6, save_every=6, eval_every=3, save_minutes=0.0, tau="measured")
    run, taus = tmp_path / "run", iter([1.3, 1.4])

    def interrupted(drafter: Drafter) -> float:
        signal.raise_signal(signal.SIGTERM)
        return 9.9

    make(tmp_path / "whole", cfg, measure=lambda _: next(taus)).fit()
    with pytest.raises(Stopped, match="step 3 is saved"):
        make(run, cfg, measure=interrupted).fit()
    taus = iter([1.3, 1.4])
    make(run, cfg, measure=lambda _: next(taus)).fit()
    assert same(outcome(run, 6), outcome(tmp_path / "whole", 6))


def test_killed_between_a_late_validation_and_the_next_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run stopped before validating step 3, validated it when it went on, and was killed before it saved."""
    cfg = config(steps=6, save_every=6, eval_every=3, bin_tokens=16, save_minutes=0.0)
    make(tmp_path / "whole", cfg).fit()
    run = tmp_path / "run"
    trainer = make(run, cfg)
    ask(trainer, monkeypatch, "step", 3)
    with pytest.raises(Stopped):
        trainer.fit()
    trainer = make(run, cfg)

    def killed(step: int) -> None:
        raise RuntimeError("killed")

    monkeypatch.setattr(trainer, "_train_step", killed)
    with pytest.raises(RuntimeError, match="killed"):
        trainer.fit()
    assert [row["step"] for row in read_metrics(run / METRICS, "valid")] == [3]
    make(run, cfg).fit()
    assert same(outcome(run, 6), outcome(tmp_path / "whole", 6))


def test_saving_by_minutes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that goes by 50 s a step and a checkpoint every two minutes: after steps 3, 6 and 9, and at the end."""
    cfg = config(steps=10, save_every=10, eval_every=10, keep_last=9, save_minutes=2.0)
    trainer = make(tmp_path, cfg)
    monkeypatch.setattr("train.trainer.time.monotonic", lambda: 1000.0 + 50.0 * trainer.state.step)
    trainer.fit()
    assert sorted(p.name[-2:] for p in (tmp_path / "checkpoints").iterdir()) == ["03", "06", "09", "10"]


def test_only_whole_checkpoints_count(tmp_path: Path) -> None:
    """keep_last=2 with the newest broken: two whole ones stay, not one."""
    cfg = config(steps=8, save_every=2, eval_every=8, keep_last=2)
    trainer = make(tmp_path, cfg)
    trainer.fit()
    folders = sorted((tmp_path / "checkpoints").iterdir())
    assert [f.name[-1] for f in folders] == ["6", "8"]
    (folders[1] / "model.safetensors").write_bytes(b"torn")
    cfg.train.keep_last = 1
    trainer = make(tmp_path, cfg)
    trainer.checkpoints.prune(None)
    assert [f.name[-1] for f in sorted((tmp_path / "checkpoints").iterdir())] == ["6"]


def test_interrupted_before_the_first_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C once more, long after the first: nothing is saved any more."""
    trainer = make(tmp_path, config(steps=3))

    def insist(step: int) -> None:
        trainer.stop._pair._first = -1e9
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(trainer, "_train_step", insist)
    with pytest.raises(Interrupted):
        trainer.fit()
    assert not (tmp_path / "checkpoints").exists()


def test_a_held_out_set_without_a_slot_is_none(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trainer = make(tmp_path, config(steps=2))
    assert trainer.valid_source is not None
    valid = InMemory(trainer.frozen, [3, 4], seed=7)
    given: dict[str, Any] = {"train": trainer.train_source, "valid": valid, "content": {"features": "a"}}
    again = Trainer(trainer.cfg, tmp_path, trainer.accelerator, trainer.drafter, trainer.frozen, **given)
    assert again.fit().best is None
    assert "no held-out document has a slot" in caplog.text


def test_a_best_checkpoint_that_is_gone_is_sought_anew(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The newest checkpoint was the best and is damaged; the one before it names a best that was pruned meanwhile."""
    cfg = config(steps=6, save_every=1, eval_every=2, keep_last=2)
    first = make(tmp_path, cfg).fit()
    newest, before = (tmp_path / f"checkpoints/step_0000000{step}" for step in (6, 5))
    state = json.loads((before / "state.json").read_text())
    state["best"] = {"step": 1, "chain": 4, "by": "simulated", "tau_t0": 99.0, "tau_t1": 99.0}
    (before / "state.json").write_text(json.dumps(state))
    (newest / "model.safetensors").write_bytes(b"torn")
    with caplog.at_level(logging.WARNING):
        again = make(tmp_path, cfg).fit()
    assert "the best checkpoint so far is missing or damaged" in caplog.text
    assert again.best is not None and again.best["step"] == 6 and again.checkpoint == newest and first.steps == 6


def test_a_save_that_fails_leaves_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = make(tmp_path, config(steps=2, save_every=1))

    def full(folder: Path, states: Any) -> None:
        (folder / "optimizer-00001.safetensors").write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("train.checkpoint.write_states", full)
    with pytest.raises(OSError, match="No space"):
        trainer.fit()
    assert not list((tmp_path / "checkpoints").iterdir())


@pytest.mark.parametrize(
    ("key", "value", "told"),
    [
        ("step", None, "step is missing"),
        ("step", "4", "step=4"),
        ("step", 3, "of another step"),
        ("window", None, "window is missing"),
        ("best", [1], r"best=\[1\]"),
        ("colour", "red", "another version of Eyas"),
    ],
)
def test_a_state_that_is_none(tmp_path: Path, key: str, value: Any, told: str) -> None:
    cfg = config(steps=4, save_every=2, eval_every=2)
    make(tmp_path, cfg).fit()
    path = tmp_path / "checkpoints/step_00000004/state.json"
    state = json.loads(path.read_text())
    state.pop(key, None)
    path.write_text(json.dumps(state if value is None else state | {key: value}))
    with pytest.raises(EyasError, match=rf"step_00000004/state\.json: .*{told}"):
        make(tmp_path, cfg).fit()


def test_a_disk_that_is_full_is_told_as_such(tmp_path: Path) -> None:
    """What safetensors tells in words becomes what Python tells: file, number and words."""
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limit[1]))
        with pytest.raises(OSError) as full:
            save_tensors({"a": torch.zeros(5000)}, tmp_path / "model.safetensors")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        signal.signal(signal.SIGXFSZ, before)
    assert full.value.errno == errno.EFBIG and full.value.filename == str(tmp_path / "model.safetensors")
