"""A command on one or several processes of this machine: started, watched, held still, killed, cleaned up after.

For scripts/survive.py and for tests that need the real command.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

ROOT = Path(__file__).parents[1]
MARK = "EYAS_JOB"  # environment variable that all processes of a job inherit, launcher or not
LAUNCHER = "torch.distributed.run"
POLL = 0.001  # seconds between two looks at a running job


def command(processes: int, *arguments: str) -> list[str]:
    """``python -m ARGUMENTS``, by torchrun if there are several processes."""
    launcher = ["-m", LAUNCHER, "--standalone", "--nproc_per_node", str(processes)]
    return [sys.executable, *(launcher if processes > 1 else ()), "-m", *arguments]


class Job:
    """A command that runs in ``folder``, all its output appended to the file ``log``. As a context manager it leaves
    no process behind.

    Its processes are known by a mark in their environment, so also those whose launcher is dead.
    """

    def __init__(self, arguments: Sequence[str], folder: Path, log: Path, env: Mapping[str, str] | None = None) -> None:
        self.log, self._mark = log, uuid.uuid4().hex
        self.launched = LAUNCHER in arguments
        self._known: list[psutil.Process] = []  # found by the last search
        self._from = log.stat().st_size if log.exists() else 0
        path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        own = {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", MARK: self._mark}
        folder.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as out:
            self.process = subprocess.Popen(
                [*arguments], cwd=folder, env={**os.environ, **(env or {}), **own}, stdout=out, stderr=out
            )

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    @property
    def running(self) -> bool:
        return self.process.poll() is None

    def output(self) -> str:
        """What it has said so far, as far as that is text."""
        with self.log.open("rb") as file:
            file.seek(self._from)
            return file.read().decode(errors="replace")

    # --- its processes ---

    def members(self) -> list[psutil.Process]:
        """All that live, oldest first: launcher, ranks and whatever they started."""
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                if process.environ().get(MARK) == self._mark and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        self._known = sorted(found, key=lambda process: (process.create_time(), process.pid))
        return self._known

    def ranks(self) -> dict[int, psutil.Process]:
        """The processes that do the work, by rank, as far as they live; without a launcher the command itself is 0."""
        if not self.launched:
            return {0: psutil.Process(self.process.pid)} if self.running else {}
        found: dict[int, psutil.Process] = {}
        for process in self.members():
            with suppress(psutil.Error):
                rank = process.environ().get("RANK")
                if rank is not None:
                    found.setdefault(int(rank), process)  # the oldest: what a rank starts inherits its number
        return found

    # --- what is done to it ---

    def freeze(self) -> list[psutil.Process]:
        """Stop all of its processes where they are; returns them. See :meth:`thaw`."""
        held: list[psutil.Process] = []
        fresh = self._known or self.members()  # those known at once: a search takes a while
        while fresh:
            for process in fresh:
                with suppress(psutil.Error):
                    process.suspend()
            for process in fresh:
                _await_stop(process)
            held += fresh
            fresh = [process for process in self.members() if process not in held]
        return held

    def thaw(self) -> None:
        for process in self.members():
            with suppress(psutil.Error):
                process.resume()

    def kill(self) -> None:
        """SIGKILL to all that is left of it."""
        while members := self.members():
            for process in members:
                with suppress(psutil.Error):
                    process.kill()
            # The command's own exit code is for its Popen to collect.
            psutil.wait_procs([process for process in members if process.pid != self.process.pid], timeout=5)
        self.process.wait()

    def wait(self, timeout: float) -> int:
        """The exit code. Raises TimeoutError with the end of the output, and kills the job, if it takes longer."""
        try:
            code = self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.kill()
            raise TimeoutError(f"still running after {timeout:.0f} s; it said:\n{self.output()[-4000:]}") from None
        return code

    def wait_for(self, seen: Callable[[], bool], timeout: float) -> bool:
        """Look again and again until something is seen; False if the job ended before. Raises TimeoutError."""
        end = time.monotonic() + timeout
        while not seen():
            if not self.running:
                return seen()
            if time.monotonic() > end:
                raise TimeoutError(f"not seen within {timeout:.0f} s; the job said:\n{self.output()[-4000:]}")
            time.sleep(POLL)
        return True


def _await_stop(process: psutil.Process, timeout: float = 1.0) -> None:
    """Signals arrive a little later; what was killed meanwhile counts as stopped. A process whose child is held before
    its exec never stops, but does nothing either."""
    end = time.monotonic() + timeout
    with suppress(psutil.Error):
        while process.status() not in (psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE) and time.monotonic() < end:
            time.sleep(POLL / 10)
