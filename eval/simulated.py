"""Acceptance length predicted on given texts from the drafter's training forward, without decoding.

The same forward, objective and walk as the training log's simulated tau, on the texts that the verifier wrote: set
beside the measured number it shows whether training and drafting see the same thing. For greedy decoding the two are
equal pass by pass; for sampling the prediction is the expectation over acceptance decisions.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch

from eval.metrics import Round, ratio
from eval.sampling import Sampling
from models.batch import Batch, slots_of
from models.drafter import Drafter
from models.frozen import FrozenTarget
from models.objective import Objective
from models.simulate import simulated_tau
from models.target import Target


class Text(NamedTuple):
    prompt: Sequence[int]
    output: Sequence[int]


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
        batch = text_batch(target, text)
        slots = slots_of(batch, depths)
        if not len(slots):
            continue
        states = drafter.unroll(batch, slots, frozen)
        teacher = frozen.teacher(batch, drafter.vocab)
        score = Objective()(states, drafter.head_weight(frozen), slots, teacher, per_slot=True)
        accept = score.match_slots if greedy else score.alpha_slots
        assert accept is not None
        more = simulated_tau(accept, slots.index, slots.valid)
        accepted, passes = accepted + more[0], passes + more[1]
        hits += (score.match if greedy else score.alpha).cpu()
        counts += score.count.cpu()
    result: dict[str, Any] = {"tau": ratio(passes + accepted, passes)}
    return result | {"per_depth": [ratio(h, n) for h, n in zip(hits.tolist(), counts.tolist(), strict=True)]}


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
