"""scripts/slurm/train.sbatch with stand-ins for srun and scontrol: what is started, and what signals do to it."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "scripts" / "slurm" / "train.sbatch"
JOB = {
    "SLURM_JOB_ID": "40123",
    "SLURM_JOB_NODELIST": "node[7-8]",
    "SLURM_NNODES": "2",
    "SLURM_GPUS_ON_NODE": "8",
    "SLURM_CPUS_PER_TASK": "64",
}
# Runs until it is told to stop, and takes a moment to leave, as a process that saves does. Its sleep has no part in
# that: a process group is not told, only srun is.
SRUN = """#!/bin/bash
printf '%s\\n' "$@" > started.part
trap 'sleep 0.3; echo saved > saved; exit 1' TERM
mv started.part started
for _ in $(seq 200); do sleep 0.05; if [ -e finish ]; then exit "$(cat finish)"; fi; done
"""
SCONTROL = """#!/bin/bash
if [ "$1" = show ]; then printf 'node7\\nnode8\\n'; else echo "$@" >> requeued; fi
"""


@pytest.fixture
def job(tmp_path: Path) -> subprocess.Popen[bytes]:
    """The script as a running job."""
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        (tmp_path / "bin").mkdir(exist_ok=True)
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o755)
    env = {**os.environ, **JOB, "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"}
    started = subprocess.Popen(["bash", SCRIPT, "conf=debug", "data.path=my file.json"], cwd=tmp_path, env=env)
    for _ in range(400):
        if (tmp_path / "started").exists():
            return started
        time.sleep(0.05)
    started.kill()
    raise AssertionError("srun was never called")


def test_every_machine_starts_one_torchrun(job: subprocess.Popen[bytes], tmp_path: Path) -> None:
    (tmp_path / "finish").write_text("0")
    assert job.wait(20) == 0
    typed = (tmp_path / "started").read_text().splitlines()
    assert typed[typed.index("torchrun") :] == [
        *("torchrun", "--nnodes=2", "--nproc_per_node=8", "--shutdown_timeout=270"),
        *("--rdzv_backend=c10d", "--rdzv_endpoint=node7:20123", "--rdzv_id=40123"),
        *("-m", "train", "conf=debug", "data.path=my file.json"),
    ]
    assert typed[: typed.index("torchrun")] == ["--kill-on-bad-exit=1", "--cpus-per-task=64"]
    assert not (tmp_path / "requeued").exists()


def test_shortly_before_the_limit_it_saves_and_queues_again(job: subprocess.Popen[bytes], tmp_path: Path) -> None:
    job.send_signal(signal.SIGUSR1)
    assert job.wait(20) == 1
    assert (tmp_path / "saved").exists()  # it waited for that
    assert (tmp_path / "requeued").read_text() == "requeue 40123\n"


def test_cancelled_it_saves_and_stays_away(job: subprocess.Popen[bytes], tmp_path: Path) -> None:
    job.send_signal(signal.SIGTERM)
    assert job.wait(20) == 1
    assert (tmp_path / "saved").exists()
    assert not (tmp_path / "requeued").exists()


def test_a_failure_is_not_tried_again(job: subprocess.Popen[bytes], tmp_path: Path) -> None:
    (tmp_path / "finish").write_text("2")
    assert job.wait(20) == 2
    assert not (tmp_path / "requeued").exists()
