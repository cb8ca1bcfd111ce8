"""What the launcher (torchrun, accelerate) tells each process that it starts; without one there is a single process."""

from __future__ import annotations

import ctypes
import os
import sys

from models.errors import EyasError

LOCAL_RANK = "LOCAL_RANK"  # which DeepSpeed sets as well


def launched() -> bool:
    """Whether a launcher started this process, be it the only one."""
    return "RANK" in os.environ


def rank() -> int:
    """Which process of the job this is."""
    return _number("RANK", 0)


def world() -> int:
    """How many processes the job has."""
    size = _number("WORLD_SIZE", 1)
    if size > 1 and not launched():
        raise EyasError(
            f"WORLD_SIZE={size} is set in the environment, but not RANK: start several processes with torchrun"
        )
    return size


def local_rank() -> int:
    """Which one of its own machine this process is."""
    return _number(LOCAL_RANK, 0)


def main_host() -> str:
    """Name or address of the machine of process 0."""
    return os.environ.get("MASTER_ADDR", "localhost")


PDEATHSIG = 1  # PR_SET_PDEATHSIG of prctl(2)


def follow_parent(number: int) -> None:
    """Have this process get a signal when the one that started it ends (Linux only): a launcher that is killed leaves
    nothing behind that goes on by itself."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PDEATHSIG, number)


def _number(name: str, default: int) -> int:
    given = os.environ.get(name, str(default))
    if not given.isdecimal():
        raise EyasError(f"{name}={given} in the environment: must be a number, as launchers set it")
    return int(given)
