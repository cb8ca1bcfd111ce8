"""SIGTERM and Ctrl-C: inside the training loop, in an entry point, and in a sweep; each in a process of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from models.signals import Interrupted, Stopped, agreed, raise_again, raising, told_of

ROOT = Path(__file__).parents[1]
PATIENCE = 120  # seconds for what takes a few on an idle machine
SAVING = "{}: saving after this step, then leaving\n"
READY = "print('ready', flush=True)"
LOOP = f"""
import signal, sys, threading, time
sys.path.insert(0, {str(ROOT)!r})
from models.signals import Interrupted, Stopped, StopRequest
before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
try:
    with StopRequest() as stop:
        {READY}
        while not stop.number:
            time.sleep(0.01)
        print('asked by', stop.number, stop.said, flush=True)
        sys.stdin.readline()
        raise Stopped(stop.number, 7)
except Stopped:
    print('left')
except Interrupted as interrupt:
    print('aborted by', interrupt.number)
print(before == [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)], signal.set_wakeup_fd(-1))
"""
COMMAND = f"""
import os, sys
sys.path.insert(0, {str(ROOT)!r})
import conf.cli
from conf.cli import entry, told_plainly
from models.errors import EyasError
from models.signals import Stopped

def run(cfg):
    try:
        {READY}
        case = sys.stdin.readline().strip()
        if case == 'stopped':
            raise Stopped(15, 7)
        if case == 'late':
            conf.cli.visible = lambda text: os.kill(os.getpid(), 15) or text  # while the message is being told
        if case in ('wrong', 'late'):
            raise EyasError('the real reason')
    finally:
        print('cleaning up', flush=True)
        sys.stdin.readline()
        print('cleaned up', flush=True)

"""
ENTRY = COMMAND + "sys.argv[1:] = ['hydra.run.dir=run']; entry('train')(run)()"
PLAIN = COMMAND + "with told_plainly('eval'): run(None)"


class Script:
    """A script in a process of its own that has come to where it says it is ready."""

    def __init__(self, folder: Path, code: str, **env: str) -> None:
        clean = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE")}
        self.process = subprocess.Popen(
            [sys.executable, "-c", code],
            cwd=folder,
            env=clean | env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.expect("ready")

    def expect(self, text: str) -> None:
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == f"{text}\n"

    def send(self, *numbers: int) -> None:
        for number in numbers:
            self.process.send_signal(number)

    def say(self, text: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{text}\n")
        self.process.stdin.flush()

    def end(self, text: str = "") -> tuple[str, str, int]:
        """What it printed since, on stdout and stderr, and its exit code."""
        out, err = self.process.communicate(f"{text}\n" if text else None, timeout=PATIENCE)
        return out, err, self.process.returncode


# --- in the training loop ---


@pytest.mark.parametrize("rank", [None, "0", "1"])
def test_a_signal_in_the_loop_asks_and_its_echo_counts_for_nothing(tmp_path: Path, rank: str | None) -> None:
    script = Script(tmp_path, LOOP, **({"RANK": rank} if rank else {}))
    script.send(signal.SIGTERM)
    script.expect("asked by 15 [False, True]")
    script.send(signal.SIGTERM, signal.SIGINT)
    time.sleep(0.2)
    told = "" if rank == "1" else SAVING.format("SIGTERM")
    assert script.end("go on") == ("left\nTrue -1\n", told, 0)  # the handlers are the former ones again


@pytest.mark.parametrize(
    ("second", "rank", "ends"),
    [
        (signal.SIGINT, None, "aborted by 2"),
        (signal.SIGTERM, None, "left"),  # schedulers repeat it
        (signal.SIGINT, "0", "left"),  # a launcher's may take seconds
    ],
)
def test_ctrl_c_once_more_aborts(tmp_path: Path, second: int, rank: str | None, ends: str) -> None:
    script = Script(tmp_path, LOOP, **({"RANK": rank} if rank else {}))
    script.send(signal.SIGINT)
    script.expect("asked by 2 [True, False]")
    time.sleep(1.2)
    script.send(second)
    time.sleep(0.2)
    assert script.end("go on") == (f"{ends}\nTrue -1\n", SAVING.format("SIGINT"), 0)


def test_a_background_job_still_ignores_ctrl_c(tmp_path: Path) -> None:
    script = Script(tmp_path, f"import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)\n{LOOP}")
    script.send(signal.SIGINT)
    time.sleep(0.2)
    script.send(signal.SIGTERM)
    script.expect("asked by 15 [False, True]")
    assert script.end("go on") == ("left\nTrue -1\n", SAVING.format("SIGTERM"), 0)


def test_all_processes_leave_by_the_same_signal() -> None:
    assert [agreed(said) for said in ([False, False], [True, False], [False, True])] == [0, 2, 15]
    assert agreed([True, True]) == 2  # one process got the one, another the other


WITHIN = f"""
import os, signal, sys, time
sys.path.insert(0, {str(ROOT)!r})
from models.errors import EyasError
from models.signals import Interrupted, Stopped, StopRequest, raising
{READY}
case = sys.stdin.readline().strip()
with raising():
    try:
        with StopRequest() as stop:
            if case != 'unasked':
                signal.raise_signal(signal.SIGTERM)
            if case == 'stopped':
                raise Stopped(stop.number, 7)
            if case == 'failed':
                raise EyasError('the loss is not finite')
        print('evaluating')
        signal.raise_signal(signal.SIGTERM)
    except (Interrupted, EyasError) as error:
        signal.raise_signal(signal.SIGTERM)  # while it is being told
        print('told:', error)
"""


@pytest.mark.parametrize(
    ("case", "told"),
    [
        ("stopped", "told: SIGTERM: step 7 is saved; the same command continues from there\n"),
        ("failed", "told: the loss is not finite\n"),
        ("too late", "told: SIGTERM\n"),  # no step was left to stop after: what comes next isn't begun
        ("unasked", "evaluating\ntold: SIGTERM\n"),
    ],
)
def test_the_loop_hands_on_what_asked_it_to_stop(tmp_path: Path, case: str, told: str) -> None:
    """To the handler outside, which the echo meets."""
    out, _, code = Script(tmp_path, WITHIN).end(case)
    assert (out, code) == (told, 0)


def test_how_an_interrupt_is_told() -> None:
    assert told_of(Stopped(15, 7), "-") == ("SIGTERM: step 7 is saved; the same command continues from there", 143)
    assert told_of(Stopped(2, 7), "-") == ("SIGINT: step 7 is saved; the same command continues from there", 130)
    assert told_of(Interrupted(15), "starts again") == ("terminated; the same command starts again", 143)
    assert told_of(KeyboardInterrupt(), "starts again") == ("interrupted; the same command starts again", 130)


# --- in an entry point ---


def test_sigterm_ends_a_command_after_cleaning_up(tmp_path: Path) -> None:
    script = Script(tmp_path, ENTRY)
    script.send(signal.SIGTERM)
    script.expect("cleaning up")
    script.send(signal.SIGTERM, signal.SIGINT)  # a launcher's echo
    time.sleep(0.2)
    assert script.end("go on") == ("cleaned up\n", "terminated; the same command continues where it stopped\n", 143)


def test_ctrl_c_ends_a_command_and_once_more_its_cleaning_up(tmp_path: Path) -> None:
    script = Script(tmp_path, PLAIN)
    script.send(signal.SIGINT)
    script.expect("cleaning up")
    time.sleep(1.2)
    script.send(signal.SIGINT)
    assert script.end() == ("", "interrupted; the same command starts again\n", 130)


def test_training_that_was_stopped_tells_it_in_one_line(tmp_path: Path) -> None:
    script = Script(tmp_path, PLAIN)
    told = "SIGTERM: step 7 is saved; the same command continues from there\n"
    assert script.end("stopped\n") == ("cleaning up\ncleaned up\n", told, 143)


def test_a_launcher_that_ends_the_rest_does_not_hide_why_this_process_fails(tmp_path: Path) -> None:
    script = Script(tmp_path, PLAIN, RANK="0", WORLD_SIZE="2")
    script.say("wrong")
    script.expect("cleaning up")
    script.send(signal.SIGTERM)
    assert script.end() == ("", "[rank 0] error: the real reason\n", 2)
    script = Script(tmp_path, PLAIN, RANK="0", WORLD_SIZE="2")
    assert script.end("late\n") == ("cleaning up\ncleaned up\n", "[rank 0] error: the real reason\n", 2)


# --- in a sweep ---


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_sweep_passes_a_signal_on_and_waits(tmp_path: Path, number: int) -> None:
    (tmp_path / "own_verb.py").write_text(LOOP.replace("sys.stdin.readline()", "time.sleep(1)"))
    sweep = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
from models.signals import raising
from train.sweep import start_process
with raising():
    start_process('own_verb', [])
"""
    script = Script(tmp_path, sweep, PYTHONPATH=str(tmp_path))
    script.send(number)
    said = [number == signal.SIGINT, number == signal.SIGTERM]
    out, err, code = script.end()
    assert (out, code) == (f"asked by {int(number)} {said}\nleft\nTrue -1\n", 128 + number)
    assert err == SAVING.format(signal.Signals(number).name)


def test_an_interrupt_that_a_library_turned_into_its_own_error_comes_back() -> None:
    """What pybind11 makes of an exception while a compiled module is imported."""
    with raising():
        raise_again()
        try:
            try:
                signal.raise_signal(signal.SIGTERM)
            except Interrupted:
                raise ImportError("initialization failed") from None
        except ImportError:
            pass
        with pytest.raises(Interrupted) as again:
            raise_again()
    assert again.value.number == signal.SIGTERM
    raise_again()  # the handlers are gone, and what they saw with them
