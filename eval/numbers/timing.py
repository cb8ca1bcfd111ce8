"""Throughput and latency of decoded prompts, apart: tokens per second of all sequences together, and what one waits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from eval.decode import Decoded
from eval.numbers.metrics import ratio

PHASES = ("prefill", "draft", "verify", "other", "decode")


def speed(decoded: Decoded) -> dict[str, Any]:
    """Speed of all prompts. Tokens are those of the passes: prefill and the token it gives are apart.

    tokens_per_second: throughput, of all sequences together. ttft_ms: time to the first token. tpot_ms: time per
    output token of one sequence after its first. ms_per_*: of one level of drafts (of all sequences together,
    commits included), of one target forward, of the rest of a pass.
    """
    outs, total = [answer.out for answer in decoded.answers], decoded.seconds
    tokens = sum(len(out.tokens) - 1 for out in outs)
    return {
        "tokens": tokens,
        "passes": total.passes,
        "seconds": {phase: getattr(total, phase) for phase in PHASES},
        "tokens_per_second": ratio(tokens, total.decode),
        "ttft_ms": spread([1e3 * out.first_token for out in outs]),
        "tpot_ms": spread([1e3 * out.latency / (len(out.tokens) - 1) for out in outs if len(out.tokens) > 1]),
        "ms_per_draft": ratio(1e3 * total.draft, total.levels),
        "ms_per_forward": ratio(1e3 * total.verify, total.passes),
        "ms_per_rest": ratio(1e3 * total.other, total.passes),
    }


def spread(values: Sequence[float]) -> dict[str, float] | None:
    """Mean, median and 95th percentile."""
    if not values:
        return None
    middle, high = np.percentile(values, [50, 95])
    return {"mean": float(np.mean(values)), "p50": float(middle), "p95": float(high)}


def compare_costs(drafted: Mapping[str, Any], plain: Mapping[str, Any]) -> dict[str, Any]:
    """c, the cost of a level of drafting, and that of a verification, in plain forwards."""

    def over(key: str) -> float | None:
        base = plain["ms_per_forward"]
        return ratio(drafted[key], base) if drafted[key] is not None and base else None

    return {"draft": over("ms_per_draft"), "verify": over("ms_per_forward")}
