"""What a folder with a drafter holds: which method, in whose layout. Config and tensor names are both looked at.

Configs of published checkpoints often name the base model's class (``LlamaForCausalLM``), or count its layers; tensor
names don't lie about the method. Names that other trainers put in front are taken off here.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from models.errors import EyasError
from models.mtp_names import modules_among


@dataclass(frozen=True)
class Method:
    """How a method is known elsewhere. drafter: the class that reads it here; vllm and sglang: the names by which the
    engines are told to draft so (None: they can't)."""

    name: str
    title: str
    drafter: str
    vllm: str | None
    sglang: str | None


METHODS = {
    method.name: method
    for method in (
        Method("eagle1", "EAGLE-1", "models.eagle1.Eagle1Drafter", "eagle", "EAGLE"),
        Method("eagle3", "EAGLE-3", "models.eagle3.Eagle3Drafter", "eagle3", "EAGLE3"),
        Method("medusa", "Medusa", "models.medusa.MedusaDrafter", "medusa", None),
        Method("mtp", "MTP", "models.mtp.MtpDrafter", "mtp", None),
    )
}

# Classes that name a method beyond doubt. LlamaForCausalLM does not: official EAGLE and EAGLE-3 configs both say so.
ARCHITECTURES = (
    (re.compile(r"\w+Eagle3|Eagle3\w+"), "eagle3"),
    (re.compile(r"\w+ForCausalLMEagle|Eagle\w+ForCausalLM"), "eagle1"),
    (re.compile(r"Medusa\w*"), "medusa"),
    (re.compile(r"\w+MTP(?:Model)?"), "mtp"),
)
MEDUSA = re.compile(r"(?:\d+\.\d+\.(?:linear\.)?(?:weight|bias)|blocks\.\d+\.layers\.\d+\.(?:weight|bias))")
MEDUSA_PREFIX = re.compile(r"medusa_heads?\.")

NEEDED = (
    "EAGLE-3 (midlayer.*, or layers.0.* with hidden_norm), EAGLE-1 (fc.weight, layers.0.* without), "
    "Medusa (0.0.linear.weight or blocks.0.layers.0.weight), MTP (mtp.layers.0.*, mtp_layers.0.* or layers.N.eh_proj)"
)


@dataclass(frozen=True)
class Found:
    """The method, and its tensors: name in the files -> name as the method's layouts spell it."""

    method: Method
    names: dict[str, str]


def method_of_class(cls: type) -> Method:
    """The entry of a drafter class, or of the class it derives from."""
    for base in cls.__mro__:
        for method in METHODS.values():
            if method.drafter == f"{base.__module__}.{base.__qualname__}":
                return method
    raise EyasError(f"{cls.__name__}: not of a method that is read back ({', '.join(METHODS)})")


def title_of(cls: type) -> str:
    """What a drafter class is called in messages: its method's title, where it has an entry."""
    try:
        return method_of_class(cls).title
    except EyasError:
        return cls.__name__.removesuffix("Drafter")


def recognise(config: Mapping[str, Any], names: Iterable[str]) -> Found:
    """What ``config.json`` and these tensor names belong to. Raises EyasError that says what was found instead."""
    names = list(names)
    method = _by_config(config) or _by_names(names)
    if method is None:
        shown = ", ".join(sorted(names)[:4]) or "none"
        raise EyasError(
            f"no drafter that Eyas reads: architectures={config.get('architectures')}, "
            f"{len(names)} tensors ({shown}{', ...' if len(names) > 4 else ''}). It would have to be {NEEDED}"
        )
    return Found(METHODS[method], _own_names(method, names))


def _by_config(config: Mapping[str, Any]) -> str | None:
    classes = config.get("architectures") or []
    if not isinstance(classes, list):
        raise EyasError(f"config.json: architectures={classes} is no list of class names")
    for name in classes:
        for pattern, method in ARCHITECTURES:
            if pattern.fullmatch(str(name)):
                return method
    if config.get("model_type") == "medusa":
        return "medusa"
    note = config.get("eyas")
    told = note.get("method") if isinstance(note, Mapping) else None
    return told if told in METHODS else None


def _by_names(names: list[str]) -> str | None:
    bare = {name.removeprefix("model.") for name in names}
    if any(MEDUSA.fullmatch(MEDUSA_PREFIX.sub("", name)) for name in names):
        return "medusa"
    if modules_among(names) is not None:
        return "mtp"
    if "layers.0.hidden_norm.weight" in bare or any(name.startswith("midlayer.") for name in bare):
        return "eagle3"
    return "eagle1" if "fc.weight" in bare and any(name.startswith("layers.0.") for name in bare) else None


def _own_names(method: str, names: list[str]) -> dict[str, str]:
    if method == "mtp":
        own = {name: name for name in _mtp_names(names)}
    elif method == "medusa":
        inside = [name for name in names if MEDUSA_PREFIX.match(name)]  # a whole model with its heads, or only those
        own = {name: MEDUSA_PREFIX.sub("", name) for name in inside or names}
    else:
        own = {name: name.removeprefix("model.") for name in names}
    if len(set(own.values())) < len(own):
        twice = next(new for new in own.values() if list(own.values()).count(new) > 1)
        raise EyasError(f"{twice}: present twice, with and without a prefix")
    return own


def _mtp_names(names: list[str]) -> list[str]:
    """Of a target that carries modules (its embedding lies beside them), those of the modules; all of other folders."""
    _, inside = modules_among(names) or (None, names)
    beside = set(names) - set(inside)
    return inside if any(name.endswith("embed_tokens.weight") for name in beside) else names
