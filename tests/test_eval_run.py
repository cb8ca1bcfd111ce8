"""The measurement end to end on a tiny target: what it writes, and that simulated and measured tau agree."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from conf.schema import VerifyConfig
from data.masks.template import ChatTemplate
from eval.candidates import drafter_folder, trained
from eval.decode import Answer
from eval.look.report import print_report
from eval.measure import Bench, compare_outputs
from eval.numbers.metrics import Round
from eval.numbers.simulated import measured_alike
from eval.prompts import Prompt, read_prompts
from eval.run import run_benches
from eval.verify.speculate import Generation
from models.blocks import Block
from models.drafter import Drafter
from models.eagle3 import Eagle3Drafter
from models.errors import EyasError
from models.target import Target
from models.vocab import DraftVocab
from tests.tiny import tiny_target

VERIFY = VerifyConfig(max_new_tokens=24, gamma=3, temperatures=[0.0, 1.0, 0.7])


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    # A small vocabulary and a flat head, so that an untrained drafter is right now and then
    folder = tiny_target(tmp_path_factory.mktemp("target"), layers=3, hidden=32, vocab=270)
    return Target.load(str(folder))


def echo(target: Target) -> Drafter:
    """An untrained drafter that starts as close to the target as it can."""
    vocab = DraftVocab.full(target.vocab_size)
    return Eagle3Drafter.create(target.frozen(), vocab, target.tap_ids, seed=0).eval()


def measure(
    target: Target,
    drafter: Drafter,
    prompts: list[list[int]] | list[Prompt],
    verify: VerifyConfig,
    folder: Path,
    seed: int = 0,
) -> dict[str, Any]:
    asked = [prompt if isinstance(prompt, Prompt) else Prompt(prompt) for prompt in prompts]
    bench = Bench(target, [trained(drafter, target.frozen(), verify)], verify, seed)
    return run_benches([bench], asked, {}, folder, quiet=True)


@pytest.fixture(scope="module")
def measured(target: Target, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    folder = tmp_path_factory.mktemp("run")
    prompts = [[1, 10 + i, 20 + i, 30 + i] for i in range(6)]
    return measure(target, echo(target), prompts, VERIFY, folder, seed=3), folder


def test_report_is_what_was_returned_and_fits_the_generations(measured: tuple[dict[str, Any], Path]) -> None:
    report, folder = measured
    assert json.loads((folder / "report.json").read_text()) == json.loads(json.dumps(report))
    rows = [json.loads(line) for line in (folder / "generations.jsonl").read_text().splitlines()]
    assert len(rows) == 3 * 6
    for run in report["runs"]:
        mine = [row for row in rows if row["temperature"] == run["temperature"]]
        passes = [r for row in mine for r in row["rounds"]]
        tokens = sum(len(row["output_ids"]) - 1 for row in mine)
        assert run["acceptance"]["passes"] == len(passes)
        assert run["acceptance"]["tau"] == pytest.approx(tokens / len(passes))
        (speed,) = run["speed"]
        assert speed["speculative"]["tokens"] == tokens and speed["speculative"]["passes"] == len(passes)
        assert sum(run["finish"].values()) == 6
        assert speed["speed_up"] > 0 and speed["speed_up_interval"][0] <= speed["speed_up"]


def test_greedy_output_is_plain_and_simulated_tau_is_the_measured_one(measured: tuple[dict[str, Any], Path]) -> None:
    greedy = measured[0]["runs"][0]
    assert greedy["same_as_plain"] == {"identical": 6, "prompts": 6, "differences": []}
    assert greedy["acceptance"]["accepted"] > 0, "nothing was ever accepted: the comparison says nothing"
    assert greedy["simulated"]["tau"] == pytest.approx(greedy["simulated"]["measured"], rel=1e-9)


def test_sampled_tau_is_near_the_simulated_one(target: Target, tmp_path: Path) -> None:
    """The prediction is an expectation; over about 600 passes it is met within four standard errors."""
    prompts = [[1, 10 + i, 20 + i] for i in range(16)]
    verify = VerifyConfig(max_new_tokens=48, gamma=3, temperatures=[1.0], baseline=False, costs=False)
    report = measure(target, echo(target), prompts, verify, tmp_path)
    run = report["runs"][0]
    rate = run["simulated"]["tau"] - 1
    error = (rate * (1 + rate) / run["acceptance"]["passes"]) ** 0.5
    assert run["simulated"]["measured"] == pytest.approx(run["simulated"]["tau"], abs=4 * error)
    assert run["speed"][0]["plain"] is None and report["cost_model"] is None


def test_other_processors_are_not_simulated(measured: tuple[dict[str, Any], Path]) -> None:
    assert [run["simulated"] is None for run in measured[0]["runs"]] == [False, False, True]


def test_the_table_names_every_number(measured: tuple[dict[str, Any], Path]) -> None:
    console = Console(width=140, record=True, file=open("/dev/null", "w"))  # noqa: SIM115, PTH123
    print_report(measured[0], console)
    text = console.export_text()
    for word in ("tau", "95% interval", "rate per depth", "simulated tau", "tokens/s", "speed-up", "T = 0.7"):
        assert word in text


def test_measured_alike_by_hand() -> None:
    """Accepted inside the text: 2 and, of the cut pass, the single kept token; two passes."""
    assert measured_alike([[Round(3, 2, 3), Round(3, 3, 1)]]) == (2 + 2 + 1) / 2


def test_wrong_taps_are_refused(target: Target, tmp_path: Path) -> None:
    other = Eagle3Drafter.create(target.frozen(), DraftVocab.full(target.vocab_size), (0, 1, 3), seed=0)
    with pytest.raises(EyasError, match="target.taps"):
        measure(target, other, [[1, 2]], VERIFY, tmp_path)


def test_prompts_of_both_kinds(target: Target, tmp_path: Path) -> None:
    template = ChatTemplate(target.tokenizer)
    path = tmp_path / "prompts.jsonl"
    lines = [
        {"question_id": 1, "turns": ["Hi", "And then?"]},
        {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]},
        {"turns": [""]},
        {"turns": "Hi"},
        {
            "messages": [
                {"role": "system", "content": "S"},
                {"role": "user", "content": "Hi"},
                {"role": "assistant", "content": "x"},
            ]
        },
        {"turns": ["x" * 500]},
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    prompts = read_prompts(str(path), template, limit=10, context=300)
    asked = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert [target.tokenizer.decode(p.ids) for p in prompts] == [
        asked,
        asked,
        "<|im_start|>system\nS<|im_end|>\n" + asked,
    ]
    assert read_prompts(str(path), template, limit=1) == prompts[:1]
    with pytest.raises(EyasError, match="verify.prompts=nowhere: no such file"):
        read_prompts("nowhere", template, limit=1)
    path.write_text('{"turns": []}\n')
    with pytest.raises(EyasError, match="verify.prompts"):
        read_prompts(str(path), template, limit=10)


def test_a_second_question_follows_the_own_first_answer(target: Target, tmp_path: Path) -> None:
    """Two prompts, three questions; what comes before the second question was generated, not read."""
    template = ChatTemplate(target.tokenizer)
    path = tmp_path / "prompts.jsonl"
    second = [{"from": r, "value": v} for r, v in (("gpt", "x"), ("human", "A"), ("gpt", "theirs"), ("human", "B"))]
    path.write_text(json.dumps({"turns": ["Only"]}) + "\n" + json.dumps({"conversations": second}) + "\n")
    prompts = read_prompts(str(path), template, limit=10)
    verify = VerifyConfig(max_new_tokens=6, temperatures=[0.0], gamma=2)
    report = measure(target, echo(target), prompts, verify, tmp_path)
    rows = [json.loads(line) for line in (tmp_path / "generations.jsonl").read_text().splitlines()]
    assert [row["prompt"] for row in rows] == [0, 1, 1] and report["settings"]["prompts"] == 2
    talk = [{"role": "user", "content": "A"}, {"role": "assistant", "content": rows[1]["text"]}]
    assert rows[2]["prompt_ids"] == template.prompt_ids([*talk, {"role": "user", "content": "B"}])
    assert rows[1]["prompt_ids"] == template.prompt_ids(talk[:1])
    run = report["runs"][0]
    assert run["questions"] == 3 and run["same_as_plain"]["prompts"] == 3
    assert run["acceptance"]["passes"] == sum(len(row["rounds"]) for row in rows)


def test_the_drafter_of_a_run(tmp_path: Path) -> None:
    with pytest.raises(EyasError, match="drafter_path"):
        drafter_folder(None, tmp_path)
    for step in (100, 200):
        folder = tmp_path / "checkpoints" / f"step_{step:08d}"
        folder.mkdir(parents=True)
        (folder / "state.json").write_text('{"files": {}}')
    assert drafter_folder(None, tmp_path).name == "step_00000200"
    (tmp_path / "best.json").write_text('{"checkpoint": "checkpoints/step_00000100"}')
    assert drafter_folder(None, tmp_path).name == "step_00000100"
    assert drafter_folder(str(tmp_path), Path("elsewhere")).name == "step_00000100"
    (tmp_path / "checkpoints/step_00000100/state.json").write_text('{"files": {"model.safetensors": "?"}}')
    assert drafter_folder(None, tmp_path).name == "step_00000200"  # damaged: the one that export takes too
    (tmp_path / "best.json").write_text("[]")
    assert drafter_folder(None, tmp_path).name == "step_00000200"
    assert drafter_folder(str(tmp_path / "checkpoints"), tmp_path) == tmp_path / "checkpoints"


def test_reduced_precision_differences_are_told_with_their_gap(target: Target) -> None:
    logits = target.step([Block(torch.tensor([1, 5]))], target.new_cache())[0][1]
    best, second = (int(i) for i in logits.topk(2).indices)
    ours, theirs = (Answer(0, 0, [1, 5], Generation([token])) for token in (second, best))
    found = compare_outputs(target, [ours], [theirs])
    assert found["identical"] == 0
    assert found["differences"][0]["logit_gap"] == pytest.approx(float(logits[best] - logits[second]))
