"""The real command on two processes, where it trains the target along: what one process computes, stage by stage."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from models.run_folder import best_checkpoint, read_notes
from models.tuned import WEIGHTS
from tests.commands import command, workplace  # noqa: F401
from tests.processes import launch
from tests.tiny import tiny_target
from train.stages import walk
from train.tracking import METRICS, read_metrics

STEPS, FIRST = 6, 2
# Three heads of which two are trained; two steps of the drafter alone, then both; three bins a step, so that the second
# process has one of them to the first's two.
TRAIN = (
    *("conf=debug", "drafter=medusa", "drafter.num_heads=3", "train.depths=2", "joint.backbone=lora", "joint.rank=2"),
    *(
        "joint.lr=1e-2",
        f"joint.warmup={FIRST}",
        f"train.steps={STEPS}",
        "train.bin_tokens=128",
        "train.bins_per_step=3",
    ),
    *("train.log_every=1", "train.eval_every=2", "train.save_every=2", "train.keep_last=9", "train.patience=9"),
    *("train.tau=measured", "train.tau_prompts=2", "verify.max_prompts=1", "verify.max_new_tokens=8"),
    *("verify.temperatures=[0.0]", "verify.costs=false", "verify.baseline=false", "device=cpu", "tracker=none"),
    *("threads=1", "preview=0"),
)


def trained(run: Path, step: int, name: str) -> dict[str, torch.Tensor]:
    return load_file(run / f"checkpoints/step_{step:08d}" / name)


def rows(run: Path, kind: str) -> list[dict[str, Any]]:
    return read_metrics(run / METRICS, kind)


def test_two_processes_train_drafter_and_target_as_one_does(workplace: Path) -> None:  # noqa: F811
    """The first stage (the target's parameters have no gradient), both terms, heads that aren't trained, tau by the
    verifier (on the main process, for all), then evaluation and export: neither a crash nor other weights."""
    folder = tiny_target(workplace / "target", layers=3)
    typed = [*TRAIN, f"target.path={folder}"]
    command(walk, *typed, "name=one")
    both = launch(2, *typed, "name=two")
    assert both.returncode == 0, both.stdout
    assert "2 on cpu" in both.stdout
    one, two = Path("outputs/one"), Path("outputs/two")

    for a, b in zip(rows(one, "train"), rows(two, "train"), strict=True):
        assert b["loss"] == pytest.approx(a["loss"], rel=1e-4) and b["slots"] == a["slots"]
    measured = [[row["tau_measured"] for row in rows(run, "valid")] for run in (one, two)]
    assert len(measured[0]) == STEPS // 2 and measured[1] == measured[0]
    for step in (2, 4, 6):
        for name in ("model.safetensors", WEIGHTS):
            expected = trained(one, step, name)
            for key, tensor in trained(two, step, name).items():
                torch.testing.assert_close(
                    tensor, expected[key], rtol=1e-3, atol=1e-4, msg=f"{step}: {key}: {{}}".format
                )
    early, late = (trained(two, step, WEIGHTS) for step in (FIRST, STEPS))
    assert not any(bool(tensor.any()) for key, tensor in early.items() if "lora_B" in key)
    assert all(bool(tensor.any()) for key, tensor in late.items() if "lora_B" in key)

    best = [read_notes(run / "best.json") for run in (one, two)]
    assert best[0]["by"] == "measured on 2 prompts" and best[1]["checkpoint"] == best[0]["checkpoint"]
    report, state = json.loads((two / "report.json").read_text()), best_checkpoint(two)
    assert state is not None and [Path(drafter["path"]) for drafter in report["drafters"]] == [state.resolve()]
    assert (two / "export/config.json").exists() and (two / "export/target/config.json").exists()
