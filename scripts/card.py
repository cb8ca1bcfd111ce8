"""The README.md of an exported folder: what the drafter is, what was measured and how, and how to serve it."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eval.look.table import VERSION, columns, ordered, sections, shape
from models.drafter import Drafter
from models.portable import TARGET
from models.recognise import METHODS, Method
from scripts.rescore import Rescored
from scripts.starting import Export, starting

LEVELS = 4  # drafted at a time, where none were measured
UNITS = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")


@dataclass(frozen=True)
class About:
    """What the card tells besides the folder's config: names as the user gave them, and a report of ``python -m eval``
    on this drafter alone (see `of_drafter`; None: nothing was measured). ``target_path`` is what an engine is given to
    load, where that differs from ``target``. tuned: the target was trained along, and lies in the export's target/;
    stitched: a copy of the target that carries the modules lies there."""

    target: str
    target_path: str | None = None
    data: str | None = None
    report: Mapping[str, Any] | None = None
    tuned: bool = False
    stitched: bool = False

    @property
    def served(self) -> str:
        return self.target_path or self.target


def model_card(folder: Path, config: Mapping[str, Any], about: About, proof: Rescored, drafter: Drafter) -> str:
    method = METHODS[config["eyas"]["method"]]
    parts = [
        front_matter(method, about),
        f"# {method.title} drafter for {about.target}",
        introduction(method, about),
        "## Drafter",
        table(drafter_facts(config, about, drafter)),
        "## Acceptance length",
        acceptance(about),
        *other_vocabulary(proof, drafter),
        "## Serving",
        *serving(method, folder, config, about, drafter),
        "## Checks at export",
        f"Read back from this folder and run on a seeded batch: training's unroll, the drafting session and a "
        f"stand-alone forward as engines compute it agree within {proof.engine:.1e} of the largest logit (float32). "
        f"Casting to {config['dtype']}, the target's tensors that it shares included, changed the logits by "
        f"{proof.rounding:.2%} (rms) of their spread; "
        f"{proof.top1:.1%} of the drafted tokens on that batch stayed the same.",
    ]
    return "\n\n".join(parts) + "\n"


def front_matter(method: Method, about: About) -> str:
    tags = ["speculative-decoding", "drafter", method.name]
    return "\n".join(["---", f"base_model: {json.dumps(about.target)}", f"tags: {json.dumps(tags)}", "---"])


def introduction(method: Method, about: About) -> str:
    made = f"{method.title} for speculative decoding of `{about.target}`, trained and exported by Eyas."
    if about.tuned:
        return (
            f"{made} **The target was trained along with it and is another model now**: the tuned one lies in "
            f"`{TARGET}/`, an ordinary model folder, and only that goes with this drafter. It verifies every drafted "
            "token, so its output stays its own, which is not that of the model it was made from."
        )
    return f"{made} The target verifies every drafted token, so its output stays its own."


def drafter_facts(config: Mapping[str, Any], about: About, drafter: Drafter) -> Iterator[tuple[str, str]]:
    yield "target", f"{about.target}, changed by joint training" if about.tuned else about.target
    yield "training data", about.data or "not recorded"
    yield "layout", config["eyas"]["layout"]
    yield "parameters", f"{drafter.trainable_parameters():,} ({config['dtype']})"
    yield "draft vocabulary", f"{len(drafter.vocab):,} of {drafter.vocab.size:,} tokens"
    if drafter.max_depth is not None:
        yield "tokens drafted at most", str(drafter.max_depth)
    if "target_layers" in config["eyas"] and drafter.tap_ids:
        taps = ", ".join(map(str, drafter.tap_ids))
        yield "tapped states", f"entering decoder layers {taps} (0 is the first) of {config['eyas']['target_layers']}"
    yield "dimensions", ", ".join(f"{key} {config[key]}" for key in UNITS if key in config)
    if config.get("rope_parameters"):
        yield "rope", json.dumps(config["rope_parameters"])


def of_drafter(report: Mapping[str, Any], source: Path) -> dict[str, Any] | None:
    """The part of a report that is about the drafter loaded from ``source``, itself a report; None if there is none.

    Raises KeyError, TypeError or ValueError for what is no report of this version.
    """
    if report["version"] != VERSION:
        raise ValueError(f"version {report['version']}, this is {VERSION}")
    for drafter in report["drafters"]:
        path = drafter["path"]
        if drafter["kind"] == "drafter" and path is not None and Path(path).resolve() == source.resolve():
            runs = [run for run in report["runs"] if run["drafter"] == drafter["name"]]
            return {**report, "drafters": [drafter], "runs": runs, "comparisons": [], "cost_model": None}
    return None


def acceptance(about: About) -> str:
    if about.report is None:
        return "Not measured at export."
    runs = ordered(about.report)
    drafter, settings = about.report["drafters"][0], flat(about.report["settings"])
    changed = flat(drafter["target"], "change of the target") if drafter.get("target") else ()
    lines = [line for section in sections(runs) for line in named(section.title, section.lines)]
    headings = [f"{column.temperature}{'' if column.lossless else ' (LOSSY)'}" for column in columns(runs)]
    return "\n\n".join(
        [
            "Measured before the cast by `python -m eval`. A tau means little without its switches, so all are given.",
            table([("definition", about.report["definition"]), ("tree measured", shape(drafter)), *changed, *settings]),
            table([("", *headings), *((name, *cells) for name, cells in lines)]),
        ]
    )


def other_vocabulary(proof: Rescored, drafter: Drafter) -> Iterator[str]:
    """Where engines draft with the target's own head, a smaller draft vocabulary is left behind."""
    if proof.draft_tokens != len(drafter.vocab):
        count = f"{len(drafter.vocab):,}"
        yield (
            f"In training, and wherever the run's own checkpoint was measured, it drafted {count} tokens "
            "only. This folder drafts all of the target's: what an engine shows is what a measurement of the folder "
            "shows."
        )


def named(title: str, lines: Iterable[tuple[str, list[str]]]) -> Iterator[tuple[str, list[str]]]:
    """Lines of a section of the report's table; the indented ones under the name of what they belong to."""
    owner = title
    for name, cells in lines:
        if name.startswith(" "):
            yield f"{owner}, {name.strip()}", cells
        else:
            owner = name if title == "acceptance" else f"{title}: {name}"
            yield owner, cells


def serving(method: Method, folder: Path, config: Mapping[str, Any], about: About, drafter: Drafter) -> Iterator[str]:
    """How engines are started with it, or that none serves it, and how it is measured."""
    beside = str(folder / TARGET)
    target = beside if about.tuned or about.stitched else about.served
    bare = about.served if not about.tuned else None if about.stitched else beside
    levels = int(about.report["drafters"][0]["levels"]) if about.report else LEVELS
    yield from starting(Export(method, folder, config, target, levels, drafter, about.stitched, bare))
    yield f"Measure it: `{shlex.join(['python', '-m', 'eval', 'conf=RECIPE', f'drafter_path={folder}'])}`."


def flat(report: Any, name: str = "") -> Iterator[tuple[str, str]]:
    """Every number and word of a nested report as (dotted key, text); long lists of objects by their position."""
    if isinstance(report, Mapping):
        for key, value in report.items():
            yield from flat(value, f"{name}.{key}" if name else str(key))
    elif isinstance(report, list | tuple) and any(isinstance(value, Mapping | list | tuple) for value in report):
        for i, value in enumerate(report):
            yield from flat(value, f"{name}.{i}")
    elif isinstance(report, list | tuple):
        yield name, " ".join(map(text, report))
    else:
        yield name, text(report)


def text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return "none" if value is None else str(value)


def table(rows: Iterable[tuple[str, ...]]) -> str:
    """A Markdown table without headings: the first cell of each row is its name."""
    filled = list(rows)
    lines = ["| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in row) + " |" for row in filled]
    width = len(filled[0])
    return "\n".join(["|" + " |" * width, "|" + "---|" * width, *lines])
