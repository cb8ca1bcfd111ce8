"""Tiny random targets with a real tokenizer and chat template, made in code: for the debug recipe and for tests.

``target.path=tiny:llama`` (any of FAMILIES) makes one in the cache. :func:`tiny_target` writes an fp32 model folder
that ``AutoModelForCausalLM`` loads. The tokenizer is byte-level (256 byte tokens and three special ones, 259 in
all), fewer than the model's ``vocab`` rows, as in many real targets.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

FAMILIES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "gemma3": "gemma3_text", "mistral": "mistral"}
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def tiny_tokenizer(chat_template: str | None = CHATML) -> PreTrainedTokenizerFast:
    """Byte-level tokenizer: ids 0..2 are SPECIAL, 3..258 the bytes; any text round-trips exactly."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate((*SPECIAL, *alphabet))}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|im_end|>", pad_token="<|endoftext|>", clean_up_tokenization_spaces=False
    )
    tokenizer.chat_template = chat_template
    return tokenizer


def tiny_config(
    family: str = "llama",
    *,
    layers: int = 4,
    hidden: int = 64,
    vocab: int = 288,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int | None = None,
    tied: bool = False,
    **extra: Any,
) -> PretrainedConfig:
    """A small config of one family; ``head_dim`` defaults to hidden / heads, ``extra`` goes to the HF config."""
    options: dict[str, Any] = {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim or hidden // heads,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": tied,
        "initializer_range": 0.15,
        "bos_token_id": None,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    if family == "gemma3":  # every other layer attends to the last 8 tokens only
        kinds = ["sliding_attention" if i % 2 == 0 else "full_attention" for i in range(layers)]
        options |= {"layer_types": kinds, "sliding_window": 8, "query_pre_attn_scalar": options["head_dim"]}
    if family == "mistral":
        options |= {"sliding_window": None}
    return AutoConfig.for_model(FAMILIES[family], **(options | extra))


def tiny_model(config: PretrainedConfig, seed: int = 0) -> PreTrainedModel:
    """A random fp32 model whose norms and biases are random too, so that leaving one out shows."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.ndim == 1:
                    centre = 0.0 if name.endswith("bias") else parameter.detach().clone()
                    parameter.copy_(centre + 0.1 * torch.randn_like(parameter))
    return model.eval()


def tiny_target(
    folder: Path,
    family: str = "llama",
    *,
    layers: int = 4,
    hidden: int = 64,
    vocab: int = 288,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int | None = None,
    tied: bool = False,
    seed: int = 0,
    chat_template: str | None = CHATML,
    max_shard_size: str = "5GB",
    **extra: Any,
) -> Path:
    """Save a tiny target (model, tokenizer with a ChatML-like template, generation config) and return ``folder``.

    family: llama, qwen2, qwen3, gemma3 (text) or mistral. EOS ids: 2 (``<|im_end|>``, also the tokenizer's) and
    0 (``<|endoftext|>``, only in generation_config). A small ``max_shard_size`` ("100KB") makes several shards.
    """
    config = tiny_config(
        family,
        layers=layers,
        hidden=hidden,
        vocab=vocab,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        tied=tied,
        **extra,
    )
    model = tiny_model(config, seed)
    model.generation_config = GenerationConfig(eos_token_id=[2, 0], pad_token_id=0, do_sample=False)
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    tiny_tokenizer(chat_template).save_pretrained(folder)
    return folder
