"""The real command, killed and run again, and run on two processes: always the weights of an unbroken run."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from models.run_folder import is_whole
from tests.tiny import tiny_target
from train.tracking import METRICS, read_metrics

ROOT = Path(__file__).parents[1]
STEPS = 19
# 6 epochs of 9 bins and one bin of the seventh: 18 steps of 3 bins and one of 1, so that the second of two
# processes has one bin to the first's two in each step, and none in the last.
TRAIN = ("train.epochs=6.05", "train.bin_tokens=128", "train.bins_per_step=3", "train.depths=3", "train.log_every=2")
OPTIONS = ("optim.lr=5e-3", "train.save_every=3", "train.eval_every=6", "device=cpu", "tracker=none", "threads=1")


class Flow(NamedTuple):
    """A tiny target and a working directory in which runs share one feature store."""

    target: Path
    cwd: Path

    def start(self, name: str, *launcher: str) -> subprocess.Popen[bytes]:
        flow = ["-m", "train", "conf=debug", f"name={name}", f"target.path={self.target}", *TRAIN, *OPTIONS]
        env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        with (self.cwd / f"{name}.log").open("ab") as log:
            command = [sys.executable, *launcher, *flow]
            return subprocess.Popen(command, cwd=self.cwd, env=env, stdout=log, stderr=log)

    def finish(self, name: str, *launcher: str) -> Path:
        """Run to the end; the run directory."""
        assert self.start(name, *launcher).wait(timeout=1200) == 0, (self.cwd / f"{name}.log").read_text()
        return self.run(name)

    def run(self, name: str) -> Path:
        return self.cwd / "outputs" / name

    def kill_at(self, name: str, step: int) -> None:
        """SIGKILL as soon as the row of a step at or after ``step`` is written."""
        process = self.start(name)
        metrics = self.run(name) / METRICS
        while process.poll() is None:
            if metrics.exists() and any(row["step"] >= step for row in read_metrics(metrics)):
                process.send_signal(signal.SIGKILL)
                break
            time.sleep(0.001)
        assert process.wait() == -signal.SIGKILL, (self.cwd / f"{name}.log").read_text()


@pytest.fixture(scope="module")
def flow(tmp_path_factory: pytest.TempPathFactory) -> Flow:
    cwd = tmp_path_factory.mktemp("flow")
    return Flow(Path(tiny_target(cwd / "target", "llama")), cwd)


@pytest.fixture(scope="module")
def whole(flow: Flow) -> Path:
    """The run directory of an unbroken run on one process."""
    return flow.finish("whole")


def weights(run: Path) -> dict[str, Tensor]:
    return load_file(run / f"checkpoints/step_{STEPS:08d}/model.safetensors")


def rows(run: Path) -> list[dict[str, Any]]:
    return [{k: v for k, v in row.items() if k != "tokens_per_s"} for row in read_metrics(run / METRICS)]


def test_killed_twice_equals_unbroken(flow: Flow, whole: Path) -> None:
    """SIGKILL at two random steps, each time the same command again: bit-identical weights, the same rows."""
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    generator = random.Random(seed)
    first = generator.randint(1, STEPS // 2)
    flow.kill_at("killed", first)
    flow.kill_at("killed", generator.randint(first + 3, STEPS - 3))
    run = flow.finish("killed")
    assert (run / f"checkpoints/step_{STEPS:08d}/model.safetensors").read_bytes() == (
        whole / f"checkpoints/step_{STEPS:08d}/model.safetensors"
    ).read_bytes()
    assert rows(run) == rows(whole)
    train = [row["step"] for row in rows(run) if row["kind"] == "train"]
    assert train == [*range(2, STEPS, 2), STEPS]
    assert all(is_whole(folder) for folder in (run / "checkpoints").iterdir())
    assert not [path for path in run.rglob("*") if ".tmp" in path.name]


def test_two_processes_equal_one(flow: Flow, whole: Path) -> None:
    """torchrun with two gloo processes, uneven bins, the second without one in the last step."""
    run = flow.finish("two", "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2")
    one, two = rows(whole), rows(run)
    assert [(row["step"], row["kind"], row["slots"]) for row in one] == [
        (row["step"], row["kind"], row["slots"]) for row in two
    ]
    for a, b in zip(one, two, strict=True):
        assert b["loss"] == pytest.approx(a["loss"], rel=1e-4)
        assert b["alpha"] == pytest.approx(a["alpha"], abs=1e-4)
    expected = weights(whole)
    for name, tensor in weights(run).items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-3, atol=1e-4)
    assert "2 on cpu" in (flow.cwd / "two.log").read_text()


def test_finished_run_again(flow: Flow, whole: Path) -> None:
    """The same command says that it is finished, and changes neither weights nor report."""
    before = {path: path.stat().st_mtime_ns for path in (whole / "checkpoints").rglob("*")}
    flow.finish("whole")
    log = (flow.cwd / "whole.log").read_text()
    assert f"this run is finished: {STEPS} of {STEPS} steps done" in log
    assert "evaluation: up to date" in log and "export: up to date" in log
    assert before == {path: path.stat().st_mtime_ns for path in (whole / "checkpoints").rglob("*")}
