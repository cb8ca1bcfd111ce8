"""Training-time-test attention over packed documents, without ever building a score matrix.

At depth k slot p attends causally to the depth-0 keys of slots <= p of its document, and to one key of its own
lineage from each depth 1..k (the diagonal keys). The fused causal kernel gives the first part with its
log-sum-exp; the few diagonal terms are merged into the softmax by hand. Calling the kernel's backward with the
*merged* output and log-sum-exp makes it recompute exactly the rows of the joint softmax, so its dq, dk, dv are
right as they are and only the diagonal gradients remain, elementwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten


@dataclass(frozen=True)
class Spans:
    """Which tokens hold queries: index [S] ascending token ids; the documents (start, stop) that hold any.

    ``stop`` is just behind a document's last query: later keys are never attended to.
    """

    index: Tensor
    documents: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, index: Tensor, cu_seqlens: Tensor) -> Spans:
        bounds = cu_seqlens.tolist()
        cuts = torch.searchsorted(index, cu_seqlens.to(index))
        last = index[(cuts[1:] - 1).clamp_min(0)].tolist() if index.numel() else [0] * (len(bounds) - 1)
        some = (cuts.diff() > 0).tolist()
        return cls(index, tuple((bounds[d], last[d] + 1) for d in range(len(some)) if some[d]))


def ttt_attention(
    query: Tensor, key: Tensor, value: Tensor, diag_keys: list[Tensor], diag_values: list[Tensor], spans: Spans
) -> Tensor:
    """Attention of S query slots at depth k = len(diag_keys).

    query [S, nq, D]; key, value [T, nkv, D] of depth 0 (nkv divides nq); diag_keys, diag_values k tensors
    [S, nkv, D]. Scale 1/sqrt(D). Returns [S, nq, D].
    """
    out: Tensor = _TTTAttention.apply(query, key, value, spans, *diag_keys, *diag_values)
    return out


class _TTTAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, spans: Spans, *lineage: Tensor) -> Tensor:
        keys, values = _halves(lineage)
        scale = query.shape[-1] ** -0.5
        full = _scatter(query, spans.index, key.shape[0])
        out_all, lse_all = _causal(full, key, value, spans, scale)
        out, lse = out_all[spans.index], lse_all[spans.index]
        if keys:
            scores = _diag_scores(query, keys, scale)  # [k, S, nq] float32
            merged = torch.logsumexp(torch.cat([lse[None], scores]), 0)
            mixed = out.float() * (lse - merged).exp()[..., None]
            mixed += _diag_mix((scores - merged).exp(), values)
            out, lse = mixed.to(query.dtype), merged
            lse_all = lse_all.index_copy(0, spans.index, lse)
        ctx.save_for_backward(query, key, value, out, lse, lse_all, *lineage)
        ctx.spans, ctx.scale = spans, scale
        return out

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, lse, lse_all, *lineage = ctx.saved_tensors
        keys, values = _halves(lineage)
        spans, scale, total = ctx.spans, ctx.scale, key.shape[0]
        grad_out = grad_out.contiguous()
        dq_all, dk, dv = _causal_backward(
            _scatter(grad_out, spans.index, total),
            _scatter(query, spans.index, total),
            key,
            value,
            _scatter(out, spans.index, total),
            lse_all,
            spans,
            scale,
        )
        dq = dq_all[spans.index]
        if not keys:
            return dq, dk, dv, None
        probs = (_diag_scores(query, keys, scale) - lse).exp()  # [k, S, nq]
        delta = (grad_out.float() * out.float()).sum(-1)
        dscores = probs * (_diag_scores(grad_out, values, 1.0) - delta) * scale
        dq = dq + _diag_mix(dscores, keys).to(dq.dtype)
        dkeys = [
            _group_sum(slopes, query, own.shape[1]).to(own.dtype) for slopes, own in zip(dscores, keys, strict=True)
        ]
        dvalues = [_group_sum(p, grad_out, own.shape[1]).to(own.dtype) for p, own in zip(probs, values, strict=True)]
        return dq, dk, dv, None, *dkeys, *dvalues


def _halves(lineage: Sequence[Tensor]) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
    """Keys and values of a lineage, k of each."""
    return lineage[: len(lineage) // 2], lineage[len(lineage) // 2 :]


def _scatter(rows: Tensor, index: Tensor, total: int) -> Tensor:
    return rows.new_zeros(total, *rows.shape[1:]).index_copy_(0, index, rows)


def _diag_scores(query: Tensor, keys: Sequence[Tensor], scale: float) -> Tensor:
    """q . k_i of every lineage key: [S, nq, D], k of [S, nkv, D] -> [k, S, nq] float32."""
    grouped = query.unflatten(1, (keys[0].shape[1], -1)).float()
    return torch.stack([(grouped * key[:, :, None].float()).sum(-1).flatten(1) for key in keys]) * scale


def _diag_mix(weights: Tensor, values: Sequence[Tensor]) -> Tensor:
    """sum_i w_i v_i: [k, S, nq], k of [S, nkv, D] -> [S, nq, D] float32."""
    mixed = weights.new_zeros(())
    for weight, value in zip(weights, values, strict=True):
        mixed = mixed + weight.unflatten(1, (value.shape[1], -1))[..., None] * value[:, :, None].float()
    return mixed.flatten(1, 2)


def _group_sum(weights: Tensor, query: Tensor, kv_heads: int) -> Tensor:
    """sum over the query heads of a group of w q: [S, nq], [S, nq, D] -> [S, nkv, D] float32."""
    grouped = weights.unflatten(1, (kv_heads, -1))
    return (grouped[..., None] * query.unflatten(1, (kv_heads, -1)).float()).sum(2)


# --- fused causal kernels over packed documents -------------------------------------------------------------


def _causal(query: Tensor, key: Tensor, value: Tensor, spans: Spans, scale: float) -> tuple[Tensor, Tensor]:
    """Causal attention inside each document: output [T, nq, D] and log-sum-exp [T, nq] float32."""
    if _varlen(query):
        cu, longest = _cu(spans, query)
        out, lse, *_ = aten._flash_attention_forward(
            query, key, value, cu, cu, longest, longest, 0.0, True, False, scale=scale
        )
        return out, lse.transpose(0, 1).contiguous()
    out = torch.zeros_like(query)
    lse = query.new_zeros(query.shape[:2], dtype=torch.float32)
    repeat = query.shape[1] // key.shape[1]
    for a, b in spans.documents:
        q, k, v = _heads(query, a, b), _heads(key, a, b, repeat), _heads(value, a, b, repeat)
        if query.device.type == "cpu" and query.dtype != torch.float64:
            o, log = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, True, scale=scale)
        else:
            o, log = _dense(q, k, v, scale)
        out[a:b] = o[0].transpose(0, 1)
        lse[a:b] = log[0].transpose(0, 1)
    return out, lse


def _causal_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, spans: Spans, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    if _varlen(query):
        cu, longest = _cu(spans, query)
        rng = torch.empty(2, dtype=torch.uint64, device=query.device)
        unused = torch.empty((), dtype=torch.uint64, device=query.device)
        args = (out, lse.transpose(0, 1).contiguous(), cu, cu, longest, longest, 0.0, True, rng, unused)
        dq, dk, dv = aten._flash_attention_backward(grad, query, key, value, *args, scale=scale)
        return dq, dk, dv
    dq, dk, dv = torch.zeros_like(query), torch.zeros_like(key), torch.zeros_like(value)
    repeat = query.shape[1] // key.shape[1]
    for a, b in spans.documents:
        g, q, o = _heads(grad, a, b), _heads(query, a, b), _heads(out, a, b)
        k, v = _heads(key, a, b, repeat), _heads(value, a, b, repeat)
        log = lse[a:b].transpose(0, 1)[None].contiguous()
        if query.device.type == "cpu" and query.dtype != torch.float64:
            gq, gk, gv = aten._scaled_dot_product_flash_attention_for_cpu_backward(
                g, q, k, v, o, log, 0.0, True, scale=scale
            )
        else:
            gq, gk, gv = _dense_backward(g, q, k, v, o, log, scale)
        dq[a:b] = gq[0].transpose(0, 1)
        dk[a:b] = gk[0].transpose(0, 1).unflatten(1, (-1, repeat)).sum(2)
        dv[a:b] = gv[0].transpose(0, 1).unflatten(1, (-1, repeat)).sum(2)
    return dq, dk, dv


def _varlen(query: Tensor) -> bool:
    return query.device.type == "cuda" and query.dtype in (torch.bfloat16, torch.float16)


def _cu(spans: Spans, query: Tensor) -> tuple[Tensor, int]:
    """Sequence bounds for the varlen kernel; tokens between spans become sequences without queries of interest."""
    edges = sorted({0, query.shape[0], *(e for span in spans.documents for e in span)})
    longest = max(b - a for a, b in zip(edges, edges[1:], strict=False))
    return torch.tensor(edges, dtype=torch.int32, device=query.device), longest


def _heads(packed: Tensor, a: int, b: int, repeat: int = 1) -> Tensor:
    """[T, n, D] -> [1, n * repeat, b - a, D]."""
    part = packed[a:b]
    part = part.repeat_interleave(repeat, 1) if repeat > 1 else part
    return part.transpose(0, 1)[None]


def _dense(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """For devices and dtypes without a fused kernel that returns its log-sum-exp."""
    scores = _dense_scores(q, k, scale)
    lse = torch.logsumexp(scores, -1)
    return ((scores - lse[..., None]).exp() @ v.to(scores.dtype)).to(q.dtype), lse.float()


def _dense_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    scores = _dense_scores(q, k, scale)
    kind = scores.dtype
    probs = (scores - lse.to(kind)[..., None]).exp()
    grad, delta = grad.to(kind), (grad.to(kind) * out.to(kind)).sum(-1, keepdim=True)
    dscores = probs * (grad @ v.to(kind).transpose(-1, -2) - delta) * scale
    dq, dk = dscores @ k.to(kind), dscores.transpose(-1, -2) @ q.to(kind)
    return dq.to(q.dtype), dk.to(k.dtype), (probs.transpose(-1, -2) @ grad).to(v.dtype)


def _dense_scores(q: Tensor, k: Tensor, scale: float) -> Tensor:
    kind = torch.promote_types(q.dtype, torch.float32)
    scores = (q.to(kind) @ k.to(kind).transpose(-1, -2)) * scale
    future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
    return scores.masked_fill(future, float("-inf"))
