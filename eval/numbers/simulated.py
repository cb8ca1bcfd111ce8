"""Acceptance length predicted on given texts from the drafter's training forward, without decoding.

The same forward, objective and walk as the training log's simulated tau, on the texts that the verifier wrote: set
beside the measured number it shows whether training and drafting see the same thing. For greedy decoding the two are
equal pass by pass; for sampling the prediction is the expectation over acceptance decisions.

For independent draft models the same numbers come from one forward of each model.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from eval.numbers.metrics import Round, ratio
from eval.verify.sampling import Sampling
from models.batch import Batch, slots_of, valid_slots
from models.drafter import Drafter
from models.frozen import FrozenTarget, Teacher
from models.objective import Objective, Score
from models.simulate import simulated_tau
from models.target import LOGITS_AT_ONCE, Target


class Text(NamedTuple):
    prompt: Sequence[int]
    output: Sequence[int]


class Accepts(NamedTuple):
    """accept [K, S] in 0..1: chance that the draft of depth k at a slot is accepted if those before it were, zero where
    not valid; slots [S], valid [K, S]: index and valid of ``models.batch.Slots``, of one text."""

    accept: Tensor
    slots: Tensor
    valid: Tensor


def can_simulate(sampling: Sampling) -> bool:
    """The objective knows the target's argmax and its distribution at T = 1, not those after other processors."""
    return (sampling.greedy and not sampling.needs_context) or sampling.plain


@torch.no_grad()
def simulate(
    target: Target, drafter: Drafter, frozen: FrozenTarget, texts: Iterable[Text], depths: int, *, greedy: bool
) -> dict[str, float | None]:
    """tau of a chain of ``depths`` tokens over the texts, pooled, and the mean acceptance of each depth.

    per_depth[k] is the agreement (greedy) or alpha (sampling) at depth k given the true prefix.
    """
    accepted = passes = 0.0
    hits, counts = torch.zeros(depths, dtype=torch.float64), torch.zeros(depths, dtype=torch.float64)
    for text in texts:
        if (score := scored(target, drafter, frozen, text, depths)) is None:
            continue
        more = simulated_tau(*accepts(score, greedy))
        accepted, passes = accepted + more[0], passes + more[1]
        hits += (score.match if greedy else score.alpha).cpu()
        counts += score.count.cpu()
    result: dict[str, Any] = {"tau": ratio(passes + accepted, passes)}
    return result | {"per_depth": [ratio(h, n) for h, n in zip(hits.tolist(), counts.tolist(), strict=True)]}


@torch.no_grad()
def scored(target: Target, drafter: Drafter, frozen: FrozenTarget, text: Text, depths: int) -> Score | None:
    """The objective's numbers for each slot of a text; None where it is too short to have one."""
    batch = text_batch(target, text)
    slots = slots_of(batch, depths)
    if not len(slots):
        return None
    states, teacher = drafter.unroll(batch, slots, frozen), frozen.teacher(batch, drafter.vocab)
    return Objective()(states, drafter.head(frozen), slots, teacher, per_slot=True)


def accepts(score: Score, greedy: bool) -> Accepts:
    found = score.match_slots if greedy else score.alpha_slots
    assert found is not None
    return Accepts(found, score.slots.index, score.slots.valid)


@torch.no_grad()
def model_accepts(target: Target, model: Target, text: Text, depths: int) -> Accepts:
    """alpha = sum min(p, q) at T = 1 of an independent draft model, which drafts only ids that both models have.

    It reads the whole text, so depth k of slot p drafts from x[0 .. p+1+k].
    """
    ids = torch.tensor([*text.prompt, *text.output], dtype=torch.int64)
    supervised = torch.arange(len(ids)) >= len(text.prompt)
    valid = valid_slots(supervised, torch.tensor([0, len(ids)]), depths)
    index = valid[0].nonzero().squeeze(1)
    valid = valid[:, index]
    if not len(index):
        return Accepts(torch.zeros(valid.shape), index, valid)
    size, first = min(target.vocab_size, model.vocab_size), int(index[0]) + 1  # drafts follow x[..t], from t = first on
    p, q = (teacher_of(one, ids, size) for one in (target, model))
    alpha = []
    for at in torch.arange(first, len(ids) - 1).split(max(1, LOGITS_AT_ONCE // size)):
        drafts = q.log_probs(at.to(model.device)).softmax(-1)  # without the ids that only the draft model has
        alpha.append(torch.minimum(p.log_probs(at.to(target.device)).exp(), drafts.to(target.device)).sum(-1).cpu())
    k, s = valid.nonzero(as_tuple=True)
    accept = torch.zeros(valid.shape)
    accept[k, s] = torch.cat(alpha)[index[s] + 1 + k - first]
    return Accepts(accept, index, valid)


def teacher_of(model: Target, ids: Tensor, size: int) -> Teacher:
    """The model's distribution over the first ``size`` ids behind every token of a text; see draft_model.py for
    ids that it lacks."""
    found = model.features([ids.clamp_max(model.vocab_size - 1)])[0]
    bias = None if model.head.bias is None else model.head.bias[:size]
    kept = (found.final, found.lse, found.top1, ids.roll(-1), model.scale, model.softcap)
    return Teacher(model.head.weight[:size], bias, *kept)


def chain_taus(texts: Iterable[Accepts], depths: int) -> list[float]:
    """tau of chains of 1 .. ``depths`` drafts over the texts, pooled; empty where no text has a slot."""
    accepted, passes = [0.0] * depths, [0.0] * depths
    for one in texts:
        for depth in range(depths):
            more = simulated_tau(one.accept[: depth + 1], one.slots, one.valid[: depth + 1])
            accepted[depth], passes[depth] = accepted[depth] + more[0], passes[depth] + more[1]
    return [1 + drafts / n for drafts, n in zip(accepted, passes, strict=True) if n]


def text_batch(target: Target, text: Text) -> Batch:
    """One text as a batch whose output is supervised."""
    ids = torch.tensor([*text.prompt, *text.output], dtype=torch.int64, device=target.device)
    features = target.features([ids])[0]
    supervised = torch.arange(len(ids), device=ids.device) >= len(text.prompt)
    ends = torch.tensor([0, len(ids)], dtype=torch.int32, device=ids.device)
    return Batch(ids, supervised, ends, features.taps, features.final, features.lse, features.top1)


def measured_alike(rounds: Sequence[Sequence[Round]]) -> float | None:
    """The measured tau in the simulation's counting: accepted drafts inside the text, bonus or not at its end."""
    passes = [r for prompt in rounds for r in prompt]
    return ratio(len(passes) + sum(min(r.accepted, r.kept) for r in passes), len(passes))
