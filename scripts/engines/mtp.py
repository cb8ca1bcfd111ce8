"""MTP modules as vLLM's DeepSeekMTP, MiMoMTP, Qwen3NextMTP and Qwen3_5MTP compute them.

In MiMo's layout the block is Qwen2's, written out here; in the other two it is the family's layer of transformers, run
over the whole text with a dense mask. Embedding, head and its transform are the target's.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from models.frozen import FrozenTarget
from scripts.engines.dense import attend, rms_norm, rotate, swiglu

Block = Callable[[Tensor, Tensor], Tensor]  # x [n, H] at positions [n] -> [n, H], every token seeing those before it


class MtpEngine:
    """See scripts/engines/__init__.py."""

    def __init__(self, folder: Path, frozen: FrozenTarget) -> None:
        raw = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        self.layout = str(raw["eyas"]["layout"])
        self.config: Any = AutoConfig.from_pretrained(folder)
        self.weights = {name: t.float() for name, t in load_file(folder / "model.safetensors").items()}
        self.frozen = frozen
        key = "mtp_num_hidden_layers" if raw["model_type"].startswith("qwen3_5") else "num_nextn_predict_layers"
        count = int(raw[key])
        first = int(raw["num_hidden_layers"]) if self.layout == "deepseek" else 0
        begin = {"deepseek": "model.layers", "mimo": "model.mtp_layers", "qwen3_next": "mtp.layers"}[self.layout]
        stems = [f"{begin}.{first + i}" for i in range(count)]
        make = self._qwen2_block if self.layout == "mimo" else self._family_block
        self.modules = [(stem, make(stem)) for stem in stems]

    @property
    def draft_ids(self) -> Tensor:
        return torch.arange(self.frozen.head.shape[0])

    def draft_logits(self, next_ids: Tensor, taps: Tensor, final: Tensor, drafted: Tensor) -> Tensor:
        run = self._again if len(self.modules) == 1 else self._in_turn
        return self._head(run(next_ids, final.float(), drafted))

    def _again(self, next_ids: Tensor, final: Tensor, drafted: Tensor) -> Tensor:
        """One module: prefill on true features, then one token at a time on the state it made itself."""
        ids, features = next_ids, final
        for step in range(len(drafted) + 1):
            state = self._module(0, ids, features, torch.arange(len(ids)))
            if step < len(drafted):
                ids, features = torch.cat([ids, drafted[step : step + 1]]), torch.cat([features, state[-1:]])
        return state[len(next_ids) - 1 :]

    def _in_turn(self, next_ids: Tensor, final: Tensor, drafted: Tensor) -> Tensor:
        """Several: each runs over all slots, on the states of the one before and the tokens shifted by one more."""
        ids, features, found = torch.cat([next_ids, drafted]), final, []
        for step in range(len(drafted) + 1):
            features = self._module(step, ids[step : step + len(final)], features, torch.arange(len(final)))
            found.append(features[-1])
        return torch.stack(found)

    def _module(self, number: int, ids: Tensor, features: Tensor, positions: Tensor) -> Tensor:
        """The state behind the module's last norm, [n, H]: scored by the head and read by the next step."""
        stem, block = self.modules[number]
        embedded = self.frozen.embedding[ids].float()
        if self.layout == "mimo":
            embedded = torch.where(positions[:, None] == 0, 0.0, embedded)
            parts = [self._norm(f"{stem}.hidden_layernorm", features), self._norm(f"{stem}.token_layernorm", embedded)]
            projection, last = f"{stem}.input_proj", f"{stem}.final_layernorm"
        elif self.layout == "deepseek":
            embedded = torch.where(positions[:, None] == 0, 0.0, embedded)
            parts = [self._norm(f"{stem}.enorm", embedded), self._norm(f"{stem}.hnorm", features)]
            projection, last = f"{stem}.eh_proj", f"{stem}.shared_head.norm"
        else:
            parts = [self._norm("mtp.pre_fc_norm_embedding", embedded), self._norm("mtp.pre_fc_norm_hidden", features)]
            projection, last = "mtp.fc", "mtp.norm"
        return self._norm(last, block(torch.cat(parts, -1) @ self.weights[f"{projection}.weight"].T, positions))

    def _norm(self, name: str, x: Tensor) -> Tensor:
        weight = self.weights[f"{name}.weight"]
        return rms_norm(x, 1 + weight if self.layout == "qwen3_next" else weight, self.config.rms_norm_eps)

    def _head(self, states: Tensor) -> Tensor:
        logits = states @ self.frozen.head.float().T
        if self.frozen.head_bias is not None:
            logits = logits + self.frozen.head_bias
        logits = logits * self.frozen.scale
        cap = self.frozen.softcap
        return cap * torch.tanh(logits / cap) if cap else logits

    def _qwen2_block(self, stem: str) -> Block:
        """Qwen2DecoderLayer, which norms the heads of queries and keys if the config has ``qk_norm``."""
        config, weights = self.config, self.weights
        rotary = LlamaRotaryEmbedding(config)
        width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads

        def block(x: Tensor, positions: Tensor) -> Tensor:
            y = rms_norm(x, weights[f"{stem}.input_layernorm.weight"], config.rms_norm_eps)
            heads = {}
            for kind in "qkv":
                name = f"{stem}.self_attn.{kind}_proj"
                projected = y @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]
                heads[kind] = projected.view(len(x), -1, width).transpose(0, 1)
            if getattr(config, "qk_norm", False):
                for kind in "qk":
                    weight = weights[f"{stem}.self_attn.{kind}_norm.weight"]
                    heads[kind] = rms_norm(heads[kind], weight, config.rms_norm_eps)
            cos, sin = (t[0] for t in rotary(x[None], positions[None]))
            q, k = rotate(heads["q"], cos, sin), rotate(heads["k"], cos, sin)
            x = x + attend(q, k, heads["v"], None)[0] @ weights[f"{stem}.self_attn.o_proj.weight"].T
            y = rms_norm(x, weights[f"{stem}.post_attention_layernorm.weight"], config.rms_norm_eps)
            return x + swiglu(y, *(weights[f"{stem}.mlp.{kind}_proj.weight"] for kind in ("gate", "up", "down")))

        return block

    def _family_block(self, stem: str) -> Block:
        """The last full-attention layer of a model of the family, with the module's weights in it."""
        config = AutoConfig.for_model(self.config.model_type, **_plain(self.config))
        config._attn_implementation = "eager"
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
        number = max(i for i, kind in enumerate(kinds) if kind == "full_attention")
        layer = type(model.model.layers[number])(config, number).eval()
        rotary = type(model.model.rotary_emb)(config)
        layer.load_state_dict(self._as_module(stem, layer.state_dict()))

        @torch.no_grad()
        def block(x: Tensor, positions: Tensor) -> Tensor:
            future = torch.ones(len(x), len(x), dtype=torch.bool).triu(1)
            mask = torch.zeros(len(x), len(x)).masked_fill(future, float("-inf"))[None, None]
            embeddings = rotary(x[None], positions[None])
            out = layer(x[None], attention_mask=mask, position_ids=positions[None], position_embeddings=embeddings)
            states: Tensor = (out[0] if isinstance(out, tuple) else out)[0]
            return states

        return block

    def _as_module(self, stem: str, wanted: dict[str, Tensor]) -> dict[str, Tensor]:
        """The layer's state dict; where the module holds experts as one tensor, from those of the single experts."""
        found = {}
        for name, like in wanted.items():
            if f"{stem}.{name}" in self.weights:
                found[name] = self.weights[f"{stem}.{name}"]
            else:
                kinds = ("gate", "up") if name.endswith("gate_up_proj") else ("down",)
                experts = f"{stem}.{name.rpartition('.')[0]}"
                single = [
                    torch.cat([self.weights[f"{experts}.{e}.{kind}_proj.weight"] for kind in kinds])
                    for e in range(like.shape[0])
                ]
                found[name] = torch.stack(single)
        return found


def _plain(config: Any) -> dict[str, Any]:
    gone = ("model_type", "architectures", "eyas", "dtype", "torch_dtype", "transformers_version", "_name_or_path")
    return {key: value for key, value in config.to_dict().items() if key not in gone}
