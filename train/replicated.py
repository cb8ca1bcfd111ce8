"""Every process has all of the module and of its optimizer: one process, or DDP (strategy=none, ddp)."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.optim import Optimizer

from models.batch import Batch
from models.drafter import TrainSpec
from models.frozen import FrozenTarget
from models.objective import Score
from train.optimizer_state import OptimizerStates, State
from train.strategy import Pass, Strategy


class Replicated(Strategy):
    """See the module docstring."""

    def __init__(
        self,
        accelerator: Accelerator,
        module: nn.Module,
        optimizer: Optimizer,
        *,
        dtype: torch.dtype | None,
        max_norm: float,
        unused: bool,
    ) -> None:
        super().__init__(accelerator, module, optimizer)
        self.max_norm, self.plain = max_norm, Pass(module, dtype)
        if accelerator.ddp_handler is not None:
            # Processes that exchange gradients would wait for those of parameters that have none in some steps; to look
            # for them costs a walk through the graph in every step.
            accelerator.ddp_handler.find_unused_parameters = unused
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # broadcast_buffers, whose new name Accelerate does not know
            self.model = accelerator.prepare_model(self.plain)

    def learn(self, batch: Batch, frozen: FrozenTarget, spec: TrainSpec, weight: float, *, last: bool) -> Score:
        with nullcontext() if last else self.accelerator.no_sync(self.model):
            score: Score = self.model(batch, frozen, spec)
            (score.loss_sum * weight).backward()
        return score

    def warm_up(self, read: Callable[[], Batch], frozen: FrozenTarget, spec: TrainSpec) -> None:
        """DDP arranges its buckets anew by the first pass, and with more than two processes the arrangement decides in
        which order numbers are added: a session that goes on must have it from its first step."""
        if self.model is not self.plain:
            self.learn(read(), frozen, spec, 0.0, last=True)
            self.optimizer.zero_grad()

    def step(self) -> Tensor:
        norm = nn.utils.clip_grad_norm_(self.module.parameters(), self.max_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return norm

    @torch.no_grad()
    def score(self, batch: Batch, frozen: FrozenTarget, spec: TrainSpec) -> Score:
        found: Score = self.plain(batch, frozen, spec)
        return found

    def optimizer_states(self) -> Iterator[tuple[str, State]]:
        if self.accelerator.is_main_process:
            for name, parameter in self.trained().items():
                if state := self.optimizer.state.get(parameter):
                    yield name, state

    def load_optimizer(self, states: OptimizerStates) -> None:
        trained = self.trained()
        states.check_names(trained)
        counts_there = self.optimizer.defaults.get("fused")  # otherwise the count of steps is read on the CPU
        for name, parameter in trained.items():
            if found := states.of(name, parameter.shape):
                moved = {k: v.to(parameter.device) if v.ndim or counts_there else v for k, v in found.items()}
                self.optimizer.state[parameter] = moved
