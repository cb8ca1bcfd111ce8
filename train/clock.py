"""How fast a run goes and how long it will take: what the log, the progress bar and ``status`` tell."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Clock:
    """How fast a run goes: of training alone, and with everything in it."""

    def __init__(self) -> None:
        self.start(0, 0)

    def start(self, step: int, tokens: int, seconds: float = 0.0) -> None:
        """Begin a session of the run at ``step``, with what the sessions before it had reached in ``seconds``."""
        self._began = self._since = time.perf_counter()
        self._first_step, self._tokens, self._earlier = step, tokens, seconds

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

    def seconds(self) -> float:
        """Time that the run has trained up to now, validation and saving included.

        Not counted: what lies between sessions, and steps that a killed session had done beyond its last checkpoint.
        """
        return self._earlier + time.perf_counter() - self._began

    def left(self, step: int, total: int) -> float:
        """Seconds to the last step at the average pace since the start, validation and saving included."""
        return (total - step) * (time.perf_counter() - self._began) / max(1, step - self._first_step)
