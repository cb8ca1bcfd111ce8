"""EAGLE-3 as serving engines read it: config.json and tensors of the layout that vLLM, SGLang and TensorRT-LLM share.

Tensor names are those of :class:`models.eagle3.Eagle3Drafter` itself. What needs care is the config: engines number
tapped layers differently, spell the rope differently, and skip in silence what they don't know.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from models.errors import EyasError
from models.layer_serving import llama_config, read_llama_config, refuse_other
from models.vocab import DraftVocab
from models.weight_files import read_vocab

ARCHITECTURE = "LlamaForCausalLMEagle3"  # the one name that every engine registers
EMBEDDING, ROTARY = "embed_tokens.weight", "rotary_emb.inv_freq"
FLAGS = ("norm_before_fc", "fc_norm", "norm_output")


def default_aux_layers(target_layers: int) -> tuple[int, int, int]:
    """The layers that engines tap when a config names none, as boundary ids."""
    return 2, target_layers // 2, target_layers - 3


def eagle3_config(architecture: dict[str, Any], vocab: DraftVocab, target_config: dict[str, Any]) -> dict[str, Any]:
    """config.json of the exported drafter, its dtype apart (the writer of the file adds that).

    ``architecture`` holds the fields of Eagle3Config; ``target_config`` is the target's text config, from which
    come the token ids and the exceptions an engine makes for its family.
    """
    taps, layers = tuple(architecture["tap_ids"]), int(architecture["target_layers"])
    nested: dict[str, Any] = {
        "use_aux_hidden_state": True,
        "norm_before_fc": architecture["norm_before_fc"],  # TensorRT-LLM looks only here
    }
    config = {
        "architectures": [ARCHITECTURE],
        **llama_config(architecture, vocab.size, target_config),
        "draft_vocab_size": len(vocab),
        "num_aux_hidden_states": len(taps),
        "norm_before_residual": False,
        **{flag: architecture[flag] for flag in FLAGS},
        "eagle_config": nested,
        "eyas": {"tap_ids": list(taps), "target_layers": layers},  # what reading back needs; engines ignore it
    }
    if taps != default_aux_layers(layers):
        config["eagle_aux_hidden_state_layer_ids"] = list(taps)
        nested["eagle_aux_hidden_state_layer_ids"] = _output_ids(taps, str(target_config.get("model_type")))
    return config


def _output_ids(taps: tuple[int, ...], family: str) -> list[int]:
    """The tapped layers as SGLang wants them: the layer whose output is tapped, one below the boundary id.

    SGLang adds the one back, except for DeepSeek targets, where it does so only if the list starts with 1.
    """
    shifts = not family.startswith("deepseek") or taps[0] == 2
    if not shifts and taps[0] == 1:
        raise EyasError(f"target.taps={list(taps)}: SGLang can't tap boundary 1 of a DeepSeek target; use 2 or above")
    return [tap - 1 if shifts else tap for tap in taps]


def read_eagle3(
    tensors: dict[str, Tensor], config: dict[str, Any], target: Mapping[str, Any]
) -> tuple[dict[str, Any], DraftVocab, dict[str, Tensor]]:
    """The inverse: fields of Eagle3Config, draft vocabulary and state dict of a serving folder.

    Where a foreign config says nothing, engines' defaults hold; ``target`` (its text config) is needed only if that
    names no tapped layers.
    """
    if isinstance(layer := config.get("transformer_layer_config"), Mapping):  # speculators; vLLM's default where unsaid
        config = {**layer, "norm_before_residual": True, **config}
    weights = own_names(tensors)
    vocab = read_vocab(weights, config)
    return read_architecture(config, target.get("num_hidden_layers")), vocab, weights


def read_architecture(config: dict[str, Any], target_layers: int | None) -> dict[str, Any]:
    nested = config.get("eagle_config") or {}
    _refuse_unsupported(config, nested)
    taps, layers = _taps(config, nested, target_layers)
    return {
        **read_llama_config(config),
        "tap_ids": taps,
        "target_layers": layers,
        **{flag: bool(nested.get(flag, config.get(flag, False))) for flag in FLAGS},
    }


def own_names(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Names of other trainers: the layer may be ``layers.0`` instead of ``midlayer``. What they save besides is left
    out: the target's embedding, which is read in its place, and rotary tables."""
    renamed = {}
    for name, tensor in tensors.items():
        if name.startswith("layers.1."):
            raise EyasError(f"{name}: a drafter of several layers is not supported, only of one")
        new = "midlayer." + name.removeprefix("layers.0.") if name.startswith("layers.0.") else name
        if new in renamed:
            raise EyasError(f"{name}: present twice, as midlayer.* and as layers.0.*")
        if new != EMBEDDING and not new.endswith(ROTARY):
            renamed[new] = tensor
    return renamed


def _refuse_unsupported(config: dict[str, Any], nested: dict[str, Any]) -> None:
    required = {
        "hidden_act": "silu",
        "target_hidden_size": config["hidden_size"],
        "norm_before_residual": False,
        "attention_bias": False,
        "mlp_bias": False,
        "bias": False,
    }
    refuse_other(config, required)  # not num_hidden_layers: an official config says 40 for one layer
    if not nested.get("use_aux_hidden_state", True):
        raise EyasError("config.json: eagle_config.use_aux_hidden_state=false is not supported, only true")


def _taps(config: dict[str, Any], nested: dict[str, Any], layers: int | None) -> tuple[tuple[int, ...], int]:
    """Boundary ids and the target's number of layers. Own note first, then vLLM's key, then SGLang's, then defaults."""
    own, key = config.get("eyas") or {}, "eagle_aux_hidden_state_layer_ids"
    layers = layers or own.get("target_layers")
    if own.get("tap_ids"):
        taps = tuple(own["tap_ids"])
    elif config.get(key):
        taps = tuple(config[key])
    elif nested.get(key):
        taps = tuple(i + 1 for i in nested[key])
    elif layers:
        taps = default_aux_layers(layers)
    else:
        raise EyasError(
            "config.json: names no tapped layers, and which they are by default depends on the target's config"
        )
    count = config.get("num_aux_hidden_states") or len(taps)
    if count != len(taps) or list(taps) != sorted(set(taps)):
        raise EyasError(f"config.json: tapped layers {list(taps)} must be num_aux_hidden_states={count} ascending ids")
    return taps, int(layers or taps[-1] + 1)
