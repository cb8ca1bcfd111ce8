"""Every test runs offline and on one thread, whatever the machine; set before anything imports torch."""

import os
import signal
from collections.abc import Iterable
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("WANDB_MODE", "offline")

# A shell's background jobs ignore Ctrl-C, and all that they start: tests that interrupt a command would wait for ever.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Few tests that take long: begun first, so that no process is left alone with them at the end.
LONG = (
    "smollm2",
    "strategies",
    "survive",
    "reported_processes",
    "distribution",
    "measure",
    "dump_processes",
    "watchdog",
)


def pytest_collection_modifyitems(items: list[Any]) -> None:
    items.sort(key=lambda item: rank_of(item.path.stem, LONG))


def rank_of(stem: str, first: Iterable[str]) -> int:
    """Its place among the files that come first; all others stay behind them in their order."""
    places = [f"test_{name}" for name in first]
    return places.index(stem) if stem in places else len(places)
