"""Several processes share the prompts of a measurement (``torchrun -m eval``); every result is that of one alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist

from models.device import pick_device
from models.launch import local_rank, world

T = TypeVar("T")


@dataclass(frozen=True)
class Processes:
    """This process among those that measure together."""

    rank: int = 0
    size: int = 1

    def share(self, items: Sequence[T]) -> list[T]:
        return list(items[self.rank :: self.size])

    def of_others(self, own: T) -> list[T]:
        """What the other processes give in the same call."""
        if self.size == 1:
            return []
        found: list[T | None] = [None] * self.size
        dist.all_gather_object(found, own)
        return [item for rank, item in enumerate(found) if item is not None and rank != self.rank]

    def first(self, own: T) -> T:
        """What the first process gives in the same call: for what is measured and must be the same for all."""
        found = [own]
        if self.size > 1:
            dist.broadcast_object_list(found, src=0)
        return found[0]


@contextmanager
def launched(device: str) -> Iterator[Processes]:
    """The processes that a launcher started, each with a device of its own; one alone without a launcher."""
    size = world()
    if size == 1:
        yield Processes()
        return
    if pick_device(device) == "cuda":
        torch.cuda.set_device(local_rank())
    dist.init_process_group("gloo")  # what is exchanged are Python objects in host memory
    try:
        yield Processes(dist.get_rank(), size)
    finally:
        dist.destroy_process_group()
