"""Activation checkpointing: what the parts of a forward make in between is made again in the backward pass.

A forward calls its parts through a :class:`Run`. :func:`again` keeps a part's arguments and results alone, and random
numbers are drawn again alike, so every number is that of :func:`plainly`. A part may be called twice, so it must
change nothing but what it returns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol, TypeVar

from torch import nn
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


@contextmanager
def layers_by(run: Run, layers: Iterable[nn.Module]) -> Iterator[None]:
    """Let ``run`` call the forwards of these layers, inside their hooks: what watches a layer sees it run once."""

    def by_run(forward: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **kwargs: run(partial(forward, **kwargs), *args)

    chosen: list[nn.Module] = [] if run is plainly else list(layers)
    own = [vars(layer).get("forward") for layer in chosen]  # set by libraries that place layers on devices
    for layer in chosen:
        layer.forward = by_run(layer.forward)
    try:
        yield
    finally:
        for layer, forward in zip(chosen, own, strict=True):
            del layer.forward
            if forward is not None:
                layer.forward = forward
