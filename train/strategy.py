"""How a run is spread over devices and processes: the only file that knows about strategies.

The trainer sees an :class:`accelerate.Accelerator`, :func:`wrap` and :func:`micro_step`; nothing else here.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import DistributedDataParallelKwargs, InitProcessGroupKwargs
from torch import nn
from torch.optim import Optimizer

from models.device import pick_device
from models.errors import EyasError

STRATEGIES = ("none", "ddp")
PRECISIONS = {"fp32": "no", "bf16": "bf16"}


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


def build_accelerator(strategy: Mapping[str, Any], *, device: str = "auto", precision: str = "fp32") -> Accelerator:
    """The accelerator of this run: one process, or one of ``WORLD_SIZE`` started by torchrun or accelerate.

    ``strategy`` is conf/strategy/*.yaml: ``name`` (none and ddp are the same code: several processes average
    their gradients) and ``timeout_minutes``, after which a collective that a lost process never joins fails.
    """
    name = str(strategy.get("name", "none"))
    if name not in STRATEGIES:
        raise EyasError(f"strategy={name}: must be one of {', '.join(STRATEGIES)}")
    precision = pick_precision(precision, device)
    on_cpu = pick_device(device) == "cpu"
    world = int(os.environ.get("WORLD_SIZE", "1"))
    _forget_previous_run(keep_processes=world > 1)
    accelerator = Accelerator(
        cpu=on_cpu,
        mixed_precision=PRECISIONS[precision],
        step_scheduler_with_optimizer=False,
        kwargs_handlers=[
            InitProcessGroupKwargs(timeout=timedelta(minutes=float(strategy.get("timeout_minutes", 30)))),
            DistributedDataParallelKwargs(gradient_as_bucket_view=True),
        ],
    )
    # Accelerate falls back to independent single-process jobs when its backend is not what it expected.
    if accelerator.num_processes != world:
        raise EyasError(
            f"the launcher started {world} processes but only {accelerator.num_processes} of them joined: "
            "launch with torchrun or accelerate, one process a device (device=cpu for CPU processes)"
        )
    return accelerator


def _forget_previous_run(*, keep_processes: bool) -> None:
    """Drop Accelerate's global state, so that a sweep may change precision or device between its jobs."""
    AcceleratorState._reset_state(reset_partial_state=not keep_processes)
    GradientState._reset_state()


def wrap(
    accelerator: Accelerator, module: nn.Module, optimizer: Optimizer, *, unused: bool
) -> tuple[nn.Module, AcceleratedOptimizer]:
    """The module as this strategy calls it, and its optimizer.

    ``unused``: some steps leave some parameters without a gradient. Processes that exchange gradients then have to look
    for those in every step, which costs a walk through the graph; they would wait for them otherwise.
    """
    if accelerator.ddp_handler is not None:
        accelerator.ddp_handler.find_unused_parameters = unused
    model, prepared = accelerator.prepare(module, optimizer)
    return model, prepared


@contextmanager
def micro_step(accelerator: Accelerator, model: nn.Module, *, last: bool) -> Iterator[None]:
    """One forward and backward of an optimizer step; processes exchange gradients in the last one only."""
    accelerator.sync_gradients = last
    with nullcontext() if last else accelerator.no_sync(model):
        yield
