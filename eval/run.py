"""The measurement of a configuration: what it measures and leaves behind.

:func:`evaluate_run` is the stage behind ``python -m eval`` and the end of ``python -m train``.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from conf.schema import Config
from eval.costs.cost import CostModel
from eval.costs.predict import measure_costs, predictions, tuned
from eval.load import load
from eval.look.page import token_texts
from eval.look.report import print_report, write_report
from eval.measure import Bench, Measurement, measure
from eval.processes import Processes
from eval.prompts import Prompt

log = logging.getLogger(__name__)


def evaluate_run(cfg: Config, processes: Processes | None = None) -> dict[str, Any]:
    """Measure ``drafter_path``, or this run's best checkpoint, into report.json of the run's folder: the report.

    ``processes``: those that share the prompts; every one must call, the first one writes and prints.
    """
    assert cfg.output_dir is not None
    benches, prompts, about = load(cfg, processes)
    return run_benches(benches, prompts, about, Path(cfg.output_dir))


def run_benches(
    benches: Sequence[Bench], prompts: Sequence[Prompt], about: dict[str, Any], folder: Path, *, quiet: bool = False
) -> dict[str, Any]:
    """Measure loaded models, target by target, into one report."""
    found = [run_bench(bench, prompts, about, folder, quiet=quiet) for bench in benches]
    if benches[0].processes.rank:
        return found[0].report
    report, rows = joined(found)
    if not quiet:  # first: the numbers are worth more than the files
        print_report(report)
    write_report(report, rows, folder, token_texts(benches[0].target.tokenizer))
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
        bench = tuned(bench, others or asked, costs, folder / "trees")
        about |= {"tuned_on": f"{len(others)} other prompts" if others else "the prompts of the measurement"}
        if not others:
            log.warning("verify.tune: no prompts are left over; the tree is chosen on those that it is measured on")
    found = measure(bench, asked, about=about, quiet=quiet)
    if costs and not bench.processes.rank:
        told = predictions(bench, costs, found.texts)
        found.report["cost_model"] = costs.to_dict() | {"predictions": told}
    return found


def joined(found: Sequence[Measurement]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The report and the rows of measurements on several targets. Costs are those of the first target: tuning changes
    none."""
    first = found[0].report
    lists = {key: [entry for one in found for entry in one.report[key]] for key in ("drafters", "runs", "comparisons")}
    costs = [one.report["cost_model"] for one in found if one.report["cost_model"]]
    if costs:
        draft = {name: cost for one in costs for name, cost in one["draft"].items()}
        told = [prediction for one in costs for prediction in one["predictions"]]
        costs[:1] = [costs[0] | {"draft": draft, "predictions": told}]
    rows = [row for one in found for row in one.rows]
    return first | lists | {"cost_model": costs[0] if costs else None}, rows
