"""Training any method in a process of its own that will be killed (tests/test_methods_training.py)."""

from __future__ import annotations

import time
from pathlib import Path

from tests.drafters import random_frozen, random_vocab
from tests.methods import METHODS, depths_of
from tests.test_trainer import LENGTHS, InMemory, config
from train.strategy import build_accelerator
from train.trainer import Trainer

STEPS = 8


def trainer_of(name: str, run: Path) -> Trainer:
    """A short run on random documents: validated and saved every third step, a row every second."""
    frozen = random_frozen()
    drafter = METHODS[name](frozen, random_vocab(40, 17))
    cfg = config(steps=STEPS, depths=depths_of(drafter, 5), save_every=3, eval_every=3, log_every=2)
    train, valid = InMemory(frozen, LENGTHS), InMemory(frozen, [15, 10], seed=7)
    accelerator = build_accelerator("cpu")
    return Trainer(cfg, run, accelerator, drafter, frozen, train=train, valid=valid, content={"features": name})


def train_until_killed(name: str, run: Path) -> None:
    """Train, but never to the end: wait before the last step for the signal."""
    trainer = trainer_of(name, run)
    plain = trainer._train_step

    def waiting(step: int) -> None:
        while step == STEPS - 1:
            time.sleep(1)
        plain(step)

    trainer._train_step = waiting  # type: ignore[method-assign]
    trainer.fit()
