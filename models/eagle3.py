"""EAGLE-3 (arXiv 2503.01840): one decoder layer over fused target taps, trained by unrolling its own output.

Depth 0 reads fc(taps of slot p) and the embedding of x[p+1]; depth k reads its own previous state and the
embedding of x[p+1+k] at position p+k. The layer sees norm(embedding) || norm(feature); the residual stream is
the un-normalised feature. Architecture and tensor names are those that vLLM and SGLang serve.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn

from models.drafter import Serving
from models.eagle3_serving import eagle3_config, read_eagle3
from models.errors import EyasError
from models.frozen import FrozenTarget
from models.heads import DraftHead
from models.layers import MLP, Attention, RMSNorm
from models.recurrent import DraftLayer, LayerConfig, RecurrentDrafter, last_layer_weight
from models.vocab import DraftVocab


def check_norms(fc_norm: bool, norm_before_fc: bool) -> None:
    if fc_norm and norm_before_fc:
        raise EyasError("drafter.fc_norm and drafter.norm_before_fc exclude each other")


@dataclass(frozen=True)
class Eagle3Config(LayerConfig):
    """Dimensions and flags; everything that rebuilds the module, vocabulary apart."""

    tap_ids: tuple[int, ...]
    target_layers: int
    norm_before_fc: bool = False  # one RMSNorm over the concatenated taps
    fc_norm: bool = False  # EAGLE-3.1: an RMSNorm of its own for every tap
    norm_output: bool = False  # EAGLE-3.1: the next depth reads the normed state

    def __post_init__(self) -> None:
        super().__post_init__()
        check_norms(self.fc_norm, self.norm_before_fc)
        if not self.tap_ids:
            raise EyasError("target.taps=[]: EAGLE-3 reads tapped states, at least one")

    @classmethod
    def for_target(cls, target: Mapping[str, Any], tap_ids: tuple[int, ...], **options: Any) -> Self:
        return cls.like_target(target, tap_ids=tap_ids, target_layers=target["num_hidden_layers"], **options)


class MidLayer(DraftLayer):
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


class Eagle3Drafter(RecurrentDrafter):
    """See the module docstring; built by :meth:`create` or :meth:`from_architecture`."""

    layouts = ("vllm",)
    config_class = Eagle3Config
    config: Eagle3Config

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
        self.rotary = config.rotary()

    # --- construction ---

    @classmethod
    def check_options(cls, options: Mapping[str, Any]) -> None:
        super().check_options(options)
        check_norms(bool(options.get("fc_norm")), bool(options.get("norm_before_fc")))

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
        drafter.start(seed, pass_on=init_fc)
        with torch.no_grad():
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
            rows = own[f"{name}.weight"].shape[0]
            own[f"{name}.weight"][:, self.config.hidden_size :] = last_layer_weight(layer, name, rows)
        pairs = {n: n for n in ("self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")}
        pairs |= {"hidden_norm": "input_layernorm", "post_attention_layernorm": "post_attention_layernorm"}
        for mine, theirs in pairs.items():
            own[f"{mine}.weight"].copy_(last_layer_weight(layer, theirs, own[f"{mine}.weight"].shape[0]))

    @classmethod
    def from_architecture(cls, architecture: dict[str, Any], vocab: DraftVocab) -> Self:
        taps = tuple(architecture["tap_ids"])  # a list, when it comes from JSON
        return super().from_architecture(architecture | {"tap_ids": taps}, vocab)

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

    @property
    def layer(self) -> MidLayer:
        return self.midlayer

    def feature(self, taps: Tensor, final: Tensor) -> Tensor:
        return self.fuse(taps)

    def inputs(self, embedding: Tensor, feature: Tensor) -> tuple[Tensor, Tensor]:
        return self.midlayer.inputs(embedding, feature), feature

    def scored(self, state: Tensor) -> Tensor:
        out: Tensor = self.norm(state)
        return out

    def next_feature(self, state: Tensor) -> Tensor:
        out: Tensor = self.norm(state) if self.config.norm_output else state
        return out

    def head(self, frozen: FrozenTarget) -> DraftHead:
        return DraftHead(self.lm_head.weight)

    # --- drafting and serving ---

    def serving(self, frozen: FrozenTarget, layout: str | None = None) -> Serving:
        self.check_layout(layout)
        tensors = {name: tensor.detach() for name, tensor in self.state_dict().items()}
        if not self.vocab.is_full:
            tensors |= {"d2t": self.vocab.d2t, "t2d": self.vocab.t2d}
        return Serving(tensors, eagle3_config(self.architecture(), self.vocab, frozen.config))

    @classmethod
    def from_serving(
        cls, tensors: dict[str, Tensor], config: dict[str, Any], target: Mapping[str, Any] | None = None
    ) -> Self:
        return cls.filled(*read_eagle3(tensors, config, target or {}))
