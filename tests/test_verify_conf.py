"""The keys of a measurement: short forms, values that are refused, and keys without effect."""

from __future__ import annotations

from pathlib import Path

import pytest

from eval.measure import unescaped
from tests.commands import config, refusal, workplace  # noqa: F401


@pytest.fixture
def run(workplace: Path) -> str:  # noqa: F811
    (workplace / "outputs" / "mine").mkdir(parents=True)
    return "outputs/mine"


def test_short_forms_of_eval(run: str, workplace: Path) -> None:  # noqa: F811
    (workplace / "asked.jsonl").write_text("{}")
    cfg = config(f"drafter={run}", "prompts=asked.jsonl", "eval.tune=true", "eval.gamma=3", job="eval")
    assert (cfg.drafter_path, cfg.verify.prompts, cfg.verify.tune, cfg.verify.gamma) == (run, "asked.jsonl", True, 3)
    cfg = config(f"drafter=[{run},ngram,model:tiny:llama]", job="eval")
    assert cfg.drafter_path == [run, "ngram", "model:tiny:llama"]
    assert config(f"drafter=[{run}]", job="export").drafter_path == run
    cfg = config("drafter=eagle3_1", job="eval")  # the group's own choices stay choices
    assert cfg.drafter["fc_norm"] and cfg.drafter_path is None
    assert config("drafter=ngram", "verify=dynamic", job="eval").verify.tree == "dynamic"


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["drafter=nowhere"], "drafter_path=nowhere: no such file or folder"),
        (["drafter=[ngram,ngram]"], "drafter_path=['ngram', 'ngram']: names the same drafter twice"),
        (["drafter_path=[]"], "drafter_path=[]: must be a folder, ngram, model:TARGET, or a list"),
        (["drafter_path=[1]"], "drafter_path=[1]: must be a folder"),
        (["verify.tree=none.json"], "verify.tree=none.json: no such file"),
        (["verify.tree=dynamic", "verify.tune=true"], "verify.tree=dynamic: verify.tune chooses the tree"),
        (["verify.draws=some"], "verify.draws=some: must be one of without_replacement"),
        (["verify.rule=lossy"], "verify.rule=lossy: must be one of lossless, typical"),
        (["verify.batch_sizes=[]"], "verify.batch_sizes=[]: must be a list"),
        (["verify.batch_sizes=[0]"], "verify.batch_sizes=[0]: must be a list"),
        (["verify.batch_sizes=[2,2]"], "verify.batch_sizes=[2, 2]: holds a number twice"),
        (["verify.temperatures=[1,1.0]"], "verify.temperatures=[1.0, 1.0]: holds a number twice"),
        (["verify.min_p=1.5"], "verify.min_p=1.5: must be between 0 and 1"),
        (["verify.repetition_penalty=0"], "verify.repetition_penalty=0.0: must be above 0"),
        (["verify.ngram_min=5"], "verify.ngram_min=5: must not be above verify.ngram_max=4"),
        (["verify.nodes=0"], "verify.nodes=0: must be at least 1"),
        (["verify.off_above=-1"], "verify.off_above=-1: must be at least 0"),
    ],
)
def test_impossible_values_name_their_key(capsys: pytest.CaptureFixture[str], arguments: list[str], told: str) -> None:
    assert told in refusal(capsys, *arguments, job="eval")


def test_only_one_trained_drafter_is_exported(capsys: pytest.CaptureFixture[str], run: str) -> None:
    for drafter in ("ngram", f"[{run},ngram]", "model:tiny:llama"):
        assert "one trained drafter is exported" in refusal(capsys, f"drafter={drafter}", job="export")


def test_keys_without_effect_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    config("verify.branch=3", "verify.typical_eps=0.1", "verify.ngram_max=5", "verify.tune_prompts=2", job="eval")
    told = capsys.readouterr().out
    for key, why in (
        ("branch", "verify.tree is not dynamic"),
        ("typical_eps", "verify.rule is not typical"),
        ("ngram_max", "drafter_path has no ngram"),
        ("tune_prompts", "verify.tune is off"),
    ):
        assert f"verify.{key} has no effect: {why}" in told
    config("verify.tree=medusa", "verify.gamma=3", "verify.temperatures=[0.0]", "verify.min_p=0.1", job="eval")
    told = capsys.readouterr().out
    assert "verify.gamma has no effect: verify.tree has levels of its own" in told
    assert "verify.min_p has no effect: verify.temperatures are all 0" in told


def test_reports_of_other_drafters_do_not_replace_the_runs_own(run: str) -> None:
    assert config(f"drafter={run}", job="eval").name == "mine"
    assert config("drafter=ngram", job="eval").name == "compared"
    assert config(f"drafter=[{run},ngram]", job="eval").name == "compared"
    assert config(f"drafter={run}", "name=other", job="eval").name == "other"
    assert config("verify.gamma=2", job="eval").name == "debug"
    assert config(f"drafter={run}", job="export").name == "debug"


def test_line_ends_may_stop_a_text(capsys: pytest.CaptureFixture[str]) -> None:
    assert config(r"verify.stop=['\n\n',' ','None']", job="eval").verify.stop == [r"\n\n", " ", "None"]
    assert "verify.stop" in refusal(capsys, "verify.stop=['']", job="eval")
    assert unescaped(r"a\n\tb") == "a\n\tb"
