"""One EAGLE-3 training step written the usual way: what ``python -m scripts.benchmark`` measures Eyas against.

Documents are padded to the longest one; at every depth the whole batch goes through the layer with a dense
[L, L + k] score matrix (a causal block and one diagonal column for each earlier depth), and keeps its logits over
the draft vocabulary; the teacher is a softmax over the target's full vocabulary. Plain autograd, float32, and no
code in common with models/. Dimensions: B documents, L tokens, K depths, H hidden, V and Vd vocabularies.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class PaddedBatch:
    """input_ids, supervised [B, L] (padding: 0 and False); taps [B, L, A*H]; final [B, L, H]."""

    input_ids: Tensor
    supervised: Tensor
    taps: Tensor
    final: Tensor


@dataclass(frozen=True)
class Target:
    """embedding, head [V, H]; draft_ids [Vd] the target ids of the draft vocabulary."""

    embedding: Tensor
    head: Tensor
    draft_ids: Tensor


@dataclass(frozen=True)
class Dims:
    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    rope_theta: float


@dataclass(frozen=True)
class Outcome:
    """loss 0-d: sum over depths of decay^k times the cross-entropy, per valid slot of depth 0. accuracy [K]: how
    often the draft's argmax is the target's."""

    loss: Tensor
    accuracy: Tensor


def reference_step(
    weights: dict[str, Tensor], batch: PaddedBatch, target: Target, dims: Dims, depths: int, decay: float
) -> Outcome:
    """The loss of a batch. weights: the drafter's tensors by their names in the exported layout."""
    teacher, best = full_teacher(batch.final, target)
    features = batch.taps @ weights["fc.weight"].T
    keys: list[Tensor] = []
    values: list[Tensor] = []
    kept: list[Tensor] = []
    valid = ahead(batch.supervised, 1)
    losses, hits, counts = [], [], []
    for k in range(depths):
        embedded = F.embedding(ahead(batch.input_ids, k + 1), target.embedding)
        features = draft_layer(weights, embedded, features, keys, values, dims, k)
        kept.append(rms_norm(features, weights["norm.weight"], dims.eps) @ weights["lm_head.weight"].T)
        valid = valid & ahead(batch.supervised, k + 2)
        cross_entropy = -(ahead(teacher, k + 1) * kept[k].log_softmax(-1)).sum(-1)
        losses.append(decay**k * (cross_entropy * valid).sum())
        hits.append(((target.draft_ids[kept[k].argmax(-1)] == ahead(best, k + 1)) & valid).sum())
        counts.append(valid.sum())
    return Outcome(torch.stack(losses).sum() / counts[0], torch.stack(hits) / torch.stack(counts))


@torch.no_grad()
def full_teacher(final: Tensor, target: Target) -> tuple[Tensor, Tensor]:
    """The target's probabilities of the draft vocabulary [B, L, Vd] and its argmax [B, L], by the full logits."""
    logits = final @ target.head.T
    return logits.softmax(-1)[..., target.draft_ids], logits.argmax(-1)


def draft_layer(
    weights: dict[str, Tensor],
    embedded: Tensor,
    features: Tensor,
    keys: list[Tensor],
    values: list[Tensor],
    dims: Dims,
    k: int,
) -> Tensor:
    """The decoder layer at depth k on [B, L, H]; appends this depth's keys and values."""

    def linear(name: str, x: Tensor) -> Tensor:
        return x @ weights[f"midlayer.{name}.weight"].T

    def norm(name: str, x: Tensor) -> Tensor:
        return rms_norm(x, weights[f"midlayer.{name}.weight"], dims.eps)

    def heads(x: Tensor, count: int) -> Tensor:
        return x.unflatten(-1, (count, dims.head_dim)).transpose(1, 2)  # [B, heads, L, D]

    inputs = torch.cat([norm("input_layernorm", embedded), norm("hidden_norm", features)], -1)
    repeat = dims.heads // dims.kv_heads
    query = rotate(heads(linear("self_attn.q_proj", inputs), dims.heads), k, dims)
    key = rotate(heads(linear("self_attn.k_proj", inputs), dims.kv_heads), k, dims)
    keys.append(key.repeat_interleave(repeat, 1))
    values.append(heads(linear("self_attn.v_proj", inputs), dims.kv_heads).repeat_interleave(repeat, 1))
    mixed = dense_attention(query, keys, values)
    features = features + linear("self_attn.o_proj", mixed.transpose(1, 2).flatten(-2))
    x = norm("post_attention_layernorm", features)
    return features + linear("mlp.down_proj", F.silu(linear("mlp.gate_proj", x)) * linear("mlp.up_proj", x))


def dense_attention(query: Tensor, keys: list[Tensor], values: list[Tensor]) -> Tensor:
    """[B, nq, L, D]: a causal block over depth 0 and one diagonal column for each later depth."""
    length, scale = query.shape[2], query.shape[-1] ** -0.5
    causal = torch.full((length, length), float("-inf")).triu(1)
    blocks = [query @ keys[0].transpose(-1, -2) * scale + causal]
    blocks += [(query * key).sum(-1, keepdim=True) * scale for key in keys[1:]]
    probabilities = torch.cat(blocks, -1).softmax(-1)  # [B, nq, L, L + k]
    out = probabilities[..., :length] @ values[0]
    for i, value in enumerate(values[1:]):
        out = out + probabilities[..., length + i, None] * value
    return out


def rotate(x: Tensor, start: int, dims: Dims) -> Tensor:
    """Rotary embedding of [B, heads, L, D] at positions start, start + 1, ..."""
    frequency = dims.rope_theta ** -(torch.arange(0, dims.head_dim, 2) / dims.head_dim)
    angle = torch.outer(torch.arange(start, start + x.shape[2]).float(), frequency)
    cos, sin = torch.cat([angle.cos()] * 2, -1), torch.cat([angle.sin()] * 2, -1)
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * (x.pow(2).mean(-1, keepdim=True) + eps).rsqrt() * weight


def ahead(x: Tensor, by: int) -> Tensor:
    """x [B, L, ...] moved ``by`` places to the left along L, zeros behind."""
    padding = torch.zeros_like(x[:, :by])
    return torch.cat([x[:, by:], padding], 1)
