"""Activation checkpointing: what the parts of a forward make in between is made again in the backward pass.

A forward calls its parts through a :class:`Run`. :func:`again` keeps a part's arguments and results alone, and random
numbers are drawn again alike, so every number is that of :func:`plainly`. A part may be called twice, so it must
change nothing but what it returns.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from torch.utils.checkpoint import checkpoint

Made = TypeVar("Made")


class Run(Protocol):
    """Calls ``part`` with ``args``."""

    def __call__(self, part: Callable[..., Made], *args: Any) -> Made: ...


def plainly(part: Callable[..., Made], *args: Any) -> Made:
    return part(*args)


def again(part: Callable[..., Made], *args: Any) -> Made:
    made: Made = checkpoint(part, *args, use_reentrant=False)
    return made
