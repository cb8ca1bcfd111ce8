"""EAGLE-3 (arXiv 2503.01840): one decoder layer over fused target taps, trained by unrolling its own output.

Depth 0 reads fc(taps of slot p) and the embedding of x[p+1]; depth k reads its own previous state and the
embedding of x[p+1+k] at position p+k. The layer sees norm(embedding) || norm(feature); the residual stream is
the un-normalised feature. Architecture and tensor names are those that vLLM and SGLang serve.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from models.attention import Spans, ttt_attention
from models.batch import Batch, Slots
from models.draft_session import LayerSession, Rows
from models.drafter import Drafter
from models.eagle3_serving import eagle3_config, read_eagle3
from models.errors import EyasError
from models.frozen import FrozenTarget
from models.layers import MLP, Attention, RMSNorm
from models.portable import fill_module
from models.rope import apply_rope, rope_parameters
from models.vocab import DraftVocab


def check_norms(fc_norm: bool, norm_before_fc: bool) -> None:
    if fc_norm and norm_before_fc:
        raise EyasError("drafter.fc_norm and drafter.norm_before_fc exclude each other")


@dataclass(frozen=True)
class Eagle3Config:
    """Dimensions and flags; everything that rebuilds the module, vocabulary apart."""

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    rope_parameters: dict[str, Any]
    tap_ids: tuple[int, ...]
    target_layers: int
    norm_before_fc: bool = False  # one RMSNorm over the concatenated taps
    fc_norm: bool = False  # EAGLE-3.1: an RMSNorm of its own for every tap
    norm_output: bool = False  # EAGLE-3.1: the next depth reads the normed state

    def __post_init__(self) -> None:
        check_norms(self.fc_norm, self.norm_before_fc)
        if self.num_attention_heads % self.num_key_value_heads:
            raise EyasError(
                f"drafter.num_key_value_heads={self.num_key_value_heads} must divide "
                f"drafter.num_attention_heads={self.num_attention_heads}"
            )

    @classmethod
    def for_target(
        cls,
        target: dict[str, Any],
        tap_ids: tuple[int, ...],
        *,
        intermediate_size: int | None = None,
        num_attention_heads: int | None = None,
        num_key_value_heads: int | None = None,
        head_dim: int | None = None,
        **flags: bool,
    ) -> Eagle3Config:
        """As wide as the target unless told otherwise. A mixture-of-experts target names its expert width
        ``intermediate_size``; a drafter narrower than its residual stream makes no sense, so the MLP is then
        three times the hidden size."""
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
            rope_parameters=rope_parameters(target),
            tap_ids=tap_ids,
            target_layers=target["num_hidden_layers"],
            **flags,
        )


class MidLayer(nn.Module):
    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = RMSNorm(hidden, eps)  # of the embedding
        self.hidden_norm = RMSNorm(hidden, eps)  # of the feature
        self.post_attention_layernorm = RMSNorm(hidden, eps)
        self.self_attn = Attention(
            2 * hidden, hidden, config.num_attention_heads, config.num_key_value_heads, config.head_dim
        )
        self.mlp = MLP(hidden, config.intermediate_size)

    def inputs(self, embedding: Tensor, feature: Tensor) -> Tensor:
        return torch.cat([self.input_layernorm(embedding), self.hidden_norm(feature)], -1)

    def finish(self, feature: Tensor, mixed: Tensor) -> Tensor:
        """Output projection, residual and MLP: feature [n, H], attention output [n, nq, D] -> [n, H]."""
        x = feature + self.self_attn.o_proj(mixed.flatten(-2))
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class Eagle3Drafter(Drafter):
    """See the module docstring; built by :meth:`create` or :meth:`from_architecture`."""

    def __init__(self, config: Eagle3Config, vocab: DraftVocab) -> None:
        super().__init__()
        self.config, self.vocab, self.tap_ids = config, vocab, config.tap_ids
        hidden, taps = config.hidden_size, len(config.tap_ids)
        self.fc = nn.Linear(taps * hidden, hidden, bias=False)
        self.midlayer = MidLayer(config)
        self.norm = RMSNorm(hidden, config.rms_norm_eps)
        self.lm_head = nn.Linear(hidden, len(vocab), bias=False)
        if config.norm_before_fc:
            self.input_norm = RMSNorm(taps * hidden, config.rms_norm_eps)
        if config.fc_norm:
            self.fc_norm = nn.ModuleList(RMSNorm(hidden, config.rms_norm_eps) for _ in range(taps))
        self.rotary = LlamaRotaryEmbedding(
            LlamaConfig(
                hidden_size=hidden,
                num_attention_heads=config.num_attention_heads,
                head_dim=config.head_dim,
                max_position_embeddings=config.max_position_embeddings,
                rope_parameters=dict(config.rope_parameters),
            )
        )

    # --- construction ---

    @classmethod
    def check_options(cls, options: Mapping[str, Any]) -> None:
        super().check_options(options)
        check_norms(bool(options.get("fc_norm")), bool(options.get("norm_before_fc")))
        if float(options.get("init_temper", 1.0)) <= 0:
            raise EyasError(f"drafter.init_temper={options['init_temper']}: must be above 0")

    @classmethod
    def create(  # type: ignore[override]
        cls,
        frozen: FrozenTarget,
        vocab: DraftVocab,
        tap_ids: tuple[int, ...],
        *,
        norm_before_fc: bool = False,
        fc_norm: bool = False,
        norm_output: bool = False,
        intermediate_size: int | None = None,
        num_attention_heads: int | None = None,
        num_key_value_heads: int | None = None,
        head_dim: int | None = None,
        init_head: bool = True,
        init_layer: bool = False,
        init_fc: bool = True,
        init_temper: float = 0.3,
        seed: int = 0,
    ) -> Eagle3Drafter:
        """init_head: head rows and final norm from the target; init_layer: the layer from the target's last
        one; init_fc: fc passes the last tap through. What is not initialised so is random from ``seed``.
        init_temper scales that norm: the tap passed through names the token just read with a confidence that
        would otherwise have to be unlearned first."""
        config = Eagle3Config.for_target(
            frozen.config,
            tuple(tap_ids),
            intermediate_size=intermediate_size,
            num_attention_heads=num_attention_heads,
            num_key_value_heads=num_key_value_heads,
            head_dim=head_dim,
            norm_before_fc=norm_before_fc,
            fc_norm=fc_norm,
            norm_output=norm_output,
        )
        drafter = cls(config, vocab)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for module in drafter.modules():
                if isinstance(module, nn.Linear):
                    std = module.in_features**-0.5
                    module.weight.copy_(torch.randn(module.weight.shape, generator=generator) * std)
            if init_fc:
                drafter.fc.weight.zero_()
                drafter.fc.weight[:, -config.hidden_size :] = torch.eye(config.hidden_size)
            if init_head:
                drafter.lm_head.weight.copy_(frozen.head[vocab.ids.to(frozen.head.device)] * frozen.scale)
                if frozen.final_norm is not None:
                    drafter.norm.weight.copy_(frozen.final_norm * init_temper)
            if init_layer:
                drafter._init_layer(frozen.last_layer)
        return drafter

    def _init_layer(self, layer: dict[str, Tensor]) -> None:
        """The target's last decoder layer reads the feature half of the input; the embedding half starts at 0."""
        own = dict(self.midlayer.named_parameters())
        for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"):
            own[f"{name}.weight"].zero_()
            own[f"{name}.weight"][:, self.config.hidden_size :] = self._source(
                layer, name, own[f"{name}.weight"].shape[0]
            )
        pairs = {n: n for n in ("self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")}
        pairs |= {"hidden_norm": "input_layernorm", "post_attention_layernorm": "post_attention_layernorm"}
        for mine, theirs in pairs.items():
            own[f"{mine}.weight"].copy_(self._source(layer, theirs, own[f"{mine}.weight"].shape[0]))

    @staticmethod
    def _source(layer: dict[str, Tensor], name: str, rows: int) -> Tensor:
        weight = layer.get(f"{name}.weight")
        if weight is None or weight.shape[0] != rows:
            found = "missing" if weight is None else f"has {weight.shape[0]} rows, the drafter {rows}"
            raise EyasError(f"drafter.init_layer=true: {name}.weight of the target's last layer {found}")
        return weight

    def architecture(self) -> dict[str, Any]:
        return asdict(self.config)

    @classmethod
    def from_architecture(cls, architecture: dict[str, Any], vocab: DraftVocab) -> Eagle3Drafter:
        options = dict(architecture) | {"tap_ids": tuple(architecture["tap_ids"])}
        return cls(Eagle3Config(**options), vocab)

    # --- one step of the layer ---

    def fuse(self, taps: Tensor) -> Tensor:
        """taps [n, A*H] -> feature [n, H]."""
        taps = taps.to(self.dtype)
        if self.config.norm_before_fc:
            taps = self.input_norm(taps)
        if self.config.fc_norm:
            parts = taps.split(self.config.hidden_size, -1)
            taps = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], -1)
        out: Tensor = self.fc(taps)
        return out.to(self.dtype)

    def rope(self, heads: Tensor, positions: Tensor) -> Tensor:
        cos, sin = self.rotary(heads, positions[None])
        return apply_rope(heads, cos[0], sin[0])

    def keys_values(self, inputs: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        attn = self.midlayer.self_attn
        return self.rope(attn.split(attn.k_proj(inputs)), positions), attn.split(attn.v_proj(inputs))

    def queries(self, inputs: Tensor, positions: Tensor) -> Tensor:
        attn = self.midlayer.self_attn
        return self.rope(attn.split(attn.q_proj(inputs)), positions)

    def next_feature(self, state: Tensor) -> Tensor:
        """What the next depth reads as its feature."""
        out: Tensor = self.norm(state) if self.config.norm_output else state
        return out

    # --- training ---

    def unroll(self, batch: Batch, slots: Slots, frozen: FrozenTarget) -> Tensor:
        """Depth 0 needs keys of every token; queries, MLP and all deeper depths only run where loss counts."""
        layer = self.midlayer
        last = batch.num_tokens - 1
        ahead = torch.arange(1, batch.num_tokens + 1, device=batch.input_ids.device).clamp_max(last)
        positions = batch.positions
        feature = self.fuse(batch.taps)
        inputs = layer.inputs(frozen.embed(batch.input_ids[ahead]).to(self.dtype), feature)
        key, value = self.keys_values(inputs, positions)
        index = slots.index
        feature, inputs = feature[index], inputs[index]
        keys: list[Tensor] = []  # of each slot's own lineage
        values: list[Tensor] = []
        counts, states = slots.valid.sum(1).tolist(), []
        for k in range(slots.depths):
            if k and counts[k] < counts[k - 1]:
                still = slots.valid[k][slots.valid[k - 1]]
                index, feature = index[still], feature[still]
                keys, values = [t[still] for t in keys], [t[still] for t in values]
            here = positions[index] + k
            if k:
                token = batch.input_ids[(index + 1 + k).clamp_max(last)]
                inputs = layer.inputs(frozen.embed(token).to(self.dtype), feature)
                own = self.keys_values(inputs, here)
                keys.append(own[0])
                values.append(own[1])
            spans = Spans.of(index, batch.cu_seqlens)
            state = layer.finish(feature, ttt_attention(self.queries(inputs, here), key, value, keys, values, spans))
            states.append(self.norm(state))
            feature = self.next_feature(state)
        return torch.cat(states)

    def head_weight(self, frozen: FrozenTarget) -> Tensor:
        return self.lm_head.weight

    # --- drafting and serving ---

    @property
    def target_hidden_size(self) -> int:
        return self.config.hidden_size

    @property
    def max_positions(self) -> int:
        return self.config.max_position_embeddings

    def session(self, frozen: FrozenTarget, slots: int = 1) -> Eagle3Session:
        return Eagle3Session(self, frozen, slots)

    def serving(self, frozen: FrozenTarget) -> tuple[dict[str, Tensor], dict[str, Any]]:
        tensors = {name: tensor.detach() for name, tensor in self.state_dict().items()}
        if not self.vocab.is_full:
            tensors |= {"d2t": self.vocab.d2t, "t2d": self.vocab.t2d}
        return tensors, eagle3_config(asdict(self.config), self.vocab, frozen.config)

    @classmethod
    def from_serving(
        cls, tensors: dict[str, Tensor], config: dict[str, Any], target_layers: int | None = None
    ) -> Eagle3Drafter:
        architecture, vocab, weights = read_eagle3(tensors, config, target_layers)
        drafter = cls.from_architecture(architecture, vocab)
        fill_module(drafter, weights)
        return drafter


class Eagle3Session(LayerSession):
    """Incremental drafting (see models/drafter.py): the index rule of ``unroll``, one depth of all slots at a time."""

    def __init__(self, drafter: Eagle3Drafter, frozen: FrozenTarget, slots: int = 1) -> None:
        config = drafter.config
        super().__init__(drafter.fc.weight, slots, config.hidden_size, config.num_key_value_heads, config.head_dim)
        self.drafter, self.frozen = drafter, frozen

    def feature(self, taps: Tensor, final: Tensor) -> Tensor:
        return self.drafter.fuse(taps)

    def next_feature(self, states: Tensor) -> Tensor:
        return self.drafter.next_feature(states)

    def read(self, feature: Tensor, tokens: Tensor, rows: Rows) -> Tensor:
        drafter, layer, attn = self.drafter, self.drafter.midlayer, self.drafter.midlayer.self_attn
        inputs = layer.inputs(self.frozen.embed(tokens).to(drafter.dtype), feature)
        cos, sin = (t[0] for t in drafter.rotary(inputs, rows.positions[None]))
        rows.write(apply_rope(attn.split(attn.k_proj(inputs)), cos, sin), attn.split(attn.v_proj(inputs)))
        asked = rows.asked
        query = apply_rope(attn.split(attn.q_proj(inputs[asked])), cos[asked], sin[asked])
        return layer.finish(feature[asked], rows.attend(query))

    def logits(self, states: Tensor) -> Tensor:
        out: Tensor = self.drafter.lm_head(self.drafter.norm(states))
        return out
