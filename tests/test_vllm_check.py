"""The comparison with vLLM's counters, without vLLM: what is read of a report, and what counts as the same."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

from scripts.vllm_check import Ours, Task, check_servable, compare, plan, read_ours, table

UNCUT = {"passes": 4, "tau": 1.75, "rate": [0.5, 0.25]}


def write(folder: Path, **changes: Any) -> Path:
    """A report of an n-gram chain and a tree, at two temperatures."""
    drafters: list[dict[str, Any]] = [
        {"name": "ngram", "kind": "ngram", "path": None, "tree": "chain", "levels": 2, "nodes": 2},
        {"name": "run", "kind": "drafter", "path": "run", "tree": "dynamic", "levels": 2, "nodes": 9},
    ]
    names = [d["name"] for d in drafters]
    runs = [{"drafter": n, "temperature": t, "uncut": {**UNCUT, "passes": 4 + t}} for n in names for t in (0, 1)]
    settings = {"gamma": 9, "max_new_tokens": 8, "eos_ids": [7], "dtype": "float32", "ngram_min": 1, "ngram_max": 3}
    report = {"version": 2, "settings": settings, "drafters": drafters, "runs": runs} | changes
    rows = [
        {"drafter": n, "temperature": t, "prompt_ids": [1, i], "output_ids": [t, i]}
        for n in names
        for t in (0, 1)
        for i in (5, 6)
    ]
    (folder / "generations.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "report.json").write_text(json.dumps(report))
    return folder / "report.json"


def arguments(**changes: Any) -> argparse.Namespace:
    given = {
        **{"target": "t", "drafter": "ngram", "prompts": None, "gamma": 4, "ngram_min": 2, "ngram_max": 4},
        **{"max_new_tokens": 64, "max_prompts": None, "max_model_len": 2048, "dtype": "bfloat16"},
    }
    return argparse.Namespace(**(given | changes))


def test_the_greedy_run_of_one_drafter_is_read(tmp_path: Path) -> None:
    ours = read_ours(write(tmp_path), None, "ngram")
    assert (ours.name, ours.uncut, ours.settings["gamma"]) == ("ngram", UNCUT, 2)
    assert ours.prompts == [[1, 5], [1, 6]] and ours.outputs == [[0, 5], [0, 6]]


def test_the_task_has_the_settings_of_the_report(tmp_path: Path) -> None:
    task = plan(arguments(), "ngram", read_ours(write(tmp_path), None, "ngram"))
    assert (task.gamma, task.max_new_tokens, task.ngram, task.stop_ids, task.dtype) == (2, 8, (1, 3), (7,), "float32")
    lookup = {"prompt_lookup_min": 1, "prompt_lookup_max": 3}
    assert task.speculative_config() == {"method": "ngram", "num_speculative_tokens": 2, **lookup}
    with pytest.raises(SystemExit, match="need --max-model-len 13"):  # 2 of the prompt, 8 new, 2 drafts, the bonus
        plan(arguments(max_model_len=12), "ngram", read_ours(write(tmp_path), None, "ngram"))


def test_without_a_report_the_task_is_as_told(tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_text('[1, 2]\n{"prompt_ids": [3]}\n')
    task = plan(arguments(drafter="x", prompts=tmp_path / "p.jsonl", max_prompts=1), "eagle3", None)
    assert task == Task("t", "x", "eagle3", [[1, 2]], 4, 64, 2048, "bfloat16", (2, 4))
    assert task.speculative_config() == {"method": "eagle3", "num_speculative_tokens": 4, "model": "x"}


@pytest.mark.parametrize(
    ("name", "method", "changes", "message"),
    [
        (None, "eagle3", {}, "'run' drafted trees"),
        ("other", "ngram", {}, "say by --name which drafter is meant: ngram, run"),
        (None, "ngram", {"drafters": []}, "--name"),
        (None, "ngram", {"runs": []}, "'ngram' was not measured at T = 0"),
        (None, "ngram", {"settings": {"adaptive": True}}, "verify.adaptive=True"),
        (None, "ngram", {"settings": {"repetition_penalty": 1.2}}, "verify.repetition_penalty=1.2"),
    ],
)
def test_what_cannot_be_compared(
    tmp_path: Path, name: str | None, method: str, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(SystemExit, match=message):
        read_ours(write(tmp_path, **changes), name, method)


@pytest.mark.parametrize(("rates", "within"), [([0.51, 0.24], True), ([0.5, 0.271], False), ([0.525, 0.225], False)])
def test_every_number_must_be_within(rates: list[float], within: bool) -> None:
    ours = Ours("ngram", {}, UNCUT, [[1], [2]], [[3], [4]])
    theirs = {"drafts": 100, "acceptance_length": 1 + sum(rates), "rate_per_position": rates}
    found = compare(ours, theirs, [[3], [5]], 0.02)
    assert found["within"] is within and found["same_outputs"] == 1
    assert [row["what"] for row in found["rows"]] == ["acceptance length", "accepted at 0", "accepted at 1"]
    assert found["rows"][1]["difference"] == pytest.approx(0.5 - rates[0])
    text = table(found, 2)
    assert "1 of 2 outputs" in text and ("NOT within" in text) is not within


def test_medusa_drafts_with_all_its_heads(tmp_path: Path) -> None:
    """vLLM proposes a token of each head, and takes paths with certain words for other methods."""
    for name, heads in (("heads", {"num_heads": 3}), ("official", {"medusa_num_heads": 3})):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(heads))
        check_servable(str(folder), "medusa", 3)
        check_servable(str(folder), "eagle", 5)
        with pytest.raises(SystemExit, match="all its 3 heads; measure with gamma 3, not 4"):
            check_servable(str(folder), "medusa", 4)
    (tmp_path / "heads").rename(tmp_path / "not-eagle-1")
    with pytest.raises(SystemExit, match="'eagle-'"):
        check_servable(str(tmp_path / "not-eagle-1"), "medusa", 3)


def test_modules_of_the_target_need_no_folder(tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_text("[1, 2]\n")
    task = plan(arguments(drafter="mtp", prompts=tmp_path / "p.jsonl", gamma=1), "mtp", None)
    assert task.speculative_config() == {"method": "mtp", "num_speculative_tokens": 1} and not task.overrides()
    alone = plan(arguments(drafter="export", prompts=tmp_path / "p.jsonl", gamma=1), "mtp", None)
    assert alone.speculative_config()["model"] == "export" and alone.overrides() == {"num_nextn_predict_layers": 1}
