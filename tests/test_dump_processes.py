"""Several processes dump one store: the bytes of a single one, whatever breaks, and no wait inside a collective."""

from __future__ import annotations

import json
import shutil
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

import data.processes
from data.features.dump import split
from data.features.manifest import Documents, Manifest
from data.features.writer import ShardWriter
from data.processes import OtherProcessFailed, Stage
from tests.dump_worker import TIMEOUT, dumping, finish, mending, preparing, results, start
from tests.features import LENGTHS, TOKEN_BYTES, FakeTarget, contents, documents, make_store


def run(folder: Path, token: str, size: int, own: dict[int, dict[str, Any]] | None = None, work: Any = dumping) -> Any:
    """What the processes of a job return or raise."""
    folder.mkdir(exist_ok=True)
    finish(start(work, size, folder, token, own))
    return results(folder, token, size)


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_shares_are_even_and_leave_nothing_out() -> None:
    """The largest first, each to who has least."""
    tokens = [16, 15, 15, 6, 11]
    assert split([0, 1, 2, 3, 4], tokens, 2) == [[0, 3, 4], [1, 2]]  # 33 and 30 tokens
    assert split([0, 1, 2, 3, 4], tokens, 3) == [[0], [1, 4], [2, 3]]  # 16, 26 and 21
    assert split([7, 9], [3, 5], 3) == [[9], [7], []] and split([], [], 2) == [[], []]


@pytest.mark.parametrize("size", [2, 3])
def test_the_same_store_from_any_number_of_processes(tmp_path: Path, size: int) -> None:
    alone = FakeTarget()
    make_store(tmp_path / "one", alone)
    did = run(tmp_path / "many", "job", size)
    assert contents(tmp_path / "many/store") == contents(tmp_path / "one")
    forwards = [found["forwards"] for found in did]
    assert sum(forwards) == len(alone.padded) and min(forwards) > 0  # the probe is process 0's
    assert min(found["ticks"] for found in did) >= 2
    assert not (tmp_path / "many/job").exists()


def test_killed_in_mid_shard_and_continued_by_another_number(tmp_path: Path) -> None:
    """One process gets SIGKILL, then its launcher kills the other, which has done its share and waits; either way
    round. What is whole is not written again, be it listed or only told of by a receipt."""
    whole = tmp_path / "whole"
    make_store(whole)
    for killed, forwards in (0, 1), (1, 2):  # process 0 after the probe, process 1 in its first shard
        folder = tmp_path / str(killed)
        folder.mkdir()
        processes = start(dumping, 2, folder, "first", {killed: {"forwards": forwards}})
        processes[killed].join(60)
        assert processes[killed].exitcode == -signal.SIGKILL
        survivor, store = processes[1 - killed], folder / "store"
        if killed == 0:
            until(lambda store=store: len(list(store.glob("shard-*.json"))) == 2)  # type: ignore[misc]
        else:
            until(lambda store=store: len(Manifest.read(store).shards) == 3)  # type: ignore[misc]
        assert survivor.is_alive()
        survivor.kill()
        survivor.join()
        assert list(store.glob("*.tmp")) and not Manifest.read(store).complete and (folder / "job").exists()
        kept = {path.name: path.stat().st_mtime_ns for path in store.glob("shard-*.safetensors")}
        for size in (1, 3):
            again = shutil.copytree(folder, tmp_path / f"{killed} again {size}")
            run(again, "second", size)
            assert contents(again / "store") == contents(whole)
            assert {name: (again / "store" / name).stat().st_mtime_ns for name in kept} == kept
            assert not list(again.rglob("*.tmp")) and (size == 1 or not (again / "job").exists())


def test_what_ends_one_process_ends_all_with_its_message(tmp_path: Path) -> None:
    """Bad features or a full disk in process 1, which has shards 1 and 2 (documents 3 to 7)."""
    bad = 20  # a token of document 6 alone
    both = {rank: {"bad": bad} for rank in range(2)}
    told = run(tmp_path / "bad", "strict", 2, both)
    wrong = "chat.jsonl:7:id6: the target's features of document 6 are NaN or infinite (1 such so far, 0 allowed)"
    assert told[1].startswith(wrong) and told[0] == f"process 1: {told[1]}"
    make_store(tmp_path / "one", FakeTarget(bad_token=bad), max_bad=1)
    run(tmp_path / "bad", "lenient", 2, {rank: {"bad": bad, "max_bad": 1} for rank in range(2)})
    assert contents(tmp_path / "bad/store") == contents(tmp_path / "one")

    told = run(tmp_path / "full", "job", 2, {1: {"full": 14 * TOKEN_BYTES}})
    assert "shard-00001.safetensors: File too large. The whole shards are safe" in told[1]
    assert told[0] == f"process 1: {told[1]}" and not list((tmp_path / "full/store").glob("*.tmp"))
    run(tmp_path / "full", "again", 2)
    make_store(tmp_path / "whole")
    assert contents(tmp_path / "full/store") == contents(tmp_path / "whole")


def test_bad_documents_of_all_processes_count(tmp_path: Path) -> None:
    """As many as are allowed in each of two processes: too many together, and the same command says so again."""
    bad = 42  # a token of documents 0 and 4, in shards 0 and 1
    given = {rank: {"bad": bad, "max_bad": 1} for rank in range(2)}
    for token in ("first", "second"):
        told = run(tmp_path / "store", token, 2, given)
        assert all("chat.jsonl:" in message and "allowed" in message for message in told), told
    run(tmp_path / "store", "third", 2, {rank: {"bad": bad, "max_bad": 2} for rank in range(2)})
    make_store(tmp_path / "one", FakeTarget(bad_token=bad), max_bad=2)
    assert contents(tmp_path / "store/store") == contents(tmp_path / "one")


def test_damaged_store_is_mended_by_all(tmp_path: Path) -> None:
    """Found whole, it is opened without a forward; damaged in two shards, each process writes one of them."""
    first = run(tmp_path / "run", "first", 2, work=mending)
    assert [found[0] for found in first] == [len(LENGTHS)] * 2 and min(found[1] for found in first) > 0
    (store,) = (tmp_path / "run/stores").iterdir()
    whole = contents(store)
    assert run(tmp_path / "run", "second", 2, work=mending) == [[len(LENGTHS), 0]] * 2
    for index in (0, 2):
        path = store / f"shard-{index:05d}.safetensors"
        path.write_bytes(path.read_bytes()[:-1] + b"\7")
    third = run(tmp_path / "run", "third", 2, work=mending)
    assert [found[0] for found in third] == [len(LENGTHS)] * 2 and min(found[1] for found in third) > 0
    assert contents(store) == whole


def test_preparing_is_bound_by_no_time_out(tmp_path: Path) -> None:
    """Finding the target takes process 0 twice as long as a collective may, dumping its share process 1 likewise."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    found = run(tmp_path / "slow", "job", 2, {rank: {"port": port} for rank in range(2)}, work=preparing)
    assert all(seconds >= 2 * TIMEOUT for times in found for seconds in times), found
    assert not (tmp_path / "slow/run/.job").exists()


# --- in one process ------------------------------------------------------------------------------------------------


def test_what_a_living_process_writes_is_left_alone(tmp_path: Path) -> None:
    """A helper that outlives the process which held the folder: its file stays, and its shard is as good as any."""
    make_store(tmp_path / "whole")
    folder = tmp_path / "store"
    with pytest.raises(KeyboardInterrupt):
        make_store(folder, FakeTarget(forwards=1))
    manifest, whole = Manifest.read(folder), Documents.of(documents(LENGTHS))
    helper = ShardWriter(folder, manifest, whole)
    with helper.shard(3) as living:
        dead = folder / "shard-00001.safetensors.0.tmp"
        dead.write_bytes(b"left over")
        make_store(folder)
        assert not dead.exists() and living.path.exists()
        (example,) = [documents(LENGTHS)[d] for d in living.documents]
        (features,) = FakeTarget().features([torch.tensor(example.input_ids)])
        living.write(8, features, torch.tensor(example.input_ids), torch.tensor(example.supervised))
    assert (folder / "shard-00003.json").exists()
    make_store(folder)
    assert contents(folder) == contents(tmp_path / "whole")


def test_receipts_that_fit_no_plan_are_dropped(tmp_path: Path) -> None:
    make_store(tmp_path)
    whole, manifest = contents(tmp_path), Manifest.read(tmp_path)
    assert (
        manifest.with_shards([*manifest.shards, manifest.shards[2]]) == manifest
    )  # also told of by who outlived a job
    (tmp_path / "manifest.json").write_bytes(manifest.with_shards(manifest.shards[1:]).to_json())
    shard = asdict(manifest.shards[0])
    for receipt in ("{", "[]", json.dumps({"shard": shard | {"documents": 2}, "state": None})):
        (tmp_path / "shard-00000.json").write_text(receipt)
        make_store(tmp_path)
        assert contents(tmp_path) == whole


def test_a_wait_ticks_when_others_move_and_ends_when_one_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data.processes, "LOOK", 0.01)
    ticks: list[float] = []
    stage = Stage(1, 3, tmp_path / "stage", lambda: ticks.append(time.monotonic()))
    looks = iter(range(100))
    events = {3: lambda: (tmp_path / "stage").mkdir(), 5: lambda: (tmp_path / "stage/moved-1").touch()}  # itself
    events |= {7: lambda: (tmp_path / "stage/moved-2").touch()}

    def look() -> int | None:
        number = next(looks)
        events.get(number, lambda: None)()
        return number if number == 8 else None

    assert stage.wait(look) == 8 and len(ticks) == 1
    Stage(2, 3, tmp_path / "stage").fail(OSError("no such thing"))
    with pytest.raises(OtherProcessFailed, match="process 2: OSError: no such thing"):
        stage.hear("never told")
    with pytest.raises(OtherProcessFailed, match="process 2"):
        Stage(0, 3, tmp_path / "stage").moved()
