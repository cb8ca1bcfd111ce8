"""EAGLE-1 as vLLM's EagleLlamaForCausalLM computes it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from models.frozen import FrozenTarget
from scripts.engines.dense import Cache, attend, rms_norm, rotate, swiglu


class Eagle1Engine:
    """See scripts/engines/__init__.py; embedding and head are the target's, the whole vocabulary is drafted.

    Of ``fc`` only the weight is read, as vLLM does. Logits are capped where the config says so (SGLang); vLLM drafts
    the likeliest token, which a cap does not change.
    """

    def __init__(self, folder: Path, frozen: FrozenTarget) -> None:
        self.config: Any = AutoConfig.from_pretrained(folder)
        self.weights = {name: t.float() for name, t in load_file(folder / "model.safetensors").items()}
        self.embedding, self.head = frozen.embedding, frozen.head
        self.rotary = LlamaRotaryEmbedding(self.config)

    @property
    def draft_ids(self) -> Tensor:
        return torch.arange(self.head.shape[0])

    def draft_logits(self, next_ids: Tensor, taps: Tensor, final: Tensor, drafted: Tensor) -> Tensor:
        state, cache = self._layer(final.float(), next_ids, 0, None)
        states = [state[-1:]]
        for step, token in enumerate(drafted, 1):
            state, cache = self._layer(states[-1], token[None], len(next_ids) - 1 + step, cache)
            states.append(state)
        logits = torch.cat(states) @ self.head.float().T * getattr(self.config, "logit_scale", 1.0)
        cap = getattr(self.config, "final_logit_softcapping", None)
        return logits if cap is None else cap * (logits / cap).tanh()

    def _weight(self, name: str) -> Tensor:
        return self.weights[f"layers.0.{name}.weight"]

    def _layer(self, feature: Tensor, ids: Tensor, start: int, cache: Cache | None) -> tuple[Tensor, Cache]:
        """fc and the draft layer on n tokens from position ``start`` on: its output [n, H] and the grown cache."""
        x = torch.cat([self.embedding[ids].float(), feature], -1) @ self.weights["fc.weight"].T
        count, width = len(ids), self.config.head_dim
        q, k, v = ((x @ self._weight(f"self_attn.{n}_proj").T).view(count, -1, width).transpose(0, 1) for n in "qkv")
        cos, sin = self.rotary(q, torch.arange(start, start + count)[None])
        mixed, cache = attend(rotate(q, cos[0], sin[0]), rotate(k, cos[0], sin[0]), v, cache)
        x = x + mixed @ self._weight("self_attn.o_proj").T
        y = rms_norm(x, self._weight("post_attention_layernorm"), self.config.rms_norm_eps)
        return x + swiglu(y, *(self._weight(f"mlp.{n}_proj") for n in ("gate", "up", "down"))), cache
