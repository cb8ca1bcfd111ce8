"""One process of a small job under a watchdog, for tests/test_watchdog.py: ``stall_worker.py SCENARIO RANK TIMEOUT``.

RANK does what the scenario says in step ODD, the others go on. A process prints its process id when all have met, and
the step at which it left.
"""

from __future__ import annotations

import os
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import torch.distributed as dist
from accelerate import Accelerator

import train.watchdog
from models.errors import EyasError
from models.signals import Stopped, StopRequest, agreed
from train.places import Phase
from train.watchdog import Watchdog

ODD = 8
PAUSE = 0.05  # seconds that a step takes


def main(scenario: str, odd: int, timeout: float) -> None:
    accelerator = Accelerator(cpu=True)
    rank = accelerator.process_index
    if scenario == "quiet":
        leave_in_both_orders(accelerator, timeout)
    if scenario == "deaf":
        train.watchdog.STOP_GRACE = 1.5
    if scenario == "early" and rank == odd:
        raise EyasError("there is no target")
    with StopRequest() as stop, Watchdog(accelerator, timeout, stop) as watchdog:
        print(f"rank {rank} is {os.getpid()}", flush=True)
        step = number = 0
        while not number:
            step += 1
            watchdog.at(step, Phase.READING)
            if step == ODD and rank == odd:
                act(scenario, watchdog)
            time.sleep(PAUSE)
            watchdog.at(step, Phase.EXCHANGING)
            said = torch.tensor(stop.said, dtype=torch.int32)
            dist.all_reduce(said, dist.ReduceOp.MAX)
            number = agreed([bool(one) for one in said])
            if scenario == "late" and step == ODD:
                fail_alike(watchdog, slow=rank == odd)
        print(f"left at step {step} by signal {number}", flush=True)
        raise Stopped(number, step)


def act(scenario: str, watchdog: Watchdog) -> None:
    if scenario in ("sleep", "deaf"):
        print("kept in a buffer")
        time.sleep(1000)
    if scenario == "fail":
        raise EyasError("there are no more documents")
    if scenario == "quiet":
        with watchdog.paused("measuring tau"):
            time.sleep(2 * watchdog.timeout)
        print("went on", flush=True)


def fail_alike(watchdog: Watchdog, *, slow: bool) -> NoReturn:
    """As all processes do where they find the same; the main one closes its trackers on the way."""
    try:
        raise EyasError("the loss is not finite")
    finally:
        watchdog.at(ODD, Phase.ENDING)
        time.sleep(train.watchdog.GRACE + 2 if slow else 0)


def leave_in_both_orders(accelerator: Accelerator, timeout: float) -> None:
    """Whoever stays longer than the time-out would give alarm if it still waited for the other."""
    for first in (0, 1):
        with Watchdog(accelerator, timeout) as watchdog:
            until = time.monotonic() + (0 if accelerator.process_index == first else 1.5 * timeout)
            while time.monotonic() < until:
                watchdog.tick()
                time.sleep(PAUSE)


if __name__ == "__main__":
    try:
        with suppress(Stopped):
            main(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]))
    except EyasError as error:
        print(f"told: {error}", file=sys.stderr, flush=True)
        os._exit(2)
