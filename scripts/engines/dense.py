"""Building blocks of the engines: norm, rotary positions and attention as every Llama-like engine computes them."""

from __future__ import annotations

import torch
from torch import Tensor

Cache = tuple[Tensor, Tensor]  # keys and values, [heads, tokens, D]


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    variance = x.pow(2).mean(-1, keepdim=True)
    return weight * (x * (variance + eps).rsqrt())


def rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """heads [heads, n, D] turned by cos, sin [n, D] (half-split layout)."""
    half = heads.shape[-1] // 2
    a, b = heads[..., :half], heads[..., half:]
    return torch.cat([a * cos[:, :half] - b * sin[:, :half], b * cos[:, half:] + a * sin[:, half:]], -1)


def attend(q: Tensor, k: Tensor, v: Tensor, cache: Cache | None) -> tuple[Tensor, Cache]:
    """Causal attention of n new tokens, behind those in the cache: q [nq, n, D], k and v [nkv, n, D] ->
    [n, nq * D] and the grown cache."""
    count, width = q.shape[1], q.shape[2]
    if cache:
        k, v = torch.cat([cache[0], k], 1), torch.cat([cache[1], v], 1)
    repeat = q.shape[0] // k.shape[0]
    scores = q @ k.repeat_interleave(repeat, 0).transpose(1, 2) * width**-0.5
    future = torch.ones(count, k.shape[1], dtype=torch.bool).triu(k.shape[1] - count + 1)
    mixed = scores.masked_fill(future, float("-inf")).softmax(-1) @ v.repeat_interleave(repeat, 0)
    return mixed.transpose(0, 1).reshape(count, -1), (k, v)


def swiglu(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """The MLP: x [n, H], gate and up [I, H], down [H, I]."""
    gated = x @ gate.T
    return (gated * gated.sigmoid() * (x @ up.T)) @ down.T
