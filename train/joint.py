"""Joint training of drafter and target: what the trainer asks of the ``joint`` section (models/joint.py computes)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from conf.schema import JointConfig, OptimConfig
from models.drafter import Drafter
from models.errors import EyasError
from models.joint import JointModel
from models.target import Target
from models.tuned import LORA_KEYS, restore_tuned, save_tuned
from train.optim import lr_factor


@dataclass(frozen=True)
class JointTraining:
    """The model that is trained and the settings of its two terms."""

    model: JointModel
    config: JointConfig

    @classmethod
    def of(cls, target: Target, drafter: Drafter, config: JointConfig) -> JointTraining:
        return cls(JointModel(target, drafter, lora=lora_of(config), distill=config.distill), config)

    def trainable_parameters(self) -> int:
        """Of the target."""
        return sum(p.numel() for p in self.model.trained_backbone())

    def weights(self, step: int, total: int) -> tuple[float, float]:
        """Weights of the target's own mean loss and of the drafter's in optimizer step ``step`` of ``total``.

        (0, 1) in the first stage, which leaves the target alone; then (1, lambda), lambda growing as
        sin(pi/2 * share of the second stage) with schedule=sine.
        """
        joint, first = self.config, self.first(total)
        if step < first:
            return 0.0, 1.0
        grown = math.sin(math.pi / 2 * (step + 1 - first) / (total - first)) if joint.schedule == "sine" else 1.0
        return 1.0, joint.weight * grown

    def first(self, total: int) -> int:
        """Steps of the first stage of a run of ``total``. Raises EyasError if it leaves none for the second."""
        warmup = self.config.warmup
        steps = int(warmup) if warmup >= 1 else round(warmup * total)
        if steps >= total:
            raise EyasError(
                f"joint.warmup={warmup:g}: as long as the whole run of {total} steps; the target never learns"
            )
        return steps

    def lr_factor(self, step: int, total: int, optim: OptimConfig) -> float:
        """The target's share of its peak learning rate: the schedule of ``optim`` over the second stage alone, with a
        warm-up of its own."""
        first = self.first(total)
        return lr_factor(step - first, total - first, optim) if step >= first else 0.0

    def save(self, folder: Path, about: Mapping[str, Any], weights: Mapping[str, Tensor]) -> None:
        """``weights``: of the backbone, by the names of its state dict."""
        save_tuned(self.model.backbone, folder, lora_of(self.config), about, weights)

    def restore(self, folder: Path) -> None:
        restore_tuned(self.model.backbone, folder, lora_of(self.config))


def lora_of(config: JointConfig) -> dict[str, Any] | None:
    """The shape of the adapters; None where all weights are trained."""
    return {key: getattr(config, key) for key in LORA_KEYS} if config.backbone == "lora" else None
