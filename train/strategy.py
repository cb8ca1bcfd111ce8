"""How a module is trained on all processes of a run: what all strategies share, and what they must do.

They differ in train/replicated.py and train/zero.py alone.

The trainer sees an :class:`accelerate.Accelerator`, which starts the processes, and a :class:`Strategy`, which holds
the module and its optimizer. All of them keep float32 weights (bfloat16 is autocast around the forward), take the same
loss sums, and save and load the same tensors by the same names, so a run may change strategy when it goes on.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import DistributedDataParallelKwargs, InitProcessGroupKwargs
from torch import Tensor, nn
from torch.optim import Optimizer

from models.batch import Batch
from models.device import pick_device
from models.drafter import Drafter, TrainSpec
from models.errors import EyasError
from models.frozen import FrozenTarget
from models.launch import LOCAL_RANK, launched, world
from models.objective import Score
from train.optimizer_state import OptimizerStates, State

PRECISIONS = {"fp32": None, "bf16": torch.bfloat16}
# The last resort: long before, the watchdog (train/watchdog.py) names the process that is missing.
COLLECTIVE_TIMEOUT = timedelta(days=7)


def pick_precision(precision: str, device: str) -> str:
    """fp32 or bf16; auto is bf16 where the device multiplies bfloat16 natively, as emulation is slower than float32."""
    if precision not in (*PRECISIONS, "auto"):
        raise EyasError(f"train.precision={precision}: must be one of {', '.join(PRECISIONS)} or auto")
    if precision != "auto":
        return precision
    if pick_device(device) == "cuda":
        return "bf16" if torch.cuda.get_device_capability() >= (8, 0) else "fp32"
    native = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return "bf16" if native else "fp32"


def build_accelerator(device: str = "auto") -> Accelerator:
    """The processes of this run: one, or one of ``WORLD_SIZE`` started by torchrun or accelerate."""
    if not launched():
        os.environ.pop(LOCAL_RANK, None)  # DeepSpeed's, of a run before this one; it would mean several processes
    os.environ.pop("ACCELERATE_USE_DEEPSPEED", None)  # `strategy` decides, not how the processes were started
    os.environ["ACCELERATE_MIXED_PRECISION"] = "no"  # as train.precision does
    _forget_previous_run(keep_processes=world() > 1)
    accelerator = Accelerator(
        cpu=pick_device(device) == "cpu",
        step_scheduler_with_optimizer=False,
        kwargs_handlers=[
            InitProcessGroupKwargs(timeout=COLLECTIVE_TIMEOUT),
            DistributedDataParallelKwargs(gradient_as_bucket_view=True, broadcast_buffers=False),
        ],
    )
    # Accelerate falls back to independent single-process jobs when its backend is not what it expected.
    if accelerator.num_processes != world():
        raise EyasError(
            f"the launcher started {world()} processes but only {accelerator.num_processes} of them joined: "
            "launch with torchrun or accelerate, one process a device (device=cpu for CPU processes)"
        )
    return accelerator


def _forget_previous_run(*, keep_processes: bool) -> None:
    """Drop Accelerate's global state, so that a sweep may change device between its jobs."""
    AcceleratorState._reset_state(reset_partial_state=not keep_processes)
    GradientState._reset_state()


class Pass(nn.Module):
    """The forward of a drafter or joint model as strategies call it: products in ``dtype`` (None: as they are).

    cached: keep the weights in that dtype for the whole forward, instead of making them again wherever they are used.
    """

    def __init__(self, module: nn.Module, dtype: torch.dtype | None, *, cached: bool = True) -> None:
        super().__init__()
        self.module, self.dtype, self.cached = module, dtype, cached

    def forward(self, batch: Batch, frozen: FrozenTarget, spec: TrainSpec) -> Score:
        kind, enabled = batch.input_ids.device.type, self.dtype is not None
        with torch.autocast(kind, self.dtype, enabled=enabled, cache_enabled=self.cached):
            score: Score = self.module(batch, frozen, spec)
        return score


class Strategy(ABC):
    """A module and its optimizer on all processes.

    Gradients are averaged over processes: a loss that is to be divided by the slots of all of them is given
    ``weight`` = processes / slots.
    """

    lockstep = False  # whether every process must make the same number of passes

    def __init__(self, accelerator: Accelerator, module: nn.Module, optimizer: Optimizer) -> None:
        self.accelerator, self.module, self.optimizer = accelerator, module, optimizer

    @abstractmethod
    def learn(self, batch: Batch, frozen: FrozenTarget, spec: TrainSpec, weight: float, *, last: bool) -> Score:
        """Forward and backward of a batch, adding to the gradient; ``last``: the last one of its optimizer step."""

    def warm_up(self, read: Callable[[], Batch], frozen: FrozenTarget, spec: TrainSpec) -> None:
        """Where anything depends on the first pass of a session: one that teaches nothing, with a batch that is the
        same in every session."""
        return

    @abstractmethod
    def step(self) -> Tensor:
        """Clip the gradients, update the weights with the learning rates in :attr:`param_groups`, and forget the
        gradients; their norm before clipping, 0-d."""

    @abstractmethod
    def score(self, batch: Batch, frozen: FrozenTarget, spec: TrainSpec) -> Score:
        """Forward of a batch, without gradient."""

    @abstractmethod
    def optimizer_states(self) -> Iterator[tuple[str, State]]:
        """What the optimizer keeps of every parameter that was updated, whole, on the main process (nothing elsewhere).
        All processes must take them together."""

    @abstractmethod
    def load_optimizer(self, states: OptimizerStates) -> None:
        """Continue with these states instead of none."""

    def weights(self) -> dict[str, Tensor]:
        """The parameters and saved buffers of the drafter, and the trained parameters of a target that is trained
        along: whole, on the main process, by the names of the module's state dict, tied ones once. All processes must
        ask together."""
        drafters = [m for m in self.module.modules() if isinstance(m, Drafter)]
        kept = {id(p) for m in drafters for p in m.parameters()} | {id(p) for p in self.trained().values()}
        parameters = dict(self.module.named_parameters(remove_duplicate=False))
        found: dict[str, Tensor] = {}
        for name, value in self.module.state_dict().items():
            parameter = parameters.get(name)
            if parameter is None:
                found[name] = value
            elif id(parameter) in kept:
                kept.discard(id(parameter))
                found[name] = self.whole(parameter)
        return found

    def whole(self, parameter: nn.Parameter) -> Tensor:
        """A parameter as the main process has to save it."""
        return parameter.detach()

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.optimizer.param_groups

    def trained(self) -> dict[str, nn.Parameter]:
        """The parameters that the optimizer updates, by name."""
        return {name: p for name, p in self.module.named_parameters() if p.requires_grad}


def passes_of(
    bins: Sequence[list[int]], accelerator: Accelerator, lengths: Sequence[int], *, at_least: int
) -> list[tuple[list[int], bool]]:
    """The documents of each forward that this process makes of these bins, and whether it counts.

    Of N processes each has every N-th bin. One that has fewer than ``at_least`` joins in with the shortest document, to
    be counted at weight zero.
    """
    passes = [(members, True) for members in bins[accelerator.process_index :: accelerator.num_processes]]
    shortest = min((d for members in bins for d in members), key=lengths.__getitem__)
    return passes + [([shortest], False)] * max(0, at_least - len(passes))


class Agreement:
    """Yes or no from any process, known to all: over the CPU, so that no accelerator is waited for."""

    def __init__(self, accelerator: Accelerator) -> None:
        self.group = None
        self.alone = accelerator.num_processes == 1
        if not self.alone and accelerator.device.type != "cpu":
            self.group = dist.new_group(backend="gloo", timeout=COLLECTIVE_TIMEOUT)

    def any(self, said: Sequence[bool]) -> list[bool]:
        """Each of these, or-ed over all processes."""
        if self.alone:
            return list(said)
        flags = torch.tensor(said, dtype=torch.int32)
        dist.all_reduce(flags, dist.ReduceOp.MAX, group=self.group)
        return [bool(flag) for flag in flags]
