"""Several processes that went wrong with other tools, from public reports, each with the right outcome.

See tests/test_reported_training.py. These inputs and outcomes are held elsewhere already:

    SpecForge#99: preparing takes longer than a collective   test_dump_processes.py, preparing_is_bound_by_no_time_out
    DeepSpeed#7900: two processes save whole under ZeRO-3    test_strategies.py, every_strategy_trains_the_same[zero3x2]
"""

from __future__ import annotations

import json
import math
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from models.checkpoint import load_drafter
from tests.commands import command, workplace  # noqa: F401
from tests.processes import launch
from tests.tiny import tiny_target
from train.document_log import read_documents
from train.stages import walk
from train.tracking import METRICS, read_metrics

STEPS, BREAK, WARMUP, LR = 40, 30, 8, 2e-3
OPTIONS = (
    *("conf=debug", f"train.steps={STEPS}", "train.bin_tokens=64", "train.bins_per_step=3", "train.depths=2"),
    *(f"optim.warmup={WARMUP}", f"optim.lr={LR}", "optim.min_lr=0.1", "train.log_every=1", "train.log_documents=true"),
    *("train.eval_every=10", "train.save_every=10", "train.keep_last=9", "data.valid_fraction=0.2", "device=cpu"),
    *("verify.max_prompts=1", "verify.max_new_tokens=4", "verify.temperatures=[0.0]", "verify.costs=false"),
    *("verify.baseline=false", "threads=1", "tracker=none", "preview=0"),
)


def rows(path: Path, *answers: str) -> Path:
    chats = [[("user", f"{i}?"), ("assistant", answer)] for i, answer in enumerate(answers)]
    lines = [{"id": f"r{i}", "messages": [{"role": r, "content": c} for r, c in chat]} for i, chat in enumerate(chats)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where commands are typed: a target and eleven rows of many lengths."""
    folder = tmp_path_factory.mktemp("processes")
    tiny_target(folder / "target", layers=3)
    return rows(folder / "rows.jsonl", *("It is so. " * (1 + i % 4) for i in range(11))).parent


@pytest.fixture(scope="module")
def sharded(place: Path) -> Path:
    """An unbroken run on two processes that share the optimizer's state and the gradients."""
    return together(2, place, "sharded", "zero2")


def typed(place: Path) -> tuple[str, ...]:
    return (*OPTIONS, f"target.path={place}/target", f"data.path={place}/rows.jsonl")


def broken_off(sharded: Path, name: str) -> Path:
    """That run as it was left by a break behind its 30th step."""
    run = sharded.parent / name
    shutil.copytree(sharded, run)
    for product in (run / "checkpoints" / f"step_{STEPS:08d}", run / "export"):
        shutil.rmtree(product)
    return run


def together(processes: int, place: Path, name: str, strategy: str) -> Path:
    """The command on several processes, to a good end."""
    done = launch(processes, *typed(place), f"name={name}", strategy=strategy, folder=place)
    assert done.returncode == 0, done.stdout[-6000:]
    return place / "outputs" / name


def alone(place: Path, name: str) -> Path:
    """The command on this one process."""
    run = place / "outputs" / name
    folders = (f"output_dir={run}", f"store.dir={place}/outputs/features", f"data.cache_dir={place}/outputs/documents")
    command(walk, *typed(place), *folders, f"name={name}")
    return run


def tensors(run: Path, step: int = STEPS) -> dict[str, Tensor]:
    """Weights and optimizer states."""
    files = sorted((run / f"checkpoints/step_{step:08d}").glob("*.safetensors"))
    assert len(files) >= 2
    return {f"{file.name}: {name}": t for file in files for name, t in load_file(file).items()}


def assert_close(found: dict[str, Tensor], wanted: dict[str, Tensor], tolerance: float) -> None:
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert tensor.numel() > 0
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=tolerance, msg=f"{name}: {{}}".format)


def losses(run: Path) -> list[float]:
    return [row["loss"] for row in read_metrics(run / METRICS, "train")]


def test_the_learning_rate_follows_optimizer_steps(sharded: Path, place: Path) -> None:
    """accelerate#1382, #662, #2773: the same curve on one and on two processes, at its end after 40 steps."""
    curves = [[row["lr"] for row in read_metrics(run / METRICS, "train")] for run in (alone(place, "alone"), sharded)]
    warm = [LR * step / WARMUP for step in range(1, WARMUP + 1)]
    share = [(step - WARMUP) / (STEPS - WARMUP) for step in range(WARMUP + 1, STEPS + 1)]
    wanted = warm + [LR * (0.1 + 0.9 * (1 + math.cos(math.pi * done)) / 2) for done in share]
    assert curves[0] == curves[1] == pytest.approx(wanted, rel=1e-6)
    assert wanted[-1] == pytest.approx(LR / 10) and len(wanted) == STEPS


def test_a_sharded_optimizer_goes_on(sharded: Path, place: Path) -> None:
    """SpecForge PR#587, #243, #288: ten more steps of two processes give what the unbroken run has."""
    run = broken_off(sharded, "again")
    begun = tensors(run, BREAK)
    together(2, place, "again", "zero2")
    assert f"starts at step      {BREAK} (resumed)" in (run / "train.log").read_text()
    assert_close(tensors(run), tensors(sharded), 1e-6)
    assert losses(run) == pytest.approx(losses(sharded), rel=1e-6)
    assert read_documents(run) == read_documents(sharded)
    moved = [name for name, tensor in tensors(run).items() if not torch.equal(tensor, begun[name])]
    assert len(moved) >= len(begun) - 2  # all but the draft vocabulary, and what a drafter may keep fixed


def test_saved_on_two_goes_on_on_one_and_on_three(sharded: Path, place: Path) -> None:
    """DeepSpeed#2898, #3810, #7628; and #7900: the three share the weights too, and save them whole."""
    broken_off(sharded, "one"), broken_off(sharded, "three")
    runs = [alone(place, "one"), together(3, place, "three", "zero3")]
    for run, world in zip(runs, (1, 3), strict=True):
        assert [[bin["world"] for bin in written(run, step)] for step in (BREAK - 1, BREAK)] == [[2] * 3, [world] * 3]
        assert_close(tensors(run), tensors(sharded), 1e-4)
        assert losses(run) == pytest.approx(losses(sharded), rel=1e-4)
        assert read_documents(run) == read_documents(sharded)  # the same documents in every step
        shapes = {name: p.shape for name, p in load_drafter(run / f"checkpoints/step_{STEPS:08d}").named_parameters()}
        saved = load_file(run / f"checkpoints/step_{STEPS:08d}/model.safetensors")
        assert shapes and all(saved[name].shape == shape and bool(saved[name].any()) for name, shape in shapes.items())


def written(run: Path, step: int) -> list[dict[str, Any]]:
    """The rows of one step in the logs of all processes."""
    lines = [json.loads(line) for file in (run / "documents").iterdir() for line in file.read_text().splitlines()]
    return [line for line in lines if line["step"] == step]


def test_a_row_found_unusable_by_one_process_ends_both(place: Path) -> None:
    """SpecForge#99, speculators PR#969: the target has no numbers for one letter, of the fourth of five rows alone,
    and features are made in the training loop. That is told by name; the other process does not wait for it."""
    folder = tiny_target(place / "spoilt", layers=3)
    weights = load_file(folder / "model.safetensors")
    weights["model.embed_tokens.weight"][3 + byte_rank("~")] = math.nan
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    data = rows(place / "five.jsonl", *("It is so. ~" if i == 3 else "It is so." for i in range(5)))
    more = (
        f"target.path={folder}",
        f"data.path={data}",
        "data.valid_fraction=0",
        "features=online",
        "data.duplicates=keep",
    )
    began = time.monotonic()
    done = launch(2, *OPTIONS, *more, "train.bin_tokens=8", "train.bins_per_step=2", "name=five", folder=place)
    told = [line for line in done.stdout.splitlines() if "error: " in line]
    assert done.returncode != 0 and time.monotonic() - began < 120
    assert any("five.jsonl:4" in line and "NaN or infinite" in line for line in told), done.stdout[-4000:]
    assert "Traceback" not in "\n".join(told)


def byte_rank(letter: str) -> int:
    """The tiny tokenizer's number of an ASCII letter behind the special tokens: its alphabet in order."""
    from tokenizers import pre_tokenizers

    return sorted(pre_tokenizers.ByteLevel.alphabet()).index(letter)
