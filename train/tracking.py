"""Where a run's numbers go: metrics.jsonl, TensorBoard, wandb, and the progress bar. All on the main process."""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tqdm import tqdm

from conf.schema import TrackerConfig
from models.errors import EyasError
from models.files import write_atomic

METRICS = "metrics.jsonl"
WANDB_MODES = ("offline", "online", "disabled")


class Tracker:
    """Rows of a run: ``{"step", "kind", ...}`` with numbers and per-depth lists of numbers.

    Opening it at ``step`` drops all later rows, so a resumed run continues the same curves: no hole, no repeat.
    """

    def __init__(self, run_dir: Path, tracker: TrackerConfig, *, step: int, config: Mapping[str, Any]) -> None:
        if tracker.wandb not in WANDB_MODES:
            raise EyasError(f"tracker.wandb={tracker.wandb}: must be one of {', '.join(WANDB_MODES)}")
        run_dir.mkdir(parents=True, exist_ok=True)
        truncate(run_dir / METRICS, step)
        self._file = (run_dir / METRICS).open("a", encoding="utf-8")
        self._board = _tensorboard(run_dir, step) if tracker.tensorboard else None
        self._wandb = None if tracker.wandb == "disabled" else _wandb(run_dir, tracker, config)

    def log(self, step: int, kind: str, values: Mapping[str, Any]) -> None:
        """Append a row; ``kind`` is train, valid or another group of curves."""
        self._file.write(json.dumps({"step": step, "kind": kind, **values}) + "\n")
        self._file.flush()
        flat = {f"{kind}/{name}": value for name, value in _flatten(values)}
        if self._board is not None:
            for name, value in flat.items():
                self._board.add_scalar(name, value, step)
        if self._wandb is not None:
            self._wandb.log(flat, step=step)

    def sync(self) -> None:
        """Put all rows on disk: called before a checkpoint that counts on them."""
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self.sync()
        self._file.close()
        if self._board is not None:
            self._board.close()
        if self._wandb is not None:
            self._wandb.finish()


def truncate(path: Path, step: int) -> None:
    """Drop the rows after ``step``, and a last line that a killed process did not finish."""
    if not path.exists():
        return
    lines = path.read_text(encoding="utf-8").splitlines()
    kept = [line for line in lines if (row := _parse(line)) is not None and row["step"] <= step]
    write_atomic(path, "".join(line + "\n" for line in kept))


def read_metrics(path: Path, kind: str | None = None) -> list[dict[str, Any]]:
    """The rows of a metrics.jsonl, of one kind or all."""
    rows = [_parse(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [row for row in rows if row is not None and kind in (None, row["kind"])]


def progress(total: int, done: int, *, enabled: bool) -> tqdm:
    """A bar over optimizer steps with rate and time left, on a terminal only (logs have their own lines)."""
    return tqdm(total=total, initial=done, unit="step", dynamic_ncols=True, disable=None if enabled else True)


def _parse(line: str) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) and "step" in row and "kind" in row else None


def _flatten(values: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    for name, value in values.items():
        if isinstance(value, (list, tuple)):
            yield from ((f"{name}/{i}", float(v)) for i, v in enumerate(value))
        else:
            yield name, float(value)


def _tensorboard(run_dir: Path, step: int) -> Any:
    from torch.utils.tensorboard import SummaryWriter  # slow to import: only when wanted

    return SummaryWriter(str(run_dir / "tensorboard"), purge_step=step + 1)


def _wandb(run_dir: Path, tracker: TrackerConfig, config: Mapping[str, Any]) -> Any:
    try:
        import wandb
    except ImportError as error:
        raise EyasError(f"tracker.wandb={tracker.wandb}: pip install wandb, or use tracker.wandb=disabled") from error
    marker = run_dir / "wandb_run_id"
    if not marker.exists():
        write_atomic(marker, uuid.uuid4().hex[:12] + "\n")
    try:
        return wandb.init(
            project=tracker.project,
            name=run_dir.name,
            id=marker.read_text(encoding="utf-8").strip(),
            resume="allow",
            dir=str(run_dir),
            mode="online" if tracker.wandb == "online" else "offline",
            config=dict(config),
            settings=wandb.Settings(silent=True, console="off", save_code=False, disable_git=True),
        )
    except wandb.errors.Error as error:  # no login, no network
        raise EyasError(f"tracker.wandb={tracker.wandb}: {error}; use tracker.wandb=offline") from error
