"""How fast a run goes and how long it will take: what the log and the progress bar tell."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Clock:
    """How fast a run goes: of training alone, and with everything in it."""

    def __init__(self) -> None:
        self.start(0, 0)

    def start(self, step: int, tokens: int) -> None:
        self._began = self._since = time.perf_counter()
        self._first_step, self._tokens = step, tokens

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave what happens meanwhile out of :meth:`rate`."""
        before = time.perf_counter()
        yield
        self._since += time.perf_counter() - before

    def rate(self, tokens: int) -> float:
        """Tokens per second since the last call."""
        now = time.perf_counter()
        rate = (tokens - self._tokens) / max(now - self._since, 1e-9)
        self._since, self._tokens = now, tokens
        return rate

    def left(self, step: int, total: int) -> float:
        """Seconds to the last step at the average pace since the start, validation and saving included."""
        return (total - step) * (time.perf_counter() - self._began) / max(1, step - self._first_step)
