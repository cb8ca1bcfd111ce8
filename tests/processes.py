"""The real command on one or several processes, from tests: nothing of it outlives the test.

done = launch(2, "conf=debug", "name=two", strategy="zero2")     # to its end, whatever its exit code
with start(2, "conf=debug", "name=two") as job:                  # see scripts/jobs.py for what a Job can do
    assert job.wait_for(reached(Path("outputs/two"), step=5), timeout=120)
    job.ranks()[1].kill()
    assert job.wait(60) != 0
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path

from scripts.jobs import Job, command
from train.tracking import METRICS, read_metrics

LOG = "jobs.log"  # in the folder that commands are typed in: what all of them said


def start(
    processes: int,
    *overrides: str,
    strategy: str = "ddp",
    verb: str = "train",
    folder: Path | None = None,
    env: Mapping[str, str] | None = None,
) -> Job:
    """``python -m train OVERRIDES`` (or another verb) typed in ``folder`` (default: the current one), by torchrun where
    there are several processes; ``strategy`` counts only then."""
    folder = folder or Path.cwd()
    chosen = [f"strategy={strategy}"] if processes > 1 else []
    return Job(command(processes, verb, *chosen, *overrides), folder, folder / LOG, env)


def launch(
    processes: int,
    *overrides: str,
    strategy: str = "ddp",
    verb: str = "train",
    folder: Path | None = None,
    env: Mapping[str, str] | None = None,
    timeout: float = 300,
) -> subprocess.CompletedProcess[str]:
    """:func:`start`, and wait for the end; ``stdout`` is all that it said. Raises TimeoutError after ``timeout`` s."""
    with start(processes, *overrides, strategy=strategy, verb=verb, folder=folder, env=env) as job:
        code = job.wait(timeout)
        return subprocess.CompletedProcess(job.process.args, code, stdout=job.output(), stderr="")


def reached(run: Path, step: int) -> Callable[[], bool]:
    """Asks whether the row of a step at or after ``step`` is written."""
    metrics = run / METRICS
    return lambda: metrics.exists() and any(row["step"] >= step for row in read_metrics(metrics))
