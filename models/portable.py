"""Folders that serving engines load: ``config.json`` and one ``model.safetensors``, whatever the drafter method.

Engines are lax readers: they skip names they don't know, leave missing tensors random and never report either. So
everything is checked here, when a folder is written and when one is read, and every error names the tensor.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from models.checkpoint import ARCHITECTURE, UNREADABLE, drafter_class, load_drafter
from models.drafter import Drafter
from models.errors import EyasError
from models.files import sync
from models.vocab import DraftVocab

WEIGHTS, CONFIG, CARD = "model.safetensors", "config.json", "README.md"
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
MAPS = {"d2t": torch.int64, "t2d": torch.bool}  # the draft vocabulary, never cast


@dataclass(frozen=True)
class Served:
    """How a layout is known elsewhere: the class that reads it here, and each engine's name for the method."""

    drafter: str
    vllm: str
    sglang: str


SERVED = {"LlamaForCausalLMEagle3": Served("models.eagle3.Eagle3Drafter", "eagle3", "EAGLE3")}


def served(config: Mapping[str, Any], where: Path) -> Served:
    """The entry of SERVED for a config.json's ``architectures``."""
    names = config.get("architectures")
    for name in names if isinstance(names, list) else ():
        if name in SERVED:
            return SERVED[name]
    raise EyasError(f"{where / CONFIG}: architectures={names} is not a layout Eyas reads ({', '.join(SERVED)})")


# --- writing ------------------------------------------------------------------------------------------------


def write_export(tensors: Mapping[str, Tensor], config: dict[str, Any], folder: Path | str, dtype: str) -> Path:
    """Write, check and put in place in one go; see :func:`staged` for what happens to an export already there."""
    with staged(Path(folder)) as temporary:
        fill_export(tensors, config, temporary, dtype)
        check_export(temporary)
    return Path(folder)


def fill_export(tensors: Mapping[str, Tensor], config: dict[str, Any], folder: Path, dtype: str) -> None:
    """Write both files into an existing folder: floating tensors cast to ``dtype``, maps as they are."""
    if dtype not in DTYPES:
        raise EyasError(f"export.dtype={dtype}: must be one of {', '.join(DTYPES)}")
    cast = {name: _cast(name, tensor, DTYPES[dtype]) for name, tensor in tensors.items()}
    save_file(cast, folder / WEIGHTS, metadata={"format": "pt"})
    whole = config | {"dtype": dtype, "torch_dtype": dtype}  # both spellings: Transformers 5 and 4
    (folder / CONFIG).write_text(json.dumps(whole, indent=2) + "\n", encoding="utf-8")
    (folder / WEIGHTS).chmod((folder / CONFIG).stat().st_mode)  # safetensors lets only the owner read it


def _cast(name: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    tensor = tensor.detach().cpu()
    if not tensor.is_floating_point():
        return tensor.contiguous()
    _check_finite(name, tensor)
    out = tensor.to(dtype)
    if not bool(out.isfinite().all()):
        largest = float(tensor.abs().max())
        raise EyasError(f"{name}: {largest:.4g} overflows {str(dtype)[6:]}; export in bfloat16 or float32")
    return out.contiguous().clone()  # safetensors refuses tensors that share memory


def _check_finite(name: str, tensor: Tensor) -> None:
    if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
        bad = int((~tensor.isfinite()).sum())
        raise EyasError(f"{name}: {bad} of {tensor.numel()} values are NaN or infinite; the drafter is broken")


@contextmanager
def staged(folder: Path) -> Iterator[Path]:
    """A temporary folder beside ``folder`` that takes its place when the block ends well.

    What is there already stays untouched until then, and for good if the block raises. Only an earlier export
    (or an empty folder) is ever replaced: a folder that holds anything else is refused.
    """
    temporary, old = (folder.with_name(f".{folder.name}.{end}") for end in (f"tmp-{os.getpid()}", "old"))
    if old.exists():  # a run died between the two renames below
        if folder.exists():
            shutil.rmtree(old)
        else:
            old.rename(folder)
    _refuse_foreign(folder)
    for left in folder.parent.glob(f".{folder.name}.tmp-*"):
        if left == temporary or not _alive(left.name.rpartition("-")[2]):  # this number again: common in containers
            shutil.rmtree(left, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        yield temporary
        for path in temporary.iterdir():
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


def _refuse_foreign(folder: Path) -> None:
    if not folder.exists():
        return
    if not folder.is_dir():
        raise EyasError(f"{folder}: is a file; give a folder to export to")
    foreign = sorted(path.name for path in folder.iterdir() if path.name not in (WEIGHTS, CONFIG, CARD))
    if foreign:
        raise EyasError(f"{folder}: holds {foreign[0]}, which no export writes; export to a folder of its own")


# --- reading ------------------------------------------------------------------------------------------------


def load_export(folder: Path | str, *, target_layers: int | None = None) -> Drafter:
    """The drafter of a serving folder, float32, in eval mode.

    Also reads folders of other trainers of the same layout. Where their config names no tapped layers, the
    defaults depend on the target's number of layers, which must then be given.
    """
    folder = Path(folder)
    tensors, config = read_export(folder)
    return _build(tensors, config, folder, target_layers)


def open_drafter(folder: Path | str, *, target_layers: int | None = None) -> Drafter:
    """The drafter of a checkpoint folder or of a serving folder, whichever it is."""
    if (Path(folder) / ARCHITECTURE).exists() or not (Path(folder) / CONFIG).exists():
        return load_drafter(folder)
    return load_export(folder, target_layers=target_layers)


def check_export(folder: Path | str) -> Drafter:
    """Prove that a folder is exactly what Eyas writes: names, shapes, dtypes, finite values, a consistent vocabulary.

    Returns the drafter read back from it.
    """
    folder = Path(folder)
    tensors, config = read_export(folder)
    dtype = config.get("dtype")
    if dtype not in DTYPES or dtype != config.get("torch_dtype"):
        raise EyasError(f"{folder / CONFIG}: dtype={dtype} and torch_dtype={config.get('torch_dtype')} must agree")
    full = config.get("draft_vocab_size") == config.get("vocab_size")
    for name, tensor in tensors.items():
        if full and name in MAPS:
            raise EyasError(f"{name}: must be absent, the draft vocabulary is the whole vocabulary (vLLM refuses it)")
        wanted = MAPS.get(name, DTYPES[dtype])
        if tensor.dtype != wanted:
            raise EyasError(f"{name}: is {tensor.dtype}, config.json and layout ask for {wanted}")
    drafter = _build(tensors, config, folder, None)
    expected = set(drafter.state_dict()) | (set() if full else set(MAPS))
    for name in sorted(expected ^ set(tensors)):
        raise EyasError(f"{name}: {'missing' if name in expected else 'not a name of the portable layout'}")
    return drafter


def read_export(folder: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors and config of a serving folder, as they are."""
    try:
        config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        tensors = load_file(folder / WEIGHTS)
    except (OSError, ValueError, SafetensorError) as error:
        raise EyasError(f"{folder}: not a serving folder with {CONFIG} and {WEIGHTS} ({error})") from error
    if not isinstance(config, dict):
        raise EyasError(f"{folder / CONFIG}: must hold a JSON object")
    return tensors, config


def _build(tensors: dict[str, Tensor], config: dict[str, Any], folder: Path, target_layers: int | None) -> Drafter:
    cls = drafter_class(served(config, folder).drafter)
    bare = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    try:
        for name, tensor in tensors.items():
            _check_finite(name, tensor)
        return cls.from_serving(bare, config, target_layers).eval()
    except EyasError as error:
        raise EyasError(f"{folder}: {error}") from error
    except KeyError as error:
        raise EyasError(f"{folder / CONFIG}: key {error} is missing") from error
    except UNREADABLE as error:
        raise EyasError(f"{folder / CONFIG}: describes no drafter ({' '.join(str(error).split())})") from error


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
