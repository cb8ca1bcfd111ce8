"""The pictures of a report, as PNG bytes. A picture whose data the report lacks is not drawn."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure  # draws without a display
from matplotlib.font_manager import FontProperties, findfont, get_font
from matplotlib.ticker import MaxNLocator

from eval.look.table import LOSSY, measured_speed_up
from models.visible import visible

# Okabe and Ito's colours, told apart by the colour-blind; each goes with a marker of its own.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
MARKERS = "osD^vPX"
WIDTH = 8.6  # inches
RATES = {"rate": "of all passes", "conditional": "given the depth before"}


class Plot(NamedTuple):
    """file: its name in the run's folder; about: what it shows, also for those who can't see it."""

    file: str
    about: str
    png: bytes


def plots(report: Mapping[str, Any]) -> list[Plot]:
    drawn = ((file, about, draw(report)) for file, about, draw in PLOTS)
    return [Plot(file, about, png(figure)) for file, about, figure in drawn if figure is not None]


def png(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=120, metadata={"Software": None})
    return buffer.getvalue()


def panels(rows: int, columns: int, height: float) -> tuple[Figure, list[list[Axes]]]:
    """Panels of a row have the same scale upwards."""
    figure = Figure(figsize=(WIDTH, height * rows), layout="constrained")
    found = figure.subplots(rows, columns, squeeze=False, sharey="row")
    for axes in found.flat:
        axes.grid(alpha=0.3)
    for axes in found[:, 1:].flat:
        axes.yaxis.label.set_visible(False)
    return figure, found.tolist()


# --- acceptance ------------------------------------------------------------------------------------------------


def per_depth(report: Mapping[str, Any]) -> Figure | None:
    """Two panels a temperature: rates of all passes, and of those that accepted the depth before."""
    runs = [run for run in report["runs"] if run["acceptance"]["passes"] and run["acceptance"]["rate"]]
    if not runs:
        return None
    temperatures = list(dict.fromkeys(run["temperature"] for run in runs))
    figure, grid = panels(len(temperatures), 2, 2.9)
    for row, temperature in zip(grid, temperatures, strict=True):
        for axes, (key, said) in zip(row, RATES.items(), strict=True):
            for run in runs:
                if run["temperature"] == temperature:
                    rates(axes, report, run, key)
            axes.set(ylim=(0, 1.03), xlabel="draft depth", ylabel="acceptance rate")
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
            axes.set_title(f"T = {temperature:g}: {said}", fontsize=10)
    legend(figure, [row[0] for row in grid])
    return figure


def rates(axes: Axes, report: Mapping[str, Any], run: Mapping[str, Any], key: str) -> None:
    acceptance = run["acceptance"]
    values = acceptance[key]
    depths = [depth for depth, value in enumerate(values) if value is not None]
    bounds = acceptance[f"{key}_interval"]
    errors = spread([values[depth] for depth in depths], [bounds[depth] for depth in depths])
    shift = 0.06 * number(report, run["drafter"])  # bars of errors beside each other
    xs = [depth + shift for depth in depths]
    axes.errorbar(xs, [values[depth] for depth in depths], errors, capsize=2, lw=1.4, ms=5, **style(report, run))


def per_category(report: Mapping[str, Any]) -> Figure | None:
    """Bars with intervals, a panel a temperature, a group a category."""
    runs = [run for run in report["runs"] if any(found["tau"] is not None for found in run["categories"].values())]
    if not runs:
        return None
    names = list(dict.fromkeys(name for run in runs for name in run["categories"]))
    temperatures = list(dict.fromkeys(run["temperature"] for run in runs))
    figure, grid = panels(len(temperatures), 1, 3.2)
    for (axes,), temperature in zip(grid, temperatures, strict=True):
        mine = [run for run in runs if run["temperature"] == temperature]
        for place, run in enumerate(mine):
            bars(axes, report, run, names, (place - (len(mine) - 1) / 2) * 0.8 / len(mine), 0.8 / len(mine))
        wide = max(map(len, names)) * len(names) > 75
        axes.set_xticks(range(len(names)), [label(name, 24) for name in names], rotation=25 * wide)
        for tick in axes.get_xticklabels() if wide else ():
            tick.set_horizontalalignment("right")
        axes.grid(axis="x", visible=False)
        axes.set_axisbelow(True)
        axes.set_ylabel("tau, tokens a pass")
        axes.set_title(f"T = {temperature:g}", fontsize=10)
        axes.axhline(1, color="0.4", lw=0.8, ls=":")  # plain decoding
    legend(figure, [row[0] for row in grid])
    return figure


def bars(
    axes: Axes, report: Mapping[str, Any], run: Mapping[str, Any], names: Sequence[str], shift: float, width: float
) -> None:
    found = [(place, run["categories"][name]) for place, name in enumerate(names) if name in run["categories"]]
    found = [(place, entry) for place, entry in found if entry["tau"] is not None]
    taus = [entry["tau"] for _, entry in found]
    errors = spread(taus, [entry["interval"] for _, entry in found])
    look = {key: value for key, value in style(report, run).items() if key in ("color", "label")}
    xs = [place + shift for place, _ in found]
    axes.bar(xs, taus, width * 0.92, yerr=errors, capsize=2, error_kw={"lw": 0.9, "ecolor": "0.25"}, **look)


def spread(values: Sequence[float], bounds: Sequence[Sequence[float] | None]) -> list[list[float]]:
    """Distances [2][n] from values down and up to their bounds, for error bars."""
    pairs = [bound or (value, value) for value, bound in zip(values, bounds, strict=True)]
    return [
        [max(value - low, 0.0) for value, (low, _) in zip(values, pairs, strict=True)],
        [max(high - value, 0.0) for value, (_, high) in zip(values, pairs, strict=True)],
    ]


# --- cost model --------------------------------------------------------------------------------------------------


def speed_up(report: Mapping[str, Any]) -> Figure | None:
    """Predicted speed-up over gamma and over the size of the tree, a row a temperature; measured ones as stars."""
    found = report["cost_model"]["predictions"] if report["cost_model"] else []
    found = [prediction for prediction in found if prediction["best"]]  # of the others nothing is known
    keys = [key for key in ("chain", "trees") if any(prediction[key] for prediction in found)]
    if not keys:
        return None
    temperatures = list(dict.fromkeys(prediction["temperature"] for prediction in found))
    figure, grid = panels(len(temperatures), len(keys), 3.0)
    for row, temperature in zip(grid, temperatures, strict=True):
        for axes, key in zip(row, keys, strict=True):
            for prediction in found:
                if prediction["temperature"] == temperature:
                    predicted(axes, report, prediction, key)
            axes.plot([], [], "*", ms=11, color="0.4", label="measured")
            axes.axhline(1, color="0.4", lw=0.8, ls=":")  # plain decoding
            axes.set(ylabel="speed-up")
            axes.set_xlabel("gamma: drafted tokens of a chain" if key == "chain" else "drafted tokens of a tree")
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
            any_here = any(p[key] for p in found if p["temperature"] == temperature)
            axes.set_title(f"T = {temperature:g}" + ("" if any_here else ": not predicted"), fontsize=10)
        row[0].set_ylim(0, None)  # of all panels in the row, now that all points are in them
    legend(figure, [axes for row in grid for axes in row])
    return figure


def predicted(axes: Axes, report: Mapping[str, Any], prediction: Mapping[str, Any], key: str) -> None:
    drafter = next(d for d in report["drafters"] if d["name"] == prediction["drafter"])
    look = style(report, prediction)
    best: dict[int, float] = {}  # of the trees of one size that of the best depth
    for point in prediction[key]:
        size = point["gamma" if key == "chain" else "nodes"]
        best[size] = max(best.get(size, -math.inf), point["speed_up"])
    sizes = sorted(best)
    if sizes:
        axes.plot(sizes, [best[size] for size in sizes], lw=1.4, ms=4, **look)
    measured = measured_speed_up(report, prediction["drafter"], prediction["temperature"])
    chain = drafter["tree"] == "chain"
    if measured is not None and chain == (key == "chain"):
        axes.plot(drafter["nodes"], measured, "*", ms=15, mec="white", mew=0.8, color=look["color"], zorder=5)


def verify_cost(report: Mapping[str, Any]) -> Figure | None:
    """Milliseconds of one forward of the target over the tokens in it; on the right in plain forwards."""
    points = sorted((p["tokens"], p["ms"]) for p in report["cost_model"]["target"]) if report["cost_model"] else []
    if not points:
        return None
    figure, (((axes,)),) = panels(1, 1, 3.2)
    axes.plot(*zip(*points, strict=True), "o-", color=COLOURS[0], lw=1.4, ms=5)
    axes.set(xlabel="tokens in one forward of the target (the confirmed one and the drafts)", ylabel="ms")
    axes.set_ylim(0, None)
    axes.set_xscale("log", base=2)
    ticks = [2**i for i in range(points[-1][0].bit_length())]
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    single = dict(points).get(1)
    if single:
        right = axes.secondary_yaxis("right", functions=(lambda ms: ms / single, lambda times: times * single))
        right.set_ylabel("plain forwards")
    axes.set_title(f"verification behind {report['cost_model']['past']:,} tokens", fontsize=10)
    return figure


# --- names and looks -----------------------------------------------------------------------------------------------


def number(report: Mapping[str, Any], drafter: str) -> int:
    return next(i for i, found in enumerate(report["drafters"]) if found["name"] == drafter)


def style(report: Mapping[str, Any], run: Mapping[str, Any]) -> dict[str, Any]:
    """Colour, marker and name of a run's or prediction's drafter, the same in every picture."""
    i = number(report, run["drafter"])
    lossy = any(r["drafter"] == run["drafter"] and not r["lossless"] for r in report["runs"])
    name = label(run["drafter"], 40) + (f" ({LOSSY})" if lossy else "")
    return {"color": COLOURS[i % len(COLOURS)], "marker": MARKERS[i % len(MARKERS)], "label": name}


def label(name: str, most: int) -> str:
    """A name as the plots' font can write it: escapes for other letters, no formulas, not too long."""
    font = get_font(findfont(FontProperties()))
    text = name if len(name) <= most else f"{name[: most - 2]}.."
    text = "".join(c if font.get_char_index(ord(c)) else c.encode("unicode_escape").decode() for c in visible(text, ""))
    return text.replace("$", r"\$").lstrip("_") or "_"  # names that begin with _ are left out of legends


def legend(figure: Figure, grid: Iterable[Axes]) -> None:
    """One legend above all panels."""
    handles: dict[str, Any] = {}
    for axes in grid:
        for handle, name in zip(*axes.get_legend_handles_labels(), strict=True):
            handles.setdefault(name, handle)
    figure.legend(handles.values(), handles, loc="outside upper left", ncols=min(len(handles), 4), fontsize=9)


PLOTS: list[tuple[str, str, Callable[[Mapping[str, Any]], Figure | None]]] = [
    (
        "acceptance_per_depth.png",
        "Acceptance rate by draft depth: of all passes, and given the depth before, with 95% intervals",
        per_depth,
    ),
    ("tau_per_category.png", "Acceptance length tau by category, with 95% intervals", per_category),
    ("predicted_speedup.png", "Speed-up predicted by the cost model over the size of the draft", speed_up),
    ("verify_cost.png", "Time of one verification by the tokens in it", verify_cost),
]
