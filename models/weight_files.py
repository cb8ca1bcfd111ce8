"""Weight files, whoever wrote them: which tensors a drafter's folder holds, and how they get into a module.

Safetensors, in one file or in shards, are read lazily. Where a folder has only PyTorch's own format (``.bin``, ``.pt``:
the official EAGLE and Medusa checkpoints), it is unpickled with ``weights_only``, which runs no code.
"""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from models.errors import EyasError
from models.vocab import DraftVocab

# Of several, the first that a folder holds is read: an index before one file, safetensors before pickles.
FILES = (
    "medusa_lm_head.safetensors",  # may lie beside a whole model
    "medusa_lm_head.pt",
    "model.safetensors.index.json",
    "model.safetensors",
    "pytorch_model.bin.index.json",
    "pytorch_model.bin",
)
BROKEN = (OSError, EOFError, ValueError, LookupError, TypeError, RuntimeError, SafetensorError, pickle.UnpicklingError)
PATTERNS = ("*.safetensors", "*.bin", "*.pt")  # under another name, where there is only one such file
# How weights of any format end, and lists of what is in them.
ENDINGS = (".safetensors", ".bin", ".pt", ".pth", ".h5", ".msgpack", ".gguf", ".index.json")


class DrafterWeights:
    """The tensors of a folder by name: ``names``, and ``read(names)`` for those that are wanted."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        first = find_weights(folder)
        try:
            self.files = self._shards(first) if first.name.endswith(".json") else self._single(first)
        except EyasError:
            raise
        except BROKEN as error:
            raise EyasError(f"{first}: not a readable weight file ({_first_line(error)})") from error

    @property
    def names(self) -> list[str]:
        return sorted(self.files)

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        """These tensors, on the CPU, as they are."""
        by_file: dict[Path, list[str]] = {}
        for name in names:
            by_file.setdefault(self.files[name], []).append(name)
        found: dict[str, Tensor] = {}
        for path, wanted in by_file.items():
            try:
                found |= _read(path, wanted)
            except EyasError:
                raise
            except BROKEN as error:
                raise EyasError(f"{path}: not a readable weight file ({_first_line(error)})") from error
        return found

    def _single(self, path: Path) -> dict[str, Path]:
        return dict.fromkeys(_names(path), path)

    def _shards(self, index: Path) -> dict[str, Path]:
        listed: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        missing = sorted({file for file in listed.values() if not (self.folder / Path(file).name).is_file()})
        if missing:
            raise EyasError(f"{index}: names {missing[0]}, which is missing")
        return {name: self.folder / Path(file).name for name, file in listed.items()}


def find_weights(folder: Path) -> Path:
    """The weight file of a folder, or the index of its shards. Raises EyasError if there is none, or several."""
    for name in FILES:
        if (folder / name).is_file():
            return folder / name
    for pattern in PATTERNS:
        found = sorted(folder.glob(pattern))
        if len(found) == 1:
            return found[0]
        if found:
            raise EyasError(f"{folder}: holds {len(found)} {pattern} files and no index that says what each is")
    raise EyasError(f"{folder}: holds no weights ({', '.join(name for name in FILES if 'index' not in name)})")


def copy_rest(source: Path, out: Path) -> None:
    """Copy what lies in a model's folder beside its weights: tokenizer, generation config, licence. What ``out`` has of
    the same name stays."""
    for path in sorted(source.iterdir()):
        skip = path.name.startswith(".") or path.name.endswith(ENDINGS) or (out / path.name).exists()
        if path.is_file() and not skip:
            shutil.copy2(path, out / path.name)


def _names(path: Path) -> list[str]:
    if path.suffix == ".safetensors":
        with safe_open(path, framework="pt") as file:
            return list(file.keys())
    return list(_unpickled(path))


def _read(path: Path, names: Iterable[str]) -> dict[str, Tensor]:
    if path.suffix == ".safetensors":
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in names}
    tensors = _unpickled(path)
    return {name: tensors[name].clone() for name in names}


def _unpickled(path: Path) -> dict[str, Tensor]:
    try:
        found: Any = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (RuntimeError, ValueError):  # the format before PyTorch 1.6 can't be mapped
        found = torch.load(path, map_location="cpu", weights_only=True)
    if not (isinstance(found, Mapping) and all(isinstance(tensor, Tensor) for tensor in found.values())):
        raise EyasError(f"{path}: holds a {type(found).__name__} that is no table of tensors")
    return dict(found)


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def check_finite(name: str, tensor: Tensor) -> None:
    if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
        bad = int((~tensor.isfinite()).sum())
        raise EyasError(f"{name}: {bad} of {tensor.numel()} values are NaN or infinite; the drafter is broken")


def read_vocab(tensors: dict[str, Tensor], config: Mapping[str, Any]) -> DraftVocab:
    """Take d2t and t2d out of ``tensors`` and check them against the config and each other."""
    size, count = int(config["vocab_size"]), int(config.get("draft_vocab_size") or config["vocab_size"])
    d2t, t2d = tensors.pop("d2t", None), tensors.pop("t2d", None)
    if d2t is None:
        if count != size:
            raise EyasError(f"d2t: missing; {count} draft tokens can't be mapped to the target's {size}")
        return DraftVocab.full(size)
    if d2t.shape != (count,) or d2t.is_floating_point():
        raise EyasError(f"d2t: is {d2t.dtype} {list(d2t.shape)}, draft_vocab_size={count} asks for int64 [{count}]")
    ids = torch.arange(count) + d2t
    if bool((ids.diff() <= 0).any()) or int(ids[0]) < 0 or int(ids[-1]) >= size:
        raise EyasError(f"d2t: its target ids j + d2t[j] must ascend within 0..{size - 1}")
    vocab = DraftVocab(ids, size)
    if t2d is not None and (t2d.shape != (size,) or not torch.equal(t2d.bool(), vocab.t2d)):
        raise EyasError("t2d: does not mark exactly the target ids that d2t names")
    return vocab


def fill_module(module: torch.nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Copy ``tensors`` into the module (in its own dtype); missing, unexpected and misshapen ones are errors."""
    expected = module.state_dict()
    for name, own in expected.items():
        if name not in tensors:
            raise EyasError(f"{name}: missing; an engine would leave it random")
        if tensors[name].shape != own.shape:
            raise EyasError(f"{name}: has shape {list(tensors[name].shape)}, config.json asks for {list(own.shape)}")
    for name in tensors:
        if name not in expected:
            raise EyasError(f"{name}: unexpected; config.json describes no such tensor")
    module.load_state_dict(dict(tensors))
