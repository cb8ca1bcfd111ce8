"""Folders that serving engines load: ``config.json`` and one weight file, whatever the drafter method and layout.

Engines are lax readers: they skip names they don't know, leave missing tensors random and never report either. So
everything is checked here, when a folder is written and when one is read, and every error names the tensor.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from models.checkpoint import ARCHITECTURE, UNREADABLE, drafter_class, load_drafter
from models.drafter import Drafter, Serving
from models.errors import EyasError
from models.files import read_json, save_tensors, sync
from models.frozen import FrozenTarget
from models.recognise import Method, method_of_class, recognise
from models.weight_files import DrafterWeights, check_finite

CONFIG, CARD, TARGET = "config.json", "README.md", "target"
WEIGHTS = ("model.safetensors", "medusa_lm_head.safetensors")  # the weight files that layouts ask for
WRITTEN = {CONFIG, CARD, TARGET, *WEIGHTS}  # all that an export may consist of
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


# --- writing ------------------------------------------------------------------------------------------------


def serve(drafter: Drafter, frozen: FrozenTarget, layout: str | None = None) -> Serving:
    """The drafter in a serving layout (None: its default), on the CPU. Engines ignore the note ``eyas`` of the config;
    it tells a reader what the folder holds."""
    first = drafter.check_layout(layout)
    served = drafter.serving(frozen, layout)
    note = {"method": method_of_class(type(drafter)).name, "layout": first, **(served.config.get("eyas") or {})}
    tensors = {name: tensor.detach().cpu() for name, tensor in served.tensors.items()}
    return replace(served, tensors=tensors, config=served.config | {"eyas": note})


def write_export(served: Serving, folder: Path | str, dtype: str) -> Path:
    """Write, check and put in place in one go; see :func:`staged` for what happens to an export already there."""
    with staged(Path(folder)) as temporary:
        fill_export(served, temporary, dtype)
        check_export(temporary, served)
    return Path(folder)


def fill_export(served: Serving, folder: Path, dtype: str) -> None:
    """Write both files into an existing folder: floating tensors cast to ``dtype``, maps as they are."""
    if dtype not in DTYPES:
        raise EyasError(f"export.dtype={dtype}: must be one of {', '.join(DTYPES)}")
    cast = {name: cast_tensor(name, tensor, DTYPES[dtype]) for name, tensor in served.tensors.items()}
    save_tensors(cast, folder / served.weights)
    whole = served.config | {"dtype": dtype, "torch_dtype": dtype}  # both spellings: Transformers 5 and 4
    (folder / CONFIG).write_text(json.dumps(whole, indent=2) + "\n", encoding="utf-8")
    (folder / served.weights).chmod((folder / CONFIG).stat().st_mode)  # safetensors lets only the owner read it


def cast_tensor(name: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    tensor = tensor.detach().cpu()
    if not tensor.is_floating_point():
        return tensor.contiguous()
    check_finite(name, tensor)
    out = tensor.to(dtype)
    if not bool(out.isfinite().all()):
        largest = float(tensor.abs().max())
        raise EyasError(f"{name}: {largest:.4g} overflows {str(dtype)[6:]}; export in bfloat16 or float32")
    return out.contiguous().clone()  # safetensors refuses tensors that share memory


@contextmanager
def staged(folder: Path) -> Iterator[Path]:
    """A temporary folder beside ``folder`` that takes its place when the block ends well.

    What is there already stays untouched until then, and for good if the block raises. Only an earlier export
    (or an empty folder) is ever replaced: a folder that holds anything else is refused. Behind a link it is the folder
    linked to.
    """
    folder = folder.resolve()
    if Path.cwd().is_relative_to(folder):
        raise EyasError(f"{folder}: is the current folder or holds it; export to a folder of its own")
    temporary, old = (folder.with_name(f".{folder.name}.{end}") for end in (f"tmp-{os.getpid()}", "old"))
    if old.exists():  # a run died between the two renames below
        if folder.exists():
            shutil.rmtree(old)
        else:
            old.rename(folder)
    refuse_foreign(folder)
    for left in folder.parent.glob(f".{folder.name}.tmp-*"):
        if left == temporary or not _alive(left.name.rpartition("-")[2]):  # this number again: common in containers
            shutil.rmtree(left, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        yield temporary
        for path in temporary.rglob("*"):
            sync(path)
        sync(temporary)
        if folder.exists():
            folder.rename(old)
        temporary.rename(folder)
        shutil.rmtree(old, ignore_errors=True)
        sync(folder.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _alive(pid: str) -> bool:
    """Whether a process of this number exists, as far as this machine can tell."""
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return False
    except (ValueError, OSError):
        return True
    return True


def refuse_foreign(folder: Path) -> None:
    """Raise EyasError for a folder that holds anything but an export, which no other may replace."""
    if not folder.exists():
        return
    if not folder.is_dir():
        raise EyasError(f"{folder}: is a file; give a folder to export to")
    present = {path.name for path in folder.iterdir()}
    foreign = sorted(present - WRITTEN)
    if foreign:
        raise EyasError(f"{folder}: holds {foreign[0]}, which no export writes; export to a folder of its own")
    if present and "eyas" not in read_config(folder):
        raise EyasError(f"{folder}: its {CONFIG} is not of an export by Eyas; export to a folder of its own")


# --- reading ------------------------------------------------------------------------------------------------


def open_drafter(folder: Path | str, *, target: Mapping[str, Any] | None = None) -> Drafter:
    """The drafter of a checkpoint folder or of a serving folder, whichever it is; see :func:`load_export`."""
    if (Path(folder) / ARCHITECTURE).exists() or not (Path(folder) / CONFIG).exists():
        return load_drafter(folder)
    return load_export(folder, target=target)


def load_export(folder: Path | str, *, target: Mapping[str, Any] | None = None) -> Drafter:
    """The drafter of a serving folder, float32, in eval mode.

    Also reads what other trainers publish, in all layouts that models/recognise.py knows, and the modules inside a
    target that carries some. ``target``: the target's text config, for what such a folder's own config leaves open.
    """
    return _build(Path(folder), target)[0]


def check_export(folder: Path | str, served: Serving, target: Mapping[str, Any] | None = None) -> Drafter:
    """Prove that a folder holds exactly ``served``, cast to the dtype it names: names, shapes, dtypes and values.

    Returns the drafter read back from it; ``target`` as in :func:`load_export`.
    """
    folder = Path(folder)
    drafter, tensors, config = _build(folder, target)
    with _naming(folder):
        _compare(tensors, config, served)
    return drafter


def _compare(tensors: Mapping[str, Tensor], config: Mapping[str, Any], served: Serving) -> None:
    dtype = str(config.get("dtype"))
    if dtype not in DTYPES or dtype != config.get("torch_dtype"):
        raise EyasError(f"{CONFIG}: dtype={dtype} and torch_dtype={config.get('torch_dtype')} must agree")
    for key, value in served.config.items():
        if config.get(key) != json.loads(json.dumps(value)):
            raise EyasError(f"{CONFIG}: {key}={config.get(key)} is not what was to be written, {value}")
    for name in sorted(set(served.tensors) ^ set(tensors)):
        raise EyasError(f"{name}: {'missing' if name in served.tensors else 'not a name of this layout'}")
    for name, tensor in tensors.items():
        wanted = cast_tensor(name, served.tensors[name], DTYPES[dtype])
        if tensor.dtype != wanted.dtype:
            raise EyasError(f"{name}: is {tensor.dtype}, config.json and layout ask for {wanted.dtype}")
        if not torch.equal(tensor, wanted):
            raise EyasError(f"{name}: its values are not those that were to be written")


def read_export(folder: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors and config of a serving folder, as they are."""
    config, weights = read_config(folder), DrafterWeights(folder)
    return weights.read(weights.names), config


def method_of(folder: Path | str) -> Method:
    """The method of a serving folder."""
    folder = Path(folder)
    with _naming(folder):
        return recognise(read_config(folder), DrafterWeights(folder).names).method


def read_config(folder: Path) -> dict[str, Any]:
    """The config.json of a serving folder."""
    try:
        return read_json(folder / CONFIG)
    except EyasError as error:
        raise EyasError(f"{folder}: not a serving folder with {CONFIG} and weights ({error})") from error


def _build(folder: Path, target: Mapping[str, Any] | None) -> tuple[Drafter, dict[str, Tensor], dict[str, Any]]:
    """The drafter, and the tensors by the names in the file and the config that it was built from."""
    config = read_config(folder)
    with _naming(folder):
        weights = DrafterWeights(folder)
        found = recognise(config, weights.names)
        cls = drafter_class(found.method.drafter)
        if (carried := cls.from_target(folder)) is not None:
            return carried.eval(), {}, config
        tensors = weights.read(found.names)
        for name, tensor in tensors.items():
            check_finite(name, tensor)
        own = {found.names[name]: tensor for name, tensor in tensors.items()}
        return cls.from_serving(own, config, target).eval(), tensors, config


@contextmanager
def _naming(folder: Path) -> Iterator[None]:
    """Errors about what a folder holds begin with it; those that a config's nonsense leads to become a message."""
    try:
        yield
    except EyasError as error:
        raise EyasError(str(error) if str(error).startswith(str(folder)) else f"{folder}: {error}") from error
    except KeyError as error:
        raise EyasError(f"{folder / CONFIG}: key {error} is missing") from error
    except UNREADABLE as error:
        raise EyasError(f"{folder / CONFIG}: describes no drafter ({' '.join(str(error).split())})") from error
