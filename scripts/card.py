"""The README.md of an exported folder: what the drafter is, what was measured and how, and how to serve it."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eval.look.table import VERSION, columns, ordered, sections, shape
from models.portable import served
from scripts.rescore import Rescored

UNITS = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")


@dataclass(frozen=True)
class About:
    """What the card tells besides the folder's config: names as the user gave them, and a report of ``python -m eval``
    on this drafter alone (see `of_drafter`; None: nothing was measured). ``target_path`` is what an engine is given to
    load."""

    target: str
    target_path: str
    data: str | None
    report: Mapping[str, Any] | None


def model_card(folder: Path, config: Mapping[str, Any], about: About, proof: Rescored, parameters: int) -> str:
    parts = [
        front_matter(config, about),
        f"# Drafter for {about.target}",
        f"A {config['architectures'][0]} head for speculative decoding of `{about.target}`, trained and exported by "
        "Eyas. The target verifies every drafted token, so its output stays its own.",
        "## Drafter",
        table(drafter_facts(config, about, parameters)),
        "## Acceptance length",
        acceptance(about, folder),
        "## Serving",
        *serving(folder, config, about),
        "## Checks at export",
        f"Read back from this folder and run on a seeded batch: training's unroll, the drafting session and a "
        f"stand-alone forward as engines compute it agree within {proof.engine:.1e} of the largest logit (float32). "
        f"Casting to {config['dtype']} changed the logits by {proof.rounding:.2%} (rms) of their spread; "
        f"{proof.top1:.1%} of the drafted tokens on that batch stayed the same.",
    ]
    return "\n\n".join(parts) + "\n"


def front_matter(config: Mapping[str, Any], about: About) -> str:
    tags = ["speculative-decoding", "drafter", *map(str.lower, config["architectures"])]
    return "\n".join(["---", f"base_model: {json.dumps(about.target)}", f"tags: {json.dumps(tags)}", "---"])


def drafter_facts(config: Mapping[str, Any], about: About, parameters: int) -> Iterator[tuple[str, str]]:
    yield "target", about.target
    yield "training data", about.data or "not recorded"
    yield "parameters", f"{parameters:,} ({config['dtype']})"
    yield "draft vocabulary", f"{config['draft_vocab_size']:,} of {config['vocab_size']:,} tokens"
    taps = ", ".join(map(str, config["eyas"]["tap_ids"]))
    yield "tapped states", f"entering decoder layers {taps} (0 is the first) of {config['eyas']['target_layers']}"
    yield "dimensions", ", ".join(f"{key} {config[key]}" for key in UNITS)
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


def acceptance(about: About, folder: Path) -> str:
    if about.report is None:
        command = shlex.join(["python", "-m", "eval", "conf=RECIPE", f"drafter_path={folder}"])
        return f"Not measured at export. Measure it with `{command}`."
    runs = ordered(about.report)
    drafter, settings = about.report["drafters"][0], about.report["settings"]
    lines = [line for section in sections(runs) for line in named(section.title, section.lines)]
    headings = [f"{column.temperature}{'' if column.lossless else ' (LOSSY)'}" for column in columns(runs)]
    return "\n\n".join(
        [
            "Measured before the cast by `python -m eval`. A tau means little without its switches, so all are given.",
            table([("definition", about.report["definition"]), ("tree measured", shape(drafter)), *flat(settings)]),
            table([("", *headings), *((name, *cells) for name, cells in lines)]),
        ]
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


def serving(folder: Path, config: Mapping[str, Any], about: About) -> Iterator[str]:
    names, depth = served(config, folder), gamma(about.report)
    speculative = {"method": names.vllm, "model": str(folder), "num_speculative_tokens": depth}
    yield "vLLM (name the method, do not leave it to be guessed from the path):"
    yield code(["vllm", "serve", about.target_path, "--speculative-config", json.dumps(speculative)])
    if len(config["eyas"]["tap_ids"]) == 1:
        yield "SGLang can't serve this drafter: it skips the projection of a single tapped state."
        return
    yield "SGLang, the same chain:"
    options = {
        "--model-path": about.target_path,
        "--speculative-algorithm": names.sglang,
        "--speculative-draft-model-path": str(folder),
        "--speculative-num-steps": str(depth),
        "--speculative-eagle-topk": "1",
        "--speculative-num-draft-tokens": str(depth + 1),
        "--dtype": config["dtype"],
    }
    yield code(["python", "-m", "sglang.launch_server", *(part for pair in options.items() for part in pair)])


def gamma(report: Mapping[str, Any] | None) -> int:
    """The levels that were measured; 4 if nothing was."""
    return int(report["drafters"][0]["levels"]) if report else 4


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


def code(command: list[str]) -> str:
    return f"```bash\n{shlex.join(command)}\n```"
