"""Scoring held-out documents: sums for the averages, the simulated walks that tau comes from, and what is best."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from conf.schema import Config
from data.features.order import plan_epoch
from data.features.source import FeatureSource
from models.drafter import Drafter, TrainSpec
from models.frozen import FrozenTarget
from models.signals import Asked
from models.simulate import simulated_tau
from train.checkpoint import TrainState
from train.metrics import Totals, rates, sum_over_processes
from train.strategy import Strategy, passes_of

SIMULATED = ("tau_t0", "simulated")  # where the tau that decides stands in a row, and what best.json calls it

log = logging.getLogger(__name__)


class Broken(Exception):
    """A validation that was not finished, as the run is asked to stop."""


@dataclass
class Validator:
    """The validations of a run: on held-out documents, which the tau of the verifier may be added to.

    spec: of the training; chain: drafts of the simulated walks. measure: greedy tau of a whole copy of the drafter, by
    the verifier, for the main process (the others have one that is not called). between: called between two batches
    with the same result in all processes, whether to break off. alone: context of work that the main process does at
    its own pace, where a request to stop raises Asked.
    """

    cfg: Config
    drafter: Drafter
    frozen: FrozenTarget
    source: FeatureSource
    spec: TrainSpec
    chain: int
    measure: Callable[[Drafter], float] | None
    between: Callable[[], bool]
    alone: Callable[[str], AbstractContextManager[None]]

    def row(self, strategy: Strategy) -> dict[str, Any]:
        """The numbers of a validation, alike in all processes. Raises Broken."""
        totals, walks = self.score(strategy)
        row = totals.averages()
        (accepted_t0, passes_t0), (accepted_t1, passes_t1) = walks
        row |= {"tau_t0": 1 + accepted_t0 / max(passes_t0, 1e-9), "tau_t1": 1 + accepted_t1 / max(passes_t1, 1e-9)}
        if self.measure is not None:
            row["tau_measured"] = self._measured(strategy)
        return row

    @torch.no_grad()
    def score(self, strategy: Strategy) -> tuple[Totals, list[list[float]]]:
        """Sums over the held-out documents, and (accepted, passes) of the simulated walks at T=0 and T=1, over all
        processes."""
        accelerator, source = strategy.accelerator, self.source
        spec = replace(self.spec, depths=max(self.spec.depths, self.chain), per_slot=True)
        spec = replace(spec, objective=replace(spec.objective, depth_keep=1.0))
        totals = Totals(spec.depths, accelerator.device)
        walks = torch.zeros(2, 2, dtype=torch.float64)
        documents = [d for d, slots in enumerate(source.slots) if slots]
        lengths = [source.lengths[d] for d in documents]
        bins = plan_epoch(lengths, seed=0, epoch=0, bin_tokens=self.cfg.train.bin_tokens)
        bins = [[documents[d] for d in members] for members in bins]
        turns = math.ceil(len(bins) / accelerator.num_processes)
        passes = passes_of(bins, accelerator, source.lengths, at_least=turns)
        strategy.module.eval()
        try:
            for members, counts in passes:
                if self.between():
                    raise Broken
                if counts or strategy.lockstep:
                    score = strategy.score(source.batch(members).to(accelerator.device), self.frozen, spec)
                if counts:
                    totals.add(score)
                    assert score.match_slots is not None and score.alpha_slots is not None
                    index, valid = score.slots.index, score.slots.valid[: self.chain]
                    for walk, accept in zip(walks, (score.match_slots, score.alpha_slots), strict=True):
                        walk += torch.tensor(simulated_tau(accept[: self.chain], index, valid), dtype=torch.float64)
        finally:
            strategy.module.train()
        totals.reduce(accelerator)
        totals.sums = sum_over_processes(accelerator, totals.sums)  # every process decides on the same numbers
        return totals, sum_over_processes(accelerator, walks.to(accelerator.device)).tolist()

    def improves(self, state: TrainState, row: Mapping[str, Any]) -> bool:
        """Whether this validation is the best so far; counts those that are not, and stops the run at too many.

        A best of another chain or another kind of tau (a resumed run may change both) is not compared with.
        """
        key, by = ("tau_measured", f"measured on {self.cfg.train.tau_prompts} prompts") if self.measure else SIMULATED
        best = state.best
        alike = best is not None and (best["chain"], best.get("by", SIMULATED[1])) == (self.chain, by)
        improved = best is None or not alike or row[key] > best[key]
        if improved:
            kept = {n: row[n] for n in ("tau_t0", "tau_t1", "tau_measured") if n in row}
            state.best = {"step": state.step, "chain": self.chain, "by": by} | kept
        state.stale = 0 if improved else state.stale + 1
        state.stopped = is_impatient(state, self.cfg)
        state.validated = state.step
        return improved

    def tell(self, step: int, row: Mapping[str, Any], *, improved: bool) -> None:
        log.info(
            "step %d: held out: loss %.4f, simulated tau (chain of %d) %.3f at T=0, %.3f at T=1%s%s; accuracy %s",
            step,
            row["loss"],
            self.chain,
            row["tau_t0"],
            row["tau_t1"],
            f", measured {row['tau_measured']:.3f}" if self.measure else "",
            ", the best so far" if improved else "",
            rates(row["accuracy"]),
        )

    def _measured(self, strategy: Strategy) -> float:
        """tau by the verifier, on the main process; all processes get its number. Raises Broken."""
        assert self.measure is not None
        weights = strategy.weights()
        found = 0.0
        if strategy.accelerator.is_main_process:
            found = math.nan  # if it is broken off
            with suppress(Asked), self.alone("measuring tau"):
                found = self.measure(self._copy(weights))
        number = torch.tensor([found], dtype=torch.float64, device=strategy.accelerator.device)
        measured = float(sum_over_processes(strategy.accelerator, number))
        if math.isnan(measured):
            raise Broken
        return measured

    def _copy(self, weights: Mapping[str, Tensor]) -> Drafter:
        """A drafter of its own, as the trained one is split over processes or called by hooks of its strategy."""
        names = self.drafter.state_dict()
        own = {name: weights[name if name in weights else f"drafter.{name}"] for name in names}
        copy = type(self.drafter).from_architecture(self.drafter.architecture(), self.drafter.vocab)
        copy.load_state_dict(own)
        return copy.to(self.frozen.head.device).eval()


def is_impatient(state: TrainState, cfg: Config) -> bool:
    """Whether there were as many validations without a better tau as ``train.patience`` allows."""
    return cfg.train.patience is not None and state.stale >= cfg.train.patience
