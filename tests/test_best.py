"""Which validation is the best one, by which tau, and what processes look for when they exchange gradients."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.linear_drafter import LinearDrafter
from tests.test_trainer import config, make
from train.trainer import Trainer


def test_only_alike_taus_are_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that goes on by another tau begins its best anew, however the numbers compare; best.json says which it is.

    Nothing is learned, so that no validation is better than the one before it."""
    taus = {8: iter([9.0, 8.0]), 4: iter([0.5, 0.4])}
    train_step, best = Trainer._train_step, list[tuple[int, str]]()
    ways: list[tuple[str, int | None]] = [("simulated", None), ("measured", 8), ("measured", 4), ("simulated", None)]
    for part, (tau, prompts) in enumerate(ways):
        cfg = config(steps=16, eval_every=2, save_every=2, tau=tau, tau_prompts=prompts or 8)
        cfg.optim.lr = 1e-30
        last = 4 * (part + 1)

        def breaking(self: Trainer, step: int, last: int = last) -> None:
            if step == last:
                raise KeyboardInterrupt
            train_step(self, step)

        monkeypatch.setattr(Trainer, "_train_step", breaking)
        trainer = make(tmp_path, cfg, measure=(lambda _, own=taus[prompts]: next(own)) if prompts else None)
        if last < 16:
            with pytest.raises(KeyboardInterrupt):
                trainer.fit()
        else:
            trainer.fit()
        told = json.loads((tmp_path / "best.json").read_text())
        best.append((told["step"], told["by"]))
        assert told["checkpoint"] == f"checkpoints/step_{told['step']:08d}"
    assert best == [
        (2, "simulated"),
        (6, "measured on 8 prompts"),
        (10, "measured on 4 prompts"),
        (14, "simulated"),
    ]


def test_processes_look_for_parameters_without_gradient_only_where_there_may_be_some(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for deepest, looked_for in ((None, False), (3, False), (4, True)):
        monkeypatch.setattr(LinearDrafter, "max_depth", deepest)
        trainer = make(tmp_path, config(depths=3))
        trainer._set_up(None)
        handler = trainer.accelerator.ddp_handler
        assert handler is not None and handler.find_unused_parameters is looked_for
