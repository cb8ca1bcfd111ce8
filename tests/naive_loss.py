"""The objective once more, slowly: plain autograd in float64 over whole tables of logits, nothing in chunks."""

from __future__ import annotations

import copy
from dataclasses import replace

import torch
from torch import Tensor

from models.batch import Batch, slots_of
from models.drafter import Drafter
from models.frozen import FrozenTarget
from models.objective import Objective


def in_float64(drafter: Drafter, batch: Batch, frozen: FrozenTarget) -> tuple[Drafter, Batch, FrozenTarget]:
    """Copies that compute in float64."""
    wide = replace(batch, taps=batch.taps.double(), final=batch.final.double())
    return copy.deepcopy(drafter).double(), wide, frozen.to("cpu", torch.float64)


def target_logits(batch: Batch, frozen: FrozenTarget) -> Tensor:
    """The target's logits at every position, [T, V] float64."""
    bias = 0.0 if frozen.head_bias is None else frozen.head_bias.double()
    logits = frozen.scale * (batch.final.double() @ frozen.head.double().T + bias)
    return frozen.softcap * torch.tanh(logits / frozen.softcap) if frozen.softcap else logits


def naive_loss(drafter: Drafter, batch: Batch, frozen: FrozenTarget, objective: Objective, depths: int) -> Tensor:
    """What ``Drafter.forward`` should give as loss_sum, differentiable; depth weights decay^k."""
    slots, ids = slots_of(batch, depths), drafter.vocab.ids
    states = drafter.unroll(batch, slots, frozen)
    head, total = drafter.head(frozen), torch.zeros((), dtype=torch.float64)
    probs = target_logits(batch, frozen).softmax(-1)[:, ids]
    alphas: dict[int, list[Tensor]] = {}
    depth_of, slot_of = (t.tolist() for t in slots.rows())
    for state, k, s in zip(states, depth_of, slot_of, strict=True):
        p, x = probs[int(slots.index[s]) + 1 + k], int(batch.input_ids[int(slots.index[s]) + 2 + k])
        logits = head.scale * (head.of(k) @ state + (0.0 if head.bias is None else head.bias))
        if head.softcap:
            logits = head.softcap * torch.tanh(logits / head.softcap)
        logq = logits.log_softmax(-1)
        alpha = torch.minimum(p, logq.exp()).sum()
        alphas.setdefault(s, []).append(alpha)
        lam = torch.exp(-3 * alpha.detach())
        kl = (p * (p.log() - logq)).sum()
        losses = {
            "ce": -(p * logq).sum(),
            "kl": kl,
            "lk": lam * kl + (1 - lam) * (1 - alpha),
            "tv": 1 - alpha,
            "nll": -logq[ids == x].sum(),  # nothing where x is no draft token
            "expected_length": torch.zeros((), dtype=torch.float64),  # per slot, below
        }
        likeliest = p.argsort(descending=True)[: objective.top_k]
        top = -(p[likeliest] * logq[likeliest]).sum()
        total = total + objective.decay**k * (losses[objective.loss] + objective.top_k_weight * top)
    if objective.loss == "expected_length":
        for own in alphas.values():
            total = total + 1 - torch.stack(own).cumprod(0).sum() / depths
    terms = drafter.extra_terms(states, slots, batch)
    if terms is None:
        return total
    weights = objective.decay ** torch.tensor(depth_of, dtype=torch.float64)
    return drafter.logit_weight * total + (terms * weights).sum()
