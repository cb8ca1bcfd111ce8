"""Which strategy ``strategy.name`` stands for."""

from __future__ import annotations

from accelerate import Accelerator
from torch import nn
from torch.optim import Optimizer

from conf.schema import Config
from train.replicated import Replicated
from train.strategy import PRECISIONS, Strategy, pick_precision


def spread(cfg: Config, accelerator: Accelerator, module: nn.Module, optimizer: Optimizer, *, unused: bool) -> Strategy:
    """The module under ``cfg.strategy``. ``unused``: some steps leave some parameters without a gradient."""
    dtype = PRECISIONS[pick_precision(cfg.train.precision, cfg.device)]
    if cfg.strategy.name in ("none", "ddp"):
        max_norm = cfg.optim.max_grad_norm
        return Replicated(accelerator, module, optimizer, dtype=dtype, max_norm=max_norm, unused=unused)
    from train.zero import Zero

    return Zero(accelerator, module, optimizer, dtype=dtype, strategy=cfg.strategy, optim=cfg.optim)
