"""How the files of a model name its multi-token-prediction modules: three families of names, both ways.

Inside Eyas (models/mtp.py) module i is ``mtp.{i}.enorm``, ``hnorm``, ``proj`` (embedding columns first), ``norm`` and
``block.*``, the family's decoder layer by the names of transformers. In the files of

* DeepSeek-V3 it is the decoder layer L + i, behind the target's own L, with extra tensors;
* MiMo it is ``model.mtp_layers.{i}``, and its projection reads the hidden state first;
* Qwen3-Next and Qwen3.5 it is ``mtp.layers.{i}``, with one projection and one set of norms (stored less one) for all.

Files store experts one by one, transformers' layers as one tensor: see :func:`fuse_experts`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from models.errors import EyasError

PARTS = ("enorm.weight", "hnorm.weight", "proj.weight", "norm.weight")  # of a module, its block apart
OUTER = re.compile(r"^(?:model\.|language_model\.)+")  # what a file may put before all names
EXPERT = re.compile(r"(.*mlp\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")
KINDS = ("gate", "up", "down")  # projections of an expert
ROTARY = "rotary_emb.inv_freq"  # some files store what every model computes


@dataclass(frozen=True)
class MtpLayout:
    """One family's way. ``prefix`` and ``block``: what the names of a module's own tensors and of its block begin with,
    {n} being the module's number; ``parts``: the file's names for PARTS; ``shared``: copies of the target's embedding
    and head that files may hold (never written: engines take the target's)."""

    name: str
    prefix: str
    block: str
    parts: tuple[str, str, str, str]
    shared: dict[str, str]
    after_layers: bool = False  # modules are numbered on from the target's layers
    hidden_first: bool = False  # columns of the projection
    plus_one: bool = False  # norms multiply by 1 + weight
    zero_first: bool = True  # the embedding at position 0 is read as zeros

    @property
    def one_projection(self) -> bool:
        return "{n}" not in self.prefix

    def first(self, config: Mapping[str, Any]) -> int:
        """The number of module 0 in the files."""
        return int(config["num_hidden_layers"]) if self.after_layers else 0

    @cached_property
    def pattern(self) -> re.Pattern[str]:
        block = re.escape(bare(self.block)).replace(r"\{n\}", r"(?P<n>\d+)")
        return re.compile(rf"{block}(?P<rest>.+)")


LAYOUTS = {
    layout.name: layout
    for layout in (
        MtpLayout(
            "deepseek",
            "model.layers.{n}.",
            "model.layers.{n}.",
            ("enorm.weight", "hnorm.weight", "eh_proj.weight", "shared_head.norm.weight"),
            {"embed_tokens.weight": "embedding", "shared_head.head.weight": "head"},
            after_layers=True,
        ),
        MtpLayout(
            "mimo",
            "model.mtp_layers.{n}.",
            "model.mtp_layers.{n}.",
            ("token_layernorm.weight", "hidden_layernorm.weight", "input_proj.weight", "final_layernorm.weight"),
            {"embed_tokens.weight": "embedding", "lm_head.weight": "head"},
            hidden_first=True,
        ),
        MtpLayout(
            "qwen3_next",
            "mtp.",
            "mtp.layers.{n}.",
            ("pre_fc_norm_embedding.weight", "pre_fc_norm_hidden.weight", "fc.weight", "norm.weight"),
            {"embed_tokens.weight": "embedding", "lm_head.weight": "head", "mtp.embed_tokens.weight": "embedding"},
            plus_one=True,
            zero_first=False,
        ),
    )
}


def bare(name: str) -> str:
    """A name without what is put before all names of a file (``model.``, ``model.language_model.``)."""
    return OUTER.sub("", name)


def default_layout(model_type: str) -> MtpLayout:
    """The layout that a family's own files have; MiMo's, whose block is that of Llama and Qwen2, for all others."""
    if model_type.startswith(("deepseek", "glm4_moe", "glm_moe")):
        return LAYOUTS["deepseek"]
    return LAYOUTS["qwen3_next" if model_type.startswith(("qwen3_next", "qwen3_5")) else "mimo"]


def modules_among(names: Iterable[str], first: int | None = None) -> tuple[MtpLayout, list[str]] | None:
    """The layout of the MTP modules among the names of a model's files, and their names; None if there are none.

    first: how many layers the target has of its own, which DeepSeek's modules lie behind. Where that isn't known, they
    are the layers from the first one on that has a module's extra tensors.
    """
    plain = {name: bare(name) for name in names}
    mimo, qwen3_next, deepseek = LAYOUTS["mimo"], LAYOUTS["qwen3_next"], LAYOUTS["deepseek"]
    if inside := [name for name, own in plain.items() if mimo.pattern.fullmatch(own)]:
        return mimo, sorted(inside)
    extra = tuple(qwen3_next.prefix + part for part in qwen3_next.parts)
    if any(qwen3_next.pattern.fullmatch(own) or own in extra for own in plain.values()):
        return qwen3_next, sorted(name for name, own in plain.items() if own.startswith(qwen3_next.prefix))
    layers = {name: match for name, own in plain.items() if (match := deepseek.pattern.fullmatch(own))}
    if first is None:
        first = min((int(m["n"]) for m in layers.values() if m["rest"] in deepseek.parts), default=None)
    inside = [name for name, match in layers.items() if first is not None and int(match["n"]) >= first]
    return (deepseek, sorted(inside)) if inside else None


# --- writing ------------------------------------------------------------------------------------------------


def to_files(layout: MtpLayout, weights: Mapping[str, Tensor], config: Mapping[str, Any]) -> dict[str, Tensor]:
    """The drafter's state dict by the names and conventions of a layout. Values keep their dtype.

    Raises EyasError where several modules differ in what the layout holds once.
    """
    out: dict[str, Tensor] = {}
    first = layout.first(config)
    own = dict(zip(PARTS, layout.parts, strict=True))
    for name, tensor in weights.items():
        number, part = name.removeprefix("mtp.").split(".", 1)
        n = first + int(number)
        if part not in own:
            out |= split_experts(layout.block.format(n=n) + part.removeprefix("block."), tensor)
            continue
        new = layout.prefix.format(n=n) + own[part]
        if layout.hidden_first and part == "proj.weight":
            tensor = torch.cat(tensor.chunk(2, 1)[::-1], 1)
        if layout.plus_one and part != "proj.weight":
            tensor = tensor - 1
        if new in out and not torch.equal(out[new], tensor):
            raise EyasError(
                f"export.layout={layout.name}: holds one {new} for all modules, and those of {name} and "
                f"mtp.0.{part} differ; export one module or another layout"
            )
        out[new] = tensor
    return out


def split_experts(name: str, tensor: Tensor) -> dict[str, Tensor]:
    """The tensors that files hold for one of transformers' layer: experts one by one, anything else as it is."""
    stem, _, kind = name.rpartition(".")
    if not stem.endswith("mlp.experts") or kind not in ("gate_up_proj", "down_proj"):
        return {name: tensor}
    if kind == "down_proj":
        return {f"{stem}.{e}.down_proj.weight": one for e, one in enumerate(tensor)}
    halves = [one.chunk(2) for one in tensor]
    return {
        f"{stem}.{e}.{k}_proj.weight": half[i] for e, half in enumerate(halves) for i, k in enumerate(("gate", "up"))
    }


# --- reading ------------------------------------------------------------------------------------------------


@dataclass
class Modules:
    """What the files hold by the drafter's names: tensors, their names in the files, copies of the target's embedding
    and head by their names in the files, and the number of modules."""

    weights: dict[str, Tensor]
    sources: dict[str, str]
    shared: dict[str, str]
    modules: int


def from_files(layout: MtpLayout, tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> Modules:
    """The inverse of :func:`to_files`; norms stored less one become float32 multipliers.

    Raises EyasError for a name that belongs to no module, and for gaps in the numbers of modules or experts.
    """
    raw: dict[str, Tensor] = {}
    sources: dict[str, str] = {}
    shared: dict[str, str] = {}
    for name, tensor in tensors.items():
        if name.endswith(ROTARY):
            continue
        if (kind := _shared(layout, name)) is not None:
            shared[name] = kind
            continue
        own = _own_name(layout, name, layout.first(config))
        raw[own], sources[own] = tensor, name
    count = _modules(layout, raw, sources, config)
    if layout.one_projection:  # every module has the same
        for part in (p for p in PARTS if f"mtp.0.{p}" in raw):
            raw |= {f"mtp.{i}.{part}": raw[f"mtp.0.{part}"] for i in range(1, count)}
            sources |= {f"mtp.{i}.{part}": sources[f"mtp.0.{part}"] for i in range(1, count)}
    return Modules(fuse_experts({n: _converted(layout, n, t) for n, t in raw.items()}, sources), sources, shared, count)


def file_name(layout: MtpLayout, own: str, config: Mapping[str, Any]) -> str:
    """What a layout calls a tensor of the drafter (of fused experts: the first of its tensors)."""
    return next(iter(to_files(layout, {own: torch.zeros(1, 2, 2)}, config)))


def _shared(layout: MtpLayout, name: str) -> str | None:
    name = bare(name)
    match = layout.pattern.fullmatch(name)
    return layout.shared.get(match["rest"] if match and not layout.one_projection else name) or layout.shared.get(name)


def _own_name(layout: MtpLayout, name: str, first: int) -> str:
    parts = dict(zip(layout.parts, PARTS, strict=True))
    match = layout.pattern.fullmatch(bare(name))
    if match and int(match["n"]) >= first:
        number, rest = int(match["n"]) - first, match["rest"]
        return (
            f"mtp.{number}.{parts[rest]}"
            if not layout.one_projection and rest in parts
            else (f"mtp.{number}.block.{rest}")
        )
    part = parts.get(bare(name).removeprefix(layout.prefix)) if layout.one_projection else None
    if part is None:
        raise EyasError(f"{name}: unexpected; no tensor of MTP modules as {layout.name} names them")
    return f"mtp.0.{part}"


def _modules(
    layout: MtpLayout, raw: Mapping[str, Tensor], sources: Mapping[str, str], config: Mapping[str, Any]
) -> int:
    numbers = {int(own.split(".")[1]): sources[own] for own in raw}
    count = len(numbers)
    for number in sorted(numbers):
        if number >= count:
            gap = min(set(range(count)) - set(numbers))
            wanted = layout.block.format(n=layout.first(config) + gap)
            raise EyasError(
                f"{wanted}*: missing, but {numbers[number]} is there; modules must be numbered without gaps"
            )
    return count


def _converted(layout: MtpLayout, own: str, tensor: Tensor) -> Tensor:
    part = own.split(".", 2)[2]
    if layout.hidden_first and part == "proj.weight" and tensor.ndim == 2:
        return torch.cat(tensor.chunk(2, 1)[::-1], 1)
    if layout.plus_one and part in PARTS and part != "proj.weight":
        return tensor.float() + 1
    return tensor


def fuse_experts(weights: Mapping[str, Tensor], sources: dict[str, str]) -> dict[str, Tensor]:
    """Experts stored one by one as transformers' layers hold them: ``mlp.experts.gate_up_proj`` [E, 2I, H] (gate rows
    first) and ``mlp.experts.down_proj`` [E, H, I]. What is fused already stays."""
    out: dict[str, Tensor] = {}
    experts: dict[str, dict[int, dict[str, tuple[str, Tensor]]]] = {}
    for name, tensor in weights.items():
        if match := EXPERT.fullmatch(name):
            experts.setdefault(match[1], {}).setdefault(int(match[2]), {})[match[3]] = (name, tensor)
        else:
            out[name] = tensor
    for stem, group in experts.items():
        _check_experts(stem, group, sources)
        gate, up, down = (torch.stack([group[e][kind][1] for e in range(len(group))]) for kind in KINDS)
        out |= {f"{stem}.gate_up_proj": torch.cat([gate, up], 1), f"{stem}.down_proj": down}
        any_source = sources[group[0]["gate"][0]]
        sources |= {f"{stem}.gate_up_proj": any_source, f"{stem}.down_proj": sources[group[0]["down"][0]]}
    return out


def _check_experts(
    stem: str, group: Mapping[int, Mapping[str, tuple[str, Tensor]]], sources: Mapping[str, str]
) -> None:
    some = next(iter(next(iter(group.values())).values()))[0]
    beginning = sources[some].removesuffix(some.removeprefix(stem))  # of the experts' names in the files
    seen = {kind: Counter(parts[kind][1].shape for parts in group.values() if kind in parts) for kind in KINDS}
    for e in range(max(group) + 1):
        for kind in KINDS:
            name = f"{beginning}.{e}.{kind}_proj.weight"
            if kind not in group.get(e, {}):
                raise EyasError(f"{name}: missing; experts up to {max(group)} are there")
            found = group[e][kind][1].shape
            usual = seen[kind].most_common(1)[0][0]
            if found != usual:
                raise EyasError(f"{name}: has shape {list(found)}, that of other experts is {list(usual)}")
