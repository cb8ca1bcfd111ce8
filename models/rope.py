"""Rotary position embedding: the target's parameters for the drafter, and its application to packed heads."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

NOT_TRAINED = ("partial_rotary_factor", "mrope_section", "mrope_interleaved")  # a drafter turns whole heads


def rope_parameters(config: dict[str, Any]) -> dict[str, Any]:
    """The rope of a target config (transformers 4 or 5 spelling) as one flat dict with rope_type and rope_theta.

    Targets with a rope per layer type (Gemma-3) give that of their full-attention layers. Plain numbers only,
    so that a drafter is served with exactly what it was trained with.
    """
    found = config.get("rope_parameters") or config.get("rope_scaling") or {}
    nested = found.get("full_attention")
    found = dict(nested if isinstance(nested, dict) else found)
    if "type" in found:
        found.setdefault("rope_type", found.pop("type"))
    found = {name: value for name, value in found.items() if name not in NOT_TRAINED}
    found.setdefault("rope_type", "default")
    found.setdefault("rope_theta", float(config.get("rope_theta") or 10000.0))
    return found


def apply_rope(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate heads [n, heads, D] by cos, sin [n, D] (half-split layout of Llama)."""
    first, second = heads.chunk(2, -1)
    turned = torch.cat([-second, first], -1)
    return (heads * cos[:, None] + turned * sin[:, None]).to(heads.dtype)
