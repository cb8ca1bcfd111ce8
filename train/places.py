"""Where the processes of a job are, and in words which of them is gone or behind. No threads, no sockets: see
train/watchdog.py."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from models.units import format_seconds

LEAVING, FAILED, LOST = "leaving", "failed", "lost contact"  # how a process takes leave
AGAIN = "The same command continues from the last checkpoint"


class Phase(Enum):
    """What a process is doing, in the order in which a step goes through it, from its first batch to its checkpoint."""

    STARTING = "starting"
    READING = "reading its batch"
    COMPUTING = "computing"
    EXCHANGING = "exchanging gradients"
    UPDATING = "updating the weights"
    LOGGING = "adding up the metrics"
    AGREEING = "agreeing with the others"
    VALIDATING = "scoring the held-out documents"
    SAVING = "saving"
    ENDING = "ending"


ORDER = {phase.name: number for number, phase in enumerate(Phase)}


@dataclass
class Member:
    """A process of the job, as far as it is known. Times are seconds of a clock of whoever keeps the list."""

    rank: int
    host: str
    step: int = 0
    phase: str = Phase.STARTING.name
    moves: int = 0  # how often its main thread has moved
    alone: str | None = None  # what it does at its own pace while the others wait
    stop: int = 0  # the signal that asked it to stop
    heard: float = 0.0
    moved: float = 0.0
    longest: float = 0.0  # between two of its movements since the first step, a checkpoint apart
    closed: float | None = None  # since when nothing more can come from it
    leave: str | None = None  # how it took leave

    def hear(self, said: dict[str, Any], now: float) -> None:
        """Take in what it says of itself: its place, or its leave."""
        self.heard = now
        if said.get("moves", self.moves) != self.moves:
            if self.step and self.phase != Phase.SAVING.name:
                self.longest = max(self.longest, now - self.moved)
            self.moved = now
        for key in ("step", "phase", "moves", "alone", "stop", "leave"):
            if key in said:
                setattr(self, key, said[key])

    @property
    def ending(self) -> bool:
        """Whether it leaves of its own accord, and waits for nobody."""
        return self.phase == Phase.ENDING.name and self.alone is None

    @property
    def order(self) -> tuple[int, int]:
        return self.step, ORDER[self.phase]

    @property
    def place(self) -> str:
        return f'"step {self.step}: {self.alone or Phase[self.phase].value}"'

    @property
    def name(self) -> str:
        return f"rank {self.rank} on {self.host}"


def gone(others: Sequence[Member], now: float, grace: float) -> str | None:
    """The message about processes that have ended without a word, or failed, ``grace`` seconds ago; None if none has.

    One that only lost contact with another is no news, and those without a word come first: others may have failed for
    want of them.
    """
    ended = [one for one in others if one.closed is not None and now - one.closed >= grace]
    for how, told in (
        (None, "ended without a word (killed, or out of memory?)"),
        (FAILED, "failed; its own words say why"),
    ):
        found = [one for one in ended if one.leave == how]
        if found:
            return f"{named(found)} {has(found)} {told}. {AGAIN}"
    return None


def silent(others: Sequence[Member], now: float, timeout: float) -> str | None:
    """The message about processes that have said nothing for ``timeout`` seconds; None if all have."""
    found = [one for one in others if one.leave is None and one.closed is None and now - one.heard >= timeout]
    if not found:
        return None
    where = "; ".join(f"last at {place}" for place in places(found))
    since = format_seconds(now - max(one.heard for one in found))
    return f"{named(found)} {has(found)} not been heard from for {since} (stopped, or out of reach?), {where}"


def behind(members: Sequence[Member], now: float, timeout: float) -> str | None:
    """The message about a job in which no main thread has moved for ``timeout`` seconds; None if one has, or is at
    work alone. Those that are furthest behind are named: the others wait for them."""
    here = [one for one in members if one.leave is None]
    if any(one.alone for one in here) or now - max(one.moved for one in here) < timeout:
        return None
    since = format_seconds(now - max(one.moved for one in here))
    last = min(one.order for one in here)
    found, waiting = ([one for one in here if (one.order == last) is late] for late in (True, False))
    still = f"not moved for {format_seconds(now - max(one.moved for one in found))}"
    at = f"{'it is' if len(found) == 1 else 'they are'} at {places(found)[0]}"
    if len(members) == 1:
        return f"this process has {still}: {at}"
    if not waiting:
        return f"no process has moved for {since}: all are at {places(here)[0]}"
    return f"{named(found)} {has(found)} {still}: {at}; the others wait at {listed(places(waiting))}"


# --- words ---


def named(members: Sequence[Member]) -> str:
    return listed([one.name for one in members])


def has(members: Sequence[Member]) -> str:
    return "has" if len(members) == 1 else "have"


def places(members: Iterable[Member]) -> list[str]:
    """Each place once."""
    return list(dict.fromkeys(one.place for one in members))


def listed(words: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(words[:-1]), words[-1])))
