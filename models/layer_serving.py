"""What the configs of all one-layer EAGLE drafters have in common: a Llama config of that layer, written and read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from models.errors import EyasError
from models.rope import rope_parameters


def llama_config(architecture: Mapping[str, Any], vocab_size: int, target_config: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of config.json that describe the layer. ``architecture`` holds the fields of LayerConfig;
    ``target_config``, the target's text config, gives the token ids. The rope is spelt for Transformers 4 and 5."""
    rope = dict(architecture["rope_parameters"])
    scaled = rope["rope_type"] != "default"
    return {
        "model_type": "llama",
        "hidden_size": architecture["hidden_size"],
        "intermediate_size": architecture["intermediate_size"],
        "num_hidden_layers": 1,
        "num_attention_heads": architecture["num_attention_heads"],
        "num_key_value_heads": architecture["num_key_value_heads"],
        "head_dim": architecture["head_dim"],
        "hidden_act": "silu",
        "rms_norm_eps": architecture["rms_norm_eps"],
        "vocab_size": vocab_size,
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
    }


def read_llama_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The inverse: the fields of LayerConfig that such a config gives. Engines' defaults where it says nothing."""
    hidden, heads = int(config["hidden_size"]), int(config["num_attention_heads"])
    return {
        "hidden_size": hidden,
        "intermediate_size": int(config["intermediate_size"]),
        "num_attention_heads": heads,
        "num_key_value_heads": int(config.get("num_key_value_heads") or heads),
        "head_dim": int(config.get("head_dim") or hidden // heads),
        "rms_norm_eps": float(config.get("rms_norm_eps", 1e-6)),
        "max_position_embeddings": int(config.get("max_position_embeddings", 2048)),
        "rope_parameters": rope_parameters(dict(config)),
    }


def refuse_other(config: Mapping[str, Any], required: Mapping[str, Any]) -> None:
    """Raise EyasError if a key says anything but the one value that is supported (absent or null is fine)."""
    for key, value in required.items():
        if config.get(key, value) not in (value, None):
            raise EyasError(f"config.json: {key}={config[key]} is not supported, only {value}")
