"""EAGLE-1/2 as serving engines read it: config.json and tensors that vLLM, SGLang and the original share.

Tensor names are those of :class:`models.eagle1.Eagle1Drafter`; embedding and head are the target's. The traps: the
original's ``fc`` has a bias, SGLang leaves it random if the file has none, and vLLM's has no bias and drops it in
silence; ``bias: true`` in the config gives vLLM's attention biases. So a bias of zeros is written, and ``bias: false``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from models.drafter import NotServed
from models.errors import EyasError
from models.frozen import FrozenTarget
from models.layer_serving import llama_config, read_llama_config, refuse_other
from models.vocab import DraftVocab

# SGLang takes the first. vLLM puts "Eagle" before each and takes the first it knows, which is the second one's.
ARCHITECTURES = ["LlamaForCausalLMEagle", "LlamaForCausalLM"]
FC_BIAS, LAYER = "fc.bias", "layers.0."
OF_THE_TARGET = ("embed_tokens.weight", "lm_head.weight")


def serving_tensors(tensors: dict[str, Tensor], frozen: FrozenTarget) -> dict[str, Tensor]:
    """The drafter's own tensors as engines want them. Raises NotServed for what they would leave out in silence."""
    bias = tensors.get(FC_BIAS)
    if bias is not None and bool(bias.any()):
        raise NotServed(f"{FC_BIAS}: is not zero, and vLLM drops it; train with drafter.fc_bias=false to export")
    if frozen.head_bias is not None and bool(frozen.head_bias.any()):
        raise NotServed("the target's output head has a bias, which engines leave out when they draft with that head")
    zeros = tensors["fc.weight"].new_zeros(tensors["fc.weight"].shape[0])
    return tensors | {FC_BIAS: zeros}


def eagle1_config(architecture: dict[str, Any], frozen: FrozenTarget) -> dict[str, Any]:
    """config.json of the exported drafter; ``architecture`` holds the fields of Eagle1Config."""
    config = {
        "architectures": ARCHITECTURES,
        **llama_config(architecture, frozen.vocab_size, frozen.config),
    }
    if frozen.scale != 1.0:
        config["logit_scale"] = frozen.scale
    if frozen.softcap is not None:  # vLLM leaves it out: it drafts the likeliest token, which is the same
        config["final_logit_softcapping"] = frozen.softcap
    return config


def read_eagle1(
    tensors: dict[str, Tensor], config: dict[str, Any]
) -> tuple[dict[str, Any], DraftVocab, dict[str, Tensor]]:
    """The inverse, and official checkpoints: fields of Eagle1Config, the whole vocabulary, and the state dict.

    The official ones carry the target's embedding, which is dropped, and a bias of ``fc`` that their config does not
    always own up to; one of zeros is none.
    """
    weights = {name: tensor for name, tensor in tensors.items() if name not in OF_THE_TARGET}
    _refuse_unsupported(weights, config)
    bias = weights.get(FC_BIAS)
    if bias is None and config.get("bias"):
        raise EyasError(f"{FC_BIAS}: missing, and config.json says bias=true")
    if bias is not None and not bool(bias.any()):
        del weights[FC_BIAS]
    architecture = read_llama_config(config) | {"fc_bias": FC_BIAS in weights}
    return architecture, DraftVocab.full(int(config["vocab_size"])), weights


def _refuse_unsupported(weights: Mapping[str, Tensor], config: Mapping[str, Any]) -> None:
    refuse_other(config, {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "qkv_bias": False})
    if "layers.1.mlp.gate_proj.weight" in weights:  # counted by tensors: an official config says 40 layers for one
        raise EyasError("layers.1: a drafter of several layers is not supported, only of one")
    if f"{LAYER}input_layernorm.weight" in weights:
        raise EyasError(f"{LAYER}input_layernorm.weight: unexpected; EAGLE-1's layer has no input norm")
