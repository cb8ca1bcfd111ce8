"""``python -m train --multirun KEY=A,B ...``: every combination in a process and a folder of its own, then one report.

    outputs/sweeps/SWEEP/JOB/    a run like any other; SWEEP names what is swept and what is fixed, JOB the values
    outputs/sweeps/SWEEP/        report.json and its company: all finished jobs on the same prompts; sweep.json: every
                                 job and how far it got

A job that is wrong or dies doesn't stop the others. The same command goes on: finished jobs pass at once. Hydra's own
sweeps run all jobs in one process, which a job that runs out of memory takes down.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser

from conf import CONF_DIR, PRIMARY, folder_name
from conf.cli import ONE_PROCESS, USER_MISTAKE
from conf.explain import MISTAKES, explain
from conf.schema import Config
from conf.validate import resolve
from models.errors import EyasError
from models.launch import follow_parent, world
from models.run_folder import REPORT, STAGES, note_down, read_notes
from models.signals import BY_SIGNAL, INTERRUPTED, number_of
from models.visible import visible

SWEEPS = Path("outputs") / "sweeps"
RECORD = "sweep.json"
UNFINISHED = "not finished"  # what a killed sweep leaves written about the job it was at and those behind

Start = Callable[[str, Sequence[str]], int]  # (verb, overrides) -> exit code


@dataclass(frozen=True)
class Job:
    """One combination of a sweep: its name in tables, what is typed for it, and its run folder."""

    name: str
    overrides: tuple[str, ...]
    folder: Path


@dataclass(frozen=True)
class Done:
    """How far a job got. cfg: its configuration, None if that is wrong; message: why it isn't finished; None: it is."""

    job: Job
    cfg: Config | None
    code: int = 0
    message: str | None = None


def run_sweep(overrides: Sequence[str], start: Start | None = None) -> int:
    """Run or continue every job, compare those that finished, and tell how each ended: the exit code.

    2 if mistakes of the user are all that went wrong, 1 if a job died of something else. Raises EyasError if the
    overrides make no sweep.
    """
    start = start or start_process
    if world() > 1:
        raise EyasError(ONE_PROCESS)
    folder, jobs = plan(overrides)
    done = checked(jobs)
    record(folder, done)
    for i, one in enumerate(done):
        done[i] = train(one, f"job {i + 1} of {len(jobs)}", start)
        record(folder, done)
    codes = [one.code for one in done]
    finished = [one for one in done if one.message is None]
    codes.append(compare(folder, finished, start) if len(jobs) > 1 else 0)
    for one in done:
        say(f"{one.job.name}: {one.message or f'finished, {one.job.folder}'}")
    failed = {code for code in codes if code}
    return 0 if not failed else USER_MISTAKE if failed == {USER_MISTAKE} else 1


# --- what there is to do ---


def plan(overrides: Sequence[str]) -> tuple[Path, list[Job]]:
    """The sweep's folder and its jobs, in the order of the values."""
    with hydra_config():
        loader = GlobalHydra.instance().config_loader()
        parsed = OverridesParser.create(config_loader=loader).parse_overrides(list(overrides))
    swept: dict[str, list[str]] = {}
    fixed: dict[str, str] = {}
    for one in parsed:
        key = one.get_key_element()
        if key in ("output_dir", "hydra.run.dir", "export.dir"):
            raise EyasError(f"{key}: the runs of a sweep have folders of their own; name= names the sweep's folder")
        if not one.is_sweep_override():
            fixed[key] = str(one.input_line)
        elif one.is_discrete_sweep():
            swept[key] = list(dict.fromkeys(one.sweep_string_iterator()))
        else:
            raise EyasError(f"{key}: a sweep takes values separated by commas")
    given = fixed.get("name", "").partition("=")[2].strip("'\"")
    folder = SWEEPS / folder_name(given or ",".join([*swept, *sorted(fixed.values())]))
    return folder, [
        job_of(folder, dict(zip(swept, values, strict=True)), tuple(fixed.values()))
        for values in itertools.product(*swept.values())
    ]


def job_of(folder: Path, values: dict[str, str], fixed: tuple[str, ...]) -> Job:
    """A recipe goes by its name; of other keys the key is told too."""
    typed = [f"{key}={value}" for key, value in values.items()]
    told = ",".join(value if key == "conf" else f"{key}={value}" for key, value in values.items()) or "run"
    name = folder_name(told)  # what the report calls it too
    return Job(name, (*typed, *fixed), folder / name)


@contextmanager
def hydra_config() -> Iterator[None]:
    with initialize_config_dir(version_base="1.3", config_dir=str(CONF_DIR)):
        yield


def checked(jobs: Sequence[Job]) -> list[Done]:
    """Compose every job's configuration: a mistake shows before the first one starts, not after hours."""
    return [composed(job) for job in jobs]


def composed(job: Job) -> Done:
    known = [f"output_dir={quoted(str(job.folder))}", "hydra.output_subdir=null"]
    if not any(text.startswith("name=") for text in job.overrides):
        known.append(f"name={quoted(job.name)}")
    try:
        with hydra_config():
            cfg, _ = resolve(compose(PRIMARY, [*job.overrides, *known]), "train", job.overrides)
    except MISTAKES as mistake:
        say(f"{job.name}: {explain(mistake)}")
        return Done(job, None, USER_MISTAKE, f"left out, {explain(mistake)}")
    return Done(job, cfg, message=UNFINISHED)


# --- doing it ---


def train(one: Done, number: str, start: Start) -> Done:
    """Run or continue a job whose configuration is sound."""
    if one.cfg is None:
        return one
    say(f"{number}: {one.job.name}, {one.job.folder}")
    code = start("train", [*one.job.overrides, f"hydra.run.dir={quoted(str(one.job.folder))}"])
    if code == INTERRUPTED:
        sys.exit(INTERRUPTED)
    if code == 0:
        return replace(one, message=None)
    how = f"killed by signal {-code}" if code < 0 else f"exit code {code}"
    return Done(one.job, one.cfg, code, f"failed, {how}; what it said stands above")


def start_process(verb: str, overrides: Sequence[str]) -> int:
    """``python -m VERB`` to its end; it dies with this process."""
    root = str(CONF_DIR.parent)
    paths = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    command = [sys.executable, "-P", "-m", verb, *overrides]  # -P: a folder named train or eval is not the package
    process = subprocess.Popen(command, env=os.environ | {"PYTHONPATH": paths}, preexec_fn=_die_with_parent)
    try:
        return process.wait()
    except KeyboardInterrupt as interrupt:  # a terminal tells both; a second time is no harm
        process.send_signal(number_of(interrupt))
        process.wait()  # it may save first, and says how it ends
        sys.exit(BY_SIGNAL + number_of(interrupt))


def _die_with_parent() -> None:
    """A killed sweep leaves no job running, which the next one would then find locked."""
    follow_parent(signal.SIGKILL)


# --- the comparison ---


def compare(folder: Path, finished: Sequence[Done], start: Start) -> int:
    """Measure the drafters of the finished jobs together, as ``python -m eval drafter=[...]`` does: the exit code."""
    measured = [one for one in finished if evaluation(one)]
    alike = [one for one in measured if target_of(one) == target_of(measured[0])]
    for one in finished:
        if one not in measured:
            say(f"{one.job.name}: not compared, no conversation is held out to measure on")
        elif one not in alike:
            say(f"{one.job.name}: not compared, it drafts for {target_of(one)[0]}; see {one.job.folder / REPORT}")
    if len(alike) < 2:
        say("nothing to compare")
        return 0
    for note in differences(alike):
        say(note)
    key = comparison_key(alike)
    if read_notes(folder / RECORD).get("comparison") == key and show(folder / REPORT):
        say(f"comparison: up to date, {folder / REPORT}")
        return 0
    entries = ",".join(quoted(str(one.job.folder)) for one in alike)
    own = [text for text in alike[0].job.overrides if not text.startswith("drafter_path=")]
    code = start("eval", [*own, f"drafter_path=[{entries}]", f"hydra.run.dir={quoted(str(folder))}"])
    if code == INTERRUPTED:
        sys.exit(INTERRUPTED)
    if code == 0:
        note_down(folder / RECORD, {"comparison": key})
    return code


def target_of(one: Done) -> tuple[str, str | None]:
    assert one.cfg is not None
    return one.cfg.target.path, one.cfg.target.revision


def differences(compared: Sequence[Done]) -> list[str]:
    """What the jobs would measure differently: the first job's settings count for all."""
    first, settings = compared[0], [measuring(one) for one in compared]
    keys = sorted(key for key in settings[0] if any(other[key] != settings[0][key] for other in settings))
    found = [
        f"the jobs differ in {key}: all are compared with {settings[0][key]}, that of {first.job.name}" for key in keys
    ]
    if any(key.startswith("data.") for key in keys):
        found.append(
            f"the prompts are the conversations that {first.job.name} held out, and the others may have learned them; "
            "verify.prompts=FILE gives prompts of their own"
        )
    return found


def measuring(one: Done) -> dict[str, Any]:
    """The keys that a measurement hangs on; those of data only where it gives the prompts."""
    assert one.cfg is not None
    sections = ["verify", "target"] + (["data"] if one.cfg.verify.prompts is None else [])
    whole = asdict(one.cfg)
    found = {f"{section}.{key}": value for section in sections for key, value in whole[section].items()}
    return found | {key: whole[key] for key in ("seed", "device")}


def comparison_key(compared: Sequence[Done]) -> str:
    """Digest of what the report is made from: the jobs' own measurements change with weights, prompts and settings."""
    made_from = [[one.job.name, evaluation(one)] for one in compared]
    return hashlib.sha256(json.dumps(made_from).encode()).hexdigest()[:32]


def evaluation(one: Done) -> str | None:
    """What a job's own measurement was made from, as it noted down; None if it had nothing to measure on."""
    found = read_notes(one.job.folder / STAGES).get("evaluation")
    return None if found is None else str(found)


def show(path: Path) -> bool:
    """Print a report; False if there is none, or one that this version doesn't write."""
    from eval.look.report import print_report
    from eval.look.table import VERSION

    report = read_notes(path)
    if report.get("version") != VERSION:
        return False
    print_report(report)
    return True


# --- what is kept and said ---


def record(folder: Path, done: Sequence[Done]) -> None:
    """Note the jobs in sweep.json as far as they got, for readers that are programs."""
    jobs = [
        {"name": one.job.name, "folder": str(one.job.folder), "overrides": one.job.overrides, "message": one.message}
        for one in done
    ]
    note_down(folder / RECORD, {"jobs": jobs})


def quoted(text: str) -> str:
    """A value that Hydra's grammar takes as one text."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def say(text: str) -> None:
    print(f"sweep: {visible(text)}", flush=True)
