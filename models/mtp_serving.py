"""MTP modules as engines read them, and as targets carry them: config.json and tensors in three layouts.

A drafter-only folder is the target's own config and the modules' tensors; the embedding and the head are left out, as
vLLM and SGLang share the target's with any MTP drafter. Inside a target the same tensors lie among its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from models.drafter import NotServed, Serving
from models.errors import EyasError
from models.files import read_json
from models.load_frozen import WeightFiles, plain_config
from models.mtp_names import (
    LAYOUTS,
    PARTS,
    Modules,
    MtpLayout,
    bare,
    default_layout,
    file_name,
    from_files,
    modules_among,
    to_files,
)
from models.native import SAME_AS, NativeLayer
from models.vocab import DraftVocab

COUNTS = ("num_nextn_predict_layers", "mtp_num_hidden_layers")  # config keys: how many modules there are
QWEN2_BLOCKS = ("llama", "mistral", "qwen2", "qwen3", "mimo")  # their layer is Qwen2's, q_norm and k_norm apart
QUANTISED = ("weight_scale", "weight_scale_inv", "qweight", "qzeros", "scales", "weight_packed")

ZEROS = {True: "as zeros", False: "as it is"}

# --- writing ------------------------------------------------------------------------------------------------


def layout_of(name: str | None, config: Mapping[str, Any]) -> MtpLayout:
    """The layout of that name; None: the one of the target's family. Raises EyasError for other names."""
    if name is None:
        return default_layout(str(config.get("model_type", "")))
    if name not in LAYOUTS:
        raise EyasError(f"export.layout={name}: MTP modules are written as {' or '.join(LAYOUTS)}")
    return LAYOUTS[name]


def write_mtp(
    state_dict: Mapping[str, Tensor],
    architecture: Mapping[str, Any],
    vocab: DraftVocab,
    target: Mapping[str, Any],
    layout: str | None = None,
) -> Serving:
    """The drafter as a folder of its own, for a target with the text config ``target``.

    ``architecture``: num_modules, config (the text config its blocks were made from), zero_first and more. Engines
    score the whole vocabulary, so it reads back with that. Raises EyasError for what the layout can't hold, and for
    what an engine would compute otherwise.
    """
    config = dict(architecture["config"])
    if vocab.size != config.get("vocab_size", vocab.size):
        raise EyasError(f"draft vocabulary: made for {vocab.size} tokens, the target has {config['vocab_size']}")
    chosen = layout_of(layout, config)
    if bool(architecture.get("zero_first", chosen.zero_first)) != chosen.zero_first:
        raise EyasError(
            f"export.layout={chosen.name}: engines read the embedding at position 0 {ZEROS[chosen.zero_first]} there, "
            f"this drafter {ZEROS[not chosen.zero_first]} (drafter.zero_first)"
        )
    tensors = to_files(chosen, state_dict, config)
    changes = config_changes(chosen, config, int(architecture["num_modules"]))
    if chosen.name == "mimo":
        tensors |= _as_qwen2_block(tensors, str(config.get("model_type") or "llama"), asked=layout is not None)
    kept = {key: value for key, value in architecture.items() if key not in ("config", "zero_first")}
    replaced = {key: config[key] for key in (*changes, "architectures", *COUNTS) if key in config}
    note = {"layout": chosen.name, "architecture": kept, "replaced": replaced, "added": sorted({*changes} - {*config})}
    eos = {"eos_token_id": target["eos_token_id"]} if "eos_token_id" in target else {}
    bare_config = {key: value for key, value in config.items() if key not in COUNTS}
    return Serving(tensors, eos | bare_config | changes | {"eyas": note})


def config_changes(layout: MtpLayout, config: Mapping[str, Any], modules: int) -> dict[str, Any]:
    """What the config.json of a drafter-only folder says beyond the target's: the class that engines read it with and
    how many modules there are."""
    family = str(config.get("model_type", ""))
    changes: dict[str, Any] = {count_key(family): modules}
    if layout.name == "deepseek":
        changes["architectures"] = ["DeepSeekMTPModel"]
    elif layout.name == "mimo":
        changes["architectures"] = ["MiMoForCausalLM"]  # vLLM turns it into its MTP class; it knows no other name
        changes |= {"qk_norm": True} if family == "qwen3" else {}
    else:
        moe = "Moe" if "moe" in family else ""
        changes["architectures"] = [f"Qwen3_5{moe}MTP" if family.startswith("qwen3_5") else "Qwen3NextMTP"]
    return changes


def count_key(family: str) -> str:
    """The config key in which a family counts its MTP modules."""
    return COUNTS[1] if family.startswith("qwen3_5") else COUNTS[0]


def _as_qwen2_block(tensors: Mapping[str, Tensor], family: str, *, asked: bool) -> dict[str, Tensor]:
    """The biases of zero that an engine's Qwen2 layer needs where the block has none: it leaves missing ones random.

    For a family whose layer computes anything else, which no engine would notice, raises EyasError if the layout was
    asked for, otherwise NotServed.
    """
    if family not in QWEN2_BLOCKS:
        reason = f"engines compute a layer of Qwen2 in MiMo's ({', '.join(QWEN2_BLOCKS)}), not one of {family}"
        if asked:
            raise EyasError(f"export.layout=mimo: {reason}")
        raise NotServed(f"MTP has no serving layout for a {family} target: {reason}")
    projections = (f"self_attn.{kind}_proj.weight" for kind in "qkv")
    found = [(name, weight) for end in projections for name, weight in tensors.items() if name.endswith(end)]
    biases = {name.removesuffix("weight") + "bias": weight.new_zeros(weight.shape[0]) for name, weight in found}
    return {name: bias for name, bias in biases.items() if name not in tensors}


# --- reading ------------------------------------------------------------------------------------------------


def read_mtp(
    tensors: Mapping[str, Tensor], config: Mapping[str, Any], target: Mapping[str, Any] | None = None
) -> tuple[dict[str, Any], DraftVocab, dict[str, Tensor]]:
    """Architecture, vocabulary (the whole) and state dict of MTP modules in any layout: a drafter-only folder, or the
    MTP tensors of a target's folder with its config.json. ``target``: its text config, which goes first if given.

    Raises EyasError that names the tensor which is missing, unexpected or misshapen, or the config key that disagrees.
    """
    if "speculators_config" in config or "speculators_model_type" in config:
        raise EyasError("config.json: MTP modules of speculators must be stitched into their target by it first")
    note = config.get("eyas") or {}
    text = text_config(config, target)
    layout = _recognised(tensors, text, note.get("layout"))
    found = from_files(layout, tensors, text)
    _check_count(found, config, layout)
    _check_shared(found, tensors, text)
    weights = checked(layout, found, text)
    architecture = {**(note.get("architecture") or {}), "num_modules": found.modules, "config": text}
    return architecture | {"zero_first": layout.zero_first}, DraftVocab.full(int(text["vocab_size"])), weights


def _recognised(names: Mapping[str, Tensor], text: Mapping[str, Any], told: str | None) -> MtpLayout:
    if told in LAYOUTS:
        return LAYOUTS[told]
    found = carried_names(names, text)
    if found is None:
        shown = ", ".join(sorted(names)[:3]) or "none"
        raise EyasError(f"tensors ({shown}): no MTP modules as {', '.join(LAYOUTS)} name them")
    return found[0]


def text_config(config: Mapping[str, Any], target: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The target's text config, as plain as FrozenTarget's, from config.json of a drafter-only or a target's folder."""
    note = config.get("eyas")
    if isinstance(note, Mapping) and "replaced" in note:  # ours: exactly what it was
        gone = {"eyas", "dtype", "torch_dtype", *note.get("added", ())}
        kept = {key: value for key, value in config.items() if key not in gone and key not in COUNTS}
        return kept | dict(note["replaced"])
    if target is not None:
        return dict(target)
    own = dict(config.get("text_config") or config)
    family = str(own.pop("model_type", ""))
    if not family:
        raise EyasError("config.json: model_type is missing")
    from transformers import AutoConfig

    try:
        whole = AutoConfig.for_model(SAME_AS.get(family, family), **own)
    except (ValueError, TypeError) as error:
        raise EyasError(f"config.json: model_type={family} is no family that transformers knows ({error})") from error
    return plain_config(whole, Path())


def checked(layout: MtpLayout, found: Modules, text: Mapping[str, Any]) -> dict[str, Tensor]:
    """The state dict, proven to be what modules of this config consist of; errors name the tensor in the files."""
    expected = expected_shapes(text, found.modules)
    weights = {}
    for name, shape in expected.items():
        if name not in found.weights:
            raise EyasError(f"{file_name(layout, name, text)}: missing; an engine would leave it random")
        tensor = found.weights[name]
        if tensor.shape != shape:
            what = f"{found.sources[name]}: has shape {list(_as_stored(name, tensor))}"
            raise EyasError(f"{what}, config.json asks for {list(_as_stored(name, torch.empty(shape, device='meta')))}")
        weights[name] = tensor
    for name, tensor in found.weights.items():
        neutral = name.endswith("_proj.bias") and not bool(tensor.any())  # written for engines whose layer has one
        if name not in expected and not neutral:
            what = "is quantised" if name.endswith(QUANTISED) else "config.json describes no such tensor"
            raise EyasError(f"{found.sources[name]}: unexpected; {what}")
    return weights


def _as_stored(name: str, tensor: Tensor) -> torch.Size:
    """The shape of one expert's tensor where ``tensor`` holds all."""
    if not name.endswith(("mlp.experts.gate_up_proj", "mlp.experts.down_proj")):
        return tensor.shape
    return tensor[0].chunk(2)[0].shape if name.endswith("gate_up_proj") else tensor[0].shape


def expected_shapes(text: Mapping[str, Any], modules: int) -> dict[str, torch.Size]:
    """Names and shapes of the state dict of so many modules."""
    hidden = int(text["hidden_size"])
    with torch.device("meta"):
        block = {name: tensor.shape for name, tensor in NativeLayer(text).state_dict().items()}
    own = {part: torch.Size([hidden, 2 * hidden] if part == "proj.weight" else [hidden]) for part in PARTS}
    own |= {f"block.{name}": shape for name, shape in block.items()}
    return {f"mtp.{i}.{part}": shape for i in range(modules) for part, shape in own.items()}


def _check_count(found: Modules, config: Mapping[str, Any], layout: MtpLayout) -> None:
    nested = config.get("text_config") or {}
    for key in COUNTS:
        told = config.get(key) or nested.get(key)
        if told and int(told) != found.modules:
            some = next(iter(found.sources.values()), layout.block)
            raise EyasError(f"config.json: {key}={told}, but the files hold {found.modules} MTP modules ({some}, ...)")


def _check_shared(found: Modules, tensors: Mapping[str, Tensor], text: Mapping[str, Any]) -> None:
    wanted = torch.Size([int(text["vocab_size"]), int(text["hidden_size"])])
    for name in found.shared:
        if tensors[name].shape != wanted:
            raise EyasError(f"{name}: has shape {list(tensors[name].shape)}, the target's is {list(wanted)}")


# --- modules that a target carries --------------------------------------------------------------------------


def carried_names(names: Iterable[str], config: Mapping[str, Any]) -> tuple[MtpLayout, list[str]] | None:
    """The layout and the names of the MTP tensors in a target's files; None if it carries none."""
    return modules_among(names, config.get("num_hidden_layers"))


def carries_mtp(folder: Path | str) -> bool:
    """Whether a folder holds a target with MTP modules of its own (its embedding lies beside them)."""
    try:
        weights = WeightFiles(Path(folder))
        outer = read_json(Path(folder) / "config.json")
        text = outer.get("text_config") or outer
        carried = carried_names(weights, text)
    except (EyasError, OSError, ValueError, KeyError, AttributeError):
        return False
    return carried is not None and any(bare(name) == "embed_tokens.weight" for name in weights)


def carried_modules(folder: Path | str, config: Mapping[str, Any]) -> dict[str, Tensor] | None:
    """The state dict of the MTP modules in a target's own folder, as stored (norms kept less one become float32).

    ``config``: the target's text config. Only these tensors are read. None if the folder has none, whatever the config
    counts (a model saved by transformers loses them). Raises EyasError that names the tensor which is missing,
    unexpected or misshapen, or differs from the target's embedding or head that it should repeat.
    """
    weights = WeightFiles(Path(folder))
    carried = carried_names(weights, config)
    if carried is None:
        return None
    layout, names = carried
    try:
        tensors = {name: weights.read(name) for name in names}
        found = from_files(layout, tensors, config)
        _check_count(found, config, layout)
        _check_shared(found, tensors, config)
        _check_repeats(found, tensors, weights)
        return checked(layout, found, config)
    except EyasError as error:
        raise EyasError(f"{folder}: {error}") from error


def open_carried(folder: Path | str) -> tuple[dict[str, Any], DraftVocab, dict[str, Tensor]]:
    """Architecture, vocabulary and state dict of the modules that a target carries. Raises EyasError if there are none,
    and as :func:`carried_modules` does."""
    folder = Path(folder)
    config = text_config(read_json(folder / "config.json"))
    weights = carried_modules(folder, config)
    if weights is None:
        raise EyasError(f"{folder}: the model carries no MTP modules")
    return architecture_of(weights, config), DraftVocab.full(int(config["vocab_size"])), weights


def architecture_of(weights: Mapping[str, Tensor], config: Mapping[str, Any]) -> dict[str, Any]:
    """Architecture of carried modules: as many as there are, the target's config, what its engines do at position 0."""
    modules = len({name.split(".")[1] for name in weights})
    zero_first = default_layout(str(config.get("model_type", ""))).zero_first
    return {"num_modules": modules, "config": dict(config), "zero_first": zero_first}


def _check_repeats(found: Modules, tensors: Mapping[str, Tensor], weights: WeightFiles) -> None:
    """Copies of the target's embedding and head must be copies: Eyas, like engines, uses the target's."""
    by_bare = {bare(name): name for name in weights if name not in found.shared}
    embedding = by_bare.get("embed_tokens.weight")
    originals = {"embedding": embedding, "head": by_bare.get("lm_head.weight", embedding)}
    for name, kind in found.shared.items():
        original = originals[kind]
        if original is not None and not torch.equal(tensors[name], weights.read(original)):
            raise EyasError(f"{name}: differs from {original}, which the module shares; that is not supported")
