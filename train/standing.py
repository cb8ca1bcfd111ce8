"""Where a run stands, read from its folder and from nothing else: while it goes on in another process, after it, and
whatever is missing or damaged there. Nothing is written and torch is not needed.
"""

from __future__ import annotations

import fcntl
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from models.run_folder import BEST, CONFIG, REPORT, STAGES, STATE, is_whole, read_notes, step_folders
from train.tracking import METRICS, parse_row

LOCK = ".lock"
RECENT = 0.25  # share of the run whose pace tells the time left: with validations every eighth, two of them
DIGESTED = 512 << 20  # bytes of checkpoints that are read through; older ones are judged by the sizes of their files
MANIFEST = "manifest.json"  # of a feature store


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint on disk. state: its state.json, empty if broken; digested: its files were read, not only sized up;
    saved: seconds since the epoch."""

    folder: Path
    whole: bool
    digested: bool
    state: Mapping[str, Any]
    saved: float

    @property
    def step(self) -> int:
        return int(self.state["step"])


@dataclass(frozen=True)
class Standing:
    """A run as its folder tells it.

    running: whether a process holds the folder, None where the file system can't tell; rows: those of training in
    metrics.jsonl; total: optimizer steps of the whole run; features: whole and planned shards of all its stores;
    measured: greedy tau of report.json; damage: files that can't be read, and why.
    """

    folder: Path
    begun: bool
    running: bool | None
    checkpoints: Sequence[Checkpoint]
    rows: Sequence[Mapping[str, Any]]
    total: int | None
    best: Mapping[str, Any] | None
    measured: float | None
    evaluated: bool
    exported: bool
    features: tuple[int, int] | None
    damage: Sequence[str] = field(default_factory=tuple)

    @property
    def newest(self) -> Checkpoint | None:
        """The newest whole checkpoint: where a run goes on."""
        return next((checkpoint for checkpoint in self.checkpoints if checkpoint.whole), None)

    @property
    def broken(self) -> list[Path]:
        return [checkpoint.folder for checkpoint in self.checkpoints if not checkpoint.whole]

    @property
    def position(self) -> Mapping[str, Any]:
        """The row or state that has the run's step, tokens and seconds: of a stopped run those that it goes on from."""
        state = self.newest.state if self.newest else {"step": 0}
        last = self.rows[-1] if self.rows and self.running is not False else state
        return max(state, last, key=lambda row: int(row["step"]))

    @property
    def step(self) -> int:
        return int(self.position["step"])

    @property
    def finished(self) -> bool:
        return self.newest is not None and (self.newest.step == self.total or self.stopped_early)

    @property
    def stopped_early(self) -> bool:
        return self.newest is not None and bool(self.newest.state.get("stopped"))

    @property
    def left(self) -> float | None:
        """Seconds to the last step at the pace of the last quarter, validation and saving included; None: unknown."""
        timed = [row for row in self.rows if "seconds" in row]
        if not timed or self.total is None or self.finished:
            return None
        last = timed[-1]
        since = last["step"] - RECENT * self.total
        first = max((row for row in timed if row["step"] <= since), key=lambda row: row["step"], default=ZERO)
        pace = (last["seconds"] - first["seconds"]) / (last["step"] - first["step"])
        return float(pace * max(0, self.total - self.step))


ZERO = {"step": 0, "seconds": 0.0}  # where every run begins


def standing(folder: Path) -> Standing:
    """Read a run's folder; one that is not there is a run that has not begun."""
    damage: list[str] = []
    config = read_config(folder / CONFIG, damage)
    rows = read_rows(folder / METRICS, damage)
    checkpoints = checkpoints_of(folder)
    newest = next((checkpoint for checkpoint in checkpoints if checkpoint.whole), None)
    state = newest.state if newest else {}
    notes, report = noted(folder / STAGES, damage), noted(folder / REPORT, damage)
    best = noted(folder / BEST, damage)
    export = Path(str(dig(config, "export", "dir") or folder / "export"))
    return Standing(
        folder,
        begun=(folder / CONFIG).exists() or bool(rows or checkpoints),
        running=is_held(folder / LOCK),
        checkpoints=checkpoints,
        rows=rows,
        total=first_count(state.get("total_steps"), notes.get("steps"), dig(config, "train", "steps")),
        best=next((found for found in (best, state.get("best")) if is_best(found)), None),
        measured=measured_tau(report),
        evaluated="evaluation" in notes and (folder / REPORT).exists(),
        exported="export" in notes and all((export / name).exists() for name in notes.get("export product") or ["?"]),
        features=shards(notes.get("features")),
        damage=damage,
    )


def is_held(path: Path) -> bool | None:
    """Whether a process holds this lock file (models/files.py); None where it can't be told. Waits for nobody."""
    try:
        with path.open("rb") as file:
            # A lock that others can share with us. It goes with the file, at once.
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except FileNotFoundError:
        return False
    except OSError:  # a filesystem without locks, or a file that is another's
        return None
    return False


def checkpoints_of(folder: Path) -> list[Checkpoint]:
    """Newest first. What another process removes meanwhile is left out."""
    found, read = list[Checkpoint](), 0
    for step_folder in step_folders(folder):
        try:
            size = sum(path.stat().st_size for path in step_folder.iterdir())
            saved = step_folder.stat().st_mtime
        except FileNotFoundError:
            continue
        read += size
        digested = read <= DIGESTED
        state = read_notes(step_folder / STATE)
        whole = is_position(state) and (is_whole(step_folder) if digested else has_its_sizes(step_folder, state))
        if step_folder.exists():
            found.append(Checkpoint(step_folder, whole, digested, state if whole else {}, saved))
    return found


def has_its_sizes(folder: Path, state: Mapping[str, Any]) -> bool:
    """Whether the files that a checkpoint lists are there, and safetensors as long as their headers say."""
    try:
        return all(is_complete(folder / name) for name in state["files"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def is_complete(path: Path) -> bool:
    size = path.stat().st_size
    if path.suffix != ".safetensors":
        return size > 0
    with path.open("rb") as file:
        header = int.from_bytes(file.read(8), "little")
        entries = json.loads(file.read(min(header, size)))
    ends = [entry["data_offsets"][1] for name, entry in entries.items() if name != "__metadata__"]
    return size == 8 + header + max(ends, default=0)


# --- files that may be missing or damaged ---


def read_rows(path: Path, damage: list[str]) -> list[Mapping[str, Any]]:
    """The rows of training, in order of their steps; a line that is being written is no damage."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
    except FileNotFoundError:
        return []
    except OSError as error:
        damage.append(f"{path}: {error.strerror}")
        return []
    rows = [parse_row(line) for line in lines]
    bad = sum(row is None and line.endswith("\n") for row, line in zip(rows, lines, strict=True))
    if bad:
        damage.append(f"{path}: {bad:,} of {len(lines):,} rows can't be read")
    kept = [row for row in rows if row is not None and row["kind"] == "train" and is_position(row)]
    return sorted(kept, key=lambda row: int(row["step"]))


def is_position(row: Mapping[str, Any]) -> bool:
    """Whether a row or state has a step, and numbers where there should be some."""
    numbers = ("loss", "epoch", "tokens", "supervised", "seconds", "tokens_per_s")
    return (
        type(row.get("step")) is int and row["step"] > 0 and all(type(row.get(n, 0)) in (int, float) for n in numbers)
    )


def noted(path: Path, damage: list[str]) -> dict[str, Any]:
    found = read_notes(path)
    if not found and path.exists():
        damage.append(f"{path}: can't be read")
    return found


def read_config(path: Path, damage: list[str]) -> Any:
    try:
        return yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, yaml.YAMLError):
        damage.append(f"{path}: can't be read")
        return None


def is_best(found: Any) -> bool:
    taus = [dig(found, "tau_t0"), dig(found, "tau_measured") or 1.0]
    return type(dig(found, "step")) is int and all(type(tau) in (int, float) for tau in taus)


def measured_tau(report: Mapping[str, Any]) -> float | None:
    """Greedy tau of the first drafter of a report."""
    runs = report.get("runs")
    for run in runs if isinstance(runs, list) else []:
        tau = dig(run, "acceptance", "tau")
        if dig(run, "temperature") == 0 and isinstance(tau, float):
            return tau
    return None


def shards(stores: Any) -> tuple[int, int] | None:
    """Whole and planned shards of feature stores; one that is not begun counts as a shard to come."""
    if not isinstance(stores, list) or not stores:
        return None
    counts = [shards_of(Path(str(store))) for store in stores]
    return sum(whole for whole, _ in counts), sum(planned for _, planned in counts)


def shards_of(store: Path) -> tuple[int, int]:
    """Those of one store: listed in its manifest, or with a receipt that waits to be (data/features/writer.py)."""
    manifest = read_notes(store / MANIFEST)
    listed = manifest.get("shards")
    whole = {Path(str(dig(shard, "file"))).stem for shard in listed} if isinstance(listed, list) else set()
    whole |= {receipt.stem for receipt in store.glob("shard-*.json")}
    return len(whole), first_count(manifest.get("planned_shards")) or 1


def dig(value: Any, *keys: str) -> Any:
    for key in keys:
        value = value.get(key) if isinstance(value, dict) else None
    return value


def first_count(*values: Any) -> int | None:
    return next((value for value in values if type(value) is int and value > 0), None)


def ago(saved: float) -> float:
    """Seconds since then; clocks of other machines may run ahead."""
    return max(0.0, time.time() - saved)
