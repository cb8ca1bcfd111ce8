"""DeepSpeed's ZeRO (arXiv 1910.02054): the optimizer's state, the gradients and the weights split over the processes.

    zero1  the optimizer's state        zero2  and the gradients        zero3  and the weights

DeepSpeed gets the trained module and its optimizer, nothing else: the frozen target is an argument of the forward. What
it splits is put together here, parameter by parameter, whenever it is saved, so its own checkpoints aren't needed.
"""

from __future__ import annotations

import logging
import os
import warnings
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import Tensor, nn
from torch.optim import Optimizer

from conf.deepspeed import check_accepted, check_installed, deepspeed_config
from conf.schema import OptimConfig, StrategyConfig
from models.batch import Batch
from models.drafter import TrainSpec
from models.errors import EyasError
from models.frozen import FrozenTarget
from models.launch import LOCAL_RANK
from models.objective import Score
from train.optimizer_state import OptimizerStates, State
from train.strategy import COLLECTIVE_TIMEOUT, Pass, Strategy


class LossFirst(nn.Module):
    """A pass whose output is the loss, as engines expect; the score it belongs to is kept beside it."""

    def __init__(self, inner: Pass) -> None:
        super().__init__()
        self.inner = inner
        self.found: list[Score] = []  # of the last forward

    def forward(self, batch: Batch, frozen: FrozenTarget, spec: TrainSpec) -> Tensor:
        self.found = [self.inner(batch, frozen, spec)]
        return self.found[0].loss_sum


@dataclass(frozen=True)
class Piece:
    """Where this process keeps its part of a parameter: ``count`` numbers from ``start`` of the flat tensor ``flat``,
    which are those from ``at`` of the parameter's own (flattened, and padded to ``padded`` numbers)."""

    flat: Tensor | None  # None: it keeps no part
    start: int
    at: int
    count: int
    padded: int


class Zero(Strategy):
    lockstep = True  # gradients (zero2) and weights (zero3) are exchanged in every pass

    def __init__(
        self,
        accelerator: Accelerator,
        module: nn.Module,
        optimizer: Optimizer,
        *,
        dtype: torch.dtype | None,
        strategy: StrategyConfig,
        optim: OptimConfig,
    ) -> None:
        super().__init__(accelerator, module, optimizer)
        self.stage = int(strategy.name.removeprefix("zero"))
        config = deepspeed_config(strategy, optim, accelerator.num_processes)
        config.setdefault("timers", {"throughput": {"enabled": False}})  # which waits for the device twice a pass
        on_cpu = accelerator.device.type == "cpu"
        self.engine = start_engine(
            LossFirst(Pass(module, dtype, cached=self.stage < 3)), optimizer, config, on_cpu=on_cpu
        )
        if self.stage == 3:
            self._gather_with_root()
        self.pieces = self._pieces_stage3() if self.stage == 3 else self._pieces()

    # --- training ---

    def learn(self, batch: Batch, frozen: FrozenTarget, spec: TrainSpec, weight: float, *, last: bool) -> Score:
        loss = self.engine(batch, frozen, spec)
        self.engine.backward(loss * weight)
        return self._score()

    def step(self) -> Tensor:
        self.engine.step()
        norm = self.engine.get_global_grad_norm()
        return torch.as_tensor(norm, dtype=torch.float32, device=self.accelerator.device)

    @torch.no_grad()
    def score(self, batch: Batch, frozen: FrozenTarget, spec: TrainSpec) -> Score:
        self.engine(batch, frozen, spec)
        return self._score()

    def _score(self) -> Score:
        return self.engine.module.found.pop()

    # --- what is saved ---

    def weights(self) -> dict[str, Tensor]:
        if self.stage == 3:
            self.engine.empty_partition_cache()  # of what was fetched ahead for a pass that did not come
        return super().weights()

    def whole(self, parameter: nn.Parameter) -> Tensor:
        if self.stage < 3:
            return parameter.detach()
        import deepspeed

        with deepspeed.zero.GatheredParameters([parameter]):
            if self.accelerator.is_main_process:
                return parameter.detach().to("cpu", copy=True)
        return torch.empty(0)

    def optimizer_states(self) -> Iterator[tuple[str, State]]:
        main = self.accelerator.is_main_process
        for name, parameter in self.trained().items():
            held = self._held(self.pieces[parameter])
            keys = ("step", "exp_avg", "exp_avg_sq") if self._any(bool(held)) else ()
            found = {key: self._gathered(parameter, key, held) for key in keys}
            if main and found:
                yield name, found

    def load_optimizer(self, states: OptimizerStates) -> None:
        trained = self.trained()
        states.check_names(trained)
        for name, parameter in trained.items():
            piece = self.pieces[parameter]
            found = states.of(name, self._shape(parameter))
            if piece.flat is None or not found:
                continue
            held = self._state.setdefault(piece.flat, {})
            steps = found.pop("step").to(piece.flat.device)
            held["step"] = torch.maximum(held.get("step", steps), steps)  # one count for all in a flat tensor
            for key, value in found.items():
                mine = held.setdefault(key, torch.zeros_like(piece.flat))
                part = nn.functional.pad(value.flatten(), (0, piece.padded - value.numel()))
                mine[piece.start : piece.start + piece.count] = part[piece.at : piece.at + piece.count]

    # --- where DeepSpeed keeps things ---

    def _gather_with_root(self) -> None:
        """Have ZeRO-3 gather what is read outside the layers that own it (the heads', in chunks of the objective) for
        all of a pass; the rest is gathered layer by layer."""
        import deepspeed

        for parameter in self.module.read_whole():  # type: ignore[operator]
            deepspeed.zero.register_external_parameter(self.engine.module, parameter)

    @property
    def _state(self) -> dict[Tensor, Any]:
        state: dict[Tensor, Any] = self.engine.optimizer.optimizer.state
        return state

    def _held(self, piece: Piece) -> dict[str, Tensor]:
        return {} if piece.flat is None else self._state.get(piece.flat, {})

    def _shape(self, parameter: nn.Parameter) -> torch.Size:
        return parameter.ds_shape if self.stage == 3 else parameter.shape  # type: ignore[attr-defined]

    def _any(self, said: bool) -> bool:
        flag = torch.tensor([float(said)], device=self.accelerator.device)
        dist.all_reduce(flag, dist.ReduceOp.MAX)
        return bool(flag.item())

    def _gathered(self, parameter: nn.Parameter, key: str, held: dict[str, Tensor]) -> Tensor:
        """One of the optimizer's tensors of a parameter, put together from all processes' parts on the main one's CPU;
        nothing elsewhere."""
        piece, device = self.pieces[parameter], self.accelerator.device
        if key == "step":
            steps = held["step"].to(device, copy=True) if held else torch.zeros((), device=device)
            dist.reduce(steps, 0, dist.ReduceOp.MAX)
            return steps.cpu()
        whole = torch.zeros(piece.padded, device=device)
        if held:
            part = held[key][piece.start : piece.start + piece.count]
            whole[piece.at : piece.at + piece.count] = part.to(device)
        dist.reduce(whole, 0)
        shape = self._shape(parameter)
        return whole[: shape.numel()].view(shape).cpu() if self.accelerator.is_main_process else whole[:0]

    def _pieces(self) -> dict[nn.Parameter, Piece]:
        """Stages 1 and 2: a group's parameters lie back to back in one flat tensor, of which each process has a
        part."""
        zero = self.engine.optimizer
        found = {}
        for group, flat in zip(zero.bit16_groups, zero.single_partition_of_fp32_groups, strict=True):
            for parameter in group:
                mine, size = parameter._hp_mapping, parameter.numel()
                if mine is None:
                    found[parameter] = Piece(None, 0, 0, 0, size)
                    continue
                here, there = mine.hp_fragment_address, mine.lp_fragment_address
                found[parameter] = Piece(flat, here.start, there.start, here.numel, size)
        return found

    def _pieces_stage3(self) -> dict[nn.Parameter, Piece]:
        """Stage 3: every parameter is padded and cut into as many equal parts as there are processes; a process has its
        parts of a group's parameters back to back."""
        zero, rank, world = self.engine.optimizer, self.accelerator.process_index, self.accelerator.num_processes
        found = {}
        for group, flat in zip(zero.fp16_groups, zero.fp32_partitioned_groups_flat, strict=True):
            start = 0
            for parameter in group:
                count = parameter.partition_numel()
                found[parameter] = Piece(flat, start, rank * count, count, world * count)
                start += count
        return found


def import_deepspeed(*, on_cpu: bool) -> Any:
    """The package, quiet and for this device. Raises EyasError if it is not installed."""
    check_installed()
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")  # of names it calls
    if on_cpu:
        os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed

    if on_cpu:  # otherwise it tries which of its extensions could be compiled, and compiles one for minutes
        deepspeed.ops.__compatible_ops__ = defaultdict(bool)
    deepspeed.utils.logger.setLevel(logging.ERROR)  # it tells of every default, and of outputs that aren't tensors
    return deepspeed


def check_engine(strategy: StrategyConfig, optim: OptimConfig, accelerator: Accelerator) -> None:
    """Raise EyasError if DeepSpeed does not take its configuration, which a file of the user's is part of."""
    import_deepspeed(on_cpu=accelerator.device.type == "cpu")
    check_accepted(deepspeed_config(strategy, optim, accelerator.num_processes), strategy)


def start_engine(module: nn.Module, optimizer: Optimizer, config: dict[str, Any], *, on_cpu: bool) -> Any:
    """DeepSpeed's engine around a module and its optimizer."""
    deepspeed = import_deepspeed(on_cpu=on_cpu)
    if not dist.is_initialized():  # one process, without a launcher
        backend = "gloo" if on_cpu else "nccl"
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group(backend, store=store, rank=0, world_size=1, timeout=COLLECTIVE_TIMEOUT)
    os.environ.setdefault(LOCAL_RANK, "0")  # asked for now and later
    try:
        engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=config)
    except (ValueError, AssertionError, NotImplementedError) as error:
        raise EyasError(f"strategy: DeepSpeed can't do what it is configured for here: {error}") from error
    return engine
