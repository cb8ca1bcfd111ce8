"""Training on two processes, killed in several phases (scripts/survive.py), and what counts as the same run."""

from __future__ import annotations

import json
import random
import shutil
from collections import Counter
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from models.errors import EyasError
from scripts.compare_runs import compare_runs
from scripts.survive import NAME, PHASES, STEPS, Record, Start, Trial, last_words, plan

CHECKPOINT = f"checkpoints/step_{STEPS:08d}"


@pytest.fixture(scope="module")
def trial(tmp_path_factory: pytest.TempPathFactory) -> Trial:
    """Two processes, unbroken, and killed while features are written, while saving and while measuring."""
    record = Record(["dump", "save", "evaluation"])  # each early in its phase, by the numbers of this seed
    trial = Trial("ddp2", record, tmp_path_factory.mktemp("survive"), [], seed=56)
    trial.unbroken()
    while not record.done:  # a kill that came too late is made in another run
        if trial.start():
            trial.compare()
    return trial


def test_killed_run_is_the_unbroken_one(trial: Trial) -> None:
    """Weights and optimizer bit for bit, every row and document once, nothing left behind."""
    assert trial.record.wrong == [] and trial.record.largest == 0
    assert trial.record.kills == {"dump": 1, "save": 1, "evaluation": 1}
    run = trial.folder / "broken/outputs" / NAME
    documents = [json.loads(line) for file in run.glob("documents/*.jsonl") for line in file.read_text().splitlines()]
    assert Counter((row["step"], row["bin"]) for row in documents) == Counter(
        (step, number) for step in range(STEPS) for number in range(3)
    )


def damage(run: Path, what: str) -> str:
    """Spoil a copy of a run in one way; how the comparison has to name it."""
    weights, metrics = run / CHECKPOINT / "model.safetensors", run / "metrics.jsonl"
    log = run / "documents/rank00001.jsonl"
    if what == "weight":
        tensors = load_file(run / "export/model.safetensors")
        name = max(tensors, key=lambda name: tensors[name].numel())
        tensors[name].view(-1)[7] += 1e-3
        save_file(tensors, run / "export/model.safetensors", metadata={"format": "pt"})
        return "export/model.safetensors: differs by 1.0e-03"
    if what == "checkpoint":
        weights.write_bytes(weights.read_bytes()[:-1] + b"\1")
        return "the last whole checkpoints are"
    if what == "row":
        metrics.write_text(metrics.read_text() + metrics.read_text().splitlines()[-1] + "\n")
        return f"valid row of step {STEPS}: 2 times"
    if what == "loss":
        rows = [json.loads(line) for line in metrics.read_text().splitlines()]
        rows[3]["loss"] += 1e-9
        metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return "metrics.jsonl: [3].loss is"
    if what == "documents lost":
        log.write_text("".join(line + "\n" for line in log.read_text().splitlines()[1:]))
        return "documents: "
    if what == "documents twice":
        log.write_text(log.read_text() + log.read_text().splitlines()[0] + "\n")
        return "bin 1 of step 0: 2 times"
    if what == "temporary":
        (run / CHECKPOINT).with_name(".tmp-step_00000007-99").mkdir()
        return f"left behind: outputs/{NAME}/checkpoints/.tmp-step_00000007-99"
    (run / "rejects.jsonl").unlink()
    return f"lacks outputs/{NAME}/rejects.jsonl"


@pytest.mark.parametrize(
    "what", ["weight", "checkpoint", "row", "loss", "documents lost", "documents twice", "temporary", "file"]
)
def test_every_difference_is_told(trial: Trial, tmp_path: Path, what: str) -> None:
    whole = trial.folder / "whole"
    shutil.copytree(whole, tmp_path / "other")
    assert compare_runs(whole, tmp_path / "other", NAME).wrong == []
    told = damage(tmp_path / "other/outputs" / NAME, what)
    assert any(told in wrong for wrong in compare_runs(whole, tmp_path / "other", NAME).wrong)


def test_tolerance_is_of_every_number(trial: Trial, tmp_path: Path) -> None:
    whole, other = trial.folder / "whole", tmp_path / "other"
    shutil.copytree(whole, other)
    damage(other / "outputs" / NAME, "weight")
    found = compare_runs(whole, other, NAME, tolerance=2e-3)
    assert found.wrong == [] and found.largest == pytest.approx(1e-3, rel=0.02)
    assert compare_runs(whole, other, NAME, tolerance=5e-4).wrong


def test_kills_are_spread_over_all_phases() -> None:
    labels = ["none", "ddp2", "ddp4", "zero1x2", "zero2x2", "zero3x2", "elastic"]
    records = plan(labels, 40, random.Random(0))
    planned = [record.planned for record in records.values()]
    assert [len(phases) for phases in planned] == [5, 6, 6, 5, 6, 6, 6]
    counts = Counter(phase for phases in planned for phase in phases)
    assert counts.keys() == set(PHASES) and set(counts.values()) == {5, 6}
    for phases in planned:  # a run comes to evaluation and export once
        order = [PHASES.index("step" if phase in ("save", "validation") else phase) for phase in phases]
        assert order == sorted(order)


def test_strategies_as_typed() -> None:
    assert [Start.of(label) for label in ("none", "ddp4", "zero3x2")] == [("none", 1), ("ddp", 4), ("zero3", 2)]
    for wrong in ("ddp", "none2", "zero4x2", "zero22", "fsdp2", ""):
        with pytest.raises(EyasError, match="--strategies"):
            Start.of(wrong)


def test_the_commands_own_message_is_told() -> None:
    said = "12:00:00 INFO plan\n[rank 1] error: strategy=zero9: must be one of none, ddp\nTraceback\n"
    assert last_words(said) == "[rank 1] error: strategy=zero9: must be one of none, ddp"
    assert last_words("Killed") == "Killed"
