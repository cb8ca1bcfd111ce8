"""What ``python -m data`` writes, and the warning when a drafter meets another prompt than it was trained with."""

from __future__ import annotations

import json
import logging
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from conf.schema import DataConfig, StoreConfig, TargetConfig
from data.look.report import compare_prompts, report, show
from data.prepare import Inputs, open_target
from tests.chats import rows_file, sharegpt
from tests.tiny import tiny_target


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_target(tmp_path_factory.mktemp("target"), "llama")


def gather(folder: Path, tmp_path: Path, *, kwargs: dict[str, Any] | None = None, **data: Any) -> Inputs:
    path = rows_file(tmp_path / "d.jsonl", *(sharegpt(f"question {i}", f"answer {i}") for i in range(8)))
    target = asdict(TargetConfig(path=str(folder), template_kwargs=kwargs or {}))
    section = asdict(DataConfig(path=path, cache_dir=str(tmp_path / "documents"), valid_fraction=0.25, **data))
    return Inputs.gather(open_target(target), target=target, data=section, store=asdict(StoreConfig()))


def test_files_of_a_look(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    inputs = gather(folder, tmp_path, supervise="last")
    report(inputs, tmp_path / "run", 2, 120, 4)
    about = json.loads((tmp_path / "run" / "data.json").read_text())
    assert about["split"] == {"training": 6, "held_out": 2, "weights": [1.0]}
    assert about["settings"]["supervise"] == "last" and about["statistics"]["kept"] == 8
    assert about["prompt"]["template_kwargs"] == {} and "im_start" in about["prompt"]["chat_template"]
    assert about["draft_vocabulary"]["chosen"] == 120 and about["draft_vocabulary"]["held_out_tokens"] > 0
    page = (tmp_path / "run" / "preview.html").read_text()
    assert "data:image/png;base64," in page and page.count("tokens supervised") == 2
    assert (tmp_path / "run" / "draft_vocab.png").read_bytes()[:4] == b"\x89PNG"
    assert capsys.readouterr().out.count("tokens supervised") == 2


def test_a_trained_run_keeps_what_it_was_trained_on(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A look at other data under the same name changes nothing, and evaluation still warns of another prompt."""
    first, other = gather(folder, tmp_path), gather(folder, tmp_path, kwargs={"enable_thinking": True}, max_length=50)
    show(first, tmp_path / "run", 0)
    show(other, tmp_path / "run", 0)  # not trained yet: the last look counts
    show(first, tmp_path / "run", 0)
    written = (tmp_path / "run" / "data.json").read_bytes()
    checkpoint = tmp_path / "run" / "checkpoints" / "step_00000001"
    checkpoint.mkdir(parents=True)
    show(other, tmp_path / "run", 0)
    assert (tmp_path / "run" / "data.json").read_bytes() == written
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        compare_prompts(first.template, checkpoint)
        compare_prompts(other.template, tmp_path)  # no run: nothing to compare with
        assert caplog.text == ""
        compare_prompts(other.template, checkpoint)
    assert "target.template_kwargs: the drafter was trained under another one: {} then" in caplog.text
