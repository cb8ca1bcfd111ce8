"""What the processes of a job tell each other through a folder, where work takes longer than a collective may.

A launcher starts a job's processes, and all of them see its folder (over nodes too); of the file system nothing is
asked but that a rename is atomic. One waits for another by looking there now and then, so that a download,
tokenising or a dump is bound by no time-out, and what one process raises ends the others with its message.
"""

from __future__ import annotations

import json
import logging
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from models.errors import EyasError
from models.files import write_atomic
from models.launch import local_rank

LOOK = 1.0  # at most so many seconds lie between two looks at the folder
POST = 5.0  # seconds between two notes that a process is moving
PATIENCE = 60.0  # seconds of waiting after which the log says for what

T = TypeVar("T")
Tick = Callable[[], None]
log = logging.getLogger(__name__)


def nothing() -> None:
    """The tick of those who do not watch."""


class OtherProcessFailed(EyasError):
    """Another process of the job failed; the message is its own."""


@dataclass(frozen=True)
class Job:
    """This process among the ``size`` of its job.

    folder: one that all of them see and that no other job uses meanwhile. token: the same for all processes of a job,
    another for every job, so that what a killed one left there is taken for nothing.
    """

    rank: int = 0
    size: int = 1
    folder: Path = Path()
    token: str = ""

    @contextmanager
    def stage(self, name: str, tick: Tick = nothing) -> Iterator[Stage]:
        """Work that ends for all processes at once: when the last has done its part, or with the first that fails.

        tick: called whenever this process moves on, and while it waits whenever another one does. Raises
        OtherProcessFailed in the processes that did not fail themselves.
        """
        if self.size == 1:
            yield Stage(tick=tick)
            return
        stage = Stage(self.rank, self.size, self.folder / f"{self.token}-{name}", tick)
        if self.rank == 0:
            for left in self.folder.glob("*"):  # by jobs that were killed
                if not left.name.startswith(self.token):
                    shutil.rmtree(left, ignore_errors=True)
        try:
            yield stage
            stage.leave()
        except OtherProcessFailed:
            raise
        except BaseException as error:
            stage.fail(error)
            raise


class Stage:
    """A stage that the processes of a job share, as one of them sees it (see :meth:`Job.stage`)."""

    def __init__(self, rank: int = 0, size: int = 1, folder: Path = Path(), tick: Tick = nothing) -> None:
        self.rank, self.size, self.folder, self.tick = rank, size, folder, tick
        self._seen: dict[str, int] = {}
        self._looked = self._posted = 0.0

    def moved(self) -> None:
        """Call it often: this process is getting on. Raises OtherProcessFailed if another one has failed."""
        self.tick()
        if self.size == 1:
            return
        now = time.monotonic()
        if now - self._looked > LOOK:
            self._look()
        if now - self._posted > POST:
            self._posted = now
            self.folder.mkdir(parents=True, exist_ok=True)
            (self.folder / f"moved-{self.rank}").touch()

    def tell(self, name: str, value: Any = None) -> None:
        """Give the other processes a JSON value."""
        if self.size > 1:
            self.folder.mkdir(parents=True, exist_ok=True)
            write_atomic(self.folder / name, json.dumps(value))

    def hear(self, name: str) -> Any:
        """Wait for what another process tells under this name."""
        self.hear_one_of(name)
        return json.loads((self.folder / name).read_bytes())

    def hear_one_of(self, *names: str) -> str:
        """Wait until another process tells something under one of these names: the first of them that it told."""
        return self.wait(lambda: next((name for name in names if (self.folder / name).exists()), None))

    def wait(self, until: Callable[[], T | None]) -> T:
        """Look until there is something. Raises OtherProcessFailed if another process fails meanwhile."""
        began, pause, silent = time.monotonic(), LOOK / 64, True
        while (found := until()) is None:
            if self._look():
                self.tick()
            if silent and time.monotonic() - began > PATIENCE:
                silent = False
                level = logging.WARNING if local_rank() == 0 else logging.DEBUG  # one on every machine tells
                log.log(level, "process %d waits for another one (all must see the folder %s)", self.rank, self.folder)
            time.sleep(pause)
            pause = min(LOOK, 2 * pause)
        return found

    @contextmanager
    def main_first(self) -> Iterator[None]:
        """The others enter the block when process 0 has left it: they find what it downloads or makes there."""
        if self.rank:
            self.hear("entered")
        yield
        if self.rank == 0:
            self.tell("entered")

    def leave(self) -> None:
        """Wait until all processes have done their part; process 0 then clears up."""
        self.tell(f"left-{self.rank}")

        def all_left() -> bool | None:
            left = len(list(self.folder.glob("left-*"))) == self.size
            return left or (self.rank > 0 and not self.folder.exists()) or None

        self.wait(all_left)
        if self.rank == 0:
            shutil.rmtree(self.folder, ignore_errors=True)
            with suppress(OSError):
                self.folder.parent.rmdir()

    def fail(self, error: BaseException) -> None:
        """Tell the others why this process ends, as far as the disk lets it."""
        told = str(error) if isinstance(error, EyasError) else f"{type(error).__name__}: {error}"
        with suppress(OSError):
            self.tell(f"failed-{self.rank}", told)

    def _look(self) -> bool:
        """Whether other processes have moved since the last look."""
        self._looked = time.monotonic()
        seen: dict[str, int] = {}
        for path in self.folder.glob("*"):
            with suppress(FileNotFoundError):  # process 0 is clearing up
                if path.name.startswith("failed-"):
                    raise OtherProcessFailed(f"process {path.name.removeprefix('failed-')}: {_text(path)}")
                seen[path.name] = path.stat().st_mtime_ns
        seen.pop(f"moved-{self.rank}", None)
        moved, self._seen = seen != self._seen, seen
        return moved


def _text(path: Path) -> str:
    return str(json.loads(path.read_bytes()))


ALONE = Stage()
