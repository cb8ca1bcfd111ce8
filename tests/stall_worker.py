"""One process of a small job under a watchdog, for tests/test_watchdog.py: ``stall_worker.py SCENARIO RANK TIMEOUT``.

RANK does what the scenario says, the others go on. Every process prints its process id when all have met.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import torch.distributed as dist
from accelerate import Accelerator

from models.errors import EyasError
from train.places import Phase
from train.signals import StopRequest
from train.watchdog import Watchdog

PAUSE = 0.05  # seconds that a step takes


def main(scenario: str, odd: int, timeout: float) -> None:
    accelerator = Accelerator(cpu=True)
    rank = accelerator.process_index
    if scenario == "orders":
        leave_in_both_orders(accelerator, timeout)
        return
    with StopRequest() as stop, Watchdog(accelerator, timeout, stop) as watchdog:
        print(f"rank {rank} is {os.getpid()}", flush=True)
        for step in range(1, 1_000_000):
            watchdog.at(step, Phase.READING)
            if step == 8 and rank == odd:
                act(scenario, watchdog)
            time.sleep(PAUSE)
            watchdog.at(step, Phase.EXCHANGING)
            said = torch.tensor([step == 100, *stop.said], dtype=torch.int32)
            dist.all_reduce(said, dist.ReduceOp.MAX)
            if said.any():
                break


def act(scenario: str, watchdog: Watchdog) -> None:
    if scenario == "sleep":
        print("ONLY IN A BUFFER")
        time.sleep(1000)
    if scenario == "fail":
        raise EyasError("there are no more documents")
    if scenario == "pause":
        with watchdog.paused("measuring tau"):
            time.sleep(2 * watchdog.timeout)


def leave_in_both_orders(accelerator: Accelerator, timeout: float) -> None:
    """Whoever stays longer than ``timeout`` would be alarmed if it still waited for the other."""
    for first in (0, 1):
        with Watchdog(accelerator, timeout) as watchdog:
            watchdog.at(1, Phase.ENDING)
            until = time.monotonic() + (0 if accelerator.process_index == first else 1.5 * timeout)
            while time.monotonic() < until:
                watchdog.tick()
                time.sleep(PAUSE)
        print(f"rank {accelerator.process_index} is through", flush=True)


if __name__ == "__main__":
    try:
        main(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]))
    except EyasError as error:
        print(f"told: {error}", file=sys.stderr, flush=True)
        os._exit(2)
