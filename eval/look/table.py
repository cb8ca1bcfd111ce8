"""A report in words: headings and cells of its tables, for the terminal and the page alike. ASCII but for names."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

VERSION = 2  # of report.json's structure
NONE = "-"
WIDE = 38  # characters of a cell with the intervals of two rates
LOSSY = "LOSSY"
TUNED = " (tuned target)"  # behind the name of a drafter that was trained together with its target
TOO_FEW = "too few prompts"
NOTE = (
    "rate per depth: share of all passes that accepted it (of those that accepted the depth before). c: a level of "
    "drafts over a plain forward. Leviathan's formula: every depth accepts alpha, and a verification takes no longer "
    "than a forward. TPOT: time per output token of one sequence, after its first; TTFT: to its first."
)


class Column(NamedTuple):
    """One run: a drafter at a temperature."""

    drafter: str
    temperature: str
    lossless: bool


class Line(NamedTuple):
    name: str
    cells: list[str]

    @property
    def empty(self) -> bool:
        return all(cell == NONE for cell in self.cells)


class Section(NamedTuple):
    title: str
    lines: list[Line]


class Table(NamedTuple):
    """headings: of the columns; words: the first so many columns are words, the others numbers."""

    title: str
    headings: list[str]
    rows: list[list[str]]
    words: int


def ordered(report: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The runs by temperature, so that drafters stand side by side; otherwise in the order of the report.

    Their ``drafts`` also say what the settings make of the depth, ``target`` what became of the drafter's target.
    """
    temperatures = list(dict.fromkeys(run["temperature"] for run in report["runs"]))
    targets = {drafter["name"]: drafter.get("target") for drafter in report["drafters"]}
    limits = _limits(report["settings"])
    limited = [
        {**run, "drafts": run["drafts"] + limits, "target": targets.get(run["drafter"])} for run in report["runs"]
    ]
    return sorted(limited, key=lambda run: temperatures.index(run["temperature"]))


def _limits(settings: Mapping[str, Any]) -> str:
    """verify.adaptive and verify.off_above in words."""
    adaptive = ", adaptive depth" if settings.get("adaptive") else ""
    most = settings.get("off_above")
    return adaptive + ("" if most is None else f", off above a batch of {most}")


def columns(runs: Iterable[Mapping[str, Any]]) -> list[Column]:
    return [Column(run["drafter"], f"T = {run['temperature']:g}", run["lossless"]) for run in runs]


def sections(runs: Sequence[Mapping[str, Any]], *, wide: bool = False) -> list[Section]:
    """Sections of lines with a cell per run; lines and sections without any value are left out.

    wide: there is room for WIDE characters a cell, and rates have their intervals.
    """
    found = [
        Section("acceptance", [*_acceptance(runs)]),
        Section("rate per depth", [*_depths(runs, wide)]),
        Section("tau per category", [*_categories(runs)]),
        Section("tau by text length", [*_positions(runs)]),
        *(Section(f"speed, batch of {size}", [*_speed(runs, size)]) for size in batch_sizes(runs)),
        Section("cost, plain forwards", [*_cost(runs)]),
        Section("ends", [*_ends(runs)]),
    ]
    kept = [Section(title, [line for line in lines if not line.empty]) for title, lines in found]
    return [section for section in kept if section.lines]


def _acceptance(runs: Sequence[Mapping[str, Any]]) -> Iterator[Line]:
    yield Line("output", ["lossless" if run["lossless"] else f"{LOSSY} (typical)" for run in runs])
    if any(run.get("target") for run in runs):
        yield Line("target", [changed(run.get("target")) for run in runs])
        yield Line("  its perplexity", [perplexity(run.get("target")) for run in runs])
    yield Line("drafts", [run["drafts"] for run in runs])
    yield _line(runs, "tau", "acceptance", "tau")
    yield Line("  95% interval", [interval(run["acceptance"]["interval"]) for run in runs])
    yield _line(runs, "  mean over prompts", "acceptance", "per_prompt_mean")
    yield _line(runs, "  uncut (engines)", "uncut", "tau")
    yield _line(runs, "simulated tau", "simulated", "tau")
    yield _line(runs, "  measured, counted alike", "simulated", "measured")
    yield _line(runs, "  simulated against it", "simulated", "difference", form="{:+.1%}")
    yield _line(runs, "passes", "acceptance", "passes", form="{:,d}")
    yield _line(runs, "questions", "questions", form="{:,d}")


def _depths(runs: Sequence[Mapping[str, Any]], wide: bool) -> Iterator[Line]:
    deepest = max((len(run["acceptance"]["rate"]) for run in runs), default=0)
    for depth in range(deepest):
        yield Line(f"  depth {depth}", [_rate(run["acceptance"], depth, wide) for run in runs])


def _rate(acceptance: Mapping[str, Any], depth: int, wide: bool) -> str:
    """The rate, and in brackets the conditional one."""
    if depth >= len(acceptance["rate"]) or acceptance["rate"][depth] is None:
        return NONE

    def value(key: str, form: str) -> str:
        rate, bounds = acceptance[key][depth], acceptance[f"{key}_interval"][depth]
        told = NONE if rate is None else form.format(rate)
        return f"{told}, {interval(bounds)}" if wide and bounds is not None else told

    return f"{value('rate', '{:.3f}')} ({value('conditional', '{:.2f}')})"


def _categories(runs: Sequence[Mapping[str, Any]]) -> Iterator[Line]:
    for name in dict.fromkeys(name for run in runs for name in run["categories"]):
        yield Line(f"  {name}", [_tau(run["categories"].get(name)) for run in runs])


def _positions(runs: Sequence[Mapping[str, Any]]) -> Iterator[Line]:
    buckets = sorted({(p["from"], p["to"]) for run in runs for p in run["positions"]}, key=lambda b: b[0])
    for first, last in buckets:
        found = [next((p for p in run["positions"] if (p["from"], p["to"]) == (first, last)), None) for run in runs]
        name = f"  from {first:,} tokens" if last is None else f"  {first:,}-{last:,} tokens"
        yield Line(name, [_tau(p) for p in found])


def _tau(acceptance: Mapping[str, Any] | None) -> str:
    if acceptance is None or acceptance["tau"] is None:
        return NONE
    bounds = interval(acceptance["interval"])
    return f"{acceptance['tau']:.2f}" if bounds == NONE else f"{acceptance['tau']:.2f} ({bounds})"


def batch_sizes(runs: Iterable[Mapping[str, Any]]) -> list[int]:
    return sorted({entry["batch_size"] for run in runs for entry in run["speed"]})


def _speed(runs: Sequence[Mapping[str, Any]], size: int) -> Iterator[Line]:
    entries: list[Mapping[str, Any]] = [speed_of(run, size) or {} for run in runs]

    def both(name: str, *path: str, form: str) -> Iterator[Line]:
        yield _line(entries, f"{name}", "speculative", *path, form=form)
        yield _line(entries, "  plain", "plain", *path, form=form)

    yield from both("tokens/s", "tokens_per_second", form="{:.1f}")
    yield _line(entries, "  speed-up", "speed_up", form="{:.2f}x")
    yield Line("  95% interval", [interval(entry.get("speed_up_interval")) for entry in entries])
    for key, name in (("tpot_ms", "TPOT, ms"), ("ttft_ms", "TTFT, ms")):
        yield from both(name, key, "mean", form="{:.1f}")
        yield _line(entries, "  p95", "speculative", key, "p95", form="{:.1f}")


def speed_of(run: Mapping[str, Any], size: int) -> Mapping[str, Any] | None:
    """The run's speed at a batch size."""
    return next((entry for entry in run["speed"] if entry["batch_size"] == size), None)


def _cost(runs: Sequence[Mapping[str, Any]]) -> Iterator[Line]:
    yield _line(runs, "one draft: c", "cost", "draft", form="{:.3f}")
    yield _line(runs, "verification", "cost", "verify", form="{:.2f}")
    yield _line(runs, "accepted of tried: alpha", "cost", "theory", "alpha")
    yield _line(runs, "best gamma by Leviathan", "cost", "theory", "gamma", form="{:d}")
    yield _line(runs, "  its speed-up", "cost", "theory", "speed_up", form="{:.2f}x")


def _ends(runs: Sequence[Mapping[str, Any]]) -> Iterator[Line]:
    same = [run["same_as_plain"] for run in runs]
    yield Line("same as plain", [f"{found['identical']} of {found['prompts']}" if found else NONE for found in same])
    for name in dict.fromkeys(name for run in runs for name in run["finish"]):
        counts = [run["finish"].get(name, 0) for run in runs]
        if any(counts):
            yield Line(f"ended by {name}", [str(count) for count in counts])


def comparisons(report: Mapping[str, Any]) -> Table:
    """Drafters against each other on the same prompts. Better or worse: the interval excludes no difference. What was
    measured with a tuned target is marked: its texts are others."""
    headings = ["a", "b", "T", "tau a - b", "95% interval", "a is", "speed a / b", "95% interval", "a is"]
    lossy = {(run["drafter"], run["temperature"]) for run in report["runs"] if not run["lossless"]}
    tuned = {drafter["name"] for drafter in report["drafters"] if drafter.get("target")}
    rows = []
    for found in report["comparisons"]:
        marks = [f" {LOSSY}" if (found[side], found["temperature"]) in lossy else "" for side in "ab"]
        marks = [mark + TUNED * (found[side] in tuned) for side, mark in zip("ab", marks, strict=True)]
        speed = found["speed_interval"]
        ratio = found["speed_ratio"]
        rows.append(
            [
                *(found[side] + mark for side, mark in zip("ab", marks, strict=True)),
                f"{found['temperature']:g}",
                NONE if found["tau_difference"] is None else f"{found['tau_difference']:+.3f}",
                interval(found["interval"], "{:+.3f}"),
                verdict(found["tau_difference"], found["interval"], 0.0, "better", "worse"),
                NONE if ratio is None else f"{ratio:.2f}x",
                interval(speed),
                verdict(ratio, speed, 1.0, "faster", "slower"),
            ]
        )
    return Table("paired comparison on the same prompts", headings, _filled(headings, rows), 2)


def verdict(value: float | None, bounds: Sequence[float] | None, even: float, above: str, below: str) -> str:
    """A word on a value and its interval: ``above`` or ``below`` if that excludes ``even``, "unclear" if not."""
    if bounds is None:
        return NONE if value is None else TOO_FEW
    low, high = bounds
    return above if low > even else below if high < even else "unclear"


def predictions(report: Mapping[str, Any]) -> Table:
    """What the cost model thinks best for each run, beside what was measured with the tree that was used."""
    headings = ["drafter", "T", "best", "tokens a pass", "predicted", "for the size used", "measured"]
    title = "cost model: speed-up predicted from measured costs"
    rows, known = [], _predicted(report)
    if any(found["drafter"] in _ngrams(report) for found in known):
        title += " (none for n-grams: what they find depends on the text)"
    for found in known:
        best = found["best"]
        used = predicted_as_used(report, found)
        measured = measured_speed_up(report, found["drafter"], found["temperature"])
        rows.append(
            [
                found["drafter"],
                f"{found['temperature']:g}",
                shape(best) if best else NONE,
                NONE if best is None else f"{best['tokens_per_pass']:.2f}",
                NONE if best is None else f"{best['speed_up']:.2f}x",
                NONE if used is None else f"{used['speed_up']:.2f}x",
                NONE if measured is None else f"{measured:.2f}x",
            ]
        )
    return Table(title, headings, _filled(headings, rows), 1)


def _predicted(report: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The predictions, and for each run of n-grams, which have none, one without numbers."""
    found: list[Mapping[str, Any]] = [*report["cost_model"]["predictions"]] if report["cost_model"] else []
    there = {(prediction["drafter"], prediction["temperature"]) for prediction in found}
    for run in report["runs"] if found else ():
        if run["drafter"] in _ngrams(report) and (run["drafter"], run["temperature"]) not in there:
            about = {"drafter": run["drafter"], "temperature": run["temperature"]}
            found.append({**about, "chain": [], "trees": [], "best": None})
    return found


def _ngrams(report: Mapping[str, Any]) -> list[str]:
    return [drafter["name"] for drafter in report["drafters"] if drafter["kind"] == "ngram"]


def legend(drafter: Mapping[str, Any]) -> str:
    """A drafter of the report in words: its name, tree, where it was loaded from, and what became of its target."""
    source = f", from {drafter['path']}" if drafter["path"] else ""
    told = f"; target {target_of(drafter)}" if drafter.get("target") else ""
    return f"{drafter['name']}: {shape(drafter)}{source}{told}"


def target_of(drafter: Mapping[str, Any]) -> str:
    """Which target a drafter of the report goes with, and what its training did to that."""
    told = perplexity(drafter.get("target"))
    return changed(drafter.get("target")) + ("" if told == NONE else f", perplexity {told}")


def changed(target: Mapping[str, Any] | None) -> str:
    """A warning in words: lossless then means that the output is the tuned target's."""
    if not target:
        return "the original"
    return "CHANGED by training" + {"lora": " (LoRA)", "full": " (all weights)"}.get(target["kind"], "")


def perplexity(target: Mapping[str, Any] | None) -> str:
    """Of a tuned target on held-out text, before and after."""
    found = (target or {}).get("perplexity") or {}
    return f"{found['before']:.2f} -> {found['after']:.2f}" if {"before", "after"} <= set(found) else NONE


def shape(drafts: Mapping[str, Any]) -> str:
    """The tree of a drafter, or the best one of a prediction, in words."""
    if drafts["tree"] == "none":
        return "no drafts"
    if drafts["tree"] == "chain":
        return f"chain of {drafts['levels']}"
    return f"{drafts['tree']} tree of {drafts['nodes']}, {drafts['levels']} deep"


def predicted_as_used(report: Mapping[str, Any], prediction: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The prediction for a chain, or a static tree, of as many nodes and levels as the drafter was measured with."""
    used = next(drafter for drafter in report["drafters"] if drafter["name"] == prediction["drafter"])
    if used["tree"] == "chain":
        return next((p for p in prediction["chain"] if p["gamma"] == used["levels"]), None)
    key = used["nodes"], used["levels"]
    trees = prediction["trees"] if used["tree"] == "static" else ()
    return next((p for p in trees if (p["nodes"], p["levels"]) == key), None)


def measured_speed_up(report: Mapping[str, Any], drafter: str, temperature: float) -> float | None:
    """Of one sequence at a time, which is what the cost model speaks of."""
    for run in report["runs"]:
        if run["drafter"] == drafter and run["temperature"] == temperature:
            found = speed_of(run, 1)
            return None if found is None else found["speed_up"]
    return None


def interval(bounds: Sequence[float] | None, form: str = "{:.2f}") -> str:
    return NONE if bounds is None else (" to " if "+" in form else "-").join(form.format(bound) for bound in bounds)


def _line(runs: Iterable[Mapping[str, Any]], name: str, *path: str, form: str = "{:.3f}") -> Line:
    return Line(name, [_cell(run, path, form) for run in runs])


def _cell(value: Any, path: Sequence[str], form: str) -> str:
    for key in path:
        value = value.get(key) if isinstance(value, Mapping) else None
    return NONE if value is None else form.format(value)


def _filled(headings: list[str], rows: list[list[str]]) -> list[list[str]]:
    """The rows without columns in which no row has a value; changes the headings likewise."""
    kept = [i for i in range(len(headings)) if any(row[i] != NONE for row in rows)]
    headings[:] = [headings[i] for i in kept]
    return [[row[i] for i in kept] for row in rows]
