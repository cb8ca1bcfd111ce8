"""Checkpoints that are either whole or not there, and the rules of going on from one.

    checkpoints/step_00000123/   model.safetensors, drafter.json   the drafter (models/checkpoint.py)
                                 target.safetensors, target.json   what became of a target that is trained along
                                 optimizer-00001.safetensors ...   train/optimizer_state.py
                                 state.json                        position, best so far, and a digest of each file
    best.json                    which checkpoint has the best tau, and which tau that is

All weights are whole and in float32, so neither number of processes nor strategy matters to who reads them.

A checkpoint is written to a hidden name, fsynced and renamed; the one before it is removed only afterwards.
"""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, get_type_hints

import torch
from accelerate import Accelerator
from torch import Tensor

from conf.options import fits
from models.checkpoint import fill, read_weights, save_drafter
from models.drafter import Drafter
from models.errors import EyasError
from models.files import read_json, sync, write_atomic
from models.run_folder import BEST, CHECKPOINTS, STATE, file_digest, is_whole, latest_checkpoint, step_folders
from train.joint import JointTraining
from train.metrics import sum_over_processes
from train.optimizer_state import State, write_states

TEMPORARY = ".tmp-"

log = logging.getLogger(__name__)


@dataclass
class TrainState:
    """Where a run stands after ``step`` optimizer steps; everything else is a function of step and config.

    seconds: time trained so far, over all sessions of the run; window: sums since the last logged row; best: {step,
    chain, by, tau_t0, tau_t1 (, tau_measured)} of the best validation, ``by`` naming the tau that it is best by and
    chain the length of its drafts; validated: step of the last validation; stale: validations since the best, stopped:
    whether they were too many; perplexity: of a target that is trained along, on held-out text, {before, after};
    content: digests of what the run was fed (data, target, vocabulary), which a resumed run must match.
    """

    step: int = 0
    total_steps: int = 0
    tokens: int = 0
    supervised: int = 0
    seconds: float = 0.0
    window: list[float] = field(default_factory=list)
    best: dict[str, Any] | None = None
    validated: int = 0
    stale: int = 0
    stopped: bool = False
    perplexity: dict[str, float] = field(default_factory=dict)
    content: dict[str, str] = field(default_factory=dict)


TYPES = get_type_hints(TrainState)


class CheckpointDir:
    """The checkpoints of one run directory. Writing methods are for the main process only."""

    def __init__(self, run_dir: Path, keep_last: int = 2) -> None:
        self.run_dir = run_dir
        self.root = run_dir / CHECKPOINTS
        self.keep_last = max(1, keep_last)
        self._whole: set[Path] = set()

    def folder(self, step: int) -> Path:
        return self.root / f"step_{step:08d}"

    def clean(self) -> None:
        """Remove what a killed process left half written or half deleted."""
        half = [*self.root.glob(f"{TEMPORARY}*"), *self.run_dir.glob(f"{TEMPORARY}*"), *self.root.glob("step_*/.*.tmp")]
        for leftover in half:
            shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()

    def save(
        self,
        state: TrainState,
        drafter: Drafter,
        weights: Mapping[str, Tensor],
        states: Iterable[tuple[str, State]],
        joint: JointTraining | None = None,
    ) -> Path:
        """Write the checkpoint of ``state.step``; of one that is there and whole, only the state may change.

        ``weights`` and ``states``: what :meth:`train.strategy.Strategy.weights` and ``optimizer_states`` give.
        """
        final = self.folder(state.step)
        if self._is_whole(final):
            self._write_state(final, state, read_json(final / STATE)["files"])
            return final
        work = self.root / f"{TEMPORARY}{final.name}"
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir(parents=True)
        try:
            save_drafter(drafter, work, _part(weights, "drafter.") if joint else weights)
            if joint is not None:
                joint.save(work, {"perplexity": state.perplexity}, _part(weights, "backbone."))
            write_states(work, states)
            self._write_state(work, state, {path.name: file_digest(path) for path in sorted(work.iterdir())})
            for path in [*work.iterdir(), work]:
                sync(path)
        except BaseException:
            shutil.rmtree(work, ignore_errors=True)  # a full disk has room again
            raise
        if final.exists():  # broken: out of the way, now that its replacement is complete
            _remove(final)
        work.rename(final)
        sync(self.root)
        self._whole.add(final)
        return final

    def _write_state(self, folder: Path, state: TrainState, files: Mapping[str, str]) -> None:
        write_atomic(folder / STATE, json.dumps({**asdict(state), "files": files}, indent=1) + "\n")

    def latest(self) -> Path | None:
        """The newest whole checkpoint; see :func:`models.run_folder.latest_checkpoint`."""
        found = latest_checkpoint(self.run_dir)
        if found is not None:
            self._whole.add(found)
        return found

    def read_state(self, folder: Path) -> TrainState:
        """Raises EyasError for a state that is not one of this version, or not of this folder."""
        path = folder / STATE
        content = read_json(path)
        content.pop("files", None)
        try:
            state = TrainState(**content)
        except TypeError as error:
            raise EyasError(f"{path}: written by another version of Eyas ({error})") from error
        fresh = asdict(TrainState())
        missing = sorted(fresh.keys() - content.keys())
        odd = [key for key, value in content.items() if not fits(value, TYPES[key])]
        if missing or odd or folder != self.folder(state.step):
            told = [f"{key} is missing" for key in missing] + [f"{key}={content[key]}" for key in odd]
            wrong = next(iter(told), "of another step")
            raise EyasError(f"{path}: damaged ({wrong}); remove {folder} to go on from the checkpoint before it")
        return state

    def agree_on_latest(self, accelerator: Accelerator) -> tuple[Path, TrainState] | None:
        """:meth:`latest` after :meth:`clean`, with its state: the main process looks, the others take its word."""
        step, has_best = 0, False
        if accelerator.is_main_process:
            self.clean()
            newest = self.latest()
            if newest is not None:
                state = self.read_state(newest)
                step, has_best = state.step, state.best is None or self._is_whole(self.folder(state.best["step"]))
        found = torch.tensor([step, has_best], device=accelerator.device)
        step, has_best = sum_over_processes(accelerator, found).tolist()
        if not step:
            return None
        state = self.read_state(self.folder(step))
        if not has_best:
            log.warning("%s: the best checkpoint so far is missing or damaged; it is sought anew", self.run_dir)
            state.best = None
        return self.folder(step), state

    def restore(
        self,
        folder: Path,
        found: TrainState,
        fresh: TrainState,
        drafter: Drafter,
        joint: JointTraining | None = None,
    ) -> None:
        """Fill the drafter (and the target that is trained along) from a whole checkpoint with the state ``found``.

        Raises EyasError where content or number of steps differ from those of a ``fresh`` run.
        """
        changed = [k for k, v in fresh.content.items() if found.content.get(k) != v]
        if changed or found.total_steps != fresh.total_steps:
            what = ", ".join(changed) or f"number of steps ({found.total_steps}, now {fresh.total_steps})"
            raise EyasError(
                f"{folder}: this run was begun with other input, {what}. Restore it, or train under another name= "
                f"(train.init_from={folder} starts from these weights)"
            )
        vocab, weights = read_weights(folder, drafter.vocab.size)
        if not torch.equal(vocab.ids, drafter.vocab.ids.cpu()):
            raise EyasError(f"{folder}: was trained with another draft vocabulary; give the new run another name=")
        fill(drafter, weights, folder)
        if joint is not None:
            joint.restore(folder)

    def mark_best(self, best: dict[str, Any] | None) -> None:
        """Record the best checkpoint in best.json."""
        if best is not None:
            name = str(self.folder(best["step"]).relative_to(self.run_dir))
            write_atomic(self.run_dir / BEST, json.dumps({"checkpoint": name, **best}, indent=1) + "\n")

    def prune(self, best: dict[str, Any] | None) -> None:
        """Keep the newest ``keep_last`` whole checkpoints and the best one."""
        spare = None if best is None else self.folder(best["step"])
        kept = 0
        for folder in step_folders(self.run_dir):
            kept += (whole := kept < self.keep_last and self._is_whole(folder))
            if not whole and folder != spare:
                _remove(folder)

    def _is_whole(self, folder: Path) -> bool:
        """Whether a checkpoint is whole: one that this process wrote or checked is not read again."""
        if folder not in self._whole and is_whole(folder):
            self._whole.add(folder)
        return folder in self._whole


def digest(parts: Iterable[Any]) -> str:
    """A short digest of a sequence of JSON-able values."""
    state = hashlib.blake2b(digest_size=16)
    for part in parts:
        state.update(json.dumps(part, sort_keys=True, separators=(",", ":")).encode() + b"\n")
    return state.hexdigest()


def _part(weights: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in weights.items() if name.startswith(prefix)}


def _remove(folder: Path) -> None:
    """Delete a folder so that no half of it can ever be taken for a checkpoint."""
    doomed = folder.with_name(f"{TEMPORARY}{folder.name}-old")
    shutil.rmtree(doomed, ignore_errors=True)
    folder.rename(doomed)
    shutil.rmtree(doomed)
