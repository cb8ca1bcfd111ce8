"""One run under every strategy, by the real command: the same curves, documents and weights as on one process.

Three bins a step, so that the second of two processes has one to the first's two, and of four one has none; in the last
step there is one bin for all of them. Some documents teach only the first depth, so processes come to depths in which
they have no slot. That makes 3, 2 + 1 and 1 + 1 + 1 + 0 passes a step; the even splits 4, 2 + 2 and 1 + 1 + 1 + 1 come
at the end.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.processes import launch
from train.document_log import read_documents
from train.tracking import METRICS, read_metrics

ROWS, ONE_LETTER = 17, range(13, 17)  # of the data, counted from 1
STEPS, BINS = 50, 8  # optimizer steps; bins of an epoch
LAUNCHED = {"none": 1, "ddp2": 2, "ddp4": 4, "zero1x2": 2, "zero2x2": 2, "zero3x2": 2}  # processes
OPTIONS = (
    *("conf=debug", "train.bin_tokens=128", "train.log_every=1", "train.log_documents=true", "tracker=none"),
    *("verify.max_prompts=1", "verify.max_new_tokens=8", "verify.temperatures=[0.0]", "verify.costs=false"),
    *("verify.baseline=false", "export.dtype=float32", "device=cpu", "threads=1", "preview=0"),
)
UNEVEN = ("train.bins_per_step=3", f"train.epochs={(3 * (STEPS - 1) + 1) / BINS}", f"train.eval_every={STEPS}")
EVEN = ("train.bins_per_step=4", "train.steps=12", "data.valid_fraction=0")


def conversations(path: Path) -> Path:
    """Answers of many lengths; four of one letter, whose only slot is in the first depth and whose questions fill a
    bin; one that isn't trained on."""
    lines = []
    for row in range(1, ROWS + 1):
        question, answer = f"{row} " + "word " * (row % 5), "ab cd ef gh" * (1 + row % 3)
        if row in ONE_LETTER:
            question, answer = f"{row} " + "word " * 20, "y"
        turns = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        lines.append(
            json.dumps(
                {"id": f"row-{row}", "messages": turns if row < ROWS else [turns[0], turns[1] | {"loss_weight": 0}]}
            )
        )
    path.write_text("\n".join(lines))
    return path


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Conversations in a folder in which all commands are typed: they share its feature stores."""
    return conversations(tmp_path_factory.mktemp("strategies") / "data.jsonl")


@pytest.fixture(scope="module")
def none(data: Path) -> Path:
    return run(data, "none", *UNEVEN)


def run(data: Path, label: str, *options: str) -> Path:
    """The finished run of a strategy."""
    name, processes = f"{label}-{options[0][-1]}", LAUNCHED[label]
    strategy = "ddp" if label.startswith("ddp") else label.partition("x")[0]
    typed = (*OPTIONS, f"data.path={data}", f"name={name}", *options)
    done = launch(processes, *typed, strategy=strategy, folder=data.parent)
    assert done.returncode == 0 and f"{processes} on cpu" in done.stdout, done.stdout[-6000:]
    return data.parent / "outputs" / name


def rows(run: Path, kind: str) -> list[dict[str, Any]]:
    return read_metrics(run / METRICS, kind)


def weights(run: Path, step: int) -> dict[str, Tensor]:
    return load_file(run / f"checkpoints/step_{step:08d}/model.safetensors")


def assert_same_curves(one: Path, other: Path, kind: str) -> None:
    """Loss, gradient norm and acceptance of every row within 1e-4, everything counted the same. (1e-7 was seen.)"""
    for a, b in zip(rows(one, kind), rows(other, kind), strict=True):
        counted = ("step", "slots", "lr", "epoch", "tokens")
        assert [b.get(key) for key in counted] == [a.get(key) for key in counted]
        for key in ("loss", "grad_norm", "alpha", "ce", "tau_t1"):
            if key in a:
                assert b[key] == pytest.approx(a[key], rel=1e-4), (b["step"], key)


def assert_same_tensors(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert other.keys() == one.keys()
    for name, tensor in other.items():
        torch.testing.assert_close(tensor, one[name], rtol=0, atol=1e-5, msg=f"{name}: {{}}".format)


def test_the_run_is_what_it_is_meant_to_be(none: Path) -> None:
    """Otherwise the comparisons below would prove less than they say."""
    read = read_documents(none)
    assert [len(bins) for bins in read.values()] == [3] * (STEPS - 1) + [1]
    alone = [documents for bins in read.values() for _, documents in bins if len(documents) == 1]
    letters = [documents for documents in alone if int(documents[0].rpartition("-")[2]) in ONE_LETTER]
    assert len(letters) == pytest.approx(3 / BINS * 3 * STEPS, abs=3), alone  # one of the four is held out
    losses = [row["loss"] for row in rows(none, "train")]
    assert len(losses) == STEPS and sum(losses[-9:-1]) < 0.95 * sum(losses[:8])


@pytest.mark.parametrize("label", [label for label in LAUNCHED if label != "none"])
def test_every_strategy_trains_the_same(label: str, none: Path, data: Path) -> None:
    other = run(data, label, *UNEVEN)
    assert_same_curves(none, other, "train")
    assert_same_curves(none, other, "valid")
    assert read_documents(other) == read_documents(none)
    assert_same_tensors(weights(none, STEPS), weights(other, STEPS))
    assert_same_tensors(*(load_file(folder / "export/model.safetensors") for folder in (none, other)))


def test_every_split_over_processes_and_passes_trains_the_same(data: Path) -> None:
    """Four bins a step: 4 passes on one process, 2 on each of two, 1 on each of four."""
    one, *others = (run(data, label, *EVEN) for label in ("none", "ddp2", "ddp4"))
    for other in others:
        assert_same_curves(one, other, "train")
        assert_same_tensors(weights(one, 12), weights(other, 12))
