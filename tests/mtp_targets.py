"""Tiny random targets that carry MTP modules, named in their files as each family names them, spelled out here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from tests.tiny import tiny_model

HIDDEN, LAYERS, VOCAB, EXPERTS = 32, 2, 64, 4
COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
}
MOE = {"moe_intermediate_size": 12, "num_experts_per_tok": 2}
LATENT = {"kv_lora_rank": 8, "q_lora_rank": 16, "qk_rope_head_dim": 8, "v_head_dim": 6, "qk_nope_head_dim": 10}
LINEAR: dict[str, Any] = {
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8},
    "layer_types": ["linear_attention", "full_attention"],
}
OPTIONS: dict[str, dict[str, Any]] = {
    "deepseek_v3": {
        **{"num_key_value_heads": 4, "n_shared_experts": 1, "n_routed_experts": EXPERTS, "n_group": 2, "topk_group": 1},
        **{"first_k_dense_replace": 1, "num_nextn_predict_layers": 1},
        **MOE,
        **LATENT,
    },
    "qwen2": {"num_key_value_heads": 2, "num_nextn_predict_layers": 1},
    "llama": {"num_key_value_heads": 2},
    "qwen3": {"num_key_value_heads": 2, "head_dim": 8},
    "qwen3_next": {
        **{"num_key_value_heads": 2, "head_dim": 8, "num_experts": EXPERTS, "shared_expert_intermediate_size": 12},
        **MOE,
        **LINEAR,
    },
    "qwen3_5_text": {"num_key_value_heads": 2, "head_dim": 8, "mtp_num_hidden_layers": 1, **LINEAR},
}
FAMILIES = ("deepseek_v3", "qwen2", "qwen3_next", "qwen3_5_text")  # those whose checkpoints carry modules


def family_config(family: str, **changes: Any) -> PretrainedConfig:
    return AutoConfig.for_model(family, **(COMMON | OPTIONS[family] | changes))


def save_target(folder: Path, family: str, seed: int = 0, max_shard_size: str = "5GB", **changes: Any) -> Path:
    """A target without modules, as transformers saves it."""
    tiny_model(family_config(family, **changes), seed).save_pretrained(folder, max_shard_size=max_shard_size)
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    return folder


def block_in_files(family: str, seed: int = 0) -> dict[str, Tensor]:
    """A random decoder layer by the names of the files, relative to the layer: a saved model's last one."""
    model = tiny_model(family_config(family), seed)
    return {
        name.split(f"layers.{LAYERS - 1}.", 1)[1]: tensor.clone()
        for name, tensor in one_by_one(dict(model.state_dict())).items()
        if f"layers.{LAYERS - 1}." in name
    }


def one_by_one(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Experts of a state dict of transformers, taken apart by hand: gate rows come before up rows."""
    out = {}
    for name, tensor in state.items():
        if name.endswith("experts.gate_up_proj"):
            for e in range(EXPERTS):
                out[name.replace("gate_up_proj", f"{e}.gate_proj.weight")] = tensor[e, :12]
                out[name.replace("gate_up_proj", f"{e}.up_proj.weight")] = tensor[e, 12:]
        elif name.endswith("experts.down_proj"):
            for e in range(EXPERTS):
                out[name.replace("down_proj", f"{e}.down_proj.weight")] = tensor[e]
        else:
            out[name] = tensor
    return {name: tensor.clone() for name, tensor in out.items()}


def module_in_files(family: str, seed: int = 0, number: int = 0) -> dict[str, Tensor]:
    """A random module by the names of the family's files."""
    generator = torch.Generator().manual_seed(seed)
    norms = [
        (torch.randn(HIDDEN, generator=generator) * 0.1).bfloat16().float() for _ in range(3)
    ]  # embedding, hidden, last
    projection = torch.randn(HIDDEN, 2 * HIDDEN, generator=generator) * 0.2
    block = block_in_files(family, seed + 1)
    own: tuple[str, ...]
    if family.startswith("qwen3_"):
        own = ("mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.norm", "mtp.fc")
        stem = f"mtp.layers.{number}"
    elif family == "deepseek_v3":
        stem = f"model.layers.{LAYERS + number}"
        own = (f"{stem}.enorm", f"{stem}.hnorm", f"{stem}.shared_head.norm", f"{stem}.eh_proj")
    else:
        stem = f"model.mtp_layers.{number}"
        own = tuple(f"{stem}.{n}" for n in ("token_layernorm", "hidden_layernorm", "final_layernorm", "input_proj"))
    base = 0.0 if family.startswith("qwen3_") else 1.0
    values = [base + norm for norm in norms] + [projection]
    named = {f"{name}.weight": value for name, value in zip(own, values, strict=True)}
    return named | {f"{stem}.{name}": tensor for name, tensor in block.items()}


def carrying_target(
    folder: Path, family: str, *, max_shard_size: str = "5GB", seed: int = 0, modules: int = 1
) -> tuple[Path, dict[str, Tensor]]:
    """A target with modules in its files (beside the target's own shards, or in its only file), and those tensors."""
    save_target(folder, family, seed, max_shard_size)
    tensors: dict[str, Tensor] = {}
    for number in range(modules):
        tensors |= module_in_files(family, seed + 10 * number, number)
    if family == "deepseek_v3":  # its files repeat embedding and head
        single = AutoModelForCausalLM.from_pretrained(folder).state_dict()
        stem = f"model.layers.{LAYERS}"
        tensors[f"{stem}.embed_tokens.weight"] = single["model.embed_tokens.weight"].clone()
        tensors[f"{stem}.shared_head.head.weight"] = single["lm_head.weight"].clone()
    add_tensors(folder, tensors)
    return folder, tensors


def add_tensors(folder: Path, tensors: dict[str, Tensor]) -> None:
    """Put tensors into a checkpoint: into its only file, or half into the last shard and half into a new one."""
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        path = folder / "model.safetensors"
        save_file(load_file(path) | tensors, path, {"format": "pt"})
        return
    content = json.loads(index.read_text())
    last = sorted(set(content["weight_map"].values()))[-1]
    names = sorted(tensors)
    here, there = names[::2], names[1::2]
    save_file(load_file(folder / last) | {n: tensors[n] for n in here}, folder / last, {"format": "pt"})
    save_file({n: tensors[n] for n in there}, folder / "extra.safetensors", {"format": "pt"})
    content["weight_map"] |= dict.fromkeys(here, last) | dict.fromkeys(there, "extra.safetensors")
    index.write_text(json.dumps(content))
