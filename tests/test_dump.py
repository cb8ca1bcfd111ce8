"""The dump: bounded, resumed to the byte after any break, and refusing what would make a bad store."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from data.features.dump import batches_by_length, dump
from data.features.manifest import Documents, Layout, Manifest
from data.features.source import OnlineFeatures, StoredFeatures
from data.features.store import FeatureStore
from data.features.writer import FeatureWriter
from data.masks.template import Example
from models.errors import EyasError
from models.target import Target
from tests.features import LENGTHS, TOKEN_BYTES, FakeTarget, contents, documents, make_store
from tests.tiny import tiny_target

REPO = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Target:
    return Target.load(str(tiny_target(tmp_path_factory.mktemp("tiny"), "llama")))


@given(st.lists(st.integers(1, 40), min_size=1, max_size=30), st.integers(1, 100))
def test_batches_by_length(lengths: list[int], batch_tokens: int) -> None:
    batches = batches_by_length(range(len(lengths)), dict(enumerate(lengths)), batch_tokens)
    assert sorted(d for batch in batches for d in batch) == list(range(len(lengths)))
    for batch in batches:
        assert len(batch) == 1 or len(batch) * max(lengths[d] for d in batch) <= batch_tokens


def test_never_more_than_a_batch_in_flight(tmp_path: Path) -> None:
    target = FakeTarget()
    make_store(tmp_path, target)
    assert max(count * longest for count, longest in target.padded if count > 1) <= 12
    assert len(target.padded) > 5


def test_lengths_from_the_target_that_disagree_are_reported(tmp_path: Path) -> None:
    with pytest.raises(EyasError, match="chat.jsonl:2:id1: .*9 token ids, 9 mask entries and 8 states"):
        make_store(tmp_path, FakeTarget(cut=1))
    with pytest.raises(EyasError, match="chat.jsonl:1:id0: .*5 token ids, 5 mask entries and 4 states"):
        OnlineFeatures(FakeTarget(cut=1), documents([5])).batch([0])
    short = [replace(documents([12])[0], supervised=[True] * 10)]
    with pytest.raises(EyasError, match="chat.jsonl:1:id0: 12 token ids and 10 mask entries"):
        dump(FakeTarget(), short, tmp_path / "short")
    with pytest.raises(EyasError, match="0 token ids"):
        OnlineFeatures(FakeTarget(), [Example([], [], "x")])


@pytest.mark.parametrize("forwards", range(1, 10))
def test_broken_dump_ends_byte_identical(tmp_path: Path, forwards: int) -> None:
    make_store(tmp_path / "whole")
    folder = tmp_path / "broken"
    with pytest.raises(KeyboardInterrupt):
        make_store(folder, FakeTarget(forwards=forwards))
    (folder / "shard-00003.safetensors.tmp").write_bytes(b"left over")
    (folder / "manifest.json.77.tmp").write_bytes(b"{")
    with pytest.raises(EyasError, match=r"unfinished, \d of 5 shards"):
        FeatureStore.open(folder)
    assert not FeatureStore.is_complete(folder)
    kept = {p: p.stat().st_mtime_ns for p in folder.glob("shard-*.safetensors")}
    make_store(folder)
    assert contents(folder) == contents(tmp_path / "whole")
    assert all(p.stat().st_mtime_ns == time for p, time in kept.items())  # whole shards were not written again


def test_killed_dump_ends_byte_identical(tmp_path: Path) -> None:
    """SIGKILL in the middle of different shards, in processes of their own."""
    make_store(tmp_path / "whole")
    code = (
        "import sys; from pathlib import Path; from tests.features import FakeTarget, make_store;"
        "make_store(Path(sys.argv[1]), FakeTarget(forwards=int(sys.argv[2]), kill=True))"
    )
    killed = {forwards: tmp_path / f"killed{forwards}" for forwards in (3, 6)}
    running = [
        subprocess.Popen([sys.executable, "-c", code, str(folder), str(forwards)], cwd=REPO)
        for forwards, folder in killed.items()
    ]
    assert [process.wait() for process in running] == [-9, -9]
    for folder in killed.values():
        assert list(folder.glob("*.tmp")) and not Manifest.read(folder).complete
        make_store(folder)
        assert contents(folder) == contents(tmp_path / "whole")


def test_broken_at_any_write_ends_byte_identical(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each file is fsynced before its rename and the folder after it: break off at each of these points."""
    make_store(tmp_path / "whole")
    real, calls = os.fsync, 0

    def fsync(descriptor: int) -> None:
        nonlocal calls
        calls += 1
        if calls == stop:
            raise KeyboardInterrupt
        real(descriptor)

    for stop in range(1, 25):  # two files at the start, then for each of five shards its own and the manifest
        calls, folder = 0, tmp_path / str(stop)
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(os, "fsync", fsync)
            make_store(folder)
        make_store(folder)
        assert contents(folder) == contents(tmp_path / "whole"), stop


def test_shard_renamed_but_not_yet_listed_is_written_again(tmp_path: Path) -> None:
    make_store(tmp_path / "whole")
    folder = tmp_path / "broken"
    make_store(folder)
    manifest = Manifest.read(folder)
    (folder / "manifest.json").write_bytes(manifest.with_shards(manifest.shards[:2]).to_json())
    make_store(folder)
    assert contents(folder) == contents(tmp_path / "whole")


def test_real_target_resumes_byte_identical(tmp_path: Path, tiny: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    examples = documents([31, 3, 17, 1, 40, 22, 8], vocab=250)
    options = {"dtype": "bfloat16", "shard_bytes": 60 * Layout(192, 64, "bfloat16").token_bytes, "batch_tokens": 64}
    dump(tiny, examples, tmp_path / "whole", **options)  # type: ignore[arg-type]
    real, calls = tiny.features, []

    def break_off(ids: list[Tensor]) -> list:
        calls.append(len(ids))
        if len(calls) == 4:
            raise KeyboardInterrupt
        return real(ids)

    monkeypatch.setattr(tiny, "features", break_off)
    with pytest.raises(KeyboardInterrupt):
        dump(tiny, examples, tmp_path / "broken", **options)  # type: ignore[arg-type]
    dump(tiny, examples, tmp_path / "broken", **options)  # type: ignore[arg-type]
    assert contents(tmp_path / "broken") == contents(tmp_path / "whole")


def test_whole_store_is_reused_and_progress_counts(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    with pytest.raises(KeyboardInterrupt):
        make_store(tmp_path, FakeTarget(forwards=6), progress=lambda done, total: seen.append((done, total)))
    make_store(tmp_path, progress=lambda done, total: seen.append((done, total)))
    assert seen[-1] == (63, 63)
    target = FakeTarget()
    make_store(tmp_path, target, shard_bytes=10**6, batch_tokens=99)  # neither changes what is stored
    assert target.padded == [] and Manifest.read(tmp_path).planned_shards == 5


def test_one_process_at_a_time(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    with (
        FeatureWriter(tmp_path, store.manifest, Documents.of(documents(LENGTHS))),
        pytest.raises(EyasError, match="another process"),
    ):
        make_store(tmp_path)
    make_store(tmp_path)


# --- features that are not finite ----------------------------------------------------------------------------


def rare() -> list[Example]:
    examples = documents([4, 5, 6, 5])
    examples[2] = replace(examples[2], input_ids=[3, 4, 99, 5, 6, 7], supervised=[True] * 6)
    return examples


def test_bad_features_stop_the_dump_or_lose_their_document(tmp_path: Path) -> None:
    target = FakeTarget(bad_token=99)
    with pytest.raises(
        EyasError, match=r"chat.jsonl:3:id2: .* document 2 are NaN or infinite \(1 such so far, 0 allowed"
    ):
        dump(target, rare(), tmp_path / "strict")
    assert not FeatureStore.is_complete(tmp_path / "strict")
    store = dump(target, rare(), tmp_path / "lenient", max_bad=1, shard_bytes=8 * TOKEN_BYTES)
    assert store.skipped == [2] and store.slots[2] == store.supervised[2] == 0
    batch = StoredFeatures(store).batch([2])
    assert batch.input_ids.tolist() == [3, 4, 99, 5, 6, 7] and not batch.supervised.any() and not batch.taps.any()
    with pytest.raises(EyasError, match="chat.jsonl:3:id2"):
        OnlineFeatures(target, rare()).batch([2])


def test_small_stores_have_shards_to_share(tmp_path: Path) -> None:
    """A 128th of the store each, or eight batches if that is more, and never more than was asked for."""
    lengths = [10] * 400  # a 128th are 31 tokens
    for batch_tokens, most, documents_each in (2, 1000, 3), (5, 1000, 4), (50, 1000, 40), (50, 100, 10), (2, 20, 2):
        folder = tmp_path / f"{batch_tokens} {most}"
        store = make_store(folder, lengths=lengths, batch_tokens=batch_tokens, shard_bytes=most * TOKEN_BYTES)
        assert {shard.documents for shard in store.manifest.shards[:-1]} == {documents_each}


# --- space ---------------------------------------------------------------------------------------------------


def test_too_little_space_is_refused_with_the_numbers(tmp_path: Path) -> None:
    need, target = 63 * TOKEN_BYTES, FakeTarget()
    with pytest.raises(EyasError, match=rf"63 tokens need .*\({need} bytes\).*\({need - 1} bytes\) are free"):
        make_store(tmp_path, target, free_bytes=lambda folder: need - 1)
    assert target.padded == [] and not list(tmp_path.glob("shard*"))
    with pytest.raises(KeyboardInterrupt):
        make_store(tmp_path, FakeTarget(forwards=5), free_bytes=lambda folder: need)
    done = sum(shard.tokens for shard in Manifest.read(tmp_path).shards)
    assert done > 0
    make_store(tmp_path, free_bytes=lambda folder: need - done * TOKEN_BYTES)  # only what is missing must fit


def test_disk_full_in_mid_dump(tmp_path: Path) -> None:
    """A limit on file sizes stands for a full disk: both make the write itself fail."""
    make_store(tmp_path / "whole", lengths=[1, 1, 90], shard_bytes=2 * TOKEN_BYTES)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (60 * TOKEN_BYTES, hard))
    try:
        with pytest.raises(EyasError, match=r"shard-00001.*[Tt]oo large.*run the same command again"):
            make_store(tmp_path / "full", lengths=[1, 1, 90], shard_bytes=2 * TOKEN_BYTES)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert len(Manifest.read(tmp_path / "full").shards) == 1 and not list((tmp_path / "full").glob("*.tmp"))
    make_store(tmp_path / "full", lengths=[1, 1, 90], shard_bytes=2 * TOKEN_BYTES)
    assert contents(tmp_path / "full") == contents(tmp_path / "whole")


def test_no_documents_no_store(tmp_path: Path) -> None:
    with pytest.raises(EyasError, match="no usable document"):
        dump(FakeTarget(), [], tmp_path / "none")
    assert not (tmp_path / "none").exists()
