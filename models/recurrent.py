"""Drafters that read their own output: one decoder layer, unrolled depth by depth and drafted in the same way.

Depth 0 reads a feature of the target's states of slot p and the embedding of x[p+1]; depth k reads what the layer
itself made of depth k-1 and the embedding of x[p+1+k], at position p+k. It attends to the depth-0 keys of slots <= p
and to its own lineage (models/attention.py). EAGLE-1 and EAGLE-3 differ in the hooks of :class:`RecurrentDrafter`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from models.attention import Spans, ttt_attention
from models.batch import Batch, Slots
from models.draft_session import LayerSession, Rows
from models.drafter import Drafter
from models.errors import EyasError
from models.frozen import FrozenTarget
from models.heads import SessionHead
from models.layers import MLP, Attention, RMSNorm
from models.recompute import Run, plainly
from models.rope import apply_rope, rope_parameters


@dataclass(frozen=True)
class LayerConfig:
    """Dimensions of the layer."""

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    rope_parameters: dict[str, Any]

    def __post_init__(self) -> None:
        if self.num_attention_heads % self.num_key_value_heads:
            raise EyasError(
                f"drafter.num_key_value_heads={self.num_key_value_heads} must divide "
                f"drafter.num_attention_heads={self.num_attention_heads}"
            )

    @classmethod
    def like_target(
        cls,
        target: Mapping[str, Any],
        *,
        intermediate_size: int | None = None,
        num_attention_heads: int | None = None,
        num_key_value_heads: int | None = None,
        head_dim: int | None = None,
        **more: Any,
    ) -> Self:
        """As wide as the target unless told otherwise; ``more``: the fields of a subclass.

        A mixture-of-experts target names its expert width ``intermediate_size``; a drafter narrower than its residual
        stream makes no sense, so the MLP is then three times the hidden size."""
        hidden = target["hidden_size"]
        heads = num_attention_heads or target["num_attention_heads"]
        width = target.get("intermediate_size") or 0
        return cls(
            hidden_size=hidden,
            intermediate_size=intermediate_size or (width if width >= hidden else 3 * hidden),
            num_attention_heads=heads,
            num_key_value_heads=num_key_value_heads or target.get("num_key_value_heads") or heads,
            head_dim=head_dim or target.get("head_dim") or hidden // target["num_attention_heads"],
            rms_norm_eps=target.get("rms_norm_eps", 1e-6),
            max_position_embeddings=target.get("max_position_embeddings", 2048),
            rope_parameters=rope_parameters(dict(target)),
            **more,
        )

    def rotary(self) -> LlamaRotaryEmbedding:
        return LlamaRotaryEmbedding(
            LlamaConfig(
                hidden_size=self.hidden_size,
                num_attention_heads=self.num_attention_heads,
                head_dim=self.head_dim,
                max_position_embeddings=self.max_position_embeddings,
                rope_parameters=dict(self.rope_parameters),
            )
        )


class DraftLayer(nn.Module):
    """What every layer here has: attention, and behind it a norm and an MLP."""

    self_attn: Attention
    post_attention_layernorm: RMSNorm
    mlp: MLP

    def finish(self, residual: Tensor, mixed: Tensor) -> Tensor:
        """Output projection, residual and MLP: residual [n, H], attention output [n, nq, D] -> [n, H]."""
        x = residual + self.self_attn.o_proj(mixed.flatten(-2))
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


def random_linears(module: nn.Module, generator: torch.Generator) -> None:
    """Every linear weight from N(0, 1 / its inputs), every bias zero."""
    with torch.no_grad():
        for part in module.modules():
            if isinstance(part, nn.Linear):
                part.weight.copy_(torch.randn(part.weight.shape, generator=generator) * part.in_features**-0.5)
                if part.bias is not None:
                    part.bias.zero_()


def last_layer_weight(layer: Mapping[str, Tensor], name: str, rows: int) -> Tensor:
    """A weight of the target's last decoder layer, to start from. Raises EyasError where there is none that fits."""
    weight = layer.get(f"{name}.weight")
    if weight is None or weight.shape[0] != rows:
        found = "missing" if weight is None else f"has {weight.shape[0]} rows, the drafter {rows}"
        raise EyasError(f"drafter.init_layer=true: {name}.weight of the target's last layer {found}")
    return weight


class RecurrentDrafter(Drafter):
    """The unroll and the session of the module docstring; a method says what its layer reads."""

    config: LayerConfig
    rotary: LlamaRotaryEmbedding
    fc: nn.Linear  # makes the feature, or joins it with the embedding; the feature, or the last tap, comes last

    @torch.no_grad()
    def start(self, seed: int, *, pass_on: bool) -> None:
        """All linear weights random from ``seed``; ``pass_on``: but fc, which hands on the last H of what it reads."""
        random_linears(self, torch.Generator().manual_seed(seed))
        if pass_on:
            hidden = self.config.hidden_size
            self.fc.weight.zero_()
            self.fc.weight[:, -hidden:] = torch.eye(hidden)

    # --- what a method says ---

    @property
    @abstractmethod
    def layer(self) -> DraftLayer:
        """The decoder layer."""

    @abstractmethod
    def feature(self, taps: Tensor, final: Tensor) -> Tensor:
        """What depth 0 reads of the target's states: taps [n, A*H], final [n, H] -> [n, H]."""

    def first_feature(self, batch: Batch) -> Tensor:
        """:meth:`feature` of every token of a training batch, [T, H]."""
        return self.feature(batch.taps, batch.final)

    @abstractmethod
    def inputs(self, embedding: Tensor, feature: Tensor) -> tuple[Tensor, Tensor]:
        """What the projections of queries, keys and values read, [n, I], and the residual stream [n, H]."""

    @abstractmethod
    def scored(self, state: Tensor) -> Tensor:
        """What the head reads of the layer's output [n, H]."""

    @abstractmethod
    def next_feature(self, state: Tensor) -> Tensor:
        """What the next depth reads of the layer's output [n, H] as its feature."""

    # --- one step of the layer ---

    def rope(self, heads: Tensor, positions: Tensor) -> Tensor:
        cos, sin = self.rotary(heads, positions[None])
        return apply_rope(heads, cos[0], sin[0])

    def keys_values(self, inputs: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        attn = self.layer.self_attn
        return self.rope(attn.split(attn.k_proj(inputs)), positions), attn.split(attn.v_proj(inputs))

    def queries(self, inputs: Tensor, positions: Tensor) -> Tensor:
        attn = self.layer.self_attn
        return self.rope(attn.split(attn.q_proj(inputs)), positions)

    # --- training ---

    def unroll(self, batch: Batch, slots: Slots, frozen: FrozenTarget, run: Run = plainly) -> Tensor:
        """Depth 0 needs keys of every token; queries, MLP and all deeper depths only run where loss counts."""
        last, positions, index = batch.num_tokens - 1, batch.positions, slots.index

        def embed(slot: Tensor, k: int) -> Tensor:
            return frozen.embed(batch.input_ids[(slot + 1 + k).clamp_max(last)]).to(self.dtype)

        def first(spans: Spans) -> tuple[Tensor, Tensor, Tensor]:
            """Depth 0: states of the slots, keys and values of every token."""
            every = torch.arange(batch.num_tokens, device=index.device)
            inputs, residual = self.inputs(embed(every, 0), self.first_feature(batch))
            key, value = self.keys_values(inputs, positions)
            query = self.queries(inputs[spans.index], positions[spans.index])
            return self.layer.finish(residual[spans.index], ttt_attention(query, key, value, [], [], spans)), key, value

        def later(
            k: int, feature: Tensor, key: Tensor, value: Tensor, keys: list[Tensor], values: list[Tensor], spans: Spans
        ) -> tuple[Tensor, Tensor, Tensor]:
            """Depth k: states, keys and values of the slots; ``keys`` and ``values``: of their own lineage so far."""
            inputs, residual = self.inputs(embed(spans.index, k), feature)
            here = positions[spans.index] + k
            own = self.keys_values(inputs, here)
            query = self.queries(inputs, here)
            mixed = ttt_attention(query, key, value, [*keys, own[0]], [*values, own[1]], spans)
            return self.layer.finish(residual, mixed), *own

        state, key, value = run(first, Spans.of(index, batch.cu_seqlens))
        counts, states = slots.counts, [self.scored(state)]
        keys, values = list[Tensor](), list[Tensor]()
        for k in range(1, slots.depths):
            feature = self.next_feature(state)
            if counts[k] < counts[k - 1]:
                still = slots.valid[k][slots.valid[k - 1]]
                index, feature = index[still], feature[still]
                keys, values = [t[still] for t in keys], [t[still] for t in values]
            spans = Spans.of(index, batch.cu_seqlens)
            state, *own = run(later, k, feature, key, value, keys, values, spans)
            keys, values = [*keys, own[0]], [*values, own[1]]
            states.append(self.scored(state))
        return torch.cat(states)

    # --- drafting ---

    @property
    def max_positions(self) -> int:
        return self.config.max_position_embeddings

    def session(self, frozen: FrozenTarget, slots: int = 1) -> RecurrentSession:
        return RecurrentSession(self, frozen, slots)


class RecurrentSession(LayerSession):
    """Incremental drafting (see models/drafter.py): the index rule of ``unroll``, one depth of all slots at a time."""

    def __init__(self, drafter: RecurrentDrafter, frozen: FrozenTarget, slots: int = 1) -> None:
        config, like = drafter.config, drafter.layer.self_attn.o_proj.weight
        super().__init__(like, slots, config.hidden_size, config.num_key_value_heads, config.head_dim)
        self.drafter, self.frozen = drafter, frozen
        self.head = SessionHead(drafter.head(frozen), drafter.dtype)

    def feature(self, taps: Tensor, final: Tensor) -> Tensor:
        return self.drafter.feature(taps, final)

    def next_feature(self, states: Tensor) -> Tensor:
        return self.drafter.next_feature(states)

    def read(self, feature: Tensor, tokens: Tensor, rows: Rows) -> Tensor:
        drafter, layer, attn = self.drafter, self.drafter.layer, self.drafter.layer.self_attn
        inputs, residual = drafter.inputs(self.frozen.embed(tokens).to(drafter.dtype), feature)
        cos, sin = (t[0] for t in drafter.rotary(inputs, rows.positions[None]))
        rows.write(apply_rope(attn.split(attn.k_proj(inputs)), cos, sin), attn.split(attn.v_proj(inputs)))
        asked = rows.asked
        query = apply_rope(attn.split(attn.q_proj(inputs[asked])), cos[asked], sin[asked])
        return layer.finish(residual[asked], rows.attend(query))

    def logits(self, states: Tensor) -> Tensor:
        return self.head(self.drafter.scored(states))
