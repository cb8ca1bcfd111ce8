"""Optimizers and the learning rate, which is a pure function of the step (so there is no scheduler to save)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from conf.schema import OptimConfig
from models.drafter import Drafter
from models.errors import EyasError

SCHEDULES = ("cosine", "wsd", "constant")


def lr_factor(step: int, total: int, optim: OptimConfig) -> float:
    """The share of the peak learning rate that optimizer step ``step`` (0-based, of ``total``) uses.

    Linear warm-up to 1 at its last step, then the schedule, which reaches ``min_lr`` at the last step of all.
    """
    if optim.schedule not in SCHEDULES:
        raise EyasError(f"optim.schedule={optim.schedule}: must be one of {', '.join(SCHEDULES)}")
    done = step + 1
    warm = min(total, int(optim.warmup) if optim.warmup >= 1 else round(optim.warmup * total))
    if done <= warm:
        return done / warm
    if optim.schedule == "constant":
        return 1.0
    if optim.schedule == "cosine":
        wave = 0.5 * (1 + math.cos(math.pi * (done - warm) / (total - warm)))
        return optim.min_lr + (1 - optim.min_lr) * wave
    decay = min(total - warm, max(1, round(optim.decay * total)))
    return 1.0 - (1 - optim.min_lr) * max(0, done - (total - decay)) / decay


def set_lr(groups: Iterable[dict[str, Any]], factor: float, backbone: float) -> None:
    """Give every parameter group its peak learning rate times ``factor``, or times ``backbone`` if it is of a target
    that is trained along."""
    for group in groups:
        group["lr"] = group["peak_lr"] * (backbone if group["backbone"] else factor)


def build_optimizer(
    drafter: Drafter, optim: OptimConfig, *, backbone: Iterable[Tensor] | None = None, backbone_lr: float | None = None
) -> Optimizer:
    """The optimizer of a drafter's trainable parameters, and of a target's that is trained along (``backbone``, with a
    peak learning rate of its own).

    Weight decay falls on matrices only. With ``optim.name=muon`` the drafter's inner matrices are Muon's, those of
    experts [E, a, b] one by one; vectors, every matrix with a row or column per (draft) vocabulary token, whose rows
    are no linear map to orthogonalise, and all of the backbone stay with AdamW.
    """
    if optim.name not in ("adamw", "muon"):
        raise EyasError(f"optim.name={optim.name}: must be adamw or muon")
    matrices, tables, vectors = by_kind(drafter.parameters(), {len(drafter.vocab), drafter.vocab.size})
    muon = optim.name == "muon"
    plain = tables if muon else matrices + tables
    groups = [_group(plain, optim.lr, optim.weight_decay), _group(vectors, optim.lr, 0.0)]
    if muon:
        groups.append(_group(matrices, optim.muon_lr, optim.weight_decay) | {"muon": True})
    if backbone is not None:
        peak = optim.lr if backbone_lr is None else backbone_lr
        matrices, _, vectors = by_kind(backbone, set())
        both = [_group(matrices, peak, optim.weight_decay), _group(vectors, peak, 0.0)]
        groups += [group | {"backbone": True} for group in both]
    groups = [group for group in groups if group["params"]]
    betas = (float(optim.betas[0]), float(optim.betas[1]))
    if muon:
        return Muon(groups, lr=optim.lr, betas=betas)
    return AdamW(groups, lr=optim.lr, betas=betas, fused=True)


def by_kind(parameters: Iterable[Tensor], vocab_sizes: set[int]) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """The trainable ones: matrices (or stacks of them), tables (with a row or column per token), and vectors."""
    matrices, tables, vectors = list[Tensor](), list[Tensor](), list[Tensor]()
    for parameter in parameters:
        if parameter.requires_grad:
            is_table = bool(vocab_sizes & set(parameter.shape[-2:]))
            kind = vectors if parameter.ndim < 2 else tables if is_table else matrices
            kind.append(parameter)
    return matrices, tables, vectors


def _group(parameters: list[Tensor], lr: float, weight_decay: float) -> dict[str, Any]:
    return {"params": parameters, "weight_decay": weight_decay, "lr": lr, "peak_lr": lr, "backbone": False}


class AdamW(torch.optim.AdamW):
    """AdamW that passes over groups whose learning rate is 0, so that such a step doesn't count in their moments.

    Without it, a target that joins in later would begin with other moments where parameters without a gradient have
    one of zeros (ZeRO) than where they have none.
    """

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        groups = self.param_groups
        self.param_groups = [group for group in groups if group["lr"]]
        try:
            return super().step(closure)
        finally:
            self.param_groups = groups


class Muon(Optimizer):
    """Muon for the groups marked ``muon``, AdamW for the others, all in the parameters' own precision.

    Muon (Jordan et al. 2024): Nesterov momentum, orthogonalised by five Newton-Schulz iterations. The update
    is scaled by 0.2 sqrt(max(rows, columns)), which gives it about the root mean square of an AdamW update
    (Liu et al. 2025, "Muon is scalable for LLM training"). torch.optim.Muon iterates in bfloat16 always;
    here float32 parameters get float32 iterations.
    """

    def __init__(
        self,
        params: list[dict[str, Any]],
        lr: float = 3e-4,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        momentum: float = 0.95,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "momentum": momentum}
        super().__init__(params, {**defaults, "muon": False})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            update = self._muon if group["muon"] else self._adamw
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.mul_(1 - group["lr"] * group["weight_decay"])
                    update(parameter, parameter.grad, group)
        return loss

    def _muon(self, parameter: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            state["momentum"] = torch.zeros_like(parameter)
        momentum = state["momentum"].lerp_(grad, 1 - group["momentum"])
        direction = orthogonalise(grad.lerp(momentum, group["momentum"]))
        parameter.add_(direction, alpha=-group["lr"] * 0.2 * math.sqrt(max(parameter.shape[-2:])))

    def _adamw(self, parameter: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            state.update(
                step=torch.zeros(()), exp_avg=torch.zeros_like(parameter), exp_avg_sq=torch.zeros_like(parameter)
            )
        state["step"] += 1
        step = float(state["step"])
        first, second = group["betas"]
        state["exp_avg"].lerp_(grad, 1 - first)
        state["exp_avg_sq"].mul_(second).addcmul_(grad, grad, value=1 - second)
        scale = math.sqrt(1 - second**step)
        denominator = state["exp_avg_sq"].sqrt().div_(scale).add_(group["eps"])
        parameter.addcdiv_(state["exp_avg"], denominator, value=-group["lr"] / (1 - first**step))


def orthogonalise(matrix: Tensor, iterations: int = 5) -> Tensor:
    """A matrix with the singular vectors of ``matrix`` [m, n] and singular values near 1 (about 0.7 .. 1.2); of a
    stack [..., m, n] each by itself.

    Newton-Schulz with Muon's quintic coefficients; zero stays zero.
    """
    a, b, c = 3.4445, -4.7750, 2.0315
    tall = matrix.shape[-2] > matrix.shape[-1]
    x = matrix.mT if tall else matrix
    x = x / (torch.linalg.matrix_norm(x, keepdim=True) + 1e-7)
    for _ in range(iterations):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if tall else x
