"""Sums over slots that add across micro-steps, steps and processes, and the averages the log shows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor

from models.objective import Score

PER_DEPTH = ("ce", "kl", "alpha", "match", "mass", "extra", "count")


class Totals:
    """Running sums as one float64 vector: [K] for each of PER_DEPTH, then a trained target's -log p and its number of
    tokens, the weighted loss, gradient norm and steps."""

    def __init__(self, depths: int, device: torch.device | str = "cpu") -> None:
        self.depths = depths
        self.sums = torch.zeros(len(PER_DEPTH) * depths + 5, dtype=torch.float64, device=device)

    def add(self, score: Score) -> None:
        """Count a micro-step; no number is read back, so the device is not waited for."""
        zeros = torch.zeros_like(score.count)
        columns = [(zeros if (found := getattr(score, name)) is None else found).detach() for name in PER_DEPTH]
        columns.append(torch.zeros_like(self.sums[:2]) if score.lm is None else score.lm)
        self.sums[:-2] += torch.cat([*columns, score.loss_sum.detach()[None]], 0).double()

    def add_step(self, grad_norm: Tensor) -> None:
        """Count an optimizer step; on one process only, since all see the same gradient norm."""
        self.sums[-2] += grad_norm.detach().double()
        self.sums[-1] += 1

    def reduce(self, accelerator: Accelerator) -> None:
        """Gather all processes' sums into the main one and empty the others (so repeating this is harmless)."""
        if accelerator.num_processes > 1:
            total = sum_over_processes(accelerator, self.sums)
            self.sums.zero_()
            if accelerator.is_main_process:
                self.sums += total

    def averages(self) -> dict[str, Any]:
        """loss per depth-0 slot, grad_norm per step and, per depth, ce, kl, alpha, accuracy and mass per valid slot.

        alpha and accuracy are against the target's full vocabulary; mass is the target's probability inside
        the draft vocabulary; extra is a method's own term, where it has one. ``tau_mean_field`` is
        1 + sum_k prod_{i<=k} alpha_i of the averages. ``perplexity``: of a target that is trained along.
        """
        *rows_flat, lm, lm_tokens, loss, grad_norm, steps = self.sums.tolist()
        rows = torch.tensor(rows_flat, dtype=torch.float64).view(len(PER_DEPTH), self.depths)
        count = rows[PER_DEPTH.index("count")]
        named = dict(zip(PER_DEPTH, (rows / count.clamp_min(1)).tolist(), strict=True))
        alpha = torch.tensor(named["alpha"], dtype=torch.float64)
        return {
            "loss": loss / max(1.0, float(count[0])),
            **({"grad_norm": grad_norm / steps} if steps else {}),
            "tau_mean_field": 1.0 + float(alpha.cumprod(0).sum()),
            **{name: named[name] for name in ("ce", "kl", "alpha", "mass")},
            "accuracy": named["match"],
            **({"extra": named["extra"]} if any(named["extra"]) else {}),
            **({"perplexity": perplexity(lm / lm_tokens)} if lm_tokens else {}),
            "slots": [int(c) for c in count],
        }

    def state(self) -> list[float]:
        return list(self.sums.tolist())

    def load(self, state: list[float]) -> None:
        self.sums.copy_(torch.tensor(state, dtype=torch.float64))

    def clear(self) -> None:
        self.sums.zero_()


def sum_over_processes(accelerator: Accelerator, values: Tensor) -> Tensor:
    """The element-wise sum of ``values`` over all processes, on every process."""
    total: Tensor = accelerator.reduce(values.clone(), reduction="sum")
    return total


def perplexity(nll: float) -> float:
    """exp of a mean -log p; infinite where that is no number any more."""
    return math.exp(nll) if nll < 700 else math.inf


def rates(values: Sequence[float]) -> str:
    return " ".join(f"{value:.3f}" for value in values)
