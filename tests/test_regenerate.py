"""data.regenerate: every row answered or rejected by name, and no kill that loses, doubles or changes one."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import data.regenerate.run
from conf.schema import Config, DataConfig, RegenerateConfig, TargetConfig
from data.chats.conversations import read_conversations
from data.chats.dialects import Dialect
from data.chats.prompts import read_questions
from data.chats.rejects import RejectLog
from data.regenerate.answers import Answers, beside
from data.regenerate.replay import Outcome
from data.regenerate.run import regenerate
from models.errors import EyasError
from tests.tiny import tiny_target

ROOT = Path(__file__).parents[1]
QUICKSTART = Path(data.__path__[0]) / "quickstart"


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


# --- the verb ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random target that ends its answers after about thirty tokens: some are cut at 40."""
    folder = tiny_target(tmp_path_factory.mktemp("regenerate"), layers=1, hidden=32)
    path = folder / "generation_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token_id": [0, 2, *range(280, 288)]}))
    return folder


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "in.jsonl"
    rows: list[Any] = [{"id": f"r{i}", "turns": [f"Question {i}?", "And then?"][: 1 + i % 2]} for i in range(40)]
    rows[3] = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]}
    rows[4] = {"conversations": [{"from": "gpt", "value": "no question"}]}
    rows[5] = [1, 2]
    rows[6]["id"] = "r7"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"turns": ["cut of')
    return path


def config(target: Path, source: Path, out: Path, **options: Any) -> Config:
    wanted = RegenerateConfig(out=str(out), max_new_tokens=40, cut="keep", batch_size=4)
    return Config(
        name="x",
        device="cpu",
        target=TargetConfig(path=str(target)),
        data=DataConfig(path=str(source)),
        regenerate=replace(wanted, **options),
    )


def test_every_row_is_answered_or_rejected_by_name(target: Path, source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    regenerate(config(target, source, out))
    rows, rejects = read_jsonl(out), read_jsonl(beside(out, ".rejects.jsonl"))
    info = json.loads(beside(out, ".info").read_text())
    assert info["rows"] == 41 == len(rows) + len(rejects) and len(rows) > 25
    found = {reject["row"]: reject["reason"] for reject in rejects}
    assert (found[5], found[6], found[41]) == ("no_user_turn", "not_an_object", "truncated_file")
    assert set(found.values()) <= {*(found[row] for row in (5, 6, 41)), "empty_answer", "nul_character"}
    ids = [row["id"] for row in rows]
    assert len(set(ids)) == len(ids) and {"in.jsonl:4", "r7", "in.jsonl:8"} <= {*ids, *(r["id"] for r in rejects)}
    places = [int(row["provenance"]["source"].rpartition(":")[2]) for row in rows]
    assert places == sorted(places)
    turns = [turn for row in rows for turn in row["conversations"] if turn["from"] == "gpt"]
    assert {turn["finish_reason"] for turn in turns} == {"stop", "length"}
    for row in rows:
        ended = [turn["finish_reason"] for turn in row["conversations"] if turn["from"] == "gpt"]
        assert "length" not in ended[:-1]
        provenance = row["provenance"]
        assert {"target", "target_fingerprint", "engine", "dtype", "template", "template_kwargs"} <= set(provenance)
        assert (provenance["temperature"], provenance["max_new_tokens"], provenance["seed"]) == (0.7, 40, 0)
        assert str(tmp_path) not in json.dumps({key: provenance[key] for key in provenance if key != "source"})


def test_the_training_reader_takes_the_rows_as_they_are(target: Path, source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    regenerate(config(target, source, out))
    log, rows = RejectLog(), read_jsonl(out)
    read = {c.id: c for c in read_conversations(str(out), dialect=Dialect.of(), rejects=log)}
    assert len(read) == len(rows) and log.rejected == 0
    for row in rows:
        message = read[row["id"]].messages[-1]
        assert message.content == row["conversations"][-1]["value"]
        assert message.ended == (row["conversations"][-1]["finish_reason"] == "stop")


def test_a_finished_file_is_left_alone(target: Path, source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    regenerate(config(target, source, out))

    def written() -> dict[Path, tuple[int, int]]:
        return {p: (p.stat().st_mtime_ns, p.stat().st_ino) for p in tmp_path.iterdir() if p.is_file()}

    before = written()
    regenerate(config(target, source, out))
    assert written() == before
    with pytest.raises(EyasError, match=r"was made with cut 'keep', now 'drop'"):
        regenerate(config(target, source, out, cut="drop"))


def test_input_without_a_question_is_refused(target: Path, tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text('{"conversations": [{"from": "gpt", "value": "x"}]}\n')
    with pytest.raises(EyasError, match=r"no row holds a question\n0 of 1 rows usable(.|\n)*no_user_turn"):
        regenerate(config(target, source, tmp_path / "out.jsonl"))


def test_progress_tells_rows_tokens_and_the_time_left(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """10 rows, 4 of them there before; after 100 seconds 2 more and 500 tokens: 4 rows take 200 seconds."""
    clock = iter([0.0, *[100.0] * 20])
    monkeypatch.setattr("data.regenerate.run.time", SimpleNamespace(monotonic=lambda: next(clock)))
    caplog.set_level(logging.INFO)
    progress = data.regenerate.run._Progress(10, 4)
    progress._bar.disable = True  # as where there is no terminal
    progress.row()
    progress.row()
    progress.tokens(500)
    assert "6 of 10 rows, 5 tok/s, about 4 minutes left" in caplog.text


def start(target: Path, source: Path, out: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "data.regenerate", "conf=debug", "device=cpu", f"target.path={target}"]
    command += [f"data.path={source}", f"regenerate.out={out}", "regenerate.max_new_tokens=40"]
    command += ["regenerate.cut=keep", "regenerate.batch_size=4"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.Popen(command, cwd=out.parent, env=environment, stderr=subprocess.PIPE, text=True)


def wait_for(condition: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    until = time.monotonic() + 120
    while not condition():
        assert process.poll() is None and time.monotonic() < until, process.communicate()
        time.sleep(0.001)


def test_a_killed_run_ends_with_the_file_of_an_unbroken_one(target: Path, source: Path, tmp_path: Path) -> None:
    lines = [{"id": f"n{i}", "turns": ["Why?"] * (1 + i % 3)} for i in range(160)]
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    whole, broken = tmp_path / "whole.jsonl", tmp_path / "broken.jsonl"
    part = beside(broken, ".part")
    process = start(target, source, broken)
    wait_for(lambda: part.exists() and part.read_bytes().count(b"\n") > 9, process)
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=60)
    there = read_jsonl(part)[1:]
    assert 9 <= len(there) < 160 and not broken.exists()
    with part.open("a") as file:
        file.write('{"index": 159, "asked": 1, "ro')  # as a kill in the middle of writing leaves it

    asked: list[int] = []
    append = Answers.append

    def remember(self: Answers, outcome: Outcome) -> None:
        asked.append(outcome.asked.index)
        append(self, outcome)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Answers, "append", remember)
        regenerate(config(target, source, broken))
    assert sorted([*asked, *(entry["index"] for entry in there)]) == list(range(160))
    regenerate(config(target, source, whole))
    assert broken.read_bytes() == whole.read_bytes()
    assert beside(broken, ".rejects.jsonl").read_bytes() == beside(whole, ".rejects.jsonl").read_bytes()


# --- quickstart --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("split", ["train", "heldout"])
def test_the_shipped_rows_answer_the_shipped_prompts(split: str) -> None:
    log = RejectLog()
    prompts = QUICKSTART / f"prompts_{split}.jsonl"
    wanted = {q.id: q.turns for q in read_questions(str(prompts), dialect=Dialect.of(), rejects=log, key="data.path")}
    assert log.rejected == 0
    rows = read_jsonl(QUICKSTART / f"{split}.jsonl")
    assert [row["id"] for row in rows] == list(wanted)
    for row in rows:
        turns = row["conversations"]
        asked = tuple(turn["value"] for turn in turns if turn["from"] == "human")
        assert [turn["from"] for turn in turns] == ["human", "gpt"] * len(asked)
        assert asked == wanted[row["id"]][: len(asked)]
        assert row["finish_reason"] == "length" or asked == wanted[row["id"]]
        assert all(turn["value"].strip() for turn in turns)


def test_no_shipped_prompt_occurs_twice() -> None:
    rows = [row for split in ("train", "heldout") for row in read_jsonl(QUICKSTART / f"prompts_{split}.jsonl")]
    first = [" ".join(row["turns"][0].casefold().split()) for row in rows]
    assert len(first) == len(set(first)) == 590
