"""What a training step is measured on: the documents of a bin, the target's exact numbers, both ways of one step."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from models.batch import slots_of
from models.errors import EyasError
from scripts.memory import apart, lengths, measure, random_batch
from tests.commands import config, workplace
from tests.drafters import random_frozen

__all__ = ["workplace"]
TINY = ("conf=debug", "device=cpu", "train.depths=2", "train.bin_tokens=300", "data.max_length=128", "threads=1")


@pytest.mark.parametrize(
    ("size", "longest", "want"), [(300, 128, [128, 128, 44]), (256, 128, [128, 128]), (100, 128, [100])]
)
def test_documents_fill_the_bin(size: int, longest: int, want: list[int]) -> None:
    cfg = config("conf=debug", f"train.bin_tokens={size}", f"data.max_length={longest}", job="memory")
    assert lengths(cfg) == want


def test_the_batch_is_a_targets() -> None:
    frozen = random_frozen(softcap=None)
    batch = random_batch(frozen, [70, 9], 2, None)
    logits = batch.final.double() @ frozen.head.double().T
    torch.testing.assert_close(batch.lse.double(), logits.logsumexp(-1), rtol=1e-5, atol=1e-5)
    assert torch.equal(batch.top1, logits.argmax(-1)) and batch.taps.shape == (79, 2 * frozen.hidden_size)
    assert slots_of(batch, 2).valid.sum(1).tolist() == [68 + 7, 67 + 6]  # every token counts


@pytest.mark.parametrize("more", [(), ("drafter=medusa", "joint.backbone=lora")], ids=["drafter", "joint"])
def test_both_ways_are_one_step(more: tuple[str, ...]) -> None:
    cfg = config(*TINY, *more, job="memory")
    kept, made = (measure(replace(cfg, train=replace(cfg.train, recompute=again))) for again in (False, True))
    assert kept.loss == made.loss and kept.gradients == made.gradients > 0
    assert min(kept.peak, kept.seconds, made.peak, made.seconds) > 0


def test_a_mistake_comes_back_from_the_other_process() -> None:
    cfg = config(*TINY, job="memory")
    with pytest.raises(EyasError, match="unheard-of"):
        apart(replace(cfg, target=replace(cfg.target, path="tiny:unheard-of")))
