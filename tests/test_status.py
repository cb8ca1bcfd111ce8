"""``python -m train ... status``: what a run's folder says, running, damaged or not there; and that it only looks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from models.files import lock
from models.run_folder import file_digest
from tests.commands import workplace  # noqa: F401 - a fixture
from tests.test_trainer import config, fit
from train import standing as standing_module
from train.__main__ import main
from train.standing import standing
from train.status import in_a_line, run_folder, state_of, table

ROOT = Path(__file__).parents[1]
TOTAL = 100


def row(step: int, seconds: float, **more: Any) -> str:
    values = {"step": step, "kind": "train", "loss": 400 / step, "epoch": step / 50, "tokens": 1000 * step}
    return json.dumps(values | {"supervised": 300 * step, "tokens_per_s": 55.5, "seconds": seconds} | more) + "\n"


# 10 s a step up to step 30, 20 s a step from there on
ROWS = "".join(row(step, 10.0 * step if step <= 30 else 20.0 * step - 300) for step in range(10, 61, 10))


def checkpoint(run: Path, step: int, seconds: float, **state: Any) -> Path:
    folder = run / "checkpoints" / f"step_{step:08d}"
    folder.mkdir(parents=True)
    save_file({"w": torch.full((64,), float(step))}, folder / "model.safetensors")
    content = {"step": step, "total_steps": TOTAL, "tokens": 1000 * step, "supervised": 300 * step, "seconds": seconds}
    files = {"model.safetensors": file_digest(folder / "model.safetensors")}
    (folder / "state.json").write_text(json.dumps(content | {"stopped": False, "files": files} | state))
    os.utime(folder, (1, 1))  # 1970
    return folder


def begun(run: Path, steps: int | None = None) -> Path:
    run.mkdir(parents=True)
    (run / "config.yaml").write_text(f"train:\n  steps: {'null' if steps is None else steps}\nexport:\n  dir: null\n")
    return run


@pytest.fixture
def half(tmp_path: Path) -> Path:
    """A run of 100 steps with rows up to 60 and checkpoints of 20 and 40, the first its best."""
    run = begun(tmp_path / "outputs" / "half")
    (run / "metrics.jsonl").write_text(ROWS)
    checkpoint(run, 20, 200.0)
    checkpoint(run, 40, 500.0)
    best = {"checkpoint": "checkpoints/step_00000020", "step": 20, "chain": 4, "by": "simulated", "tau_t0": 1.25}
    (run / "best.json").write_text(json.dumps(best))
    return run


def shown(run: Path) -> dict[str, str]:
    found = standing(run)
    return {"state": state_of(found), **dict(table(found))}


def test_running_and_stopped(half: Path) -> None:
    """Running, a run is at its last row; stopped, at the checkpoint that it goes on from."""
    held = lock(half, "training this run")
    told = shown(half)
    assert told.pop("last checkpoint").startswith("step 40, 20")  # thousands of days ago
    assert told == {
        "state": "training, running now",
        "step": "60 of 100 (60.0%)",
        "tokens": "60,000, 18,000 supervised",
        "last row": "step 60",
        "epochs": "1.20",
        "loss": "6.6667",
        "speed": "56 tokens/s",
        "best tau": "1.250 at step 20 (simulated, chain of 4)",
        "checkpoints": "2 whole, 0 broken",
        "trained for": "15 min",  # 900 s
        "time left": "13 min, validation and saving included",  # 40 steps of 20 s
    }
    held.close()
    told = shown(half)
    assert told["state"] == "training, stopped"
    assert told["step"] == "40 of 100 (40.0%)" and told["tokens"] == "40,000, 12,000 supervised"
    assert told["last row"] == "step 60; made again from the checkpoint on"
    assert told["trained for"] == "8 min" and told["time left"] == "20 min, validation and saving included"
    assert in_a_line(standing(half)) == (
        "training, stopped; step 40 of 100 (40.0%); best tau 1.250 at step 20; 20 min left"
    )


def test_asking_takes_no_lock(half: Path) -> None:
    lock(half, "training this run").close()
    assert standing(half).running is False
    lock(half, "training this run").close()


def test_broken_newest_checkpoint(half: Path) -> None:
    """A changed byte: the run goes on from the one before. So it does with a state.json that is cut short."""
    weights = half / "checkpoints" / "step_00000040" / "model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[:-1] + b"\xff")
    told = shown(half)
    assert told["checkpoints"] == "1 whole, 1 broken: step_00000040"
    assert told["step"] == "20 of 100 (20.0%)" and told["last checkpoint"].startswith("step 20, ")
    weights.write_bytes(content)
    state = weights.with_name("state.json")
    state.write_text(state.read_text()[:-20])
    assert shown(half)["checkpoints"] == "1 whole, 1 broken: step_00000040"
    (half / "checkpoints" / "step_00000020" / "model.safetensors").unlink()
    told = shown(half)
    assert told["checkpoints"] == "0 whole, 2 broken: step_00000040, step_00000020"
    assert told["state"] == "stopped without a whole checkpoint: the same command begins anew"
    assert told["step"] == "0; how many there are is known once the data is read" and "last checkpoint" not in told


def test_large_checkpoints_are_sized_up(half: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond what is read through, a file that is cut short is still seen; a changed byte is not."""
    newest = sum(path.stat().st_size for path in (half / "checkpoints" / "step_00000040").iterdir())
    monkeypatch.setattr(standing_module, "DIGESTED", newest)
    assert shown(half)["checkpoints"] == "2 whole (1 by the sizes of the files), 0 broken"
    weights = half / "checkpoints" / "step_00000020" / "model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[:-1] + b"\xff")
    assert shown(half)["checkpoints"] == "2 whole (1 by the sizes of the files), 0 broken"
    weights.write_bytes(content[:-1])
    assert shown(half)["checkpoints"] == "1 whole, 1 broken: step_00000020"


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe\x00", b"[]", b"null"])
def test_damaged_files(half: Path, content: bytes) -> None:
    """Each is named; what others tell is still told."""
    for name in ("best.json", "stages.json", "report.json"):
        (half / name).write_bytes(content)
    (half / "metrics.jsonl").write_bytes(ROWS.encode() + b'\xff\xfe\n{"step": null, "kind": "train"}\n{"step": 70, "ki')
    found = standing(half)
    names = [what.removeprefix(f"{half}/") for what in found.damage]
    assert names == [
        "metrics.jsonl: 2 of 9 rows can't be read",
        "stages.json: can't be read",
        "report.json: can't be read",
        "best.json: can't be read",
    ]
    assert (found.step, found.rows[-1]["step"], found.best) == (40, 60, None)
    assert len(list(table(found))) == 14


def test_odd_values_are_passed_over(half: Path) -> None:
    """JSON, but not what a run writes."""
    with (half / "metrics.jsonl").open("a") as file:
        file.write(row(70, 1.0, loss=None) + row(80, 1.0, tokens="many") + row(-3, 1.0))
    (half / "best.json").write_text('{"step": "20", "tau_t0": 1.5}')
    (half / "report.json").write_text('{"runs": [{"temperature": 0, "acceptance": null}, 7]}')
    (half / "config.yaml").write_text("train: [1\n")
    (half / "stages.json").write_text('{"features": "here", "export": "x", "export product": {}}')
    found = standing(half)
    assert (found.rows[-1]["step"], found.best, found.measured, found.exported) == (60, None, None, False)
    assert found.damage == [f"{half / 'config.yaml'}: can't be read"]


@pytest.mark.parametrize("early", [False, True])
def test_finished(half: Path, early: bool) -> None:
    step = 60 if early else TOTAL
    best = {"step": step, "chain": 3, "by": "measured on 8 prompts", "tau_t0": 1.5, "tau_measured": 1.75}
    checkpoint(half, step, 900.0, stopped=early, best=best)
    (half / "best.json").write_text(json.dumps(best))
    runs = [{"temperature": 1.0, "acceptance": {"tau": 1.1}}, {"temperature": 0.0, "acceptance": {"tau": 1.375}}]
    (half / "report.json").write_text(json.dumps({"runs": runs}))
    stages = {"evaluation": "a", "export": "b", "export product": {"model.safetensors": "c"}}
    (half / "stages.json").write_text(json.dumps(stages))
    trained = "stopped early by train.patience" if early else "trained"
    assert state_of(standing(half)) == f"{trained}, evaluated"  # what was exported is gone
    (half / "export").mkdir()
    (half / "export" / "model.safetensors").touch()
    told = shown(half)
    assert told["state"] == f"{trained}, evaluated, exported"
    assert told["best tau"] == (
        f"1.750 at step {step} (measured on 8 prompts, chain of 3); 1.375 measured by the evaluation"
    )
    assert "time left" not in told and told["checkpoints"] == "3 whole, 0 broken"
    held = lock(half, "training this run")
    assert state_of(standing(half)) == f"{trained}, evaluated, exported, running now"
    held.close()


def test_before_the_first_step(tmp_path: Path) -> None:
    """Not there, begun, dumping (of two shards one listed, one with a receipt; a second store not yet begun), whole."""
    run = tmp_path / "run"
    assert shown(run) == {"state": "not begun"}
    begun(run, steps=200)
    assert shown(run) == {
        "state": "reading data and features, before the first step, stopped",
        "step": "0 of 200 (0.0%)",
    }
    stores = [tmp_path / "a", tmp_path / "b"]
    (run / "stages.json").write_text(json.dumps({"features": list(map(str, stores)), "steps": 120}))
    stores[0].mkdir()
    shard = {"index": 0, "file": "shard-00000.safetensors"}
    (stores[0] / "manifest.json").write_text(json.dumps({"planned_shards": 4, "shards": [shard]}))
    for number in (0, 2):
        (stores[0] / f"shard-{number:05d}.json").write_text("{}")
    held = lock(run, "training this run")
    assert shown(run) == {
        "state": "dumping features, running now",
        "step": "0 of 120 (0.0%)",
        "features": "2 of 5 shards (40%)",
    }
    for store in stores:
        store.mkdir(exist_ok=True)
        (store / "manifest.json").write_text(json.dumps({"planned_shards": 1, "shards": [shard]}))
        for receipt in store.glob("shard-*.json"):
            receipt.unlink()
    assert shown(run)["features"] == "whole"
    held.close()


def test_files_of_a_real_run(tmp_path: Path) -> None:
    """What the trainer writes is what is read here."""
    run = tmp_path / "run"
    fit(run, config(steps=5, log_every=2, save_every=2, eval_every=2))
    found = standing(run)
    assert (found.step, found.total, found.finished, found.damage) == (5, 5, True, [])
    names = "step, tokens, last row, epochs, loss, speed, best tau, last checkpoint, checkpoints, trained for"
    assert [name for name, _ in table(found)] == names.split(", ")
    seconds = [one["seconds"] for one in found.rows]
    assert [one["step"] for one in found.rows] == [2, 4, 5] and 0 < seconds[0] < seconds[1] < seconds[2]
    assert found.newest is not None and found.newest.state["seconds"] >= seconds[2]


# --- the command ---


def asked(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    """Exit code and output of ``python -m train`` with these arguments."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["train", *arguments])
        with pytest.raises(SystemExit) as left:
            main()
    told = capsys.readouterr()
    return int(left.value.code or 0), told.out + told.err


def listing(folder: Path) -> list[tuple[Path, int]]:
    return sorted((path, path.lstat().st_mtime_ns) for path in folder.rglob("*"))


@pytest.mark.parametrize(
    "arguments",
    [
        ("conf=eagle3_smollm2", "name=half", "status"),
        ("status", "conf=eagle3_smollm2", "name=half"),
        ("name=half", "status", "train.steps=77", "optim=muon"),
        ("status", "conf=medusa1_llama", "name=half"),  # asks for data that training would need
        ("output_dir=outputs/half", "status"),
        ("hydra.run.dir=outputs/${name}", "name=half", "status"),
    ],
)
def test_the_word_stands_anywhere(half: Path, capsys: pytest.CaptureFixture[str], arguments: Sequence[str]) -> None:
    (Path.cwd() / "status").mkdir()
    (Path.cwd() / "status" / "train").touch()
    before = listing(Path.cwd())
    code, told = asked(capsys, *arguments)
    assert code == 0 and told.splitlines()[0].endswith("outputs/half: training, stopped")
    assert "  step             40 of 100 (40.0%)\n" in told and "log" not in told
    assert listing(Path.cwd()) == before


def test_other_ranks_are_silent(
    half: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    assert asked(capsys, "name=half", "status") == (0, "")
    monkeypatch.setenv("RANK", "0")
    assert "training, stopped" in asked(capsys, "name=half", "status")[1]


def test_a_line_for_each_run_of_a_sweep(half: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = Path("outputs/sweeps/optim.lr,conf=debug")
    folder.mkdir(parents=True)
    half.rename(folder / "optim.lr=0.001")
    code, told = asked(capsys, "status", "conf=debug", "optim.lr=1e-3,3e-4", "--multirun")
    assert code == 0
    assert told.splitlines() == [
        str(folder),
        "  optim.lr=0.001   training, stopped; step 40 of 100 (40.0%); best tau 1.250 at step 20; 20 min left",
        "  optim.lr=0.0003  not begun",
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("status", "nme=half"), "nme: there is no such key"),
        (("status", "conf=nothing"), "conf=nothing: there is no such choice"),
        (("status", "name=features"), "name=features: features is a folder that Eyas itself uses"),
        (("status", "optim.lr=1,2"), "optim.lr: '1,2' is several values"),
        (("status", "status=1"), "status: there is no such key"),
        (("status", "--cfg", "job"), "status: of the flags only --multirun"),
        (("--multirun", "hydra/launcher=basic", "optim.lr=1,2", "status"), "status: of the flags only --multirun"),
        (("--config-dir", "status", "name=half"), "Additional config directory"),  # a folder, and not the word
    ],
)
def test_mistakes(capsys: pytest.CaptureFixture[str], arguments: Sequence[str], message: str) -> None:
    code, told = asked(capsys, *arguments)
    assert code == 2 and message in told and "Traceback" not in told and list(Path.cwd().iterdir()) == []


def test_help_tells_of_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert "[key=value ...] status    where that run stands" in asked(capsys, "status", "--help")[1]


def test_name_of_a_run_is_no_word() -> None:
    assert run_folder(["name=status"]) == Path("outputs/status").absolute()


def test_needs_no_torch(half: Path) -> None:
    """Nor does it wait for accelerate, transformers and the like."""
    code = (
        "import sys; sys.argv[1:] = ['name=half', 'status']\n"
        "from train.__main__ import main\n"
        "try: main()\n"
        "finally: print(sorted({'torch', 'accelerate', 'transformers', 'wandb', 'numpy'} & set(sys.modules)))"
    )
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    told = subprocess.run(
        [sys.executable, "-P", "-c", code], env=env, capture_output=True, text=True, check=True
    ).stdout
    assert "training, stopped" in told and told.splitlines()[-1] == "[]"
