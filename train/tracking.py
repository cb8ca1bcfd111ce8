"""Where a run's numbers go: metrics.jsonl, TensorBoard, wandb, and the progress bar. All on the main process."""

from __future__ import annotations

import json
import os
import shutil
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tqdm import tqdm

from conf.schema import TrackerConfig
from models.errors import EyasError
from models.files import write_atomic

METRICS = "metrics.jsonl"
CLOCKED = ("tokens_per_s", "seconds")  # of a row: what tells of the machine, not of the run
WANDB_ID = "wandb_run_id"
WANDB_DONE = "wandb_done"  # there as long as wandb's folder holds all rows
WANDB_MODES = ("offline", "online", "disabled")


class Tracker:
    """Rows of a run: ``{"step", "kind", ...}`` with numbers and per-depth lists of numbers.

    Opening it at ``step`` drops all later rows (and those of kind ``without`` at it), so a resumed run continues the
    same curves: no hole, no repeat.
    metrics.jsonl is the truth: it is on disk before a checkpoint counts on it, and wandb is given what it lacks of it.
    """

    def __init__(
        self,
        run_dir: Path,
        tracker: TrackerConfig,
        *,
        step: int,
        config: Mapping[str, Any],
        without: str | None = None,
    ) -> None:
        if tracker.wandb not in WANDB_MODES:
            raise EyasError(f"tracker.wandb={tracker.wandb}: must be one of {', '.join(WANDB_MODES)}")
        run_dir.mkdir(parents=True, exist_ok=True)
        truncate(run_dir / METRICS, step, without)
        self._file = (run_dir / METRICS).open("a", encoding="utf-8")
        self._board = _tensorboard(run_dir, step) if tracker.tensorboard else None
        self._wandb = None
        if tracker.wandb != "disabled":
            self._wandb = WandbRun(run_dir, tracker, config)
        for row in read_metrics(run_dir / METRICS):
            self._draw(row, on_board=row["step"] == step)

    def log(self, step: int, kind: str, values: Mapping[str, Any]) -> None:
        """Append a row; ``kind`` is train, valid or another group of curves."""
        row = {"step": step, "kind": kind, **values}
        self._file.write(json.dumps(row) + "\n")
        self._file.flush()
        self._draw(row)

    def _draw(self, row: Mapping[str, Any], *, on_board: bool = True) -> None:
        curves = _curves(row)
        if self._board is not None and on_board:
            for name, value in curves.items():
                self._board.add_scalar(name, value, row["step"])
        if self._wandb is not None:
            self._wandb.log(curves, row["step"])

    def sync(self) -> None:
        """Put all rows on disk: called before a checkpoint that counts on them."""
        self._file.flush()
        os.fsync(self._file.fileno())
        if self._board is not None:
            self._board.flush()  # its thread may be behind

    def close(self) -> None:
        self.sync()
        self._file.close()
        if self._board is not None:
            self._board.close()
        if self._wandb is not None:
            self._wandb.finish()


class WandbRun:
    """The run on wandb, under one id however often it is continued.

    Offline, a killed session leaves an empty folder, and ``wandb sync`` puts a folder in the place of whatever has come
    under the same id. So each session gets the rows of those before it too, and its folder replaces theirs. Online, the
    server keeps what it has received: the rows behind that are sent.
    """

    def __init__(self, run_dir: Path, tracker: TrackerConfig, config: Mapping[str, Any]) -> None:
        try:
            import wandb
        except ImportError as error:
            raise EyasError(
                f"tracker.wandb={tracker.wandb}: pip install wandb, or use tracker.wandb=disabled"
            ) from error
        marker, self._done = run_dir / WANDB_ID, run_dir / WANDB_DONE
        self._done.unlink(missing_ok=True)
        if not marker.exists():
            write_atomic(marker, uuid.uuid4().hex[:12] + "\n")
        name = marker.read_text(encoding="utf-8").strip()
        for earlier in (run_dir / "wandb").glob(f"offline-run-*-{name}"):
            shutil.rmtree(earlier)
        online = tracker.wandb == "online"
        try:
            self._run = wandb.init(
                project=tracker.project,
                name=run_dir.name,
                id=name,
                resume="allow" if online else None,  # only a server knows what to resume
                dir=str(run_dir),
                mode="online" if online else "offline",
                config=dict(config),
                settings=wandb.Settings(silent=True, console="off", save_code=False, disable_git=True),
            )
        except wandb.errors.Error as error:  # no login, no network
            raise EyasError(f"tracker.wandb={tracker.wandb}: {error}; use tracker.wandb=offline") from error
        self._first = self._run.starting_step if online else 0

    def log(self, curves: Mapping[str, float], step: int) -> None:
        if step >= self._first:
            self._run.log(dict(curves), step=step)

    def finish(self) -> None:
        import wandb

        self._run.finish()
        wandb.teardown()  # waits until the file is written
        self._done.touch()


def settle(run_dir: Path, tracker: TrackerConfig, *, step: int, config: Mapping[str, Any]) -> None:
    """Give wandb the rows of a run that is trained to its end, if that was killed before they were all there."""
    if tracker.wandb != "disabled" and not (run_dir / WANDB_DONE).exists():
        Tracker(run_dir, tracker, step=step, config=config).close()


def truncate(path: Path, step: int, without: str | None = None) -> None:
    """Drop the rows after ``step``, those of kind ``without`` at it, and a last line that a killed process did not
    finish."""
    if not path.exists():
        return
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    rows = [(line, parse_row(line)) for line in lines]
    kept = [line for line, row in rows if row and row["step"] < step + (row["kind"] != without)]
    write_atomic(path, "".join(line + "\n" for line in kept))


def read_metrics(path: Path, kind: str | None = None) -> list[dict[str, Any]]:
    """The rows of a metrics.jsonl, of one kind or all."""
    rows = [parse_row(line) for line in path.read_text(encoding="utf-8", errors="replace").splitlines()]
    return [row for row in rows if row is not None and kind in (None, row["kind"])]


def progress(total: int, done: int, *, enabled: bool) -> tqdm:
    """A bar over optimizer steps with rate and time left, on a terminal only (logs have their own lines)."""
    return tqdm(total=total, initial=done, unit="step", dynamic_ncols=True, disable=None if enabled else True)


def parse_row(line: str) -> dict[str, Any] | None:
    """The row of a line of metrics.jsonl; None if it is none."""
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) and type(row.get("step")) is int and "kind" in row else None


def _curves(row: Mapping[str, Any]) -> dict[str, float]:
    """A row as ``{kind/name: value}``, a list as ``kind/name/0`` and so on."""
    values = {name: value for name, value in row.items() if name not in ("step", "kind")}
    return {f"{row['kind']}/{name}": value for name, value in _flatten(values)}


def _flatten(values: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    for name, value in values.items():
        if isinstance(value, (list, tuple)):
            yield from ((f"{name}/{i}", float(v)) for i, v in enumerate(value))
        else:
            yield name, float(value)


def _tensorboard(run_dir: Path, step: int) -> Any:
    """A writer that makes readers forget what they know of ``step`` and later, other files included."""
    from torch.utils.tensorboard import SummaryWriter  # slow to import: only when wanted

    return SummaryWriter(str(run_dir / "tensorboard"), purge_step=step)
