"""Scoring held-out documents: sums for the averages, and the simulated walks that tau comes from."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch

from data.features.order import plan_epoch
from data.features.source import FeatureSource
from models.drafter import TrainSpec
from models.frozen import FrozenTarget
from models.simulate import simulated_tau
from train.metrics import Totals, sum_over_processes
from train.strategy import Strategy, passes_of


@torch.no_grad()
def score_held_out(
    strategy: Strategy,
    frozen: FrozenTarget,
    source: FeatureSource,
    spec: TrainSpec,
    chain: int,
    bin_tokens: int,
) -> tuple[Totals, list[list[float]]]:
    """Sums over the held-out documents, and (accepted, passes) of the simulated walks of ``chain`` drafts at T=0 and
    T=1, over all processes. The strategy's module must be in eval mode."""
    accelerator = strategy.accelerator
    totals = Totals(spec.depths, accelerator.device)
    walks = torch.zeros(2, 2, dtype=torch.float64)
    documents = [d for d, slots in enumerate(source.slots) if slots]
    bins = plan_epoch([source.lengths[d] for d in documents], seed=0, epoch=0, bin_tokens=bin_tokens)
    spec = replace(spec, objective=replace(spec.objective, depth_keep=1.0), per_slot=True)
    bins = [[documents[d] for d in members] for members in bins]
    together = math.ceil(len(bins) / accelerator.num_processes) if strategy.lockstep else 0
    for members, counts in passes_of(bins, accelerator, source.lengths, at_least=together):
        score = strategy.score(source.batch(members).to(accelerator.device), frozen, spec)
        if not counts:
            continue
        totals.add(score)
        assert score.match_slots is not None and score.alpha_slots is not None
        index, valid = score.slots.index, score.slots.valid[:chain]
        for walk, accept in zip(walks, (score.match_slots, score.alpha_slots), strict=True):
            walk += torch.tensor(simulated_tau(accept[:chain], index, valid), dtype=torch.float64)
    totals.reduce(accelerator)
    totals.sums = sum_over_processes(accelerator, totals.sums)  # every process decides on the same numbers
    return totals, sum_over_processes(accelerator, walks.to(accelerator.device)).tolist()


def rates(values: Sequence[float]) -> str:
    return " ".join(f"{value:.3f}" for value in values)
