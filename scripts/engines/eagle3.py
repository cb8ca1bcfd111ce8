"""EAGLE-3 as vLLM's LlamaForCausalLMEagle3 computes it."""

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


class Eagle3Engine:
    """See scripts/engines/__init__.py; the embedding is the target's."""

    def __init__(self, folder: Path, frozen: FrozenTarget) -> None:
        self.config: Any = AutoConfig.from_pretrained(folder)
        tensors = load_file(folder / "model.safetensors")
        self.weights = {name: t.float() if t.is_floating_point() else t for name, t in tensors.items()}
        self.embedding = frozen.embedding
        self.rotary = LlamaRotaryEmbedding(self.config)

    @property
    def draft_ids(self) -> Tensor:
        every = torch.arange(self.weights["lm_head.weight"].shape[0])
        return every + self.weights["d2t"] if "d2t" in self.weights else every

    def draft_logits(self, next_ids: Tensor, taps: Tensor, final: Tensor, drafted: Tensor) -> Tensor:
        state, cache = self._layer(self._fuse(taps), next_ids, 0, None)
        outputs = [self._norm("norm", state[-1:])]
        feature = outputs[-1] if self._flag("norm_output") else state[-1:]
        for step, token in enumerate(drafted, 1):
            state, cache = self._layer(feature, token[None], len(next_ids) - 1 + step, cache)
            outputs.append(self._norm("norm", state))
            feature = outputs[-1] if self._flag("norm_output") else state
        return torch.cat(outputs) @ self.weights["lm_head.weight"].T

    def _flag(self, key: str) -> bool:
        nested = getattr(self.config, "eagle_config", None) or {}
        return bool(nested.get(key, getattr(self.config, key, False)))

    def _norm(self, name: str, x: Tensor) -> Tensor:
        return rms_norm(x, self.weights[f"{name}.weight"], self.config.rms_norm_eps)

    def _weight(self, name: str) -> Tensor:
        return self.weights[f"midlayer.{name}.weight"]

    def _fuse(self, taps: Tensor) -> Tensor:
        taps = taps.float()
        if self._flag("norm_before_fc"):
            taps = self._norm("input_norm", taps)
        if self._flag("fc_norm"):
            parts = taps.chunk(self.config.num_aux_hidden_states, -1)
            taps = torch.cat([self._norm(f"fc_norm.{i}", part) for i, part in enumerate(parts)], -1)
        return taps @ self.weights["fc.weight"].T

    def _layer(self, feature: Tensor, ids: Tensor, start: int, cache: Cache | None) -> tuple[Tensor, Cache]:
        """The draft layer on n tokens from position ``start`` on: its residual stream [n, H] and the grown cache."""
        embedded = self._norm("midlayer.input_layernorm", self.embedding[ids].float())
        inputs = torch.cat([embedded, self._norm("midlayer.hidden_norm", feature)], -1)
        count, width = len(ids), self.config.head_dim
        q, k, v = (
            (inputs @ self._weight(f"self_attn.{n}_proj").T).view(count, -1, width).transpose(0, 1) for n in "qkv"
        )
        cos, sin = self.rotary(q, torch.arange(start, start + count)[None])
        mixed, cache = attend(rotate(q, cos[0], sin[0]), rotate(k, cos[0], sin[0]), v, cache)
        x = feature + mixed @ self._weight("self_attn.o_proj").T
        y = self._norm("midlayer.post_attention_layernorm", x)
        return x + swiglu(y, *(self._weight(f"mlp.{n}_proj") for n in ("gate", "up", "down"))), cache
