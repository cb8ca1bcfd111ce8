"""EAGLE-3 as serving engines read it: config.json and tensors of the layout that vLLM, SGLang and TensorRT-LLM share.

Tensor names are those of :class:`models.eagle3.Eagle3Drafter` itself. What needs care is the config: engines number
tapped layers differently, spell the rope differently, and skip in silence what they don't know.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from models.errors import EyasError
from models.portable import read_vocab
from models.rope import rope_parameters
from models.vocab import DraftVocab

ARCHITECTURE = "LlamaForCausalLMEagle3"  # the one name that every engine registers
FLAGS = ("norm_before_fc", "fc_norm", "norm_output")


def default_aux_layers(target_layers: int) -> tuple[int, int, int]:
    """The layers that engines tap when a config names none, as boundary ids."""
    return 2, target_layers // 2, target_layers - 3


def eagle3_config(architecture: dict[str, Any], vocab: DraftVocab, target_config: dict[str, Any]) -> dict[str, Any]:
    """config.json of the exported drafter, its dtype apart (the writer of the file adds that).

    ``architecture`` holds the fields of Eagle3Config; ``target_config`` is the target's text config, from which
    come the token ids and the exceptions an engine makes for its family.
    """
    rope = dict(architecture["rope_parameters"])
    scaled = rope["rope_type"] != "default"
    taps, layers = tuple(architecture["tap_ids"]), int(architecture["target_layers"])
    nested: dict[str, Any] = {
        "use_aux_hidden_state": True,
        "norm_before_fc": architecture["norm_before_fc"],  # TensorRT-LLM looks only here
    }
    config = {
        "architectures": [ARCHITECTURE],
        "model_type": "llama",
        "hidden_size": architecture["hidden_size"],
        "intermediate_size": architecture["intermediate_size"],
        "num_hidden_layers": 1,
        "num_attention_heads": architecture["num_attention_heads"],
        "num_key_value_heads": architecture["num_key_value_heads"],
        "head_dim": architecture["head_dim"],
        "hidden_act": "silu",
        "rms_norm_eps": architecture["rms_norm_eps"],
        "vocab_size": vocab.size,
        "draft_vocab_size": len(vocab),
        "max_position_embeddings": architecture["max_position_embeddings"],
        "rope_theta": rope["rope_theta"],
        "rope_scaling": {k: v for k, v in rope.items() if k != "rope_theta"} if scaled else None,
        "rope_parameters": rope,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "bias": False,
        "bos_token_id": target_config.get("bos_token_id"),
        "eos_token_id": target_config.get("eos_token_id"),
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
    tensors: dict[str, Tensor], config: dict[str, Any], target_layers: int | None
) -> tuple[dict[str, Any], DraftVocab, dict[str, Tensor]]:
    """The inverse: fields of Eagle3Config, draft vocabulary and state dict of a serving folder.

    Where a foreign config says nothing, engines' defaults hold; ``target_layers`` is needed only if it names no
    tapped layers.
    """
    weights = own_names(tensors)
    vocab = read_vocab(weights, config)
    return read_architecture(config, target_layers), vocab, weights


def read_architecture(config: dict[str, Any], target_layers: int | None) -> dict[str, Any]:
    nested = config.get("eagle_config") or {}
    hidden, heads = int(config["hidden_size"]), int(config["num_attention_heads"])
    _refuse_unsupported(config, nested)
    taps, layers = _taps(config, nested, target_layers)
    return {
        "hidden_size": hidden,
        "intermediate_size": int(config["intermediate_size"]),
        "num_attention_heads": heads,
        "num_key_value_heads": int(config.get("num_key_value_heads") or heads),
        "head_dim": int(config.get("head_dim") or hidden // heads),
        "rms_norm_eps": float(config.get("rms_norm_eps", 1e-6)),
        "max_position_embeddings": int(config.get("max_position_embeddings", 2048)),
        "rope_parameters": rope_parameters(config),
        "tap_ids": taps,
        "target_layers": layers,
        **{flag: bool(nested.get(flag, config.get(flag, False))) for flag in FLAGS},
    }


def own_names(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Names of other trainers: the layer may be ``layers.0`` instead of ``midlayer``."""
    renamed = {}
    for name, tensor in tensors.items():
        new = "midlayer." + name.removeprefix("layers.0.") if name.startswith("layers.0.") else name
        if new in renamed:
            raise EyasError(f"{name}: present twice, as midlayer.* and as layers.0.*")
        renamed[new] = tensor
    return renamed


def _refuse_unsupported(config: dict[str, Any], nested: dict[str, Any]) -> None:
    required = {
        "num_hidden_layers": 1,
        "hidden_act": "silu",
        "target_hidden_size": config["hidden_size"],
        "norm_before_residual": False,
        "attention_bias": False,
        "mlp_bias": False,
        "bias": False,
    }
    for key, value in required.items():
        if config.get(key, value) not in (value, None):
            raise EyasError(f"config.json: {key}={config[key]} is not supported, only {value}")
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
        raise EyasError("config.json: names no tapped layers; say how many layers the target has (target_layers)")
    count = config.get("num_aux_hidden_states") or len(taps)
    if count != len(taps) or list(taps) != sorted(set(taps)):
        raise EyasError(f"config.json: tapped layers {list(taps)} must be num_aux_hidden_states={count} ascending ids")
    return taps, int(layers or taps[-1] + 1)
