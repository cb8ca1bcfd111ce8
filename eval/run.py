"""The measurement of a configuration: what it measures and leaves behind.

:func:`evaluate_run` is the stage behind ``python -m eval`` and the end of ``python -m train``.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from conf.schema import Config
from eval.costs.cost import CostModel
from eval.costs.predict import measure_costs, predictions, tune_shapes
from eval.load import load
from eval.look.page import token_texts
from eval.look.report import print_report, write_report
from eval.measure import Bench, Measurement, measure
from eval.numbers.pairs import compare
from eval.processes import Processes
from eval.prompts import Prompt

log = logging.getLogger(__name__)


def evaluate_run(cfg: Config, processes: Processes | None = None) -> dict[str, Any]:
    """Measure ``drafter_path``, or this run's best checkpoint, into report.json of the run's folder: the report.

    ``processes``: those that share the prompts; every one must call, the first one writes and prints.
    """
    assert cfg.output_dir is not None
    loaded = load(cfg, processes)
    return run_benches(loaded.benches(), loaded.prompts, loaded.about, Path(cfg.output_dir), order=loaded.names)


def run_benches(
    benches: Iterable[Bench],
    prompts: Sequence[Prompt],
    about: dict[str, Any],
    folder: Path,
    *,
    order: Sequence[str] | None = None,
    quiet: bool = False,
) -> dict[str, Any]:
    """Measure loaded models, target by target, into one report. A bench is let go of before the next one is asked for.

    order: of the candidates' names in the report, by default that of the benches.
    """
    found, rank, token_text = list[Measurement](), 0, None
    for bench in benches:
        found.append(run_bench(bench, prompts, about, folder, quiet=quiet))
        rank, token_text = bench.processes.rank, token_texts(bench.target.tokenizer)
        del bench  # the next target may need the memory
    report, rows = joined(found, order)
    if rank:
        return report
    if not quiet:  # first: the numbers are worth more than the files
        print_report(report)
    write_report(report, rows, folder, token_text)
    return report


def run_bench(
    bench: Bench, prompts: Sequence[Prompt], about: dict[str, Any], folder: Path, *, quiet: bool = False
) -> Measurement:
    """Measure on the first ``verify.max_prompts`` prompts; the others serve to choose a tree."""
    verify = bench.verify
    asked, others = prompts[: verify.max_prompts], prompts[verify.max_prompts :]
    costs: CostModel | None = None
    if asked and (verify.costs or verify.tune):  # each process by itself would choose trees of its own
        costs = bench.processes.first(measure_costs(bench.target, bench.candidates))
    if verify.tune and costs:
        bench = tune_shapes(bench, others or asked, costs, folder / "trees")
        about |= {"tuned_on": f"{len(others)} other prompts" if others else "the prompts of the measurement"}
        if not others:
            log.warning("verify.tune: no prompts are left over; the tree is chosen on those that it is measured on")
    found = measure(bench, asked, about=about, quiet=quiet)
    if costs and not bench.processes.rank:
        told = predictions(bench, costs, found.texts)
        found.report["cost_model"] = costs.to_dict() | {"predictions": told}
    return found


def joined(
    found: Sequence[Measurement], order: Sequence[str] | None = None
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The report and the rows of measurements of the same prompts on several targets, whose drafters are paired like
    those of one. Settings and costs are those of the first target: tuning changes none."""
    first = found[0].report
    names = [drafter["name"] for one in found for drafter in one.report["drafters"]]
    if len({*names}) < len(names):
        raise ValueError(f"drafters of several targets share a name: {', '.join(names)}")
    place = {name: i for i, name in enumerate(order or names)}
    temperatures = first["settings"]["temperatures"]

    def by_run(of: dict[str, Any]) -> tuple[int, int]:
        return temperatures.index(of["temperature"]), place[of["drafter"]]

    drafters = sorted((entry for one in found for entry in one.report["drafters"]), key=lambda of: place[of["name"]])
    runs = sorted((run for one in found for run in one.report["runs"]), key=by_run)
    rows = sorted((row for one in found for row in one.rows), key=by_run)
    sums = {key: own for one in found for key, own in one.sums.items()}
    paired = {key: sums[key] for key in sorted(sums, key=lambda key: place[key[0]])}
    comparisons = compare(paired, seed=first["settings"]["seed"])
    whole = first | {"drafters": drafters, "runs": runs, "comparisons": comparisons}
    return whole | {"cost_model": joined_costs([one.report["cost_model"] for one in found], place)}, rows


def joined_costs(found: Sequence[dict[str, Any] | None], place: dict[str, int]) -> dict[str, Any] | None:
    costs = [one for one in found if one]
    if not costs:
        return None
    draft = {name: cost for one in costs for name, cost in one["draft"].items()}
    told = [prediction for one in costs for prediction in one["predictions"]]
    return costs[0] | {
        "draft": {name: draft[name] for name in sorted(draft, key=place.__getitem__)},
        "predictions": sorted(told, key=lambda prediction: place[prediction["drafter"]]),
    }
