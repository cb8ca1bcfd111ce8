"""One report on drafters of several targets: a jointly trained drafter, its export, a frozen one and n-grams."""

from __future__ import annotations

import gc
import json
import logging
import shutil
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from jsonschema import Draft202012Validator
from transformers import AutoModelForCausalLM

import eval.look.report
from conf.schema import Config, VerifyConfig
from eval.candidates import ngrams
from eval.load import GreedyTau, load, load_bench
from eval.measure import Bench, measure
from eval.numbers.intervals import Sums
from eval.numbers.pairs import PerPrompt, compare
from eval.prompts import Prompt
from eval.run import evaluate_run, run_benches
from models.checkpoint import save_drafter
from models.eagle3 import Eagle3Drafter
from models.errors import EyasError
from models.target import Target
from models.tuned import apply_tuned, is_tuned_by, save_tuned, tuned, with_adapters
from models.vocab import DraftVocab
from scripts.export import run_export
from tests.tiny import tiny_target

LORA = {"rank": 4, "alpha": 8, "dropout": 0.0}
PERPLEXITY = {"before": 9.0, "after": 7.5}
SCHEMA = json.loads((Path(eval.look.report.__file__).parent / "report.schema.json").read_text())
QUESTIONS = ("Hi", "What is a hawk?", "1 + 1", "Name a bird of prey.", "Why?")
VERIFY = VerifyConfig(max_new_tokens=32, gamma=2, temperatures=[0.0], baseline=False, costs=False, ngram_min=1)


class Place(NamedTuple):
    """Folders: of the original target, of a joint run's checkpoint and its export, of a frozen drafter; questions."""

    target: Path
    joint: Path
    export: Path
    frozen: Path
    questions: Path

    @property
    def asked(self) -> list[str]:
        return [str(self.joint), "ngram", str(self.export), str(self.frozen)]


def checkpoint(folder: Path, target: Target) -> Path:
    """Of an untrained drafter that starts as close to the target as it can: some of its drafts are accepted."""
    folder.mkdir(parents=True)
    vocab = DraftVocab.full(target.vocab_size)
    save_drafter(Eagle3Drafter.create(target.frozen(), vocab, target.tap_ids, seed=0), folder)
    return folder


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    root = tmp_path_factory.mktemp("targets")
    original = tiny_target(root / "target", layers=3, hidden=32, vocab=270)
    adapted: Any = with_adapters(Target.load(str(original)).model, LORA)
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.3)
    (root / "tuned").mkdir()
    save_tuned(adapted, root / "tuned", LORA, {"perplexity": PERPLEXITY})
    target = Target.load(str(original))
    apply_tuned(target, root / "tuned")
    joint = checkpoint(root / "joint/checkpoints/step_00000010", target)
    for path in (root / "tuned").iterdir():
        path.rename(joint / path.name)
    frozen = checkpoint(root / "frozen/checkpoints/step_00000010", Target.load(str(original)))
    cfg = Config(name="joint", output_dir=str(root / "joint"), drafter_path=str(joint))
    cfg.target.path, cfg.export.dtype = str(original), "float32"
    questions = root / "questions.jsonl"
    questions.write_text("".join(json.dumps({"turns": [text]}) + "\n" for text in QUESTIONS))
    return Place(original, joint, run_export(cfg), frozen, questions)


def config(place: Place, folder: Path, drafters: list[str], **verify: Any) -> Config:
    asked = replace(VERIFY, prompts=str(place.questions), **verify)
    cfg = Config(name="run", output_dir=str(folder), drafter_path=drafters, device="cpu", seed=3, verify=asked)
    cfg.target.path = str(place.target)
    return cfg


def rows_of(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """Rows of generations.jsonl by drafter."""
    found: dict[str, list[dict[str, Any]]] = {}
    for line in (folder / "generations.jsonl").read_text().splitlines():
        row = json.loads(line)
        found.setdefault(row["drafter"], []).append(row)
    return found


@pytest.fixture(scope="module")
def measured(place: Place, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    folder = tmp_path_factory.mktemp("measured")
    return evaluate_run(config(place, folder, place.asked)), folder


def test_the_report_is_valid_and_in_the_order_asked_for(measured: tuple[dict[str, Any], Path]) -> None:
    report = json.loads((measured[1] / "report.json").read_text())
    assert [found.message for found in Draft202012Validator(SCHEMA).iter_errors(report)] == []
    names = ["joint", "ngram", "joint (2)", "frozen"]
    assert [drafter["name"] for drafter in report["drafters"]] == names == [run["drafter"] for run in report["runs"]]
    assert [drafter["target"] for drafter in report["drafters"]] == [
        {"kind": "lora", "perplexity": PERPLEXITY},
        None,
        {"kind": "whole", "perplexity": PERPLEXITY},
        None,
    ]
    assert [drafter["draft_vocab"] for drafter in report["drafters"]] == [270, None, 270, 270]


def test_each_drafts_for_its_own_target(place: Place, measured: tuple[dict[str, Any], Path]) -> None:
    """Greedy output is transformers' own with the model that each was trained for."""

    def written(folder: Path, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
        model: Any = AutoModelForCausalLM.from_pretrained(folder)
        ends = sorted(Target.load(str(folder)).eos_ids)
        how = {"max_new_tokens": 32, "do_sample": False, "eos_token_id": ends, "pad_token_id": ends[0]}
        found = [model.generate(input_ids=torch.tensor([ids]), **how)[0, len(ids) :] for ids in prompts]
        return [[int(token) for token in out] for out in found]

    rows = rows_of(measured[1])
    prompts = [row["prompt_ids"] for row in rows["ngram"]]
    original, changed = written(place.target, prompts), written(place.export / "target", prompts)
    assert len(prompts) == len(QUESTIONS) and original != changed
    for name, wanted in (("joint", changed), ("joint (2)", changed), ("ngram", original), ("frozen", original)):
        assert [row["prompt_ids"] for row in rows[name]] == prompts
        assert [row["output_ids"] for row in rows[name]] == wanted, name
        assert sum(passed["accepted"] for row in rows[name] for passed in row["rounds"]) > 0, name


def test_each_is_measured_as_it_is_alone(place: Place, measured: tuple[dict[str, Any], Path], tmp_path: Path) -> None:
    together = rows_of(measured[1])
    for source, run in zip(place.asked, measured[0]["runs"], strict=True):
        alone = measure(*load_bench(config(place, tmp_path, [source])), quiet=True)
        assert alone.report["runs"][0]["acceptance"] == run["acceptance"] and alone.report["comparisons"] == []
        rounds = [row["rounds"] for row in json.loads(json.dumps(alone.rows))]
        assert rounds == [row["rounds"] for row in together[run["drafter"]]]


def test_pairs_across_targets_are_paired(measured: tuple[dict[str, Any], Path]) -> None:
    """tau differences and their intervals counted again from the generations, on the same draws of prompts."""
    report, folder = measured
    names, rows = [drafter["name"] for drafter in report["drafters"]], rows_of(folder)
    pairs = [(a, b) for i, a in enumerate(names) for b in names[i + 1 :]]
    assert [(found["a"], found["b"]) for found in report["comparisons"]] == pairs
    drawn = np.random.default_rng(3).integers(len(QUESTIONS), size=(2000, len(QUESTIONS)))

    def taus(name: str) -> tuple[float, np.ndarray]:
        tokens = np.array([len(row["output_ids"]) - 1 for row in rows[name]])
        passes = np.array([len(row["rounds"]) for row in rows[name]])
        return tokens.sum() / passes.sum(), tokens[drawn].sum(1) / passes[drawn].sum(1)

    for found in report["comparisons"]:
        (a, of_a), (b, of_b) = taus(found["a"]), taus(found["b"])
        assert found["tau_difference"] == pytest.approx(a - b)
        assert found["interval"] == pytest.approx(np.quantile(of_a - of_b, (0.025, 0.975)))
        assert found["speed_interval"][0] <= found["speed_ratio"] <= found["speed_interval"][1]
    same = next(found for found in report["comparisons"] if (found["a"], found["b"]) == ("joint", "joint (2)"))
    assert same["tau_difference"] == 0, "the export is the checkpoint"


def test_comparisons_by_hand() -> None:
    """By temperature, then in the order given; shared passes have no seconds of a prompt."""
    fast, slow = Sums.of([8, 8, 8], [1, 1, 1]), Sums.of([8, 8, 8], [4, 4, 4])
    sums = {
        ("x", 0.0): PerPrompt(Sums.of([4, 4, 4], [2, 2, 2]), fast),
        ("y", 0.0): PerPrompt(Sums.of([9, 9, 9], [3, 3, 3]), slow),
        ("y", 1.0): PerPrompt(Sums.of([9, 9, 9], [3, 3, 3]), None),
        ("x", 1.0): PerPrompt(Sums.of([4, 4, 4], [2, 2, 2]), fast),
    }
    wanted = [("x", "y", 0.0, -1.0, (-1.0, -1.0), 4.0, (4.0, 4.0)), ("y", "x", 1.0, 1.0, (1.0, 1.0), None, None)]
    assert [tuple(found.values()) for found in compare(sums)] == wanted


def test_one_target_at_a_time(place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[weakref.ref[Target]] = []
    alive: list[int] = []
    load_one = Target.load

    def counting(path: str, **how: Any) -> Target:
        alive.append(sum(target() is not None for target in loaded))
        target = load_one(path, **how)
        loaded.append(weakref.ref(target))
        return target

    gc.collect()
    monkeypatch.setattr(Target, "load", counting)
    monkeypatch.setattr("eval.run.write_report", lambda *of: None)
    evaluate_run(config(place, tmp_path, place.asked, max_prompts=1, max_new_tokens=4))
    assert alive == [0, 0, 0]


def test_an_exports_own_target_may_be_named(
    place: Place, measured: tuple[dict[str, Any], Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Then it is the target of all, the adapters are not added again, and nobody is warned."""
    (place.joint.parents[1] / "config.yaml").write_text(f"target: {{path: '{place.target}'}}")
    cfg = config(place, tmp_path, [str(place.joint), str(place.export)])
    cfg.target.path = str(place.export / "target")
    with caplog.at_level(logging.WARNING):
        found = measure(*load_bench(cfg), quiet=True)
        assert "trained for" not in caplog.text
    assert [drafter["target"] for drafter in found.report["drafters"]] == [None, None]
    together = rows_of(measured[1])
    for name in ("joint", "joint (2)"):
        outputs = [row["output_ids"] for row in found.rows if row["drafter"] == name]
        assert outputs == [row["output_ids"] for row in together[name]]
    with pytest.raises(EyasError, match="these draft for several targets"):
        load_bench(config(place, tmp_path, place.asked))


def test_an_export_says_what_became_of_its_target(place: Place, tmp_path: Path) -> None:
    """Also when it is exported again, or when the target that it needs has been left behind."""
    about = tuned(place.export)
    assert about == tuned(place.export / "target") and about is not None and about["perplexity"] == PERPLEXITY
    assert is_tuned_by(place.export / "target", place.joint) and not is_tuned_by(place.target, place.joint)
    assert tuned(place.frozen) is None and tuned(place.target) is None
    cfg = config(place, tmp_path / "run", [])
    cfg.drafter_path, cfg.export.dtype, cfg.export.dir = str(place.export), "float32", str(tmp_path / "again")
    again = run_export(cfg)
    assert tuned(again) == about and is_tuned_by(again / "target", place.export)
    models: Mapping[Path, Any] = {
        folder: AutoModelForCausalLM.from_pretrained(folder / "target").state_dict() for folder in (place.export, again)
    }
    assert all(torch.equal(models[again][name], tensor) for name, tensor in models[place.export].items())
    shutil.rmtree(again / "target")
    with pytest.raises(EyasError, match=r"goes with a target that was trained along; .*target is missing"):
        load(config(place, tmp_path, [str(again)]))


def test_names_must_differ(place: Place, tmp_path: Path) -> None:
    target = Target.load(str(place.target))
    benches = [Bench(target, [ngrams(VERIFY)], VERIFY) for _ in range(2)]
    with pytest.raises(ValueError, match="share a name: ngram, ngram"):
        run_benches(benches, [Prompt([1, 2])], {}, tmp_path, quiet=True)


def test_tau_in_training_is_measured_on_held_out_conversations(place: Place, tmp_path: Path) -> None:
    """Never on verify.prompts, which the final report is about."""
    held_out = tmp_path / "held_out.jsonl"
    talks = [
        [{"role": "user", "content": text}, {"role": "assistant", "content": "Yes."}] for text in ("One", "Two", "3")
    ]
    held_out.write_text("".join(json.dumps({"messages": talk}) + "\n" for talk in talks))
    cfg = config(place, tmp_path, [], off_above=2, tune=True)
    cfg.data.valid_path, cfg.train.tau_prompts = str(held_out), 2
    target = Target.load(str(place.target))
    greedy_tau = GreedyTau(cfg, target)
    assert [target.tokenizer.decode(prompt.ids) for prompt in greedy_tau.prompts] == [
        f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n" for text in ("One", "Two")
    ]
    vocab = DraftVocab.full(target.vocab_size)
    tau = greedy_tau(Eagle3Drafter.create(target.frozen(), vocab, target.tap_ids, seed=0), target.frozen())
    assert 1 < tau <= 3
    held_out.write_text(json.dumps({"messages": talks[0][:1]}) + "\n")
    with pytest.raises(EyasError, match="no held-out conversation gives a prompt|data.valid_path"):
        GreedyTau(cfg, target)
