"""What the launcher (torchrun, accelerate) tells each process that it starts; without one there is a single process."""

from __future__ import annotations

import ctypes
import os
import sys

LOCAL_RANK = "LOCAL_RANK"  # which DeepSpeed sets as well


def launched() -> bool:
    """Whether a launcher started this process, be it the only one."""
    return "RANK" in os.environ


def rank() -> int:
    """Which process of the job this is."""
    return int(os.environ.get("RANK", "0"))


def world() -> int:
    """How many processes the job has."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def local_rank() -> int:
    """Which one of its own machine this process is."""
    return int(os.environ.get(LOCAL_RANK, "0"))


def main_host() -> str:
    """Name or address of the machine of process 0."""
    return os.environ.get("MASTER_ADDR", "localhost")


PDEATHSIG = 1  # PR_SET_PDEATHSIG of prctl(2)


def follow_parent(number: int) -> None:
    """Have this process get a signal when the one that started it ends (Linux only): a launcher that is killed leaves
    nothing behind that goes on by itself."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PDEATHSIG, number)
