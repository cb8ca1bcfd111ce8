"""A target that was trained along with its drafter (joint training), as a checkpoint keeps it beside the drafter.

    target.safetensors   full: every weight; lora: the adapters
    target.json          kind, how the adapters are shaped, and what became of the target (its perplexity)

:func:`apply_tuned` makes an original target the tuned one; :func:`write_tuned` writes that as an ordinary model folder.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from models.errors import EyasError
from models.packed import lay_out_again

if TYPE_CHECKING:
    from models.target import Target

WEIGHTS, ABOUT = "target.safetensors", "target.json"
LORA_KEYS = ("rank", "alpha", "dropout")
FORMAT = 1


def with_adapters(model: nn.Module, lora: Mapping[str, Any]) -> nn.Module:
    """The model with fresh LoRA adapters (which change nothing yet) on every linear layer but the output head; the
    layers are changed in place."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(
        r=int(lora["rank"]),
        lora_alpha=lora["alpha"],
        lora_dropout=float(lora["dropout"]),
        target_modules="all-linear",
        task_type="CAUSAL_LM",
    )
    wrapped: nn.Module = get_peft_model(model, config)
    wrapped.eval()
    return wrapped


def save_tuned(backbone: nn.Module, folder: Path, lora: Mapping[str, Any] | None, about: Mapping[str, Any]) -> None:
    """Write both files into a checkpoint's folder. about: JSON-able facts about the tuned target."""
    tensors = {name: tensor.detach().contiguous() for name, tensor in _state(backbone, lora).items()}
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    kind = {"kind": "full"} if lora is None else {"kind": "lora", "lora": dict(lora)}
    (folder / ABOUT).write_text(json.dumps({"format": FORMAT, **kind, **about}, indent=1) + "\n", encoding="utf-8")


def restore_tuned(backbone: nn.Module, folder: Path, lora: Mapping[str, Any] | None) -> None:
    """Fill the backbone of a run that goes on."""
    _fill(backbone, lora, folder)


def tuned(folder: Path) -> dict[str, Any] | None:
    """What target.json of a checkpoint says; None where the target was frozen."""
    path = folder / ABOUT
    if not path.is_file():
        return None
    try:
        about: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if about["format"] != FORMAT or about["kind"] not in ("full", "lora"):
            raise ValueError(f"format {about['format']}, kind {about['kind']}")
    except (ValueError, KeyError, TypeError) as error:
        raise EyasError(f"{path}: does not describe a tuned target ({error})") from error
    return about


def apply_tuned(target: Target, folder: Path) -> None:
    """Give ``target``, loaded from its original folder, the weights of the checkpoint ``folder``, adapters merged."""
    about = tuned(folder)
    if about is None:
        raise EyasError(f"{folder}: holds no tuned target ({ABOUT})")
    lora = about.get("lora")
    model: Any = target.model if lora is None else with_adapters(target.model, lora)
    with torch.no_grad():
        _fill(model, lora, folder)
        if lora is not None:
            model.merge_and_unload()
            lay_out_again(target.model)
    target.model.requires_grad_(False)


def write_tuned(source: Path, checkpoint: Path, out: Path, **how: Any) -> None:
    """The tuned target of ``checkpoint`` as an ordinary model folder in ``out`` (which must exist): its weights in the
    dtype of ``how`` (see :meth:`Target.load`), and every other file of the original in ``source`` but its weights."""
    from models.target import Target

    target = Target.load(str(source), **how)
    apply_tuned(target, checkpoint)
    target.model.save_pretrained(out)
    for path in sorted(source.iterdir()):
        weights = path.suffix in (".safetensors", ".bin", ".pt", ".gguf") or path.name.endswith(".index.json")
        if path.is_file() and not weights and not (out / path.name).exists():
            shutil.copyfile(path, out / path.name)


def _state(backbone: nn.Module, lora: Mapping[str, Any] | None) -> dict[str, Tensor]:
    if lora is not None:
        from peft import get_peft_model_state_dict

        found: dict[str, Tensor] = get_peft_model_state_dict(backbone)
        return found
    seen: dict[int, str] = {}
    return {n: t for n, t in backbone.state_dict().items() if seen.setdefault(t.data_ptr(), n) == n}  # tied ones once


def _fill(backbone: nn.Module, lora: Mapping[str, Any] | None, folder: Path) -> None:
    path = folder / WEIGHTS
    try:
        tensors = load_file(path)
    except (OSError, SafetensorError) as error:
        raise EyasError(f"{path}: not a readable safetensors file ({error})") from error
    expected = _state(backbone, lora)
    for name in sorted(set(expected) ^ set(tensors)):
        what = "missing" if name in expected else "not a weight of this target"
        raise EyasError(f"{path}: {name}: {what}; it was trained for another target")
    for name, tensor in tensors.items():
        if tensor.shape != expected[name].shape:
            shapes = f"{list(tensor.shape)} instead of {list(expected[name].shape)}"
            raise EyasError(f"{path}: {name}: has shape {shapes}; it was trained for another target")
    with torch.no_grad():
        for name, tensor in tensors.items():
            expected[name].copy_(tensor)
