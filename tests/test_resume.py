"""The real command, killed and run again: always the weights of an unbroken run."""

from __future__ import annotations

import random
import signal
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from models.run_folder import is_whole
from tests.processes import launch, reached, start
from tests.tiny import tiny_target
from train.tracking import CLOCKED, METRICS, read_metrics

STEPS = 19
# 6 epochs of 9 bins and one bin of the seventh: 18 steps of 3 bins and one of 1.
TRAIN = ("train.epochs=6.05", "train.bin_tokens=128", "train.bins_per_step=3", "train.depths=3", "train.log_every=2")
OPTIONS = ("optim.lr=5e-3", "train.save_every=3", "train.eval_every=6", "device=cpu", "tracker=none", "threads=1")


class Flow(NamedTuple):
    """A tiny target and a working directory in which runs share one feature store."""

    target: Path
    cwd: Path

    def typed(self, name: str) -> list[str]:
        return ["conf=debug", f"name={name}", f"target.path={self.target}", *TRAIN, *OPTIONS]

    def finish(self, name: str) -> str:
        """Run to the end; what the command said."""
        done = launch(1, *self.typed(name), folder=self.cwd)
        assert done.returncode == 0, done.stdout
        return done.stdout

    def run(self, name: str) -> Path:
        return self.cwd / "outputs" / name

    def kill_at(self, name: str, step: int) -> None:
        """SIGKILL as soon as the row of a step at or after ``step`` is written."""
        with start(1, *self.typed(name), folder=self.cwd) as job:
            assert job.wait_for(reached(self.run(name), step), timeout=300), job.output()
            job.ranks()[0].kill()
            assert job.wait(60) == -signal.SIGKILL, job.output()


@pytest.fixture(scope="module")
def flow(tmp_path_factory: pytest.TempPathFactory) -> Flow:
    cwd = tmp_path_factory.mktemp("flow")
    return Flow(Path(tiny_target(cwd / "target", "llama")), cwd)


@pytest.fixture(scope="module")
def whole(flow: Flow) -> Path:
    """The run directory of an unbroken run."""
    flow.finish("whole")
    return flow.run("whole")


def rows(run: Path) -> list[dict[str, Any]]:
    return [{k: v for k, v in row.items() if k not in CLOCKED} for row in read_metrics(run / METRICS)]


def test_killed_twice_equals_unbroken(flow: Flow, whole: Path) -> None:
    """SIGKILL at two random steps, each time the same command again: bit-identical weights, the same rows."""
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    generator = random.Random(seed)
    first = generator.randint(1, STEPS // 2)
    flow.kill_at("killed", first)
    flow.kill_at("killed", generator.randint(first + 3, STEPS - 3))
    flow.finish("killed")
    run = flow.run("killed")
    assert (run / f"checkpoints/step_{STEPS:08d}/model.safetensors").read_bytes() == (
        whole / f"checkpoints/step_{STEPS:08d}/model.safetensors"
    ).read_bytes()
    assert rows(run) == rows(whole)
    train = [row["step"] for row in rows(run) if row["kind"] == "train"]
    assert train == [*range(2, STEPS, 2), STEPS]
    assert all(is_whole(folder) for folder in (run / "checkpoints").iterdir())
    assert not [path for path in run.rglob("*") if ".tmp" in path.name]


def test_finished_run_again(flow: Flow, whole: Path) -> None:
    """The same command says that it is finished, and changes neither weights nor report."""
    before = {path: path.stat().st_mtime_ns for path in (whole / "checkpoints").rglob("*")}
    said = flow.finish("whole")
    assert f"this run is finished: {STEPS} of {STEPS} steps done" in said
    assert "evaluation: up to date" in said and "export: up to date" in said
    assert before == {path: path.stat().st_mtime_ns for path in (whole / "checkpoints").rglob("*")}
