"""A target that was trained along with its drafter (joint training), as a checkpoint keeps it beside the drafter.

    target.safetensors   full: every weight; lora: the adapters
    target.json          kind, how the adapters are shaped, and what became of the target (its perplexity)

:func:`apply_tuned` makes an original target the tuned one; :func:`write_tuned` writes that as an ordinary model folder,
which an export has in ``target/``. That folder has a target.json of kind ``whole``, and the export's config says the
same (:func:`as_model`), so that the drafter is never taken for one of the original. :func:`load_tuned` loads the target
of any of them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from models.errors import EyasError
from models.files import read_json, save_tensors
from models.packed import lay_out_again
from models.portable import TARGET
from models.run_folder import file_digest
from models.weight_files import copy_rest

if TYPE_CHECKING:
    from models.target import Target

WEIGHTS, ABOUT = "target.safetensors", "target.json"
LORA_KEYS = ("rank", "alpha", "dropout")
FORMAT = 1
WHOLE = "whole"
KINDS = ("full", "lora", WHOLE)


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


def save_tuned(
    backbone: nn.Module,
    folder: Path,
    lora: Mapping[str, Any] | None,
    about: Mapping[str, Any],
    weights: Mapping[str, Tensor] | None = None,
) -> None:
    """Write both files into a checkpoint's folder. about: JSON-able facts about the tuned target; weights: what to
    write instead of the backbone's own state dict, of which they are a part."""
    found = _state(backbone, lora, backbone.state_dict() if weights is None else weights)
    tensors = {name: tensor.detach().contiguous() for name, tensor in found.items()}
    save_tensors(tensors, folder / WEIGHTS)
    kind = {"kind": "full"} if lora is None else {"kind": "lora", "lora": dict(lora)}
    (folder / ABOUT).write_text(json.dumps({"format": FORMAT, **kind, **about}, indent=1) + "\n", encoding="utf-8")


def restore_tuned(backbone: nn.Module, folder: Path, lora: Mapping[str, Any] | None) -> None:
    """Fill the backbone of a run that goes on."""
    _fill(backbone, lora, folder)


def tuned(folder: Path) -> dict[str, Any] | None:
    """What is known of the target that was trained along; None where it was frozen.

    ``folder``: a checkpoint (kind full or lora), an export of one, or the tuned model itself (kind whole).
    """
    path = folder / ABOUT
    told: Any = read_json(path) if path.is_file() else _note(folder)
    if told is None and (folder / WEIGHTS).is_file():
        raise EyasError(f"{path}: missing, although {WEIGHTS} beside it is a tuned target's")
    if told is None:
        return None
    try:
        about: dict[str, Any] = dict(told)
        if about["format"] != FORMAT or about["kind"] not in KINDS:
            raise ValueError(f"format {about['format']}, kind {about['kind']}")
        if about["kind"] == "lora" and not all(isinstance(about["lora"][key], int | float) for key in LORA_KEYS):
            raise ValueError(f"lora {about['lora']}, which must have the numbers {', '.join(LORA_KEYS)}")
    except (ValueError, KeyError, TypeError) as error:
        raise EyasError(f"{path}: does not describe a tuned target ({error})") from error
    return about


def as_model(folder: Path) -> dict[str, Any]:
    """What is said of the tuned target of ``folder`` once it is a model of its own. weights: digest of what was
    trained, by which the model is known again."""
    about = _known(folder)
    kept = {key: value for key, value in about.items() if key != "lora"}
    return kept | {"kind": WHOLE, "weights": _weights_digest(folder, about)}


def is_tuned_by(target: Path, folder: Path) -> bool:
    """Whether the model in ``target`` is the one trained along with the drafter of ``folder``."""
    own, about = tuned(target) if (target / ABOUT).is_file() else None, tuned(folder)
    return own is not None and about is not None and own.get("weights") == _weights_digest(folder, about)


def load_tuned(original: Path, folder: Path, **how: Any) -> Target:
    """The target that was trained along with the drafter of ``folder``, from the original it was made from (or from
    itself). ``how``: see :meth:`Target.load`."""
    from models.target import Target

    about = _known(folder)
    if is_tuned_by(original, folder):
        return Target.load(str(original), **how)
    if about["kind"] == WHOLE:
        return Target.load(str(_model_folder(folder)), **how)
    target = Target.load(str(original), **how)
    apply_tuned(target, folder)
    return target


def check_tuned(folder: Path) -> None:
    """Raise EyasError if the tuned target that a checkpoint or export speaks of is not there; reads no weights."""
    found = _model_folder(folder) if _known(folder)["kind"] == WHOLE else folder / WEIGHTS
    if not found.exists():
        raise EyasError(f"{folder}: its drafter goes with a target that was trained along; {found} is missing")


def apply_tuned(target: Target, folder: Path) -> None:
    """Give ``target``, loaded from its original folder, the weights of the checkpoint ``folder``, adapters merged."""
    lora = _known(folder).get("lora")
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
    target = load_tuned(source, checkpoint, **how)
    target.model.save_pretrained(out)
    copy_rest(source, out)
    (out / ABOUT).write_text(json.dumps(as_model(checkpoint), indent=1) + "\n", encoding="utf-8")


def _known(folder: Path) -> dict[str, Any]:
    about = tuned(folder)
    if about is None:
        raise EyasError(f"{folder}: holds no tuned target ({ABOUT})")
    return about


def _note(folder: Path) -> Any:
    """What the config of an export says of its target; None of any other folder."""
    try:
        return json.loads((folder / "config.json").read_text(encoding="utf-8"))["eyas"]["target"]
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _model_folder(folder: Path) -> Path:
    """Where the tuned model of an export lies; ``folder`` itself if it is that model."""
    return folder if (folder / ABOUT).is_file() else folder / TARGET


def _weights_digest(folder: Path, about: Mapping[str, Any]) -> Any:
    return about["weights"] if about["kind"] == WHOLE else file_digest(folder / WEIGHTS)


def _state(backbone: nn.Module, lora: Mapping[str, Any] | None, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    if lora is not None:
        from peft import get_peft_model_state_dict

        found: dict[str, Tensor] = get_peft_model_state_dict(backbone, state_dict=weights)
        return found
    every = {name for name, _ in backbone.named_parameters(remove_duplicate=False)}
    again = every - {name for name, _ in backbone.named_parameters()}  # tied to one that has another name
    return {name: tensor for name, tensor in weights.items() if name not in again}


def _fill(backbone: nn.Module, lora: Mapping[str, Any] | None, folder: Path) -> None:
    path = folder / WEIGHTS
    try:
        tensors = load_file(path)
    except (OSError, SafetensorError) as error:
        raise EyasError(f"{path}: not a readable safetensors file ({error})") from error
    expected = _state(backbone, lora, backbone.state_dict())
    for name in sorted(set(expected) ^ set(tensors)):
        what = "missing" if name in expected else "not a weight of this target"
        raise EyasError(f"{path}: {name}: {what}; it was trained for another target")
    for name, tensor in tensors.items():
        if tensor.shape != expected[name].shape:
            shapes = f"{list(tensor.shape)} instead of {list(expected[name].shape)}"
            raise EyasError(f"{path}: {name}: has shape {shapes}; it was trained for another target")
        if not bool(tensor.isfinite().all()):
            raise EyasError(f"{path}: {name}: holds NaN or infinite values; the tuned target is broken")
    with torch.no_grad():
        for name, tensor in tensors.items():
            expected[name].copy_(tensor)
