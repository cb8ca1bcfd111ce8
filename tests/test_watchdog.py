"""The watchdog: who is named, in small jobs that really hang, and silence where nothing is wrong."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import pytest
from accelerate import Accelerator

from models.errors import EyasError
from train.places import FAILED, LEAVING, LOST, Member, Phase, behind, gone, silent
from train.watchdog import STALLED, Link, RunningClock, Watchdog, listening, lost_contact

WORKER = Path(__file__).with_name("stall_worker.py")
HOST = socket.gethostname()
PATIENCE = 120  # seconds for what takes a few on an idle machine
AGAIN = "The same command continues from the last checkpoint"


# --- who is named ---


def member(rank: int, step: int = 7, phase: Phase = Phase.EXCHANGING, moved: float = 0.0) -> Member:
    return Member(rank, f"node{rank // 2}", step=step, phase=phase.name, moved=moved, heard=100.0)


def test_those_furthest_behind_are_named() -> None:
    late = [member(0), member(1, phase=Phase.READING), member(2), member(3, step=6, phase=Phase.SAVING, moved=39.0)]
    assert behind(late, 98.9, 60.0) is None  # rank 3 moved 59.9 s ago
    assert behind(late, 100.0, 60.0) == (
        'rank 3 on node1 has not moved for 61 s: it is at "step 6: saving"; the others wait at '
        '"step 7: exchanging gradients" and "step 7: reading its batch"'
    )
    two = [member(0, phase=Phase.COMPUTING, moved=5.0), member(1), member(2, phase=Phase.COMPUTING)]
    assert behind(two, 605.0, 600.0) == (
        'rank 0 on node0 and rank 2 on node1 have not moved for 10 min: they are at "step 7: computing"; '
        'the others wait at "step 7: exchanging gradients"'
    )
    same = [member(0, moved=9.0), member(1), member(2)]
    assert behind(same, 69.0, 60.0) == 'no process has moved for 60 s: all are at "step 7: exchanging gradients"'
    assert behind([member(0)], 60.0, 60.0) == (
        'this process has not moved for 60 s: it is at "step 7: exchanging gradients"'
    )


def test_one_that_works_alone_or_has_left_is_not_waited_for() -> None:
    one, other = member(0, phase=Phase.READING), member(1)
    one.alone = "measuring tau"
    assert behind([one, other], 1000.0, 60.0) is None
    assert one.place == '"step 7: measuring tau"'
    one.alone = None
    other.hear({"leave": LEAVING}, 100.0)
    told = behind([one, other], 1000.0, 60.0)
    assert told is not None and told.startswith("no process has moved") and "reading" in told
    assert silent([other], 1000.0, 60.0) is None and gone([other], 1000.0, 5.0) is None


def test_those_that_ended_are_named_before_those_that_failed_for_want_of_them() -> None:
    lost, failed, ended = member(1), member(2), member(3)
    lost.leave, lost.closed = LOST, 90.0
    failed.leave, failed.closed = FAILED, 90.0
    assert gone([lost], 100.0, 5.0) is None  # somebody else's news
    assert gone([lost, failed], 94.9, 5.0) is None
    assert gone([lost, failed], 95.0, 5.0) == f"rank 2 on node1 has failed; its own words say why. {AGAIN}"
    ended.closed = 90.0
    told = gone([lost, failed, ended], 95.0, 5.0)
    assert told == f"rank 3 on node1 has ended without a word (killed, or out of memory?). {AGAIN}"


def test_a_process_that_says_nothing_is_silent_though_others_move() -> None:
    quiet, speaks = member(1, phase=Phase.READING), member(2)
    speaks.hear({"step": 8, "phase": "READING", "moves": 3, "alone": None, "stop": 0}, 160.0)
    assert silent([quiet, speaks], 159.9, 60.0) is None
    told = silent([quiet, speaks], 160.0, 60.0)
    assert told is not None and "rank 2" not in told
    assert told.startswith("rank 1 on node0 has not been heard from for 60 s") and "step 7: reading its batch" in told
    assert (speaks.moved, speaks.place) == (160.0, '"step 8: reading its batch"')
    speaks.hear({"step": 8, "phase": "READING", "moves": 3, "alone": None, "stop": 0}, 170.0)
    assert (speaks.moved, speaks.heard) == (160.0, 170.0)


def test_time_stands_still_while_the_process_is_suspended() -> None:
    times = iter([0.0, 1.0, 2.5, 4000.0, 4001.0])
    clock = RunningClock(2.0, lambda: next(times))
    seen = []
    for _ in range(4):
        clock.advance()
        seen.append(clock.now)
    assert seen == [1.0, 2.5, 4.5, 5.5]


@pytest.mark.parametrize(
    ("error", "lost"),
    [
        (RuntimeError("[pair.cc:553] Connection closed by peer [127.0.0.1]:16265. This is typically"), True),
        (RuntimeError("Broken pipe"), True),
        (RuntimeError("ncclRemoteError: A call failed possibly due to a network error or a remote process exit"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (RuntimeError("CUDA out of memory"), False),
        (ConnectionResetError("Connection reset by peer"), False),  # of a tracker, say
        (None, False),
    ],
)
def test_what_collectives_say_of_a_lost_process(error: BaseException | None, lost: bool) -> None:
    assert isinstance(lost_contact(error), EyasError) is lost


def test_a_goodbye_is_read_after_the_connection_is_gone() -> None:
    """What was not read on the other side turns its closing into a reset."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        one = Link(socket.create_connection(server.getsockname()), member(0))
        other = Link(server.accept()[0], member(1))
    one.send({"moves": 1})
    time.sleep(0.05)
    other.send({"leave": LEAVING})
    other.socket.close()
    time.sleep(0.05)
    one.send({"moves": 2})
    assert one.receive() == [{"leave": LEAVING}] and one.closed
    one.socket.close()


def test_a_link_never_waits_for_one_that_does_not_read() -> None:
    """Whole lines are left out, so that what is read later can be."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        one = Link(socket.create_connection(server.getsockname()), member(0))
        other = Link(server.accept()[0], member(1))
    for number in range(30_000):
        one.send({"moves": number, "phase": "x" * 500})
    read: list[int] = []
    until = time.monotonic() + PATIENCE
    while not read or read[-1] != -1:
        assert time.monotonic() < until
        read += [said["moves"] for said in other.receive()]
        one.send({"moves": -1})
    kept = read[: read.index(-1)]
    assert kept == sorted(kept) and 100 < len(kept) < 30_000
    one.socket.close()
    other.socket.close()


class Fake:
    """What a watchdog asks of an accelerator."""

    process_index, num_processes = 0, 2


@pytest.fixture
def watchdog() -> Iterator[Watchdog]:
    """That of the main process of two, without a thread; the tests turn its clock."""
    found = Watchdog(cast(Accelerator, Fake()), 600.0)
    found._clock = RunningClock(1.0)
    here, there = socket.socketpair()
    found._links = [Link(here, member(1))]
    with here, there:
        yield found


def test_a_request_to_stop_shortens_the_patience_but_not_with_a_checkpoint(watchdog: Watchdog) -> None:
    (other,) = watchdog._others

    def judged(now: float, *, moved: float, phase: Phase = Phase.READING, stop: int = signal.SIGTERM) -> str:
        watchdog._clock.now = other.heard = now
        other.moved, other.phase, other.stop = moved, phase.name, stop
        watchdog._self.phase = phase.name
        return watchdog._judge() or ""

    assert judged(1000.0, moved=500.0, stop=0) == ""
    assert judged(1001.0, moved=500.0) == ""  # asked, and given time
    assert judged(1020.9, moved=500.0) == ""
    assert judged(1021.1, moved=1001.2) == ""  # it moves
    assert judged(1021.1, moved=500.0, phase=Phase.SAVING) == ""
    assert judged(1021.1, moved=500.0, phase=Phase.ENDING) == ""  # a tracker may take a while to close
    assert judged(1021.1, moved=500.0).endswith(f", and can't save and leave as SIGTERM asks. {AGAIN}")
    told = judged(1100.0, moved=500.0, phase=Phase.SAVING)
    assert told.endswith(f"{AGAIN}; strategy.timeout_minutes=10 is how long is waited")


def test_one_that_is_leaving_itself_does_not_mind_those_that_are_gone(watchdog: Watchdog) -> None:
    """All failed alike, and this one still closes its tracker. What it waits for behind the loop it does mind."""
    (other,) = watchdog._others
    other.leave, other.closed = FAILED, 100.0
    watchdog._clock.now = 110.0

    def judged(phase: Phase, alone: str | None = None) -> str | None:
        watchdog.at(7, phase)
        watchdog._alone = alone
        watchdog._beat()
        return watchdog._judge()

    told = f"rank 1 on node0 has failed; its own words say why. {AGAIN}"
    assert judged(Phase.EXCHANGING) == judged(Phase.ENDING, "evaluating and exporting") == told
    assert judged(Phase.ENDING) is None
    watchdog._clock.now = 710.1
    late = watchdog._judge()  # it must come to an end
    assert late is not None and late.startswith('no process has moved for 10 min: all are at "step 7: ending"')


def test_a_long_bin_is_no_stall_and_a_long_pause_no_long_bin(watchdog: Watchdog) -> None:
    """Seconds at which the processes move; after SIGTERM they have 20 s or twice their longest bin."""
    (other,) = watchdog._others
    other.step, other.moved = 0, 0.0
    moves = 0

    def move(now: float, step: int, phase: Phase = Phase.EXCHANGING, alone: str | None = None) -> None:
        nonlocal moves
        moves += 1
        watchdog.at(step, phase)
        watchdog._alone, watchdog._clock.now = alone, now
        watchdog._beat()
        other.hear({"step": step, "phase": phase.name, "moves": moves, "alone": None}, now)

    def longest() -> float:
        assert watchdog._judge() is None
        return max(watchdog._self.longest, other.longest)

    move(500.0, 0, Phase.STARTING)  # loading the target
    move(900.0, 1, Phase.READING)
    move(930.0, 1)
    move(931.0, 1, Phase.SAVING)
    move(1400.0, 1, Phase.READING)  # a large checkpoint
    assert longest() == 30.0
    move(1401.0, 1, Phase.VALIDATING, alone="measuring tau")
    for second in range(1402, 3000):
        watchdog._clock.now = other.heard = float(second)
        assert longest() == 30.0
    move(3000.0, 2, Phase.READING)
    assert longest() == 30.0
    other.stop = signal.SIGTERM
    stuck: dict[str, Any] = {"moves": moves, "stop": int(signal.SIGTERM)}
    for now, told in (3001.0, ""), (3060.9, ""), (3061.1, "no process has moved for 61 s"):
        watchdog._clock.now = now
        other.hear(stuck, now)
        assert (watchdog._judge() or "")[: len(told) or None] == told


@pytest.mark.parametrize("dual", [True, False])
def test_the_main_process_is_reached_by_addresses_of_either_kind(dual: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own machine may know it by another one than the others do."""
    if dual and not socket.has_dualstack_ipv6():
        pytest.skip("this machine has no IPv6")
    monkeypatch.setattr(socket, "has_dualstack_ipv6", lambda: dual)
    with listening(2) as server:
        for address in ("127.0.0.1", *(["::1"] if dual else [])):
            socket.create_connection((address, server.getsockname()[1]), 5).close()


# --- jobs ---


class Job:
    """Two processes of tests/stall_worker.py."""

    def __init__(self, folder: Path, scenario: str, odd: int, timeout: float) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        self.folder = folder
        self.processes = []
        for rank in range(2):
            env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2", "PYTHONUNBUFFERED": ""}
            env |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            with (folder / f"out{rank}").open("wb") as out, (folder / f"err{rank}").open("wb") as err:
                command = [sys.executable, str(WORKER), scenario, str(odd), str(timeout)]
                self.processes.append(subprocess.Popen(command, env=os.environ | env, stdout=out, stderr=err))

    def out(self, rank: int) -> str:
        return (self.folder / f"out{rank}").read_text()

    def err(self, rank: int) -> str:
        return (self.folder / f"err{rank}").read_text()

    def wait_for(self, text: str, *ranks: int) -> None:
        until = time.monotonic() + PATIENCE
        while not all(text in self.out(rank) for rank in ranks):
            assert time.monotonic() < until and not any(p.poll() for p in self.processes), self.err(0) + self.err(1)
            time.sleep(0.05)

    def send(self, number: signal.Signals, *ranks: int) -> None:
        for rank in ranks:
            self.processes[rank].send_signal(number)

    def end(self, *ranks: int) -> list[int]:
        return [self.processes[rank].wait(PATIENCE) for rank in ranks]


@contextmanager
def job(folder: Path, scenario: str, odd: int = 1, timeout: float = 2.0) -> Iterator[Job]:
    found = Job(folder, scenario, odd, timeout)
    try:
        yield found
    finally:
        for process in found.processes:
            process.kill()
            process.wait()


def test_a_process_that_hangs_is_named_and_ends_the_job_of_a_launcher(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(WORKER)]
    done = subprocess.run([*command, "sleep", "1", "2"], capture_output=True, text=True, timeout=PATIENCE)
    (line,) = (line for line in done.stderr.splitlines() if "error: rank" in line)
    assert line.startswith(f"[rank 0] error: rank 1 on {HOST} has not moved for ")
    assert 'it is at "step 8: reading its batch"; the others wait at "step 8: exchanging gradients"' in line
    assert done.returncode != 0 and f"exitcode: {STALLED}" in done.stderr.replace("exitcode  :", "exitcode:")


@pytest.mark.parametrize("odd", [0, 1])
def test_a_stopped_process_is_named(tmp_path: Path, odd: int) -> None:
    with job(tmp_path, "none", odd) as found:
        found.wait_for("is", 0, 1)
        found.send(signal.SIGSTOP, odd)
        assert found.end(1 - odd) == [STALLED]
        told = found.err(1 - odd)
        assert f"[rank {1 - odd}] error: rank {odd} on {HOST} has not been heard from for " in told
        found.send(signal.SIGCONT, odd)  # ends too, when it can
        assert found.end(odd)[0] in (2, STALLED)


def test_a_killed_process_ends_the_others_with_a_plain_message(tmp_path: Path) -> None:
    with job(tmp_path, "none", timeout=60) as found:
        found.wait_for("is", 0, 1)
        found.send(signal.SIGKILL, 1)
        assert found.end(0) == [2]
        told = found.err(0)
    assert told == f"told: rank 1 on {HOST} has ended without a word (killed, or out of memory?). {AGAIN}\n"


def test_a_process_that_fails_says_why_and_the_others_who(tmp_path: Path) -> None:
    with job(tmp_path, "fail", timeout=60) as found:
        assert found.end(0, 1) == [2, 2]
        assert found.err(1) == "told: there are no more documents\n"
        assert found.err(0) == f"told: rank 1 on {HOST} has failed; its own words say why. {AGAIN}\n"


def test_a_process_that_fails_before_they_have_met_leaves_no_stack_trace(tmp_path: Path) -> None:
    with job(tmp_path, "early", odd=0) as found:
        assert found.end(0, 1) == [2, 2]
        assert found.err(0) == "told: there is no target\n"
        assert found.err(1).startswith("told: another process of this run has ended; its own words say why.")


def test_a_process_that_closes_slowly_says_itself_why_all_failed(tmp_path: Path) -> None:
    with job(tmp_path, "late", odd=0, timeout=60) as found:
        assert found.end(0, 1) == [2, 2]
        assert [found.err(rank) for rank in (0, 1)] == ["told: the loss is not finite\n"] * 2


def test_no_alarm_where_nothing_is_wrong(tmp_path: Path) -> None:
    """Leaving in either order, work of one process alone, a job that is suspended, and a request to stop: the second
    and third take longer than the time-out."""
    with job(tmp_path, "quiet", odd=0, timeout=1.0) as found:
        found.wait_for("went on", 0)
        found.send(signal.SIGSTOP, 0, 1)
        time.sleep(2.5)
        found.send(signal.SIGCONT, 0, 1)
        time.sleep(0.5)
        found.send(signal.SIGTERM, 1)
        assert found.end(0, 1) == [0, 0]
        assert found.err(0) + found.err(1) == ""  # only the main process tells of a signal of its own
        left = [re.findall(r"left at step (\d+) by signal 15", found.out(rank)) for rank in (0, 1)]
        assert left[0] == left[1] and int(left[0][0]) > 8


def test_a_job_that_hangs_heeds_sigterm(tmp_path: Path) -> None:
    """The main thread sits in a collective, where no handler of Python's runs; the time-out is far away."""
    with job(tmp_path, "deaf", timeout=600) as found:
        found.wait_for("is", 0, 1)
        time.sleep(2)
        found.send(signal.SIGTERM, 0)
        assert found.end(0, 1) == [STALLED, STALLED]
        first, second = found.err(0).splitlines()
        assert "kept in a buffer" in found.out(1)  # flushed
    assert first == "SIGTERM: saving after this step, then leaving"
    assert second.startswith(f"[rank 0] error: rank 1 on {HOST} has not moved for ")
    assert second.endswith(f", and can't save and leave as SIGTERM asks. {AGAIN}")
