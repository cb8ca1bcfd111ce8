"""What each process of a dump runs (tests/test_dump_processes.py): the fake target over the usual documents."""

from __future__ import annotations

import json
import multiprocessing
import os
import resource
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from torch import Tensor

from data.features.store import FeatureStore
from data.prepare import Inputs, TargetFiles
from data.processes import Job, Stage
from models.errors import EyasError
from tests.features import LENGTHS, FakeFeatures, FakeTarget, documents, make_store

TIMEOUT = 3.0  # of collectives, in seconds
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload([__name__])  # torch is imported once for all processes


class Tiring(FakeTarget):
    """Takes its time; one that is told to break off does so in the middle of a shard."""

    def features(self, ids: list[Tensor]) -> list[FakeFeatures]:
        time.sleep(0.01)
        return super().features(ids)


def start(
    work: Callable[..., Any], size: int, folder: Path, token: str, own: Mapping[int, Mapping[str, Any]] | None = None
) -> list[BaseProcess]:
    """Processes of one job. own: keyword arguments for ``work`` by process."""
    arguments = [
        (work, Job(rank, size, folder / "job", token), folder, (own or {}).get(rank, {})) for rank in range(size)
    ]
    processes: list[BaseProcess] = [CONTEXT.Process(target=_run, args=given, daemon=True) for given in arguments]
    for process in processes:
        process.start()
    return processes


def results(folder: Path, token: str, size: int) -> list[Any]:
    """What each process returned, or the message of its error."""
    return [json.loads((folder / f"{token}-{rank}.json").read_text()) for rank in range(size)]


def finish(processes: list[BaseProcess]) -> None:
    for process in processes:
        process.join(60)
        assert process.exitcode == 0


def _run(work: Callable[..., Any], job: Job, folder: Path, own: Mapping[str, Any]) -> None:
    try:
        result = work(job, folder, **own)
    except EyasError as error:
        result = str(error)
    (folder / f"{job.token}-{job.rank}.json").write_text(json.dumps(result))


def dumping(
    job: Job, folder: Path, *, forwards: int | None = None, bad: int | None = None, full: int = 0, **options: Any
) -> dict[str, int]:
    """Dump into ``folder``/store. forwards: SIGKILL after so many; full: no file may have more bytes."""
    target, ticks = Tiring(forwards=forwards, kill=True, bad_token=bad), []
    if full:
        resource.setrlimit(resource.RLIMIT_FSIZE, (full, full))
    with job.stage("features", lambda: ticks.append(1)) as stage:
        make_store(folder / "store", target, stage=stage, **options)
    return {"forwards": len(target.padded), "ticks": len(ticks)}


def mending(job: Job, folder: Path) -> list[int]:
    """Documents of the store, and how many forwards that took here."""
    target = Tiring()
    with job.stage("features") as stage:
        return [len(stored(folder, target, stage)), len(target.padded)]


def stored(folder: Path, target: FakeTarget, stage: Stage) -> FeatureStore:
    """As training asks for it."""
    about: Any = SimpleNamespace(fingerprint=lambda: "", supervise="all", about={"statistics": {}})
    files: Any = SimpleNamespace(fingerprint="fake", tap_ids=target.tap_ids)
    settings = {"dir": str(folder / "stores"), "dtype": "float32", "shard_mib": 1, "batch_tokens": 2}
    inputs = Inputs(files, about, about, {"dtype": "float32", "path": "fake", "template_kwargs": {}}, settings)
    return inputs.stored(documents(LENGTHS), lambda: target, stage)


def preparing(job: Job, folder: Path, *, port: int) -> list[float]:
    """The flow up to the features, where process 0 needs long to find the target and process 1 for its first forward;
    collectives may last TIMEOUT. The seconds that the inputs and the features took."""
    os.environ |= {"RANK": str(job.rank), "LOCAL_RANK": str(job.rank), "WORLD_SIZE": str(job.size)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "EYAS_CACHE": str(folder / "cache")}
    os.chdir(folder)
    from accelerate import Accelerator
    from accelerate.utils import InitProcessGroupKwargs

    from models.target import Target
    from tests.commands import config
    from train import stages

    cfg = config("conf=debug", "device=cpu", "preview=0", "store.batch_tokens=32")
    if job.rank == 0:
        TargetFiles.open = slowly(TargetFiles.open)  # type: ignore[method-assign]
    else:
        Target.features = slowly(Target.features)  # type: ignore[method-assign]
    with job.stage("start"):  # imports take their time too
        pass
    accelerator = Accelerator(cpu=True, kwargs_handlers=[InitProcessGroupKwargs(timeout=timedelta(seconds=TIMEOUT))])
    times = [time.monotonic()]
    inputs = stages.gather(cfg, accelerator, folder / "run")
    times.append(time.monotonic())
    train, valid = stages.feature_sources(cfg, accelerator, inputs)
    times.append(time.monotonic())
    accelerator.wait_for_everyone()
    assert valid is not None and (len(train), len(valid)) == (len(inputs.corpus.train), len(inputs.corpus.valid))
    return [times[1] - times[0], times[2] - times[1]]


def slowly(function: Callable[..., Any]) -> Callable[..., Any]:
    """The first call takes longer than a collective may."""
    calls: list[int] = []

    def slow(*given: Any, **named: Any) -> Any:
        if not calls:
            time.sleep(2 * TIMEOUT)
        calls.append(1)
        return function(*given, **named)

    return slow
