"""A decoder layer of the target's own family as a draft block, whatever the family: transformers' class, our attention.

The layer computes its queries, keys and values (biases, norms, latent attention, rotary embedding and all) and hands
them to the one attention function registered here, which calls whatever ``attend`` the current forward brought along:
packed causal attention, the lineages of an unroll, or a cache of keys and values. No family needs code of its own.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM, PretrainedConfig

from models.attention import Spans, ttt_attention
from models.errors import EyasError
from models.load_frozen import EXPERTS, PLUS_ONE_NORMS, is_norm

ATTENTION = "eyas"
SAME_AS = {"mimo": "qwen2"}  # families that transformers lacks, and whose decoder layers they use
WRITES = re.compile(r"(?:.*\.)?(?:o_proj|out_proj|down_proj)(?:\.weight|\.bias)?")  # to the residual stream
# Norms of what is written, in families that have them (Gemma, OLMo-2; GLM-4).
POST_NORMS = (
    ("post_attention_layernorm", "post_feedforward_layernorm"),
    ("post_self_attn_layernorm", "post_mlp_layernorm"),
)


KeyValue = tuple[Tensor, Tensor]


class Attend(Protocol):
    """query [n, nq, D], key and value [n, nkv, D] of the n tokens at hand, rotated; scale 1/sqrt(D) -> [n, nq, D]."""

    def __call__(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor: ...


_attend: ContextVar[Attend] = ContextVar("attend")


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **unused: Any,
) -> tuple[Tensor, None]:
    """What transformers calls for every layer: query [1, nq, n, Dk], key [1, nkv, n, Dk], value [1, nkv, n, Dv].

    Another scale goes into the queries; heads of unequal width (latent attention) are filled up with zeros.
    """
    if softcap or s_aux is not None:
        what = "a soft cap of its scores" if softcap else "attention sinks"
        raise EyasError(f"the target's attention has {what}: its decoder layer can't be a draft block")
    wide, out_width = max(query.shape[-1], value.shape[-1]), value.shape[-1]
    factor = 1.0 if scaling is None else scaling * wide**0.5
    if scaling is None and wide != query.shape[-1]:
        factor = (wide / query.shape[-1]) ** 0.5
    if abs(factor - 1.0) > 1e-9:
        query = query * factor
    heads = (t.to(value.dtype)[0].transpose(0, 1) for t in (query, key, value))  # autocast widens what is rotated
    query, key, value = (F.pad(t, (0, wide - t.shape[-1])) if t.shape[-1] < wide else t for t in heads)
    return _attend.get()(query, key, value)[None, ..., :out_width], None


AttentionInterface.register(ATTENTION, _attention)


class NativeLayer(nn.Module):
    """One decoder layer of a family, with the parameter names that transformers gives it, and its rotary embedding.

    config: the target's text config as a plain dict. The last layer with full attention is the pattern: of a
    mixture-of-experts target that is one with experts. Weights start as the family starts its own, from torch's random
    numbers. Raises EyasError for families without such a layer.
    """

    _layer: nn.Module

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        own = family_config(config)
        self.hidden_size = int(own.hidden_size)
        self.offset = 1.0 if PLUS_ONE_NORMS.fullmatch(config.get("model_type", "")) else 0.0
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(own)
        pattern, rotary, number = _pattern(model, own)
        layer = type(pattern)(own, number)
        layer.apply(model._init_weights)
        # Its parts are ours, without another level of names; the layer itself only knows how to call them.
        object.__setattr__(self, "_layer", layer)
        for name, part in layer.named_children():
            self.add_module(name, part)
        for name, parameter in layer.named_parameters(recurse=False):
            self.register_parameter(name, parameter)
        self.rotary = type(rotary)(own)
        kinds = getattr(own, "layer_types", None)
        takes = inspect.signature(self.rotary.forward).parameters
        self.rotary_options = {"layer_type": kinds[number]} if kinds and "layer_type" in takes else {}

    def forward(self, hidden: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """hidden [n, H] at positions [n] -> [n, H]; ``attend`` sees their queries, keys and values."""
        if len(hidden):
            return self._run(hidden, positions, attend)

        def none(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            return _longer(attend(query[:0], key[:0], value[:0]))

        return self._run(_longer(hidden), _longer(positions), none)[:0]  # transformers' layers want a row at least

    def _run(self, hidden: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        positions = positions[None]
        token = _attend.set(attend)
        try:
            out = self._layer(
                hidden[None],
                attention_mask=None,
                position_ids=positions,
                position_embeddings=self.rotary(hidden[None], positions, **self.rotary_options),
            )
        finally:
            _attend.reset(token)
        states: Tensor = (out[0] if isinstance(out, tuple) else out)[0]
        return states

    @torch.no_grad()
    def kv_shape(self) -> tuple[int, int]:
        """Heads and width of the keys and values that ``attend`` is given."""
        found: list[tuple[int, int]] = []

        def look(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            found.append((key.shape[1], key.shape[2]))
            return query

        like = next(self.parameters())
        self(like.new_zeros(1, self.hidden_size), torch.zeros(1, dtype=torch.int64, device=like.device), look)
        return found[0]

    @torch.no_grad()
    def init_from(self, layer: Mapping[str, Tensor], option: str) -> None:
        """Start from the target's last layer (``FrozenTarget.last_layer``). Experts, which it lacks, stay random.

        Raises EyasError that names ``option`` and the tensor that is missing or has another shape.
        """
        for name, own in self.state_dict().items():
            weight = layer.get(name)
            if weight is None and EXPERTS.search(name):
                continue
            if weight is None or weight.shape != own.shape:
                found = "missing" if weight is None else f"of shape {list(weight.shape)}, the block's {list(own.shape)}"
                raise EyasError(f"{option}: {name} of the target's last layer is {found}")
            own.copy_(weight - self.offset if self.offset and is_norm(name) else weight)

    @torch.no_grad()
    def pass_through(self) -> None:
        """Make the layer write nothing: its output is its input, until it has learned better.

        The last matrices become zero; where a norm follows them its multiplier does, as the slope of a norm at zero is
        enormous.
        """
        own = self.state_dict()
        for names in POST_NORMS:
            if names[1] + ".weight" in own:
                for name in names:
                    own[name + ".weight"].fill_(-self.offset)
                return
        for name, weight in own.items():
            if WRITES.fullmatch(name):
                weight.zero_()


def _longer(rows: Tensor) -> Tensor:
    """rows [n, ...] and one of zeros behind them."""
    return torch.cat([rows, rows.new_zeros(1, *rows.shape[1:])])


def family_config(config: Mapping[str, Any]) -> PretrainedConfig:
    """The target's config with our attention. Raises EyasError for a family that transformers doesn't know."""
    fields = {k: v for k, v in config.items() if k not in ("model_type", "quantization_config", "architectures")}
    family = config.get("model_type", "")
    try:
        own = AutoConfig.for_model(SAME_AS.get(family, family), **fields)
    except ValueError as error:
        raise EyasError(f"target: model_type={family!r} is no family that transformers knows") from error
    own._attn_implementation = ATTENTION
    return own


def _pattern(model: nn.Module, config: PretrainedConfig) -> tuple[nn.Module, nn.Module, int]:
    """The decoder layer to copy, the model's rotary embedding, and the layer's number."""
    decoder = getattr(model, "model", model)
    layers, rotary = getattr(decoder, "layers", None), getattr(decoder, "rotary_emb", None)
    if not isinstance(layers, nn.ModuleList) or rotary is None:
        raise EyasError(f"target: decoder layers of model_type={config.model_type!r} can't be draft blocks")
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * len(layers)
    full = [i for i, kind in enumerate(kinds) if kind == "full_attention"]
    number = full[-1] if full else len(layers) - 1  # a window over all layers is longer than most texts
    return layers[number], rotary, number


class Causal:
    """Packed causal attention: every token sees those before it in its own document, and itself."""

    def __init__(self, cu_seqlens: Tensor) -> None:
        index = torch.arange(int(cu_seqlens[-1]), device=cu_seqlens.device)
        self.spans = Spans.of(index, cu_seqlens)

    def __call__(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return ttt_attention(query, key, value, [], [], self.spans)


class Lineage:
    """Attention at a depth k > 0 of an unroll (models/attention.py), where the slots [S] of ``spans`` run.

    first: keys and values of depth 0, [T, nkv, D]; before: those of depths 1 .. k-1 of the slots, [S, nkv, D].
    """

    def __init__(self, first: KeyValue, before: Sequence[KeyValue], spans: Spans) -> None:
        self.first, self.before, self.spans = first, before, spans

    def __call__(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        own = [*self.before, (key, value)]
        return ttt_attention(query, *self.first, [k for k, _ in own], [v for _, v in own], self.spans)


class Kept:
    """``attend``, and the keys and values that it was called with: ``own``."""

    own: KeyValue

    def __init__(self, attend: Attend) -> None:
        self.attend = attend

    def __call__(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        self.own = key, value
        return self.attend(query, key, value)
