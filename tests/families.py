"""Text configs of tiny targets of many families, as FrozenTarget.config has them."""

from __future__ import annotations

from typing import Any

from models.tiny_target import tiny_config

SHARED: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 512,
    "initializer_range": 0.15,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
}
EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
# Latent attention whose values are narrower than its keys, and experts in groups behind one dense layer.
DEEPSEEK: dict[str, Any] = {
    **SHARED,
    **EXPERTS,
    "model_type": "deepseek_v3",
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "head_dim": 8,  # of the rotated part
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
# Full attention with a gate in every fourth layer, partial rotation, norms of 1 + weight, experts.
QWEN3_NEXT: dict[str, Any] = {
    **SHARED,
    **EXPERTS,
    "model_type": "qwen3_next",
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": 4,
    "shared_expert_intermediate_size": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0, "partial_rotary_factor": 0.5},
}
# The same, dense, with positions in three parts.
QWEN3_5: dict[str, Any] = {k: v for k, v in QWEN3_NEXT.items() if k not in EXPERTS} | {"model_type": "qwen3_5_text"}


def plain(family: str, **extra: Any) -> dict[str, Any]:
    config: dict[str, Any] = tiny_config(family, vocab=40, **extra).to_dict()
    return config


GEMMA3 = plain("gemma3", query_pre_attn_scalar=25)
FAMILIES: dict[str, dict[str, Any]] = {
    **{family: plain(family) for family in ("llama", "mistral", "qwen2", "qwen3")},
    "deepseek_v3": DEEPSEEK,
    "gemma3": GEMMA3,
    "qwen3_5": QWEN3_5,
    "qwen3_next": QWEN3_NEXT,
}
