"""Curves of runs that are killed and continued: in every tracker each row once; and the clock that dates them."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import struct
import time
from pathlib import Path
from typing import Any

import pytest

from conf.schema import TrackerConfig
from train.clock import Clock
from train.tracking import METRICS, WANDB_DONE, Tracker, read_metrics, settle, truncate

BOTH = TrackerConfig(tensorboard=True, wandb="offline", project="p")
WANDB = TrackerConfig(tensorboard=False, wandb="offline", project="p")
VALIDATED = 3  # every third step


def log_steps(tracker: Tracker, steps: range) -> None:
    for step in steps:
        tracker.log(step, "train", {"loss": 1 / step, "alpha": [0.5, 1 / step]})
        if step % VALIDATED == 0:
            tracker.log(step, "valid", {"loss": 2 / step})


def log_until_killed(run: Path, config: TrackerConfig, first: int, saved: int, last: int) -> None:
    """Rows of ``first`` to ``last``, a checkpoint at ``saved``, and SIGKILL."""
    tracker = Tracker(run, config, step=first - 1, config={"seed": 0})
    log_steps(tracker, range(first, saved + 1))
    tracker.sync()
    log_steps(tracker, range(saved + 1, last + 1))
    os.kill(os.getpid(), signal.SIGKILL)


def killed(run: Path, *session: Any) -> None:
    process = multiprocessing.get_context("spawn").Process(target=log_until_killed, args=(run, *session))
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("WANDB_SERVICE", raising=False)  # it starts its own: this process's would outlive it
        process.start()
    process.join(120)
    assert process.exitcode == -signal.SIGKILL


def on_board(run: Path, name: str) -> list[tuple[int, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    return [(event.step, round(event.value, 6)) for event in events.Scalars(name)]


def on_wandb(run: Path) -> list[dict[str, Any]]:
    """The history in the run's one wandb folder: LevelDB's log format around protobuf records."""
    from wandb.proto import wandb_internal_pb2

    (path,) = (run / "wandb").glob("offline-run-*/*.wandb")
    data, at, part, rows = path.read_bytes(), 7, b"", list[dict[str, Any]]()
    while at + 7 <= len(data):
        if (left := 32768 - at % 32768) < 7:  # a block's end
            at += left
            continue
        _, length, kind = struct.unpack("<IHB", data[at : at + 7])
        body, at = data[at + 7 : at + 7 + length], at + 7 + length
        part = body if kind in (1, 2) else part + body  # 1: whole, 2, 3, 4: first, middle and last part
        if kind in (1, 4):
            record = wandb_internal_pb2.Record.FromString(part)
            if record.WhichOneof("record_type") == "history":
                items = {"/".join(item.nested_key) or item.key: item.value_json for item in record.history.item}
                rows.append({key: json.loads(value) for key, value in items.items()})
    return rows


def test_killed_and_continued_curves(tmp_path: Path) -> None:
    """One session killed right behind its checkpoint, one four rows behind the next: each row once."""
    killed(tmp_path, BOTH, 1, 12, 12)
    killed(tmp_path, BOTH, 13, 15, 19)
    name = (tmp_path / "wandb_run_id").read_text().strip()
    tracker = Tracker(tmp_path, BOTH, step=15, config={"seed": 0})
    log_steps(tracker, range(16, 22))
    tracker.close()

    steps, validated = list(range(1, 22)), list(range(3, 22, 3))
    assert [row["step"] for row in read_metrics(tmp_path / METRICS, "train")] == steps
    assert [row["step"] for row in read_metrics(tmp_path / METRICS, "valid")] == validated
    assert on_board(tmp_path, "train/loss") == [(s, round(1 / s, 6)) for s in steps]
    assert on_board(tmp_path, "train/alpha/1") == [(s, round(1 / s, 6)) for s in steps]
    assert on_board(tmp_path, "valid/loss") == [(s, round(2 / s, 6)) for s in validated]
    history = on_wandb(tmp_path)
    assert [(row["_step"], row["train/loss"]) for row in history] == [(s, 1 / s) for s in steps]
    assert [(row["_step"], row["valid/loss"]) for row in history if "valid/loss" in row] == [
        (s, 2 / s) for s in validated
    ]
    assert (tmp_path / "wandb_run_id").read_text().strip() == name
    assert [path.name.endswith(name) for path in (tmp_path / "wandb").glob("offline-run-*")] == [True]


def test_the_board_waits_for_nothing_after_sync(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """TensorBoard's own thread, slowed down here, has written all when a checkpoint counts on it."""
    from tensorboard.summary.writer.record_writer import RecordWriter

    plain = RecordWriter.write

    def slowly(self: Any, data: bytes) -> None:
        time.sleep(0.02)
        plain(self, data)

    monkeypatch.setattr(RecordWriter, "write", slowly)
    tracker = Tracker(tmp_path, TrackerConfig(tensorboard=True, wandb="disabled"), step=0, config={})
    for step in range(1, 6):
        tracker.log(step, "train", {"loss": float(step)})
    tracker.sync()
    assert on_board(tmp_path, "train/loss") == [(s, float(s)) for s in range(1, 6)]
    tracker.close()


def test_validation_is_made_again(tmp_path: Path) -> None:
    """A checkpoint of step 3 was saved before its validation, which ended in a kill: the row comes again, once."""
    board = TrackerConfig(tensorboard=True, wandb="disabled")
    tracker = Tracker(tmp_path, board, step=0, config={})
    log_steps(tracker, range(1, 4))
    tracker.close()
    tracker = Tracker(tmp_path, board, step=3, config={}, without="valid")
    tracker.log(3, "valid", {"loss": 5.0})
    log_steps(tracker, range(4, 5))
    tracker.close()
    assert on_board(tmp_path, "train/loss") == [(s, round(1 / s, 6)) for s in range(1, 5)]
    assert on_board(tmp_path, "valid/loss") == [(3, 5.0)]
    assert [(row["step"], row["loss"]) for row in read_metrics(tmp_path / METRICS, "valid")] == [(3, 5.0)]


def test_killed_after_the_last_checkpoint(tmp_path: Path) -> None:
    """Nothing is left to train, but wandb's folder is empty: it is filled, and then left alone."""
    killed(tmp_path, WANDB, 1, 4, 4)
    assert on_wandb(tmp_path) == []
    settle(tmp_path, WANDB, step=4, config={})
    assert [row["_step"] for row in on_wandb(tmp_path)] == [1, 2, 3, 4]
    (folder,) = (tmp_path / "wandb").glob("offline-run-*")
    settle(tmp_path, WANDB, step=4, config={})
    assert list((tmp_path / "wandb").glob("offline-run-*")) == [folder]


def test_online_sends_what_the_server_lacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that received rows up to step 4 of a run whose checkpoint is at 6: 5 and 6 are sent, then 7."""

    class Resumed:
        starting_step = 5

        def log(self, values: dict[str, float], step: int) -> None:
            sent.append((step, values["train/loss"]))

        def finish(self) -> None:
            pass

    def init(**options: Any) -> Resumed:
        asked.append(options["resume"])
        return Resumed()

    sent: list[tuple[int, float]] = []
    asked: list[Any] = []
    monkeypatch.setattr("wandb.init", init)
    first = Tracker(tmp_path, TrackerConfig(tensorboard=False, wandb="disabled"), step=0, config={})
    for step in range(1, 9):
        first.log(step, "train", {"loss": float(step)})
    first.close()
    assert not (tmp_path / WANDB_DONE).exists()
    tracker = Tracker(tmp_path, TrackerConfig(tensorboard=False, wandb="online"), step=6, config={})
    tracker.log(7, "train", {"loss": 7.0})
    tracker.close()
    assert asked == ["allow"] and sent == [(5, 5.0), (6, 6.0), (7, 7.0)]


def test_damaged_rows_are_dropped(tmp_path: Path) -> None:
    """Bytes that are no text, rows without a step and half a row: what remains is the curve up to the checkpoint."""
    path = tmp_path / METRICS
    good = [json.dumps({"step": step, "kind": "train", "loss": 1.0}).encode() for step in (1, 2, 3)]
    bad = [b"\xff\xfe\x00", b'{"step": "2", "kind": "train"}', b'{"step": null, "kind": "valid"}', b"[1]"]
    path.write_bytes(b"\n".join([good[0], *bad, good[1], good[2], b'{"step": 2, "ki']))
    assert [row["step"] for row in read_metrics(path)] == [1, 2, 3]
    truncate(path, 2)
    assert path.read_bytes() == good[0] + b"\n" + good[1] + b"\n"


def test_clock_goes_on_over_sessions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two sessions of 30 and 12 seconds, an hour apart; validation counts for the time, not for the rate."""
    now = [100.0]
    monkeypatch.setattr("train.clock.time.perf_counter", lambda: now[0])
    clock = Clock()
    clock.start(0, 0)
    now[0] += 20
    assert clock.rate(4000) == 200
    with clock.paused():
        now[0] += 10
    assert clock.seconds() == 30
    kept = clock.seconds()
    now[0] += 3600
    clock = Clock()
    clock.start(10, 4000, kept)
    with clock.paused():
        now[0] += 8
    now[0] += 4
    assert clock.seconds() == 42
    assert clock.rate(5000) == 250
    assert clock.left(14, 20) == 18  # 4 steps in 12 seconds of this session
