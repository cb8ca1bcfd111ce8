"""What a serving engine computes from an exported folder, in plain torch: an export is proven against this.

Nothing here is shared with the drafters of models/: it reads config.json and the tensors as vLLM does and runs the
engine's steps (prefill of the true features, then one drafted token at a time) with dense attention.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding


class Eagle3Engine:
    """LlamaForCausalLMEagle3. embedding [V, H] is the target's, which engines share with the drafter."""

    def __init__(self, folder: Path, embedding: Tensor) -> None:
        self.config: Any = AutoConfig.from_pretrained(folder)
        tensors = load_file(folder / "model.safetensors")
        self.weights = {name: t.float() if t.is_floating_point() else t for name, t in tensors.items()}
        self.embedding = embedding
        self.rotary = LlamaRotaryEmbedding(self.config)

    @property
    def draft_ids(self) -> Tensor:
        """The target's id of each draft token, [Vd] int64."""
        every = torch.arange(self.weights["lm_head.weight"].shape[0])
        return every + self.weights["d2t"] if "d2t" in self.weights else every

    def draft_logits(self, next_ids: Tensor, taps: Tensor, drafted: Tensor) -> Tensor:
        """Logits [1 + len(drafted), Vd]: after the prefill of slots 0..n-1, and after each drafted token.

        next_ids [n] the token behind each slot, taps [n, A*Ht] its target states.
        """
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
        variance = x.pow(2).mean(-1, keepdim=True)
        return self.weights[f"{name}.weight"] * (x * (variance + self.config.rms_norm_eps).rsqrt())

    def _linear(self, name: str, x: Tensor) -> Tensor:
        return x @ self.weights[f"midlayer.{name}.weight"].T

    def _fuse(self, taps: Tensor) -> Tensor:
        taps = taps.float()
        if self._flag("norm_before_fc"):
            taps = self._norm("input_norm", taps)
        if self._flag("fc_norm"):
            parts = taps.chunk(self.config.num_aux_hidden_states, -1)
            taps = torch.cat([self._norm(f"fc_norm.{i}", part) for i, part in enumerate(parts)], -1)
        return taps @ self.weights["fc.weight"].T

    def _layer(
        self, feature: Tensor, ids: Tensor, start: int, cache: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """The draft layer on n tokens from position ``start`` on: its residual stream [n, H] and the grown cache."""
        embedded = self._norm("midlayer.input_layernorm", self.embedding[ids].float())
        inputs = torch.cat([embedded, self._norm("midlayer.hidden_norm", feature)], -1)
        count, width = len(ids), self.config.head_dim
        q, k, v = (self._linear(f"self_attn.{n}_proj", inputs).view(count, -1, width).transpose(0, 1) for n in "qkv")
        cos, sin = self.rotary(q, torch.arange(start, start + count)[None])
        q, k = self._rotate(q, cos[0], sin[0]), self._rotate(k, cos[0], sin[0])
        if cache:
            k, v = torch.cat([cache[0], k], 1), torch.cat([cache[1], v], 1)
        repeat = q.shape[0] // k.shape[0]
        scores = q @ k.repeat_interleave(repeat, 0).transpose(1, 2) * width**-0.5
        future = torch.ones(count, k.shape[1], dtype=torch.bool).triu(k.shape[1] - count + 1)
        mixed = scores.masked_fill(future, float("-inf")).softmax(-1) @ v.repeat_interleave(repeat, 0)
        x = feature + self._linear("self_attn.o_proj", mixed.transpose(0, 1).reshape(count, -1))
        y = self._norm("midlayer.post_attention_layernorm", x)
        gate = self._linear("mlp.gate_proj", y)
        return x + self._linear("mlp.down_proj", gate * gate.sigmoid() * self._linear("mlp.up_proj", y)), (k, v)

    @staticmethod
    def _rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        half = heads.shape[-1] // 2
        a, b = heads[..., :half], heads[..., half:]
        return torch.cat([a * cos[:, :half] - b * sin[:, :half], b * cos[:, half:] + a * sin[:, half:]], -1)


ENGINES = {"LlamaForCausalLMEagle3": Eagle3Engine}


def engine_for(folder: Path, embedding: Tensor) -> Eagle3Engine:
    """The engine that config.json's ``architectures`` asks for."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return ENGINES[config["architectures"][0]](folder, embedding)
