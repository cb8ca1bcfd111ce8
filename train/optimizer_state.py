"""The optimizer's state on disk: whole tensors by parameter name, whatever strategy they were trained under.

    optimizer-00001.safetensors ...   NAME/KEY for every number the optimizer keeps of a parameter: exp_avg,
                                      exp_avg_sq [like the parameter], step [] (how often it was updated)

So a run that was begun on some number of processes, or sharded by ZeRO, goes on under any other. Parameters that were
never updated have no state.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from models.errors import EyasError
from models.files import save_tensors

FILES = "optimizer-*.safetensors"
FILE_BYTES = 1 << 30  # so many are held in memory at a time while writing

State = dict[str, Tensor]  # what the optimizer keeps of one parameter


def is_optimizer_file(name: str) -> bool:
    return Path(name).match(FILES)


def write_states(
    folder: Path, states: Iterable[tuple[str, Mapping[str, Tensor]]], file_bytes: int = FILE_BYTES
) -> None:
    """Write the states of parameters by name, in files of about ``file_bytes``; at least one, which may be empty."""
    held: State = {}
    number = size = 0

    def flush() -> None:
        nonlocal held, number, size
        number += 1
        save_tensors(held, folder / f"optimizer-{number:05d}.safetensors")
        held, size = {}, 0

    for name, state in states:
        for key, value in state.items():
            held[f"{name}/{key}"] = value.detach().to("cpu", copy=True).contiguous()
            size += value.numel() * value.element_size()
        if size >= file_bytes:
            flush()
    if held or not number:
        flush()


class OptimizerStates:
    """Reads the states in a checkpoint, one parameter at a time."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._keys: dict[str, dict[str, Path]] = {}
        files = sorted(folder.glob(FILES))
        if not files:
            raise EyasError(
                f"{folder}: holds no optimizer state ({FILES}), so a run can't go on from it; start another one from "
                f"its weights with train.init_from={folder} and another name="
            )
        for file in files:
            try:
                with safe_open(file, "pt") as opened:
                    for full in opened.keys():  # noqa: SIM118 (not a mapping)
                        name, _, key = full.rpartition("/")
                        self._keys.setdefault(name, {})[key] = file
            except (OSError, SafetensorError) as error:
                raise EyasError(f"{file}: not a readable safetensors file ({error})") from error

    def of(self, name: str, shape: torch.Size) -> State:
        """The state of a parameter of this shape on the CPU; empty if it was never updated. Raises EyasError for a
        state of another shape."""
        found: State = {}
        for key, file in self._keys.get(name, {}).items():
            with safe_open(file, "pt") as opened:
                value = found[key] = opened.get_tensor(f"{name}/{key}")
            if value.ndim and value.shape != shape:
                raise EyasError(f"{file}: {name}/{key} has shape {list(value.shape)}, the parameter {list(shape)}")
        return found

    def check_names(self, names: Iterable[str]) -> None:
        """Raise EyasError for a state of a parameter that is not among ``names``."""
        unknown = sorted(set(self._keys) - set(names))
        if unknown:
            raise EyasError(f"{self.folder}: optimizer state of {unknown[0]}, which this run does not train")
