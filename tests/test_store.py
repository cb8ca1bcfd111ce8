"""The feature store: exact numbers, exact bytes after any break, and nothing damaged ever read."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

import data.features.store
from data.features.dump import dump, key_of
from data.features.manifest import Layout, count_slots, file_blake2b, store_key
from data.features.source import OnlineFeatures, StoredFeatures
from data.features.store import FeatureStore
from data.masks.template import Example
from models.batch import valid_slots
from models.errors import EyasError
from models.target import Target
from tests.features import LENGTHS, FakeTarget, contents, documents, make_store
from tests.tiny import tiny_target


def resign(folder: Path, index: int) -> None:
    """Make the manifest agree with an edited shard, as someone who edits stores by hand would."""
    raw = json.loads((folder / "manifest.json").read_text())
    shard = folder / raw["shards"][index]["file"]
    raw["shards"][index] |= {"bytes": shard.stat().st_size, "blake2b": file_blake2b(shard)}
    (folder / "manifest.json").write_text(json.dumps(raw))


def edit(folder: Path, index: int, change: Callable[[dict[str, Tensor]], None]) -> None:
    path = folder / f"shard-{index:05d}.safetensors"
    tensors = {name: t.clone() for name, t in load_file(path).items()}
    change(tensors)
    save_file(tensors, path)
    resign(folder, index)


# --- the numbers ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Target:
    return Target.load(str(tiny_target(tmp_path_factory.mktemp("tiny"), "llama")))


def single_rows(target: Target, examples: list[Example]) -> list[dict[str, Tensor]]:
    """Hugging Face's own hidden states, one unpadded document at a time."""
    model = AutoModelForCausalLM.from_pretrained(target.folder, dtype=torch.float32).eval()
    rows = []
    for example in examples:
        with torch.no_grad():
            out = model(torch.tensor([example.input_ids]), output_hidden_states=True)
        taps = torch.cat([out.hidden_states[i][0] for i in target.tap_ids], -1)
        logits = out.logits[0].double()
        final, lse = out.hidden_states[-1][0], logits.logsumexp(-1)
        rows.append({"taps": taps, "final": final, "lse": lse, "top1": logits.argmax(-1)})
    return rows


@pytest.mark.parametrize("batch_tokens", [1, 60, 4096])
@pytest.mark.parametrize("shuffled", [False, True])
def test_stored_equals_single_row_forward(tmp_path: Path, tiny: Target, batch_tokens: int, shuffled: bool) -> None:
    examples = documents([31, 3, 17, 1, 40, 22, 8], vocab=250)
    if shuffled:
        examples = [examples[i] for i in (4, 1, 6, 0, 3, 5, 2)]
    width = Layout(3 * 64, 64, "float32").token_bytes
    store = dump(tiny, examples, tmp_path, dtype="float32", shard_bytes=60 * width, batch_tokens=batch_tokens)
    assert store.manifest.planned_shards > 1 and store.lengths == [len(e.input_ids) for e in examples]
    for document, (example, expected) in enumerate(zip(examples, single_rows(tiny, examples), strict=True)):
        stored = store.read(document)
        for name in ("taps", "final", "lse"):
            torch.testing.assert_close(getattr(stored, name), expected[name].float(), atol=1e-5, rtol=1e-5)
        assert stored.top1.tolist() == expected["top1"].tolist()
        assert stored.input_ids.tolist() == example.input_ids
        assert stored.supervised.tolist() == example.supervised


def bf16_steps(tensor: Tensor) -> Tensor:
    """Consecutive integers for consecutive bfloat16 numbers."""
    bits = tensor.to(torch.bfloat16).contiguous().view(torch.int16).int()
    return torch.where(bits < 0, -(bits & 0x7FFF), bits)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_online_equals_stored(tmp_path: Path, tiny: Target, dtype: str) -> None:
    examples = documents([31, 3, 17, 2, 40], vocab=250)
    stored = StoredFeatures(dump(tiny, examples, tmp_path, dtype=dtype, batch_tokens=64))
    online = OnlineFeatures(tiny, examples, store_dtype=dtype, batch_tokens=100)
    assert (stored.lengths, stored.supervised, stored.slots) == (online.lengths, online.supervised, online.slots)
    left, right = stored.batch([3, 0, 4]), online.batch([3, 0, 4])
    for name in ("input_ids", "supervised", "cu_seqlens", "top1"):
        assert torch.equal(getattr(left, name), getattr(right, name)), name
    torch.testing.assert_close(left.lse, right.lse, atol=1e-5, rtol=1e-5)
    for name in ("taps", "final"):
        a, b = getattr(left, name), getattr(right, name)
        assert a.dtype == b.dtype == torch.float32
        if dtype == "float32":
            torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)
        else:
            assert torch.equal(b, b.bfloat16().float())  # rounded to what a store holds
            assert bool(((bf16_steps(a) - bf16_steps(b)).abs() <= 1).all())


def test_batch_by_hand(tmp_path: Path) -> None:
    examples = [Example([8, 16, 8], [False, True, True], "a:1:x"), Example([24, 8], [True, True], "a:2:y")]
    source = StoredFeatures(dump(FakeTarget(), examples, tmp_path))  # bfloat16: the numbers are exact in it
    batch = source.batch([1, 0])
    assert batch.input_ids.tolist() == [24, 8, 8, 16, 8] and batch.input_ids.dtype == torch.int64
    assert batch.supervised.tolist() == [True, True, False, True, True]
    assert batch.cu_seqlens.tolist() == [0, 2, 5] and batch.cu_seqlens.dtype == torch.int32
    # Running sums of the tokens over 8, plus the column.
    assert batch.final[:, 0].tolist() == [3, 4, 1, 3, 4] and batch.final[:, 3].tolist() == [6, 7, 4, 6, 7]
    assert torch.equal(batch.taps, torch.cat([batch.final, 2 * batch.final, 3 * batch.final], 1))
    assert batch.lse.tolist() == [0.25, 1.25, 0.25, 1.25, 2.25] and batch.lse.dtype == torch.float32
    assert batch.top1.tolist() == [25, 9, 9, 17, 9] and batch.top1.dtype == torch.int64
    assert batch.final.dtype == torch.float32
    # Only 8 of the second document at p = 0 has two supervised tokens after it.
    assert (source.lengths, source.supervised, source.slots) == ([3, 2], [2, 2], [1, 0])
    half, full = source.batch([0], torch.bfloat16), StoredFeatures(source.store, torch.float64).batch([0])
    assert half.taps.dtype == torch.bfloat16 and full.final.dtype == torch.float64
    assert torch.equal(half.taps.double(), full.taps) and half.lse.dtype == torch.float32


@given(st.lists(st.booleans(), min_size=1, max_size=12))
def test_slots_follow_the_index_rule(mask: list[bool]) -> None:
    expected = valid_slots(torch.tensor(mask), torch.tensor([0, len(mask)]), 1).sum()
    assert count_slots(np.asarray(mask)) == int(expected)


# --- the files -----------------------------------------------------------------------------------------------


def test_shards_are_plain_safetensors_in_document_order(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    assert [(s.first, s.documents, s.tokens) for s in store.manifest.shards] == [
        (0, 3, 16), (3, 3, 15), (6, 2, 15), (8, 1, 6), (9, 1, 11)]  # fmt: skip
    ids = torch.cat([load_file(tmp_path / s.file)["input_ids"] for s in store.manifest.shards])
    assert ids.tolist() == [i for e in documents(LENGTHS) for i in e.input_ids]
    with safe_open(tmp_path / "shard-00001.safetensors", framework="pt") as file:  # the second document alone
        final = file.get_slice("final")[7:14]
        assert {n: file.get_slice(n).get_dtype() for n in file.keys()} == {  # noqa: SIM118 - not a mapping
            "taps": "F32", "final": "F32", "lse": "F32", "top1": "I32", "input_ids": "I32", "supervised": "BOOL"
        }  # fmt: skip
        assert file.metadata()["key"] == store.manifest.key
    assert final[:, 0].tolist() == (torch.tensor(documents(LENGTHS)[4].input_ids).cumsum(0) / 8).tolist()
    assert {p.name for p in tmp_path.glob("*.tmp")} == set()


def test_manifest_says_what_is_in_it(tmp_path: Path) -> None:
    make_store(tmp_path, provenance={"template": "abc"})
    raw = json.loads((tmp_path / "manifest.json").read_text())
    assert (raw["format"], raw["version"], raw["complete"], raw["dtype"]) == ("eyas-features", 1, True, "float32")
    assert raw["tap_ids"] == [1, 2, 3] and "hidden_states[i]" in raw["taps"] and raw["final"] == "after the final norm"
    assert raw["target"] == "fake" and raw["provenance"] == {"template": "abc"}
    assert raw["tokens"] == sum(LENGTHS) and raw["documents"] == 10


def test_plan_of_shards() -> None:
    layout = Layout(12, 4, "bfloat16")
    assert layout.token_bytes == 12 + 16 * 2 + 1
    room = 10 * layout.token_bytes
    assert layout.plan([4, 6, 1, 30, 9, 1], room) == [range(0, 2), range(2, 3), range(3, 4), range(4, 6)]
    assert layout.plan([4], 1) == [range(0, 1)]


def test_many_shards_are_read_through_few_maps_and_survive_pickling(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data.features.store, "OPEN_SHARDS", 2)
    store = make_store(tmp_path)
    for _ in range(2):
        assert [store.read(d).input_ids.tolist() for d in range(10)] == [e.input_ids for e in documents(LENGTHS)]
    again = pickle.loads(pickle.dumps(store))
    assert torch.equal(again.read(4).taps, store.read(4).taps)


# --- keys ----------------------------------------------------------------------------------------------------


def test_anything_that_changes_the_content_changes_the_key() -> None:
    examples = documents([4, 3])
    first, second = examples
    more_ids = replace(first, input_ids=[*first.input_ids[:-1], first.input_ids[-1] + 1])
    flipped = replace(first, supervised=[not first.supervised[0], *first.supervised[1:]])
    moved = [
        replace(first, input_ids=first.input_ids[:3], supervised=first.supervised[:3]),
        replace(
            second,
            input_ids=[first.input_ids[3], *second.input_ids],
            supervised=[first.supervised[3], *second.supervised],
        ),
    ]
    keys = [
        store_key(examples, "f", (1, 2, 3), "float32"),
        store_key([more_ids, second], "f", (1, 2, 3), "float32"),
        store_key([flipped, second], "f", (1, 2, 3), "float32"),
        store_key([second, first], "f", (1, 2, 3), "float32"),
        store_key([first], "f", (1, 2, 3), "float32"),
        store_key(moved, "f", (1, 2, 3), "float32"),
        store_key(examples, "g", (1, 2, 3), "float32"),
        store_key(examples, "f", (1, 2, 4), "float32"),
        store_key(examples, "f", (1, 2, 3), "bfloat16"),
        store_key(examples, "f", (1, 2, 3), "float32", compute_dtype="bfloat16"),
    ]
    assert len(set(keys)) == len(keys)
    renamed = [replace(e, source="elsewhere") for e in examples]
    assert store_key(renamed, "f", (1, 2, 3), "float32") == keys[0]
    with pytest.raises(EyasError, match=r"store.dtype=float8"):
        store_key(examples, "f", (1, 2, 3), "float8")


def test_another_store_is_never_written_over(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    before = contents(tmp_path)
    with pytest.raises(EyasError, match="documents 10 there, 9 now; tokens 63 there, 52 now"):
        make_store(tmp_path, lengths=LENGTHS[:-1])
    with pytest.raises(EyasError, match="dtype float32 there, bfloat16 now"):
        make_store(tmp_path, dtype="bfloat16")
    assert contents(tmp_path) == before
    assert store.manifest.key == key_of(FakeTarget(), documents(LENGTHS), "float32")
    with pytest.raises(EyasError, match="not other"):
        FeatureStore.open(tmp_path, key="other")
    assert FeatureStore.is_complete(tmp_path, store.manifest.key) and not FeatureStore.is_complete(tmp_path, "other")


# --- damage --------------------------------------------------------------------------------------------------


def test_damaged_shard_is_refused_and_alone_written_again(tmp_path: Path) -> None:
    make_store(tmp_path)
    whole = contents(tmp_path)
    path = tmp_path / "shard-00002.safetensors"
    edited = bytearray(whole[path.name])
    edited[-30] ^= 1
    for bad, message in [
        (bytes(edited), "checksum differs"),
        (whole[path.name][:-5], "bytes instead of"),
        (None, "missing"),
    ]:
        path.unlink()
        if bad is not None:
            path.write_bytes(bad)
        with pytest.raises(EyasError, match=rf"shard-00002.safetensors.*{message}"):
            FeatureStore.open(tmp_path)
        target = FakeTarget()
        make_store(tmp_path, target)
        assert contents(tmp_path) == whole
        assert len(target.padded) == 3  # the probe and the two documents of the shard


def test_checksums_are_computed_once_until_a_file_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data.features.store, "SETTLED_NS", -1)
    hashed: list[str] = []

    def count(path: Path) -> str:
        hashed.append(path.name)
        return file_blake2b(path)

    make_store(tmp_path)
    monkeypatch.setattr(data.features.store, "file_blake2b", count)
    FeatureStore.open(tmp_path)
    assert hashed == ["documents.json"]
    path = tmp_path / "shard-00001.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"\7")
    with pytest.raises(EyasError, match="shard-00001"):
        FeatureStore.open(tmp_path)
    assert hashed == ["documents.json"] * 2 + [path.name]
    remembered = tmp_path / ".verified.json"
    remembered.write_text("[]")  # only a cache
    make_store(tmp_path)
    assert len(FeatureStore.open(tmp_path)) == 10
    remembered.unlink()
    FeatureStore.open(tmp_path, remember=False)
    assert not remembered.exists()
    FeatureStore.open(tmp_path)
    assert remembered.exists()


def test_poisoned_shard_is_refused_by_document(tmp_path: Path) -> None:
    make_store(tmp_path)

    def poison(tensors: dict[str, Tensor]) -> None:
        tensors["taps"][8, 5] = torch.nan  # the second document of the shard: 4

    edit(tmp_path, 1, poison)
    source = StoredFeatures(FeatureStore.open(tmp_path))
    assert source.batch([3]).num_tokens == 7
    with pytest.raises(EyasError, match=r"chat.jsonl:5:id4: document 4 in .*shard-00001.* NaN"):
        source.batch([3, 4])


@pytest.mark.parametrize(
    ("name", "lengths"),
    [("taps", "11 token ids, 11 mask entries and 10 states"), 
     ("supervised", "11 token ids, 10 mask entries and 11 states"),
     ("input_ids", "10 token ids, 11 mask entries and 11 states")],
)  # fmt: skip
def test_stored_lengths_that_disagree_are_reported(tmp_path: Path, name: str, lengths: str) -> None:
    make_store(tmp_path)
    edit(tmp_path, 4, lambda tensors: tensors.update({name: tensors[name][:-1].clone()}))
    store = FeatureStore.open(tmp_path)
    with pytest.raises(EyasError, match=f"chat.jsonl:10:id9.*{lengths}"):
        store.read(9)


def test_stored_dtype_or_width_that_disagrees_is_reported(tmp_path: Path) -> None:
    make_store(tmp_path)
    edit(tmp_path, 4, lambda tensors: tensors.update(final=tensors["final"][:, :3].clone()))
    with pytest.raises(EyasError, match=r"final is F32 \[11, 3\], expected F32 \[11, 4\]"):
        FeatureStore.open(tmp_path).read(9)


def test_damaged_manifests(tmp_path: Path) -> None:
    make_store(tmp_path)
    manifest, listed = (tmp_path / "manifest.json"), (tmp_path / "documents.json")
    good, good_list = manifest.read_text(), listed.read_text()
    for text, message in [
        ("{", "not valid JSON"),
        ("[1]", "expected a JSON object"),
        (good.replace('"version": 1', '"version": 9'), "version 9, but this Eyas reads"),
        (good.replace('"tokens": 63', '"tokens": 64'), "do not add up"),
        (good.replace('"hidden_size"', '"hidden"'), "damaged"),
    ]:
        manifest.write_text(text)
        with pytest.raises(EyasError, match=message):
            FeatureStore.open(tmp_path)
    manifest.write_text(good)
    listed.write_text(good_list.replace("id3", "id4"))
    with pytest.raises(EyasError, match=r"documents.json.*checksum"):
        FeatureStore.open(tmp_path)
    make_store(tmp_path)
    assert listed.read_text() == good_list
    with pytest.raises(EyasError, match=r"nowhere.manifest.json: cannot be read"):
        FeatureStore.open(tmp_path / "nowhere")
