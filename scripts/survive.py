"""Training, killed again and again: ``python -m scripts.survive [--strategies none,ddp2,zero2x2] [KEY=VALUE ...]``.

For every strategy a tiny recipe (with these overrides) is trained twice, once unbroken and once with SIGKILL at random
moments, each followed by the same command, until it is finished. Then both must be the same: weights, optimizer state,
metrics, the documents of every step, report, export, and the names of all files, so that nothing temporary is left.
none and ddp must agree bit for bit, ZeRO within 1e-6. ``elastic`` changes strategy and number of processes at every
start, and must agree with one process within 1e-4.

Each kill is planned for a phase (start, dump, step, save, validation, evaluation, export) and falls on a rank or the
launcher: the whole job is held still, and if it is in that phase, one of its processes dies there. What a launcher
leaves behind is killed a moment later, as a cluster's scheduler would. Where a run ends before all of its kills were
made, another one is begun.

Everything lies in --folder; the same command continues. Exit code 1: a difference, a run that failed by itself or that
--seconds left unfinished; 2: a strategy that the command refuses.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import shutil
import signal
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import NamedTuple

import psutil

from models.errors import EyasError
from models.files import write_atomic
from models.run_folder import CHECKPOINTS, STAGES, read_notes
from scripts.compare_runs import EXACT, compare_runs
from scripts.jobs import POLL, Job, command

LOOP = ("step", "save", "validation")  # phases that come again and again
PHASES = ("start", "dump", *LOOP, "evaluation", "export")
NAME, NOTES = "survive", "survive.json"
STEPS, EVERY = 30, 10  # steps, and those between two validations
TINY = (
    *("conf=debug", f"train.steps={STEPS}", f"train.eval_every={EVERY}", "train.save_every=5", "train.log_every=1"),
    # Three bins a step: of two processes one has a bin more, of four one has none.
    *("train.bin_tokens=128", "train.bins_per_step=3", "train.log_documents=true", "store.batch_tokens=64"),
    *("verify.max_prompts=1", "verify.max_new_tokens=8", "verify.temperatures=[0.0]", "verify.costs=false"),
    *("verify.baseline=false", "export.dtype=float32", "device=cpu", "threads=1", "tracker=none", "preview=0"),
)
STRATEGIES = "none,ddp2,ddp4,zero1x2,zero2x2,zero3x2,elastic"
ROTATION = ("none", "ddp2", "zero1x2", "ddp4", "zero3x2", "none", "zero2x2")  # of elastic, one after the other
TOLERANCES = {"none": EXACT, "ddp": EXACT, "zero": 1e-6, "elastic": 1e-4}
PATIENCE = 300.0  # seconds until a start must have ended, or the rest of a job that lost a process
RUNS = 5  # until all kills of a strategy were made
ROW = re.compile(r"INFO step (\d+)(/\d+|: held out)")


class Start(NamedTuple):
    """A strategy and a number of processes."""

    strategy: str
    processes: int

    @classmethod
    def of(cls, label: str) -> Start:
        found = re.fullmatch(r"(none|ddp(?=\d)|zero[123](?=x\d))x?(\d*)", label)
        if found is None or (found[1] == "none" and found[2]):
            raise EyasError(f"--strategies: {label} is not one of none, ddpN, zero1xN, zero2xN, zero3xN, elastic")
        return cls(found[1], int(found[2] or 1))

    def job(self, folder: Path, log: Path, overrides: Sequence[str]) -> Job:
        typed = ("train", *TINY, f"strategy={self.strategy}", f"name={NAME}", *overrides)
        return Job(command(self.processes, *typed), folder, log, {"EYAS_CACHE": str(folder / "cache")})


class Watch:
    """Tells by its traces in which phase a job is; those of an earlier start don't count."""

    def __init__(self, job: Job, folder: Path) -> None:
        self.job, self.folder, self.run = job, folder, folder / "outputs" / NAME
        self.first = self.step = 0  # where this start began, and the last step whose row is written

    def phase(self) -> str:
        """One of PHASES, or done."""
        said = self.job.output()
        begun = re.search(r"starts at step +(\d+)", said)  # in the plan, which is shown before the first step
        if begun is None:
            dumps = re.findall(r"features into (\S+):", said)
            unfinished = dumps and not read_notes(self.folder / dumps[-1] / "manifest.json").get("complete")
            return "dump" if unfinished else "start"
        rows = ROW.findall(said)
        self.first = int(begun[1])
        self.step = int(rows[-1][0]) if rows else self.first
        if (self.run / CHECKPOINTS / f"step_{STEPS:08d}").exists():
            made = read_notes(self.run / STAGES)
            return "done" if "export" in made else "export" if "evaluation" in made else "evaluation"
        if any((self.run / CHECKPOINTS).glob(".tmp-*")):
            return "save"
        validating = rows and self.step % EVERY == 0 and rows[-1][1].startswith("/")
        return "validation" if validating else "step"


@dataclass
class Record:
    """What happened to one strategy so far. planned: phases of the kills still to come; kills, victims: numbers by
    phase and by process; leaving: the longest that a job needed to end after a kill, seconds."""

    planned: list[str]
    kills: dict[str, int] = field(default_factory=dict)
    victims: dict[str, int] = field(default_factory=dict)
    durations: dict[str, float] = field(default_factory=dict)
    starts: int = 0
    runs: int = 0
    seconds: float = 0.0
    leaving: float = 0.0
    largest: float = 0.0
    wrong: list[str] = field(default_factory=list)
    under_way: bool = False
    done: bool = False


class Trial:
    """One strategy: its unbroken run, and the one that is killed."""

    def __init__(self, label: str, record: Record, work: Path, overrides: Sequence[str], seed: int) -> None:
        self.label, self.record, self.overrides = label, record, overrides
        self.folder, self.seed = work / label, seed
        self.order = [Start.of(name) for name in (ROTATION if label == "elastic" else (label,))]
        self.tolerance = TOLERANCES["elastic" if label == "elastic" else self.order[0].strategy.rstrip("123")]

    def unbroken(self) -> None:
        """Train without a kill, and note how long each phase lasts at first. Raises EyasError with the command's own
        message."""
        folder = self.folder / "whole"
        shutil.rmtree(folder, ignore_errors=True)
        spans: dict[str, float] = {}
        with self.order[0].job(folder, self.folder / "whole.log", self.overrides) as job:
            watch, now, began = Watch(job, folder), "start", time.monotonic()
            while job.running:
                if (phase := watch.phase()) != now:
                    spans.setdefault(now, time.monotonic() - began)
                    now, began = phase, time.monotonic()
                time.sleep(POLL)
            code, said = job.wait(PATIENCE), job.output()
        if code:
            raise EyasError(f"{self.label}: {last_words(said)}")
        self.record.durations = spans
        if unseen := [phase for phase in PHASES if phase not in spans]:
            raise EyasError(f"{self.label}: never seen in {', '.join(unseen)}; has the log changed?")

    def start(self) -> bool:
        """Start the run that is killed once more, and kill it if that is planned; whether it is finished now."""
        record, folder = self.record, self.folder / "broken"
        if not record.under_way:
            shutil.rmtree(folder, ignore_errors=True)
            record.runs, record.under_way = record.runs + 1, True
        generator = random.Random(f"{self.seed} {self.label} {record.starts}")
        start = self.order[record.starts % len(self.order)]
        record.starts += 1
        with start.job(folder, self.folder / "broken.log", self.overrides) as job:
            watch = Watch(job, folder)
            victim = self.strike(job, watch, generator) if record.planned else None
            began = time.monotonic()
            code, said = job.wait(PATIENCE), job.output()
        if victim is not None:
            phase = record.planned.pop(0)
            record.kills[phase] = record.kills.get(phase, 0) + 1
            record.victims[victim] = record.victims.get(victim, 0) + 1
            record.leaving = max(record.leaving, time.monotonic() - began)
            print(f"{self.label}: {victim} killed in {phase}, step {watch.step}", flush=True)
        elif code:
            raise EyasError(f"{self.label}: start {record.starts} failed by itself, code {code}: {last_words(said)}")
        return code == 0

    def strike(self, job: Job, watch: Watch, generator: random.Random) -> str | None:
        """Kill a process of the job in the phase that comes next in the plan: which one, or None if it ended before."""
        phase, duration = self.record.planned[0], self.record.durations[self.record.planned[0]]
        left = sum(planned in LOOP for planned in self.record.planned)
        share = 0.8 * generator.random() / max(1, left)  # of what is left of the run, to be trained before

        def there() -> bool:
            found = watch.phase()
            return found == phase and (found not in LOOP or watch.step >= watch.first + share * (STEPS - watch.first))

        end = time.monotonic() + PATIENCE
        while job.running and time.monotonic() < end:
            time.sleep(POLL)
            if not there():
                continue
            time.sleep(generator.uniform(0, duration))
            job.freeze()
            if there() and (victim := kill_one(job, generator)):
                return victim
            job.thaw()  # it was too quick
            duration /= 2
        return None

    def compare(self) -> None:
        """Note what differs from the unbroken run; the strategy is done if no kill is left to be made."""
        found = compare_runs(self.folder / "whole", self.folder / "broken", NAME, self.tolerance)
        self.record.largest = max(self.record.largest, found.largest)
        self.record.wrong += found.wrong
        self.record.under_way = False
        if self.record.planned and self.record.runs == RUNS:
            self.record.wrong.append(f"not in {RUNS} runs was it killed in {self.record.planned[0]}")
        self.record.done = not self.record.planned or bool(self.record.wrong)


def kill_one(job: Job, generator: random.Random) -> str | None:
    """SIGKILL to a rank or the launcher of a job that is held still; the others go on. None if none was there."""
    victims = {f"rank {rank}" if job.launched else "the process": found for rank, found in job.ranks().items()}
    if job.launched and job.running:
        victims["launcher"] = psutil.Process(job.process.pid)
    if not victims:
        return None
    name = generator.choice(sorted(victims))
    victims[name].kill()
    job.thaw()
    if name == "launcher":
        time.sleep(generator.uniform(0, 1))
        job.kill()
    return name


def last_words(said: str) -> str:
    """The message of a command that failed, or else the end of what it said."""
    told = re.findall(r"^(?:\[rank \d+\] )?error: .*", said, re.MULTILINE)
    return told[0] if told else said[-3000:]


def plan(labels: Sequence[str], kills: int, generator: random.Random) -> dict[str, Record]:
    """The kills of each strategy: all phases alike often, in the order in which a run comes to them."""
    phases, records = [PHASES[number % len(PHASES)] for number in range(kills)], {}
    for number, label in enumerate(labels):
        own = phases[number * kills // len(labels) : (number + 1) * kills // len(labels)]
        generator.shuffle(own)
        records[label] = Record(sorted(own, key=lambda phase: PHASES.index("step" if phase in LOOP else phase)))
    return records


def table(records: dict[str, Record]) -> str:
    heads = ["strategy", *PHASES, "kills", "starts", "runs", "seconds", "slowest end", "largest difference", ""]
    rows = [heads]
    for label, r in records.items():
        verdict = "DIFFERS" if r.wrong else "same" if r.done else "unfinished"
        counts = [r.kills.get(phase, 0) for phase in PHASES]
        numbers = [*counts, sum(counts), r.starts, r.runs, f"{r.seconds:.0f}", f"{r.leaving:.1f} s", f"{r.largest:.1e}"]
        rows.append([label, *map(str, numbers), verdict])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    victims = sum((Counter(r.victims) for r in records.values()), Counter())
    told = ", ".join(f"{name} {times}" for name, times in sorted(victims.items()))
    wrong = [f"{label}: {what}" for label, r in records.items() for what in r.wrong]
    return "\n".join([*lines, f"killed: {told or 'nothing'}", *wrong])


def run(labels: Sequence[str], kills: int, overrides: Sequence[str], work: Path, *, seed: int, seconds: float) -> int:
    """All strategies one after the other, as far as ``seconds`` go; the exit code."""
    end, notes = time.monotonic() + seconds, work / NOTES
    work.mkdir(parents=True, exist_ok=True)
    asked = {"strategies": list(labels), "kills": kills, "seed": seed, "overrides": list(overrides)}
    known = read_notes(notes)
    if known and known["asked"] != asked:
        raise EyasError(f"{work}: holds the trials of {known['asked']}, not of {asked}; give another --folder")
    records = plan(labels, kills, random.Random(seed))
    records |= {label: Record(**found) for label, found in known.get("records", {}).items()}

    def keep() -> None:
        found = {"asked": asked, "records": {label: asdict(record) for label, record in records.items()}}
        write_atomic(notes, json.dumps(found, indent=1) + "\n")

    for label, record in records.items():
        trial = Trial(label, record, work, overrides, seed)
        while not record.done and time.monotonic() < end:
            began = time.monotonic()
            if not record.durations:
                trial.unbroken()
            elif trial.start():
                trial.compare()
            record.seconds += time.monotonic() - began
            keep()
    print(table(records))
    return 0 if all(record.done and not record.wrong for record in records.values()) else 1


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m scripts.survive", description="Training, killed again and again")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="of the configuration, beyond the tiny one")
    parser.add_argument("--strategies", default=STRATEGIES, help=f"default: {STRATEGIES}")
    parser.add_argument("--kills", type=int, default=40, help="over all strategies; default: 40")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin nothing after so many")
    parser.add_argument("--folder", type=Path, default=Path("outputs/survive"))
    args = parser.parse_args(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # through the blocks that kill what runs
    try:
        labels = list(dict.fromkeys(args.strategies.split(",")))
        return run(labels, args.kills, args.overrides, args.folder.resolve(), seed=args.seed, seconds=args.seconds)
    except EyasError as error:
        print(error, file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
