"""A copy of a target whose checkpoint also holds MTP modules: how engines find them (``export.stitch=true``).

The target's shards are linked (or copied, across file systems), the modules lie in a shard of their own, and an index
names what is where. Modules that the target carried before are gone from the copy, also from its shards: an engine that
reads every shard would otherwise see both.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from models.drafter import Serving
from models.errors import EyasError
from models.files import read_json, save_tensors
from models.load_frozen import WeightFiles, read_header
from models.mtp_names import bare
from models.mtp_serving import COUNTS, carried_modules, carried_names, text_config
from models.portable import cast_tensor, staged
from models.weight_files import copy_rest

CONFIG, INDEX, SINGLE = "config.json", "model.safetensors.index.json", "model.safetensors"


def stitch_drafter(target: Path | str, served: Serving, out: Path | str, dtype: torch.dtype) -> Path:
    """:func:`stitch` for a drafter in one of the MTP layouts, floating tensors cast to ``dtype``."""
    tensors = {name: cast_tensor(name, tensor, dtype) for name, tensor in served.tensors.items()}
    return stitch(target, tensors, changes_for_target(served.config), out)


def changes_for_target(config: Mapping[str, Any]) -> dict[str, Any]:
    """What a target's config must say for the modules of a drafter-only config: how many there are. Its class stays: a
    Qwen2 target that vLLM runs as MiMo would hand the modules states from before the final norm."""
    return {key: config[key] for key in COUNTS if key in config}


def stitch(
    target: Path | str, tensors: Mapping[str, Tensor], config_changes: Mapping[str, Any], out: Path | str
) -> Path:
    """Write the copy of the folder ``target`` with ``tensors`` (names and dtypes as they are to be stored) to ``out``.

    Everything else in the target's folder comes along, but for weights in other formats; the target's own files are
    never changed. ``out`` appears whole or not at all. Raises EyasError for a quantised target (engines would take the
    modules for quantised, too), a name that is the target's own, and an ``out`` that is there already.
    """
    target, out = Path(target), Path(out)
    config = read_json(target / CONFIG)
    text = text_config(config)
    if config.get("quantization_config") or text.get("quantization_config"):
        raise EyasError(f"export.stitch=true: {target} is quantised; engines would read the modules as quantised, too")
    if out.exists() and any(out.iterdir()):
        raise EyasError(f"{out}: is there already; stitch into a folder of its own")
    weights = WeightFiles(target)
    carried = carried_names(weights, text)
    dropped = set(carried[1]) if carried else set()
    taken = {bare(name) for name in weights if name not in dropped}
    for name in tensors:
        if bare(name) in taken:
            raise EyasError(f"{name}: is a tensor of the target {target} itself")
    with staged(out) as temporary:
        where = _write_weights(weights.files, dropped, tensors, temporary)
        _write_json(temporary / INDEX, where)
        _write_json(temporary / CONFIG, _changed(config, config_changes))
        copy_rest(target, temporary)  # but for weights in other formats, which have no modules
        _check(
            temporary, tensors, set(weights) - dropped, text | {k: v for k, v in config_changes.items() if k in COUNTS}
        )
    return out


def _write_weights(files: list[Path], dropped: set[str], tensors: Mapping[str, Tensor], out: Path) -> dict[str, Any]:
    """Put all shards in place; the content of the index."""
    where: dict[str, str] = {}
    size = sum(tensor.nbytes for tensor in tensors.values())
    for path in files:
        header = read_header(path)[0]
        kept = [name for name in header if name not in dropped]
        size += sum(end - begin for begin, end in (header[name]["data_offsets"] for name in kept))
        new = out / ("model-target.safetensors" if path.name == SINGLE else path.name)
        if len(kept) == len(header):
            _link(path, new)
        elif kept:
            with safe_open(path, framework="pt") as file:
                save_tensors({name: file.get_tensor(name) for name in kept}, new, file.metadata())
            shutil.copymode(path, new)
        where |= dict.fromkeys(kept, new.name)
    name, number = "model-mtp.safetensors", 1
    while (out / name).exists():  # a target that was stitched before, with other tensors in that shard
        name, number = f"model-mtp-{number}.safetensors", number + 1
    save_tensors({key: tensor.detach().cpu().contiguous() for key, tensor in tensors.items()}, out / name)
    shutil.copymode(files[0], out / name)
    return {"metadata": {"total_size": size}, "weight_map": where | dict.fromkeys(tensors, name)}


def _link(path: Path, new: Path) -> None:
    try:
        os.link(path.resolve(), new)  # caches hold links to the real files
    except OSError:
        shutil.copy2(path, new)


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _changed(config: dict[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """The config with these changes; counts of modules stand beside the dimensions they belong to."""
    counts = {key: value for key, value in changes.items() if key in COUNTS}
    kept = {key: value for key, value in config.items() if key not in COUNTS}
    others = {key: value for key, value in changes.items() if key not in COUNTS}
    nested = kept.get("text_config")
    if not isinstance(nested, dict):
        return kept | others | counts
    inner = {key: value for key, value in nested.items() if key not in COUNTS}
    return kept | others | {"text_config": inner | counts}


def _check(folder: Path, tensors: Mapping[str, Tensor], own: set[str], text: Mapping[str, Any]) -> None:
    """The copy holds the target's tensors and these, and the modules read back."""
    weights = WeightFiles(folder)
    for name in sorted({*weights} ^ (own | {*tensors})):
        raise EyasError(f"{folder / INDEX}: {name} is {'unexpected' if name in weights else 'missing'}")
    for name, tensor in tensors.items():
        if not torch.equal(weights.read(name), tensor.detach().cpu()):
            raise EyasError(f"{name}: its values are not those that were to be written")
    if carried_modules(folder, text) is None:
        raise EyasError(f"{folder}: holds no MTP modules")
