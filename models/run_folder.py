"""A run's folder as training leaves it: which checkpoints are whole and which one is its drafter."""

from __future__ import annotations

import hashlib
import json
import logging
from pathlib import Path
from typing import Any

from models.files import write_atomic

CHECKPOINTS = "checkpoints"
STATE = "state.json"  # of a checkpoint; lists a digest of each of its files
BEST = "best.json"  # which checkpoint has the best tau (train.tau: simulated or measured)
CONFIG = "config.yaml"  # the configuration that a run was begun with
STAGES = "stages.json"  # what evaluation and export were made from
REPORT = "report.json"  # what ``python -m eval`` leaves

log = logging.getLogger(__name__)


def best_checkpoint(run_dir: Path) -> Path | None:
    """The checkpoint of a run to evaluate and export: its best, or its newest where nothing was validated."""
    try:
        best = run_dir / json.loads((run_dir / BEST).read_text(encoding="utf-8"))["checkpoint"]
    except (OSError, ValueError, KeyError, TypeError):
        return latest_checkpoint(run_dir)
    if is_whole(best):
        return best
    log.warning("%s is missing or damaged: taking the newest whole checkpoint instead", best)
    return latest_checkpoint(run_dir)


def beside_run(source: Path, name: str) -> Path | None:
    """The file of that name in a run's folder, or in that of the run that a checkpoint or export lies in."""
    near = (folder / name for folder in (source, *source.absolute().parents[:2]))
    return next((file for file in near if file.is_file()), None)


def has_begun(run_dir: Path) -> bool:
    """Whether the run has a checkpoint: what it was trained on is settled then."""
    return any((run_dir / CHECKPOINTS).glob("step_*"))


def latest_checkpoint(run_dir: Path) -> Path | None:
    """The newest whole checkpoint; broken ones are named in a warning and passed over."""
    for folder in step_folders(run_dir):
        if is_whole(folder):
            return folder
        log.warning("%s is incomplete or damaged: falling back to the checkpoint before it", folder)
    return None


def step_folders(run_dir: Path) -> list[Path]:
    """All checkpoints, newest first, whole or not."""
    return sorted((p for p in (run_dir / CHECKPOINTS).glob("step_*") if p.is_dir()), reverse=True)


def is_whole(folder: Path) -> bool:
    """Whether every file of a checkpoint is there with the digest its state.json lists."""
    try:
        files = json.loads((folder / STATE).read_text(encoding="utf-8"))["files"]
        return all(file_digest(folder / name) == digest for name, digest in files.items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def read_notes(path: Path) -> dict[str, Any]:
    """A JSON object that a run or a sweep notes things down in; an empty one where there is none, or a damaged one."""
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return {}


def note_down(path: Path, found: dict[str, Any]) -> None:
    """Add to such notes, which one process writes."""
    notes = read_notes(path)
    if not found.items() <= notes.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, json.dumps(notes | found, indent=1) + "\n")


def file_digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()
