"""Where each token of an answer came from, and the plots of a report."""

from __future__ import annotations

import copy
import json
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from eval.look.origin import cut, origins
from eval.look.plots import label, plots, speed_up
from tests.reports import Faker

FILES = ["acceptance_per_depth.png", "predicted_speedup.png", "tau_per_category.png", "verify_cost.png"]


@pytest.fixture(scope="module")
def fake() -> tuple[dict[str, Any], list[dict[str, Any]]]:
    return Faker(questions=8).build()


# --- where tokens come from ------------------------------------------------------------------------------------------


def spent(accepted: int, kept: int, parents: Sequence[int] = (), path: Sequence[int] = (), drafted: int = 2) -> Any:
    tokens = list(range(100, 100 + len(parents)))
    found = {"drafted": drafted, "accepted": accepted, "kept": kept}
    return found | {"tokens": tokens, "parents": list(parents), "path": list(path)}


def test_origins_by_hand() -> None:
    tree = (-1, -1, 0, 0)  # nodes 2 and 3 are leaves behind 0, node 1 is one behind the root
    row = {
        "output_ids": [*range(12)],
        "rounds": [
            spent(2, 3, tree, (0, 3)),  # to a leaf: bonus
            spent(1, 2, tree, (0,)),  # 2 and 3 rejected
            spent(1, 2, tree, (1,)),  # a leaf at depth 0: bonus
            spent(0, 1, tree),  # 0 and 1 rejected
            spent(0, 1, drafted=0),
            spent(2, 2, (-1, 0, 1), (0, 1), drafted=3),  # cut: its own token is not in the output
        ],
    }
    assert [(o.kind, o.depth, o.pass_number) for o in origins(row)] == [
        ("prefill", None, None),
        ("accepted", 0, 0), ("accepted", 1, 0), ("bonus", 2, 0),
        ("accepted", 0, 1), ("own", 1, 1),
        ("accepted", 0, 2), ("bonus", 1, 2),
        ("own", 0, 3),
        ("undrafted", None, 4),
        ("accepted", 0, 5), ("accepted", 1, 5),
    ]  # fmt: skip
    assert cut(row) == []
    row["rounds"][-1]["kept"] = 1
    row["output_ids"].pop()
    assert cut(row) == [101] and origins(row)[-1].depth == 0
    with pytest.raises(AssertionError, match="kept tokens"):
        origins(row | {"output_ids": [1, 2]})


def test_origins_without_a_recorded_tree() -> None:
    row = {"output_ids": [1, 2, 3, 4, 5, 6], "rounds": [spent(2, 3), spent(1, 2)]}
    assert [o.kind for o in origins(row)] == ["prefill", "accepted", "accepted", "bonus", "accepted", "own"]
    assert origins({"output_ids": [], "rounds": []}) == [] and cut({"rounds": []}) == []


# --- plots --------------------------------------------------------------------------------------------------------


def test_plots_are_drawn_from_what_there_is(fake: tuple[dict[str, Any], Any]) -> None:
    report = copy.deepcopy(fake[0])
    drawn = plots(report)
    assert sorted(plot.file for plot in drawn) == FILES
    assert all(plot.png[:4] == b"\x89PNG" and plot.about for plot in drawn)
    for run in report["runs"]:
        run["acceptance"]["rate_interval"] = [[0.0, 1.0] for _ in run["acceptance"]["rate"]]
    for prediction in report["cost_model"]["predictions"]:
        prediction |= {"chain": [], "trees": [], "best": None}
    fewer = plots(report)
    assert [plot.file for plot in fewer] == [FILES[0], FILES[2], FILES[3]]
    assert fewer[0].png != drawn[0].png and fewer[1].png == drawn[1].png  # with other error bars; the same again
    for run in report["runs"]:
        run["acceptance"] |= {"passes": 0, "rate": [None], "conditional": [None]}
        run["acceptance"] |= {"rate_interval": [None], "conditional_interval": [None]}
        run["categories"] = {}
    assert [plot.file for plot in plots(report | {"cost_model": None})] == []


def test_no_point_of_the_predicted_speed_up_is_cut_off(fake: tuple[dict[str, Any], Any]) -> None:
    """The panels of a row share their scale; trees and measured values may lie far above the chains."""
    report = copy.deepcopy(fake[0])
    for point in report["cost_model"]["predictions"][0]["trees"]:  # at T = 0, the panel on the right
        point["speed_up"] = 7.0
    report["runs"][0]["speed"][0]["speed_up"] = 9.0  # of a tree, too
    figure = speed_up(report)
    assert figure is not None
    tops = []
    for axes in figure.axes:
        low, high = axes.get_ylim()
        assert low == 0 and max(float(np.max(line.get_ydata(), initial=0.0)) for line in axes.get_lines()) < high
        tops.append(high)
    assert tops[0] == tops[1] > 9 > 7 > tops[2] == tops[3]


def test_names_that_a_plot_cannot_write(fake: tuple[dict[str, Any], Any]) -> None:
    assert label("a$b$ 鹰 \u202e é", 40) == r"a\$b\$ \u9e70 \u202e é"
    assert label("_x" * 30, 10) == "x_x_x_x.."
    report = json.loads(json.dumps(fake[0]).replace("ngram", "_$\\u9e70^{").replace("coding", "$x_{"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(plots(report)) == 4
