"""Ends a job in which nothing moves any more, and names the process that is behind.

A collective waits for the process that doesn't come; all that its time-out could say is that somebody didn't. So the
main thread of every process notes where it is (an attribute, no more), a thread of its own tells the main process once
a second, and that one sees who is behind::

    with StopRequest() as stop, Watchdog(accelerator, seconds, stop) as watchdog:
        for step in ...:
            watchdog.at(step + 1, Phase.READING)
            batch = ...
            watchdog.at(step + 1, Phase.COMPUTING)  # EXCHANGING in the last pass, whose backward waits for the others
            ...
            with watchdog.paused("measuring tau"):  # the main process alone, at its own pace; the others wait for it
                ...

What is found is told in one line on stderr, and every process ends with exit code STALLED (the main thread may sit in
C code, where nothing can be raised):

* No main thread has moved for ``timeout`` seconds: the processes that are furthest behind are named, by step and then
  by the order of Phase.
* A process has said nothing for as long: it is stopped, or its machine is gone.
* A process has ended without taking leave, or has failed, and GRACE seconds later this one still waits for it (not if
  it is ENDING itself). Mostly a collective raises at once; leaving the context then turns that into a plain EyasError.

Time counts only while this process runs, so a job that is suspended as a whole goes on afterwards. Processes may leave
in any order: each takes leave, and none waits for one that did.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn

from models.errors import EyasError
from models.launch import launched, local_rank, main_host
from models.log_files import note_in_log_files
from models.signals import Stopped, StopRequest
from train.places import AGAIN, FAILED, LEAVING, LOST, Member, Phase, behind, gone, silent

if TYPE_CHECKING:
    from accelerate import Accelerator

STALLED = 124  # exit code, that of timeout(1)
LONGEST = 1 << 16  # bytes that are kept for a process that doesn't read
GRACE = 5.0  # seconds for the main thread to notice by itself that another process is gone, and to say why it leaves
STOP_GRACE = 20.0  # seconds without movement that a request to stop leaves: launchers kill after 30
BEAT = 1.0  # seconds between two beats, less for a short time-out
CONNECT = 60.0  # seconds for all processes to come together
# What collectives say (all as RuntimeError) when another process is gone: gloo, torch.distributed's store, NCCL.
NO_CONTACT = (
    *("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Connection was likely closed"),
    *("remote process exit", "ncclRemoteError", "NCCL communicator was aborted"),
)


def lost_contact(error: BaseException | None) -> EyasError | None:
    """The plain message for what a collective raises when another process is gone; None for any other error."""
    if isinstance(error, RuntimeError) and any(text in str(error) for text in NO_CONTACT):
        return EyasError(f"another process of this run has ended; its own words say why. {AGAIN}")
    return None


class Watchdog:
    """Context of the part of a run that is watched; all processes must enter it together.

    ``timeout``: seconds without movement that are too long. ``stop``: the request that shortens them to STOP_GRACE, as
    a process that hangs can't save and leave (not while one is SAVING or ENDING). Raises EyasError if the processes
    can't reach the main one; for what a collective raises because another process is gone, EyasError instead of that.
    """

    def __init__(self, accelerator: Accelerator, timeout: float, stop: StopRequest | None = None) -> None:
        self.rank, self.world = accelerator.process_index, accelerator.num_processes
        self.timeout, self.stop = timeout, stop
        self._step, self._phase, self._moves = 0, Phase.STARTING, 0
        self._alone: str | None = None
        self._interval = min(BEAT, timeout / 10)
        self._self = Member(self.rank, socket.gethostname())
        self._asked: float | None = None  # since when one of them is asked to stop
        self._links: list[Link] = []  # the main process: to all others; they: to the main process

    # --- what the main thread calls ---

    def at(self, step: int, phase: Phase) -> None:
        """The main thread has come to this place. Costs nothing; call it often."""
        self._step, self._phase = step, phase
        self._moves += 1

    def tick(self) -> None:
        """The main thread has moved on, at the same place."""
        self._moves += 1

    @contextmanager
    def paused(self, doing: str) -> Iterator[None]:
        """This process works at its own pace, the others wait: nobody's movement counts. Beats still do."""
        before, self._alone = self._alone, doing
        try:
            yield
        finally:
            self._moves += 1
            self._alone = before

    def __enter__(self) -> Watchdog:
        if self.world > 1:
            try:
                self._links = meet(self._self, self.world)
            except RuntimeError as error:
                raise lost_contact(error) or error from None
        self._clock = RunningClock(2 * self._interval)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._over.set()
        self._thread.join()
        told = lost_contact(error) if self.world > 1 else None
        if told:
            told = self._by_name() or told
        planned = error is None or isinstance(error, Stopped)
        self._leave(LEAVING if planned else LOST if told else FAILED)
        if told:
            raise told from error

    def _by_name(self) -> EyasError | None:
        """The same with the name of the process that is gone, where this one can know it."""
        for _ in range(10):  # the news may be a moment behind the collective's
            self._listen()
            message = gone(self._others, self._clock.now, grace=0)
            if message:
                return EyasError(message)
            time.sleep(0.05)
        return None

    def _leave(self, how: str) -> None:
        for link in self._links:
            link.send({"leave": how})
            link.socket.close()

    # --- what the watchdog's thread does ---

    def _watch(self) -> None:
        while not self._over.wait(self._interval):
            self._clock.advance()
            self._listen()
            self._beat()
            message = self._judge()
            if message:
                self._end(message)

    def _beat(self) -> None:
        place = {"step": self._step, "phase": self._phase.name, "moves": self._moves, "alone": self._alone}
        said = place | {"stop": self.stop.poll() if self.stop else 0}
        self._self.hear(said, self._clock.now)
        for link in self._links:
            link.send(said)

    def _listen(self) -> None:
        now = self._clock.now
        for link in self._links:
            for said in link.receive():
                if "end" in said:
                    self._end(said["end"], aloud=local_rank() == 0)  # once on every machine
                link.member.hear(said, now)
            if link.closed and link.member.closed is None:
                link.member.closed = now

    def _judge(self) -> str | None:
        """Why all should end, as this process sees it."""
        now, members = self._clock.now, [self._self, *self._others]
        timeout, why = self.timeout, f". {AGAIN}; strategy.timeout_minutes={self.timeout / 60:g} is how long is waited"
        asked = max(one.stop for one in members)
        if asked and self._asked is None:
            self._asked = now
        here = [one for one in members if one.leave is None]
        if any(one.alone for one in here):
            for one in here:
                one.moved = now  # or waits for the one that is at work
        heeding = any(one.ending or one.phase == Phase.SAVING.name for one in here)
        grace = max(STOP_GRACE, *(2 * one.longest for one in members))  # a long bin is no stall
        if self._asked is not None and self.world > 1 and not heeding and now - self._asked > grace < timeout:
            timeout, why = grace, f", and can't save and leave as {signal.Signals(asked).name} asks. {AGAIN}"
        found = None if self._self.ending else gone(self._others, now, min(GRACE, timeout))
        if found:
            return found
        found = silent(self._others, now, timeout)
        if not found and self.rank == 0:  # the others know the place of the main process only
            found = behind(members, now, timeout)
        return found and found + why

    def _end(self, message: str, *, aloud: bool = True) -> NoReturn:
        """End this process, and if it is the main one all others."""
        for link in self._links:
            link.send({"end": message} if self.rank == 0 else {"leave": LOST})
        # In a thread, as whoever hangs may hold a lock of theirs.
        flushing = threading.Thread(target=flush, args=(message,), daemon=True)
        flushing.start()
        flushing.join(2.0)
        if aloud:
            where = f"[rank {self.rank}] " if launched() else ""
            os.write(2, f"{where}error: {message}\n".encode())
        os._exit(STALLED)

    @property
    def _others(self) -> list[Member]:
        return [link.member for link in self._links]


class RunningClock:
    """Seconds during which this process ran: what lies between two advances counts as at most ``longest``."""

    def __init__(self, longest: float, time_of: Callable[[], float] = time.monotonic) -> None:
        self.now, self._longest, self._time_of = 0.0, longest, time_of
        self._last = time_of()

    def advance(self) -> None:
        last, self._last = self._last, self._time_of()
        self.now += min(self._last - last, self._longest)


def flush(message: str) -> None:
    """Note why this process ends, and write out what logs and streams still hold."""
    note_in_log_files(message)
    for handler in logging.getLogger().handlers:
        handler.flush()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()


# --- how the processes speak ---


class Link:
    """Lines of JSON to and from another process, never waited for."""

    def __init__(self, connection: socket.socket, member: Member) -> None:
        connection.setblocking(False)
        self.socket, self.member, self.closed = connection, member, False
        self._in = self._out = b""

    def send(self, said: dict[str, Any]) -> None:
        """Nothing is lost but what a process that is stopped or gone would not read anyway."""
        if len(self._out) < LONGEST:
            self._out += line(said)
        with suppress(OSError):
            self._out = self._out[self.socket.send(self._out) :]

    def receive(self) -> list[dict[str, Any]]:
        """What came since the last call, up to the end: a goodbye is read even if the connection is gone."""
        while not self.closed:
            try:
                found = self.socket.recv(1 << 16)
            except BlockingIOError:
                break
            except OSError:
                found = b""
            self._in += found
            self.closed = not found
        *lines, self._in = self._in.split(b"\n")
        return [json.loads(one) for one in lines]


def line(said: dict[str, Any]) -> bytes:
    return json.dumps(said).encode() + b"\n"


def meet(me: Member, world: int) -> list[Link]:
    """Connect the main process with every other one, at the address that the launcher gave it.

    Its port, and a word that proves who belongs to the job, are told by a collective. Raises EyasError if they don't
    come together.
    """
    from accelerate.utils import broadcast_object_list

    host = main_host()
    if me.rank == 0:
        with listening(world) as server:
            word = secrets.token_hex()
            broadcast_object_list([server.getsockname()[1], word])
            return admit(server, me, world, word)
    port, word = broadcast_object_list([None, None])
    try:
        connection = socket.create_connection((host, port), CONNECT)
        connection.sendall(word.encode() + line({"rank": me.rank, "host": me.host}))
        welcome = read_line(connection)
    except OSError as error:
        raise EyasError(f"{me.name} can't reach rank 0 at {host}:{port}: {error}") from error
    return [Link(connection, Member(0, json.loads(welcome)["host"]))]


def listening(backlog: int) -> socket.socket:
    """A server on every address: which one the others know this machine by is theirs to say."""
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=backlog)
    return socket.create_server(("", 0), backlog=backlog)


def admit(server: socket.socket, me: Member, world: int, word: str) -> list[Link]:
    """Wait for the other processes; whoever doesn't know the word is none of them."""
    links: dict[int, Link] = {}
    deadline = time.monotonic() + CONNECT
    while len(links) < world - 1:
        server.settimeout(max(0.01, deadline - time.monotonic()))
        try:
            connection, _ = server.accept()
        except TimeoutError:
            missing = ", ".join(str(rank) for rank in range(1, world) if rank not in links)
            raise EyasError(f"{me.name} waited {CONNECT:.0f} s in vain for rank {missing} to connect") from None
        with suppress(OSError):
            connection.settimeout(CONNECT / 10)
            hello = read_line(connection)
            if secrets.compare_digest(hello[: len(word)], word.encode()):
                said = json.loads(hello[len(word) :])
                connection.sendall(line({"host": me.host}))
                links[said["rank"]] = Link(connection, Member(said["rank"], said["host"]))
                continue
        connection.close()
    return list(links.values())


def read_line(connection: socket.socket) -> bytes:
    """The first line, and nothing of what may follow. Raises OSError if there is none."""
    found = b""
    while not found.endswith(b"\n"):
        part = connection.recv(1)
        found += part
        if not part or len(found) > LONGEST:
            raise ConnectionError("no answer")
    return found
