"""What SIGTERM and SIGINT (Ctrl-C) do to a command.

Outside the training loop either raises :class:`Interrupted` in the main thread (see :func:`raising`), so that whatever
is open is cleaned up. Inside the loop they only ask, and training saves before it leaves::

    with StopRequest() as stop, Watchdog(accelerator, timeout, stop) as watchdog:
        for step in ...:
            self._train_step(step)
            watchdog.at(self.state.step, Phase.AGREEING)
            number = agreed(agreement.any(stop.said))  # one all-reduce a step
            if number:
                self._save(tracker)  # unless this step is saved already
                raise Stopped(number, self.state.step)

``conf.cli.told_plainly`` turns both exceptions into one line and exit code 128 + signal, 130 or 143.

A launcher passes on what the terminal or the scheduler may have sent to all processes anyway, so signals come in pairs:
the second of a pair counts for nothing. Ctrl-C once more after that means it: nothing more is saved then. SIGTERM is
never more than a request, as schedulers repeat it before they kill.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from types import FrameType, TracebackType
from typing import Any

from models.launch import launched, rank

SIGNALS = (signal.SIGINT, signal.SIGTERM)
PAIR = 1.0  # seconds within which a second signal belongs to the first
LAUNCHED_PAIR = 5.0  # the same with a launcher, whose machine may be busy
BY_SIGNAL = 128  # plus the signal's number: the exit code of a process that it ended, as shells have it
INTERRUPTED = BY_SIGNAL + signal.SIGINT


class Interrupted(KeyboardInterrupt):
    """A signal ends this command. ``number``: which one."""

    def __init__(self, number: int, message: str | None = None) -> None:
        super().__init__(message or signal.Signals(number).name)
        self.number = number


class Stopped(Interrupted):
    """Training was asked to stop by a signal, has saved ``step``, and leaves. Raised by every process."""

    def __init__(self, number: int, step: int) -> None:
        name = signal.Signals(number).name
        super().__init__(number, f"{name}: step {step} is saved; the same command continues from there")


def number_of(interrupt: KeyboardInterrupt) -> int:
    """The signal behind an interrupt; Python's own handler knows SIGINT only."""
    return interrupt.number if isinstance(interrupt, Interrupted) else int(signal.SIGINT)


def told_of(interrupt: KeyboardInterrupt, goes: str) -> tuple[str, int]:
    """The line to print for an interrupt, and the exit code. ``goes``: what the same command does next."""
    number = number_of(interrupt)
    how = "terminated" if number == signal.SIGTERM else "interrupted"
    message = str(interrupt) if isinstance(interrupt, Stopped) else f"{how}; the same command {goes}"
    return message, BY_SIGNAL + number


class Asked(Exception):
    """Training was asked to stop while it was at work that can be broken off (see :meth:`StopRequest.breaking`)."""


class Pair:
    """Tells what a signal means by those that came before it."""

    def __init__(self) -> None:
        self._first: float | None = None
        self._lasts = LAUNCHED_PAIR if launched() else PAIR

    def first(self) -> bool:
        """Whether no signal came before this one."""
        if self._first is not None:
            return False
        self._first = time.monotonic()
        return True

    def insists(self, number: int) -> bool:
        """Whether this is another Ctrl-C, and no echo of the first signal."""
        late = self._first is not None and time.monotonic() - self._first > self._lasts
        return late and number == signal.SIGINT


# --- outside the training loop ---


class _Raise:
    """The handler that raises."""

    def __init__(self) -> None:
        self.pair = Pair()
        self.leaving = False
        self.raised = 0

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if not self.leaving and (self.pair.first() or self.pair.insists(number)):
            self.raised = number
            raise Interrupted(number)


@contextmanager
def raising() -> Iterator[None]:
    """Raise Interrupted in the main thread at SIGTERM or SIGINT, where they aren't ignored; the former handlers are
    back afterwards. Within another ``raising`` it does nothing."""
    with _handled(_Raise()):
        yield


def raise_again() -> None:
    """Raise the Interrupted that a library has swallowed or made another exception of (as the import of a compiled one
    does), if there was one: what was made since is not what it seems."""
    for number in SIGNALS:
        handler = signal.getsignal(number)
        if isinstance(handler, _Raise) and handler.raised:
            raise Interrupted(handler.raised)


def leaving() -> None:
    """From here on signals are ignored until :func:`raising` is over: the command ends and has told why. A launcher
    terminates the processes that are left when the first one fails; that must not hide what they have to say."""
    for number in SIGNALS:
        handler = signal.getsignal(number)
        if isinstance(handler, _Raise):
            handler.leaving = True


# --- inside the training loop ---


def agreed(said: Sequence[bool]) -> int:
    """The signal to leave by, or 0: ``said`` is :attr:`StopRequest.said`, or-ed over all processes."""
    return next((int(number) for number, one in zip(SIGNALS, said, strict=True) if one), 0)


class StopRequest:
    """Context: SIGTERM and SIGINT ask training to stop, which the trainer looks up once a step.

    ``number``: the signal that asked first, 0 while none has. The main process says so at once, in one line on stderr.
    Another Ctrl-C later raises Interrupted, and so does leaving the context though somebody asked: there was no step
    left to stop after. Does nothing outside the main thread.
    """

    def __init__(self) -> None:
        self.number = 0
        self._breaks = False
        self._pair = Pair()
        self._told = threading.Lock()

    @property
    def said(self) -> list[bool]:
        """Which of SIGNALS asked to stop."""
        return [self.number == number for number in SIGNALS]

    def __enter__(self) -> StopRequest:
        # Python runs a handler only when the main thread is back from C code, where it may hang. What C writes to the
        # wakeup file at once, poll() reads in the watchdog's thread.
        self._read, self._write = socket.socketpair()
        for end in (self._read, self._write):
            end.setblocking(False)
        self._outer = [signal.getsignal(number) for number in SIGNALS]
        self._handlers = _handled(self._handle)
        self._handlers.__enter__()
        if _in_main_thread():
            self._file = signal.set_wakeup_fd(self._write.fileno(), warn_on_full_buffer=False)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        for handler in self._outer:
            if isinstance(handler, _Raise):
                handler.pair = self._pair  # the echo of what ended the loop may come when this is over
        if _in_main_thread():
            signal.set_wakeup_fd(self._file)
        self._handlers.__exit__(None, None, None)
        self._read.close()
        self._write.close()
        if error is None and self.number:
            raise Interrupted(self.number)

    @contextmanager
    def breaking(self) -> Iterator[None]:
        """Within it a request raises Asked: long work of one process, which what asks for it need not wait for."""
        if self.number:
            raise Asked
        self._breaks = True
        try:
            yield
        finally:
            self._breaks = False

    def poll(self) -> int:
        """The signal that asked to stop or 0, known even while the main thread hangs in C code; for another thread."""
        with suppress(OSError):  # nothing there, or closed
            for number in self._read.recv(4096):
                if number in SIGNALS:
                    self._note(number)
        return self.number

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._pair.first():
            self._note(number)
            if self._breaks:
                raise Asked
        elif self._pair.insists(number):
            raise Interrupted(number)

    def _note(self, number: int) -> None:
        if not self._told.acquire(blocking=False):
            return
        self.number = number
        if rank() == 0:
            line = f"{signal.Signals(number).name}: saving after this step, then leaving\n"
            # Not through sys.stderr: the main thread may just be writing there.
            os.write(2, ("\n" * sys.stderr.isatty() + line).encode())


@contextmanager
def _handled(handler: Callable[[int, FrameType | None], Any]) -> Iterator[None]:
    """Let ``handler`` have both signals, those apart that are ignored (as a shell's background jobs ignore Ctrl-C) or
    raise already."""
    before: dict[int, Any] = {}
    if _in_main_thread():
        before = {number: signal.getsignal(number) for number in SIGNALS}
    taken = {
        number: old
        for number, old in before.items()
        if old not in (None, signal.SIG_IGN) and not (isinstance(handler, _Raise) and isinstance(old, _Raise))
    }
    for number in taken:
        signal.signal(number, handler)
    try:
        yield
    finally:
        for number, old in taken.items():
            signal.signal(number, old)


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()
