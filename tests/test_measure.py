"""The measurement of several drafters: turns, batches, processes, comparisons, tuning; identities of the report."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from conf.schema import VerifyConfig
from data.masks.template import ChatTemplate
from eval.candidates import independent, ngrams, trained
from eval.costs.cost import CostModel, Curve, draft_cost
from eval.decode import Decoded, decode_all
from eval.drafts.proposers import PlainProposer
from eval.drafts.shapes import read_tree
from eval.measure import Bench
from eval.numbers.timing import compare_costs, speed
from eval.processes import Processes
from eval.prompts import Prompt
from eval.run import run_benches
from eval.verify.speculate import Generation
from models.eagle3 import Eagle3Drafter
from models.target import Target
from models.vocab import DraftVocab
from tests.tiny import tiny_target

ROOT = Path(__file__).parent.parent
IDENTITIES = ("passes", "accepted", "tau", "histogram", "rate", "conditional", "per_prompt_mean", "interval")


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    return Target.load(str(tiny_target(tmp_path_factory.mktemp("target"), layers=3, hidden=32, vocab=270)))


def prompts(count: int = 6) -> list[Prompt]:
    return [Prompt([1, 10 + i, *range(20, 20 + 3 * i)], category=("math", "talk")[i % 2]) for i in range(count)]


def bench_of(target: Target, verify: VerifyConfig, **options: Any) -> Bench:
    drafter = Eagle3Drafter.create(target.frozen(), DraftVocab.full(target.vocab_size), target.tap_ids, seed=0)
    itself = independent(target, target, verify, "model:itself")
    return Bench(target, [trained(drafter, target.frozen(), verify), ngrams(verify), itself], verify, 5, **options)


@pytest.fixture(scope="module")
def measured(target: Target, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    verify = VerifyConfig(max_new_tokens=20, gamma=3, batch_sizes=[1, 3], ngram_min=1, ngram_max=3)
    folder = tmp_path_factory.mktemp("run")
    return run_benches([bench_of(target, verify)], prompts(), {}, folder, quiet=True), folder


def test_identities_hold_for_every_run(measured: tuple[dict[str, Any], Path]) -> None:
    report, folder = measured
    rows = [json.loads(line) for line in (folder / "generations.jsonl").read_text().splitlines()]
    assert len(report["runs"]) == 3 * 2 and len(rows) == 3 * 2 * 6
    for run in report["runs"]:
        mine = [r for r in rows if (r["drafter"], r["temperature"]) == (run["drafter"], run["temperature"])]
        passes = [p for row in mine for p in row["rounds"]]
        for key, accepted in (
            ("acceptance", [p["kept"] - 1 for p in passes]),
            ("uncut", [p["accepted"] for p in passes if p["drafted"]]),
        ):
            found = run[key]
            assert found["passes"] == sum(found["histogram"]) == len(accepted)
            assert found["accepted"] == sum(i * n for i, n in enumerate(found["histogram"])) == sum(accepted)
            if accepted:
                assert found["tau"] == pytest.approx(1 + sum(accepted) / len(accepted))
                assert found["tau"] == pytest.approx(1 + sum(found["rate"]))
        tokens = sum(len(row["output_ids"]) - 1 for row in mine)
        assert run["acceptance"]["tau"] * len(passes) == pytest.approx(tokens)
        assert sum(c["passes"] for c in run["categories"].values()) == len(passes)
        assert sum(c["accepted"] for c in run["categories"].values()) == run["acceptance"]["accepted"]
        assert sum(p["passes"] for p in run["positions"]) == len(passes)
        if run["temperature"] == 0:
            assert run["same_as_plain"] == {"identical": 6, "prompts": 6, "differences": []}
    itself = [run for run in report["runs"] if run["drafter"] == "itself"]
    assert all(run["uncut"]["tau"] == pytest.approx(4.0) for run in itself)  # p = q: all three drafts, always


def test_comparisons_are_differences_of_the_runs(measured: tuple[dict[str, Any], Path]) -> None:
    report, _ = measured
    tau = {(run["drafter"], run["temperature"]): run["acceptance"]["tau"] for run in report["runs"]}
    assert len(report["comparisons"]) == 3 * 2
    for found in report["comparisons"]:
        a, b = (tau[found[side], found["temperature"]] for side in ("a", "b"))
        assert found["tau_difference"] == pytest.approx(a - b)
        assert found["interval"][0] <= found["tau_difference"] <= found["interval"][1]
    speeds = [entry["batch_size"] for run in report["runs"] for entry in run["speed"]]
    assert speeds == [1, 3] * 6
    assert {entry["drafter"] for entry in report["cost_model"]["predictions"]} == {"drafter", "itself"}


def test_neither_batch_size_nor_processes_change_what_is_counted(
    target: Target, measured: tuple[dict[str, Any], Path], tmp_path: Path
) -> None:
    verify = VerifyConfig(
        max_new_tokens=20, gamma=3, batch_sizes=[4], ngram_min=1, ngram_max=3, baseline=False, costs=False
    )
    again = run_benches([bench_of(target, verify)], prompts(), {}, tmp_path, quiet=True)
    for mine, alone in zip(again["runs"], measured[0]["runs"], strict=True):
        assert {key: mine["acceptance"][key] for key in IDENTITIES} == {
            key: alone["acceptance"][key] for key in IDENTITIES
        }
    bench = bench_of(target, verify)
    decoder = bench.decoder(1.0)
    parts = [
        decode_all(decoder, bench.ways(decoder, 1), prompts(), 1, seed=5, processes=Share(rank, 2), quiet=True)
        for rank in (0, 1)
    ]
    whole = decode_all(decoder, bench.ways(decoder, 1), prompts(), 1, seed=5, quiet=True)
    for name, decoded in whole.items():
        together = Decoded()
        for part in parts:
            together.add(part[name])
        assert [(a.number, a.turn, a.out.tokens) for a in together.answers] == [
            (a.number, a.turn, a.out.tokens) for a in decoded.answers
        ]
        assert all(len(part[name].answers) == 3 for part in parts)


class Share(Processes):
    """One of several processes, without the others."""

    def of_others(self, own: Any) -> list[Any]:
        return []


@pytest.mark.parametrize("processes", [3])
def test_launched_processes_report_what_one_does(processes: int, tmp_path: Path) -> None:
    """``torchrun -m eval`` with more processes than one, as users start it, against a single process."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    keys = [
        "conf=debug",
        "device=cpu",
        "drafter=[ngram,model:tiny:qwen3]",
        "verify.max_prompts=4",
        "verify.costs=false",
    ]
    keys += ["verify.max_new_tokens=12", "data.valid_fraction=0.4", "verify.batch_sizes=[2]"]
    launch = ["-m", "torch.distributed.run", f"--nproc_per_node={processes}", f"--master_port={port}"]
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "EYAS_CACHE": str(tmp_path / "cache")}
    reports = []
    for name, start in (("one", []), ("many", launch)):
        command = [sys.executable, *start, "-m", "eval", *keys, f"name={name}"]
        done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
        reports.append(json.loads((tmp_path / "outputs" / name / "report.json").read_text()))
    assert [report["settings"]["processes"] for report in reports] == [1, processes]
    for one, many in zip(*(report["runs"] for report in reports), strict=True):
        assert one["acceptance"] == many["acceptance"] and one["questions"] == many["questions"] == 4


def test_tuning_picks_a_tree_and_saves_it(target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With drafts that cost next to nothing. A draft model that is the target: its tree is accepted whole."""
    cheap = draft_cost({(0, 1): 0.1, (1, 1): 0.1})
    costs = CostModel(64, Curve.of({1: 10.0, 64: 11.0}), {"drafter": cheap, "itself": cheap})
    monkeypatch.setattr("eval.run.measure_costs", lambda target, candidates: costs)
    verify = VerifyConfig(max_prompts=4, max_new_tokens=20, tune=True, temperatures=[0.0], baseline=False)
    report = run_benches([bench_of(target, verify)], prompts(), {}, tmp_path, quiet=True)
    assert report["settings"]["tuned_on"] == "2 other prompts"
    about = {entry["name"]: entry for entry in report["drafters"]}
    assert about["ngram"]["levels"] == 4, "n-grams keep their chain"
    files = sorted((tmp_path / "trees").iterdir())
    assert [file.name for file in files] == ["drafter.json", "itself.json"]
    for file in files:
        entry = about[file.stem]
        shape = read_tree(file)
        assert (entry["levels"], entry["nodes"]) == (shape.levels, shape.nodes)
    levels = about["itself"]["levels"]
    assert levels >= 6 and about["drafter"]["nodes"] > 1
    run = next(run for run in report["runs"] if run["drafter"] == "itself")
    assert run["uncut"]["tau"] == pytest.approx(1 + levels)


def test_typical_acceptance_is_marked_lossy(target: Target, tmp_path: Path) -> None:
    verify = VerifyConfig(max_new_tokens=12, rule="typical", baseline=False, costs=False, temperatures=[0.0, 1.0])
    report = run_benches([bench_of(target, verify)], prompts(2), {}, tmp_path, quiet=True)
    assert not report["settings"]["lossless"] and not any(run["lossless"] for run in report["runs"])
    assert all(run["simulated"] is None for run in report["runs"])
    assert "lossy" in (tmp_path / "report.html").read_text().lower()


def test_second_questions_at_every_batch_size(target: Target) -> None:
    """Each conversation's second question follows its own answer, whoever else is being decoded."""
    template = ChatTemplate(target.tokenizer)
    asked = []
    for text in ("Hi", "A longer question", "X"):
        messages = ({"role": "user", "content": text},)
        ids = template.prompt_ids(list(messages))
        asked.append(Prompt(ids, later=("And then?",), template=template))
    verify = VerifyConfig(max_new_tokens=7)
    decoder = bench_of(target, verify).decoder(0.0)
    alone, together = (
        decode_all(decoder, {"": PlainProposer()}, asked, slots, quiet=True)[""].answers for slots in (1, 3)
    )
    assert [(a.number, a.turn) for a in alone] == [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1)]
    assert [(a.prompt, a.out.tokens) for a in alone] == [(a.prompt, a.out.tokens) for a in together]


def test_speed_by_hand() -> None:
    """Two sequences of 5 and 3 tokens; passes of 2 s drafting, 4 s target, 2 s rest together."""
    from eval.decode import Answer
    from eval.numbers.metrics import Round
    from eval.verify.speculate import Seconds

    outs = [
        Generation([1] * 5, "eos", [Round(3, 2, 3), Round(3, 0, 1)], first_token=0.1, latency=6.0),
        Generation([1] * 3, "eos", [Round(3, 1, 2)], first_token=0.3, latency=3.0),
    ]
    decoded = Decoded(
        [Answer(i, 0, [1], out) for i, out in enumerate(outs)], Seconds(1.0, 2.0, 4.0, 2.0, passes=2, levels=6)
    )
    found = speed(decoded)
    assert (found["tokens"], found["passes"]) == (6, 2)
    assert found["tokens_per_second"] == pytest.approx(6 / 8)  # prefill apart
    assert found["ttft_ms"] == {"mean": pytest.approx(200), "p50": pytest.approx(200), "p95": pytest.approx(290)}
    assert found["tpot_ms"]["mean"] == pytest.approx((6000 / 4 + 3000 / 2) / 2)
    assert found["ms_per_draft"] == pytest.approx(2000 / 6)  # two passes of three levels
    assert found["ms_per_forward"] == pytest.approx(2000) and found["ms_per_rest"] == pytest.approx(1000)
    plain = found | {"ms_per_forward": 1000.0}
    assert compare_costs(found, plain) == {"draft": pytest.approx(1 / 3), "verify": pytest.approx(2.0)}
