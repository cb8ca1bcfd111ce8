"""report.json against its schema, the other files beside it, and the tables in the terminal."""

from __future__ import annotations

import copy
import io
import json
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from rich.console import Console

import eval.look.report
import eval.run
from conf.schema import VerifyConfig
from eval.candidates import ngrams, trained
from eval.costs.predict import measure_costs
from eval.look.report import print_report, write_report
from eval.look.table import WIDE, comparisons, legend, ordered, predictions, sections, verdict
from eval.measure import Bench
from eval.prompts import Prompt
from eval.run import run_benches
from models.eagle3 import Eagle3Drafter
from models.target import Target
from models.vocab import DraftVocab
from tests.reports import CATEGORIES, EXPORT, FAKES, TUNED, Faker, token_text
from tests.tiny import tiny_target

SCHEMA = json.loads((Path(eval.look.report.__file__).parent / "report.schema.json").read_text())
FILES = ["acceptance_per_depth.png", "predicted_speedup.png", "tau_per_category.png", "verify_cost.png"]


@pytest.fixture(scope="module")
def fake() -> tuple[dict[str, Any], list[dict[str, Any]]]:
    return Faker(questions=8).build()


def errors(report: Any) -> list[str]:
    """What is wrong with a report as a reader of report.json gets it."""
    read = json.loads(json.dumps(report, allow_nan=False))
    return [f"{found.json_path}: {found.message}" for found in Draft202012Validator(SCHEMA).iter_errors(read)]


def wrong_rows(rows: Sequence[Any]) -> list[str]:
    """What is wrong with rows of generations.jsonl."""
    schema = Draft202012Validator({"$ref": "#/$defs/generation", "$defs": SCHEMA["$defs"]})
    return [f"{found.json_path}: {found.message}" for row in rows for found in schema.iter_errors(row)]


def text(report: dict[str, Any], width: int, encoding: str = "utf-8") -> str:
    stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    print_report(report, Console(file=stream, width=width))
    stream.seek(0)
    return stream.read()


# --- the schema ---------------------------------------------------------------------------------------------------


def test_every_field_is_described() -> None:
    Draft202012Validator.check_schema(SCHEMA)

    def fields(schema: dict[str, Any], name: str) -> Iterator[tuple[str, dict[str, Any]]]:
        yield name, schema
        for key, value in schema.get("properties", {}).items():
            yield from fields(value, f"{name}.{key}")
        for key in ("items", "additionalProperties"):
            if isinstance(schema.get(key), dict):
                yield from fields(schema[key], f"{name}.{key}")

    found = [field for key, value in SCHEMA["$defs"].items() for field in fields(value, key)] + [*fields(SCHEMA, "")]
    undescribed = [
        n for n, field in found if not (field.get("description") or field.get("$ref") or field == {"type": "number"})
    ]
    assert len(found) > 150 and undescribed == [
        "settings.temperatures.items",
        "settings.stop.items",
        "settings.batch_sizes.items",
    ]


@pytest.mark.parametrize("lossy", [False, True])
def test_a_made_up_report_is_valid(lossy: bool) -> None:
    assert errors(Faker(questions=3, lossy=lossy).build()[0]) == []
    assert errors(Faker(questions=1, fakes=FAKES[:1], temperatures=(0.7,)).build()[0]) == []
    assert errors(Faker(questions=3, fakes=(*FAKES, TUNED, EXPORT)).build()[0]) == []


def test_real_reports_are_valid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A trained drafter and n-grams on a tiny target, lossless and typical; what is written has all the files."""
    target = Target.load(str(tiny_target(tmp_path / "target", layers=3, hidden=32, vocab=270)))
    monkeypatch.setattr(eval.run, "measure_costs", partial(measure_costs, budget=0.2))
    frozen = target.frozen()
    drafter = Eagle3Drafter.create(frozen, DraftVocab.full(target.vocab_size), target.tap_ids, seed=0).eval()
    prompts = [Prompt([1, 10 + i, 20 + i], category=CATEGORIES[i % 2]) for i in range(4)]
    for rule in ("lossless", "typical"):
        verify = VerifyConfig(
            max_new_tokens=12, gamma=2, temperatures=[0.0, 1.0], rule=rule, batch_sizes=[1, 2], costs=rule == "lossless"
        )
        bench = Bench(target, [trained(drafter, frozen, verify), ngrams(verify)], verify, 3)
        report = run_benches([bench], prompts, {}, tmp_path / rule, quiet=True)
        assert errors(report) == []
        assert json.loads((tmp_path / rule / "report.json").read_text()) == json.loads(json.dumps(report))
        rows = [json.loads(line) for line in (tmp_path / rule / "generations.jsonl").read_text().splitlines()]
        assert len(rows) == 4 * 2 * 2 and wrong_rows(rows) == []
        assert any(spent["tokens"] for row in rows for spent in row["rounds"])
        for row in rows:
            assert len(row["output_ids"]) == 1 + sum(spent["kept"] for spent in row["rounds"])
            assert all(len(spent["path"]) == spent["accepted"] <= spent["drafted"] for spent in row["rounds"])
            assert all(len(spent["parents"]) == len(spent["tokens"]) for spent in row["rounds"])
        drawn = sorted(path.name for path in (tmp_path / rule / "plots").iterdir())
        assert drawn == [
            file for file in FILES if verify.costs or file not in ("predicted_speedup.png", "verify_cost.png")
        ]
        assert ("LOSSY" in text(report, 100)) is (rule == "typical")
        page = (tmp_path / rule / "report.html").read_text()
        assert ("LOSSY" in page) is (rule == "typical") and page.count("<article") == 16


Change = Callable[[dict[str, Any]], Any]


@pytest.mark.parametrize(
    ("change", "where"),
    [
        (lambda r: r.update(version=1), "$.version"),
        (lambda r: r.pop("definition"), "$:"),
        (lambda r: r.update(tau=2.0), "$:"),
        (lambda r: r["settings"].pop("lossless"), "$.settings:"),
        (lambda r: r["settings"].update(gama=4), "$.settings:"),
        (lambda r: r["settings"].update(draws="sampled"), "$.settings.draws"),
        (lambda r: r["drafters"][0].update(kind="eagle"), "$.drafters[0].kind"),
        (lambda r: r["runs"][0].update(temperature=-1), "$.runs[0].temperature"),
        (lambda r: r["runs"][0].pop("lossless"), "$.runs[0]:"),
        (lambda r: r["runs"][0]["acceptance"].update(tau=0.9), "$.runs[0].acceptance.tau"),
        (lambda r: r["runs"][0]["acceptance"]["rate"].append(1.2), "$.runs[0].acceptance.rate["),
        (lambda r: r["runs"][0]["acceptance"].update(interval=[1.0]), "$.runs[0].acceptance.interval"),
        (lambda r: r["runs"][0]["acceptance"].pop("rate_interval"), "$.runs[0].acceptance:"),
        (lambda r: r["runs"][0]["categories"]["math"].pop("conditional_interval"), "$.runs[0].categories.math:"),
        (lambda r: r["runs"][0]["positions"][0].pop("interval"), "$.runs[0].positions[0]:"),
        (lambda r: r["runs"][2]["cost"]["theory"].pop("gamma"), "$.runs[2].cost"),
        (lambda r: r["runs"][0]["categories"].update(math=2.5), "$.runs[0].categories.math"),
        (lambda r: r["runs"][0]["finish"].update(bored=1), "$.runs[0].finish"),
        (lambda r: r["runs"][0]["speed"][0].update(batch_size=0), "$.runs[0].speed[0].batch_size"),
        (lambda r: r["runs"][0]["speed"][0]["speculative"]["seconds"].update(draft="1"), "$.runs[0].speed[0]."),
        (lambda r: r["comparisons"][0].pop("interval"), "$.comparisons[0]"),
        (lambda r: r["cost_model"]["target"][0].update(tokens=0), "$.cost_model"),
        (lambda r: r["cost_model"]["predictions"][0].pop("best"), "$.cost_model"),
    ],
)  # fmt: skip
def test_the_schema_refuses(fake: tuple[dict[str, Any], Any], change: Change, where: str) -> None:
    report = copy.deepcopy(fake[0])
    change(report)
    found = errors(report)
    assert len(found) == 1 and found[0].startswith(where), found


@pytest.mark.parametrize(
    ("change", "where"),
    [
        (lambda row: row.pop("id"), "$:"),
        (lambda row: row.update(seed=1), "$:"),
        (lambda row: row.update(finish="bored"), "$.finish"),
        (lambda row: row.update(prompt_ids=[]), "$.prompt_ids"),
        (lambda row: row["output_ids"].append(-1), "$.output_ids["),
        (lambda row: row["rounds"][0].pop("path"), "$.rounds[0]:"),
        (lambda row: row["rounds"][0].update(kept=0), "$.rounds[0].kept"),
        (lambda row: row["rounds"][0]["parents"].append(-2), "$.rounds[0].parents["),
    ],
)  # fmt: skip
def test_the_schema_refuses_rows(fake: tuple[Any, list[dict[str, Any]]], change: Change, where: str) -> None:
    row = json.loads(json.dumps(fake[1][0]))
    assert wrong_rows([row]) == []
    change(row)
    found = wrong_rows([row])
    assert len(found) == 1 and found[0].startswith(where), found


# --- files --------------------------------------------------------------------------------------------------------


def test_the_report_is_written_last(
    fake: tuple[dict[str, Any], list[dict[str, Any]]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped before that there is none, not even an older one; another time without a cost model its plots go."""
    report, rows = fake
    written: list[str] = []

    def write(path: Path, content: bytes | str) -> None:
        assert not (tmp_path / "report.json").exists()
        written.append(path.name)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())

    monkeypatch.setattr(eval.look.report, "write_atomic", write)
    assert write_report(report, iter(rows), tmp_path, token_text) == tmp_path / "report.json"
    assert written[0] == "generations.jsonl" and written[-2:] == ["report.html", "report.json"]
    assert sorted(written[1:-2]) == FILES
    assert json.loads((tmp_path / "report.json").read_text()) == json.loads(json.dumps(report))
    lines = (tmp_path / "generations.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == json.loads(json.dumps(rows))
    write_report({**report, "cost_model": None}, rows, tmp_path)
    assert sorted(path.name for path in (tmp_path / "plots").iterdir()) == [FILES[0], FILES[2]]
    monkeypatch.setattr(eval.look.report, "write_atomic", lambda path, content: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        write_report(report, rows, tmp_path)
    assert not (tmp_path / "report.json").exists()


# --- the terminal ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [60, 80, 120, 200])
def test_tables_fit_the_terminal(fake: tuple[dict[str, Any], Any], width: int) -> None:
    report, _ = fake
    shown = text(report, width)
    assert max(map(len, shown.splitlines())) <= width
    words = " ".join(shown.split())
    for run in report["runs"]:
        assert f"{run['acceptance']['tau']:.3f}" in words
        assert f"{run['speed'][2]['speculative']['tokens_per_second']:.1f}" in words
    for word in (
        "95% interval", "uncut (engines)", "rate per depth", "simulated tau", "tau per category", "speed, batch of 8",
        "TPOT, ms", "TTFT, ms", "same as plain", "paired comparison", "cost model", "lossless", *CATEGORIES,
    ):  # fmt: skip
        assert word in words
    assert "LOSSY" not in words


def test_rows_without_a_value_are_left_out(fake: tuple[dict[str, Any], Any]) -> None:
    report = copy.deepcopy(fake[0])
    for run in report["runs"]:
        run |= {"simulated": None, "categories": {}, "positions": [], "cost": None, "same_as_plain": None}
        for entry in run["speed"]:
            entry |= {"plain": None, "speed_up": None, "speed_up_interval": None}
    report |= {"comparisons": [], "cost_model": None}
    assert errors(report) == []
    shown = text(report, 80)
    for word in ("simulated", "category", "tau by", "cost", "plain ", "speed-up", "paired"):
        assert word not in shown.replace("over a plain forward", ""), word
    assert {line.name for section in sections(report["runs"]) for line in section.lines if line.empty} == set()
    assert "tokens/s" in shown


def test_rates_have_intervals_where_there_is_room(fake: tuple[dict[str, Any], Any]) -> None:
    run = copy.deepcopy(fake[0]["runs"][0])
    acceptance = run["acceptance"]
    acceptance |= {"rate": [0.8, 0.0, 0.0], "conditional": [0.8, 0.0, None]}
    acceptance |= {"rate_interval": [[0.7512, 0.85], [0.0, 0.0], None]}
    acceptance |= {"conditional_interval": [[0.7512, 0.85], None, None]}

    def cells(wide: bool) -> list[str]:
        (found,) = (section for section in sections([run], wide=wide) if section.title == "rate per depth")
        return [line.cells[0] for line in found.lines]

    assert cells(wide=False) == ["0.800 (0.80)", "0.000 (0.00)", "0.000 (-)"]
    assert cells(wide=True) == ["0.800, 0.75-0.85 (0.80, 0.75-0.85)", "0.000, 0.00-0.00 (0.00)", "0.000 (-)"]
    assert max(map(len, cells(wide=True))) + 2 <= WIDE


def test_leviathans_formula_is_shown_for_chains(fake: tuple[dict[str, Any], Any]) -> None:
    """All taus by position have intervals too."""
    runs = copy.deepcopy(fake[0]["runs"][:3:2])  # a tree and a chain
    assert runs[0]["cost"]["theory"] is None
    runs[1]["cost"]["theory"] = {"alpha": 0.71249, "gamma": 3, "speed_up": 1.996}
    found = {section.title: {line.name: line.cells for line in section.lines} for section in sections(runs)}
    cost = found["cost, plain forwards"]
    assert cost["accepted of tried: alpha"] == ["-", "0.712"]
    assert cost["best gamma by Leviathan"] == ["-", "3"] and cost["  its speed-up"] == ["-", "2.00x"]
    assert all("-" in cell for cells in found["tau by text length"].values() for cell in cells)


def test_lossy_runs_are_marked_everywhere() -> None:
    report, _ = Faker(questions=2, lossy=True).build()
    shown = text(report, 200)
    assert [*["T", "=", "0"] * 3, *["LOSSY"] * 3] in [line.split() for line in shown.splitlines()]
    assert "acceptance: HuggingFaceTB/SmolLM2-360M-Instruct, 2 prompts, LOSSY: typical" in shown
    assert next(line for line in shown.splitlines() if line.startswith("  output")).split() == [
        "output", *["lossless"] * 3, *["LOSSY", "(typical)"] * 3,
    ]  # fmt: skip
    marked = {(row[0], row[2]) for row in comparisons(report).rows if "LOSSY" in row[0] and "LOSSY" in row[1]}
    assert marked == {(f"{name} LOSSY", "1") for name in ("eagle3-smollm2", "SmolLM2-135M")}


def test_names_are_not_markup_and_need_no_unicode(fake: tuple[dict[str, Any], Any]) -> None:
    report = json.loads(json.dumps(fake[0]).replace("eagle3-smollm2", "[red]h\\u00e9ron\\u001b[0m"))
    assert "[red]héron\\x1b[0m" in text(report, 200)
    shown = text(report, 200, "ascii")
    assert "[red]h\\xe9ron\\x1b[0m" in shown and shown.isascii()


def test_verdicts_by_hand() -> None:
    words = ("better", "worse")
    assert verdict(0.2, (0.1, 0.4), 0.0, *words) == "better"
    assert verdict(-0.2, (-0.4, -0.1), 0.0, *words) == "worse"
    assert verdict(0.1, (-0.1, 0.3), 0.0, *words) == "unclear" == verdict(0.1, (0.0, 0.3), 0.0, *words)
    assert verdict(0.2, None, 0.0, *words) == "too few prompts"
    assert verdict(None, None, 0.0, *words) == "-"


def test_two_prompts_tell_nothing() -> None:
    report, _ = Faker(questions=2).build()
    assert errors(report) == []
    assert {found["acceptance"]["interval"] for found in report["runs"]} == {None}
    table = comparisons(report)
    assert "95% interval" not in table.headings
    places = [i for i, heading in enumerate(table.headings) if heading == "a is"]
    assert len(places) == 2 and {row[i] for row in table.rows for i in places} == {"too few prompts"}
    assert text(report, 200).count("too few prompts") == 2 * len(table.rows)


def test_what_limits_the_drafts_is_said(fake: tuple[dict[str, Any], Any]) -> None:
    report = copy.deepcopy(fake[0])

    def drafts(**settings: Any) -> list[str]:
        report["settings"] |= settings
        (section,) = (found for found in sections(ordered(report)) if found.title == "acceptance")
        return next(line.cells for line in section.lines if line.name == "drafts")

    plain = drafts()
    assert plain[:3] == ["top", "top", "fixed (n-gram)"]
    assert drafts(off_above=4) == [f"{words}, off above a batch of 4" for words in plain]
    assert drafts(adaptive=True)[0] == "top, adaptive depth, off above a batch of 4"
    assert drafts(off_above=None)[0] == "top, adaptive depth"


def test_simulated_tau_stands_beside_what_it_is_compared_with(fake: tuple[dict[str, Any], Any]) -> None:
    run = copy.deepcopy(fake[0]["runs"][0])
    run["simulated"] |= {"tau": 2.5, "measured": 2.0, "difference": 0.25}
    lines = {line.name.strip(): line.cells for line in sections([run])[0].lines}
    assert lines["simulated tau"] == ["2.500"] and lines["measured, counted alike"] == ["2.000"]
    assert lines["simulated against it"] == ["+25.0%"]


def test_the_legend_tells_drafters_of_one_name_apart(fake: tuple[dict[str, Any], Any]) -> None:
    assert [legend(drafter) for drafter in fake[0]["drafters"][::2]] == [
        "eagle3-smollm2: dynamic tree of 30, 6 deep, from outputs/run/checkpoints/step_00002000",
        "ngram: chain of 4",
    ]


def test_what_became_of_a_target_is_said() -> None:
    report, _ = Faker(questions=3, fakes=(FAKES[0], TUNED, EXPORT)).build()
    shown = text(report, 200)
    assert [legend(drafter).split("; ")[1:] for drafter in report["drafters"]] == [
        [],
        ["target CHANGED by training (LoRA), perplexity 7.12 -> 6.50"],
        ["target CHANGED by training"],
    ]
    lines = {line.name.strip(): line.cells for line in sections(ordered(report)[:3])[0].lines}
    assert lines["target"] == ["the original", "CHANGED by training (LoRA)", "CHANGED by training"]
    assert lines["its perplexity"] == ["-", "7.12 -> 6.50", "-"]
    assert all(legend(drafter) in shown for drafter in report["drafters"])


def test_predictions_stand_beside_what_was_measured(fake: tuple[dict[str, Any], Any]) -> None:
    report = copy.deepcopy(fake[0])
    found = report["cost_model"]["predictions"][2]  # SmolLM2-135M, T = 0
    found["best"] = {"tree": "none", "levels": 0, "nodes": 0, "tokens_per_pass": 1.0, "ms": 30.0, "speed_up": 1.0}
    found["chain"][4]["speed_up"] = 1.125
    report["runs"][2]["speed"][0]["speed_up"] = 1.25
    table = predictions(report)
    assert table.headings[-2:] == ["for the size used", "measured"]
    assert table.rows[2] == ["SmolLM2-135M", "0", "no drafts", "1.00", "1.00x", "1.12x", "1.25x"]
    assert table.rows[0][-2] == "-"  # a dynamic tree is none of those predicted
    report["drafters"][0]["tree"] = "static"  # of 30 nodes in 6 levels
    used = next(p for p in report["cost_model"]["predictions"][0]["trees"] if (p["nodes"], p["levels"]) == (30, 6))
    assert predictions(report).rows[0][-2] == f"{used['speed_up']:.2f}x"
    assert predictions(report).rows[1][-2] == "-"  # nothing is predicted of trees at T = 1
    report["drafters"][0]["levels"] = 5
    assert predictions(report).rows[0][-2] == "-"


def test_n_grams_have_no_prediction_but_what_was_measured(fake: tuple[dict[str, Any], Any]) -> None:
    report = copy.deepcopy(fake[0])
    report["runs"][4]["speed"][0]["speed_up"] = 1.5
    table = predictions(report)
    assert [row[:2] for row in table.rows[4:]] == [["ngram", "0"], ["ngram", "1"]]
    assert table.rows[4][2:] == [*["-"] * 4, "1.50x"] and "none for n-grams" in table.title
    report["drafters"].pop()
    assert len(predictions(report).rows) == 4 and "n-grams" not in predictions(report).title
    report["cost_model"] = None
    assert predictions(report).rows == []
