"""A drafter on disk: ``model.safetensors`` (its weights and draft vocabulary) and ``drafter.json``.

Nothing is unpickled, and the class named in ``drafter.json`` must be a Drafter of the ``models`` package, so a
folder from elsewhere can't run code.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from models.drafter import Drafter
from models.errors import EyasError
from models.files import save_tensors
from models.vocab import DraftVocab

WEIGHTS = "model.safetensors"
ARCHITECTURE = "drafter.json"
# What configuration classes and modules say to values that make no sense.
UNREADABLE = (TypeError, ValueError, AttributeError, ArithmeticError, RuntimeError, StrictDataclassError)
VOCAB_IDS = "draft_vocab.ids"  # [Vd] int64 target ids, beside the weights
FORMAT = 1


def save_drafter(drafter: Drafter, folder: Path, weights: Mapping[str, Tensor] | None = None) -> None:
    """Write the drafter into an existing folder: its parameters and persistent buffers, never the target's.

    weights: what to write instead of its own state dict, of the same names (of parameters that are split over
    processes, it has only a part). Raises EyasError for a tensor without numbers where there should be some.
    """
    tensors = {name: tensor.detach().contiguous() for name, tensor in (weights or drafter.state_dict()).items()}
    if missing := set(drafter.state_dict()) ^ set(tensors):
        raise ValueError(f"not the weights of this {type(drafter).__name__}: {sorted(missing)}")
    if empty := sorted(name for name, tensor in tensors.items() if not tensor.numel()):
        raise EyasError(f"{folder}: {empty[0]} has no numbers: its parts were not put together; nothing is saved")
    save_tensors({**tensors, VOCAB_IDS: drafter.vocab.ids.contiguous()}, folder / WEIGHTS)
    cls = type(drafter)
    about = {
        "format": FORMAT,
        "_target_": f"{cls.__module__}.{cls.__qualname__}",
        "architecture": drafter.architecture(),
        "vocab_size": drafter.vocab.size,
        "tap_ids": list(drafter.tap_ids),
    }
    (folder / ARCHITECTURE).write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")


def load_drafter(folder: Path | str, device: torch.device | str = "cpu") -> Drafter:
    """The drafter saved in ``folder``, in eval mode on ``device``."""
    folder = Path(folder)
    about = _read_about(folder)
    cls = drafter_class(str(about["_target_"]))
    try:
        vocab, weights = read_weights(folder, int(about["vocab_size"]))
        drafter = cls.from_architecture(about["architecture"], vocab)
    except EyasError:
        raise
    except (LookupError, *UNREADABLE) as error:
        told = " ".join(str(error).split())
        raise EyasError(f"{folder / ARCHITECTURE}: describes no drafter ({told})") from error
    fill(drafter, weights, folder)
    return drafter.to(device).eval()


def read_weights(folder: Path, vocab_size: int) -> tuple[DraftVocab, dict[str, Tensor]]:
    """The draft vocabulary and the state dict of a saved drafter."""
    path = folder / WEIGHTS
    try:
        tensors = load_file(path)
    except (OSError, SafetensorError) as error:
        raise EyasError(f"{path}: not a readable safetensors file ({error})") from error
    if VOCAB_IDS not in tensors:
        raise EyasError(f"{path}: has no tensor {VOCAB_IDS}; it is not a drafter saved by Eyas")
    return DraftVocab(tensors.pop(VOCAB_IDS), vocab_size), tensors


def fill(drafter: Drafter, weights: dict[str, Tensor], folder: Path) -> None:
    """Load a state dict strictly, with a message instead of a trace where it doesn't fit or holds no numbers."""
    for name, tensor in weights.items():
        if not bool(tensor.isfinite().all()):
            raise EyasError(f"{folder}: {name} holds NaN or infinite values; the drafter is broken")
    try:
        drafter.load_state_dict(weights)
    except RuntimeError as error:
        raise EyasError(f"{folder}: its weights don't fit a {type(drafter).__name__} of this shape: {error}") from error


def drafter_class(path: str) -> type[Drafter]:
    """The Drafter subclass at the dotted path ``models.<module>.<Class>``; nothing outside ``models`` is imported."""
    module, _, name = path.rpartition(".")
    if not module.startswith("models."):
        raise EyasError(f"drafter._target_={path}: must name a class of the models package, models.<module>.<Class>")
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise EyasError(f"drafter._target_={path}: no such drafter ({error})") from error
    if not (isinstance(found, type) and issubclass(found, Drafter)):
        raise EyasError(f"drafter._target_={path}: is not a drafter (a subclass of models.drafter.Drafter)")
    return found


def _read_about(folder: Path) -> dict[str, Any]:
    path = folder / ARCHITECTURE
    try:
        about = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise EyasError(f"{folder}: no {ARCHITECTURE} there; give a checkpoint folder written by a run") from error
    except ValueError as error:
        raise EyasError(f"{path}: is not JSON ({error})") from error
    missing = {"_target_", "architecture", "vocab_size"} - set(about)
    if missing or about.get("format") != FORMAT:
        raise EyasError(f"{path}: format {about.get('format')} lacks {sorted(missing)} or is not format {FORMAT}")
    return dict(about)
