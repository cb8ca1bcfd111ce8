"""What a measurement leaves behind: report.json, generations.jsonl and a table in the terminal.

report.json: definition (of tau), settings, and one entry of ``runs`` per temperature with
  acceptance, uncut      eval.metrics.Acceptance of the headline rule and of the engines' counting
  simulated              tau predicted on the same texts, the measured one in the same counting, their ratio - 1
  speculative, plain     decoding speed (see eval.run.speed); speed_up = ratio of their tokens per second
  cost                   c = seconds of one draft / seconds of one plain step, and the verification's cost likewise
  same_as_plain          prompts whose output equals plain decoding's (T = 0), and the first differences
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from models.files import write_atomic

REPORT, GENERATIONS = "report.json", "generations.jsonl"


def write_report(report: Mapping[str, Any], generations: Iterable[Mapping[str, Any]], folder: Path) -> Path:
    """Write both files, the report last: where it is, the other is complete."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = (json.dumps(row, ensure_ascii=False) for row in generations)
    write_atomic(folder / GENERATIONS, "".join(f"{line}\n" for line in lines))
    write_atomic(folder / REPORT, json.dumps(report, indent=1, allow_nan=False) + "\n")
    return folder / REPORT


def print_report(report: Mapping[str, Any], console: Console | None = None) -> None:
    console = console or Console()
    settings = report["settings"]
    table = Table(
        title=f"acceptance: chain of {settings['gamma']}, {settings['prompts']} prompts", title_justify="left"
    )
    table.add_column("")
    for run in report["runs"]:
        table.add_column(f"T = {run['temperature']:g}", justify="right")
    for name, cells in rows(report):
        if any(cell != "-" for cell in cells):
            table.add_row(name, *cells)
    console.print(table)
    console.print(report["definition"], style="dim")


def rows(report: Mapping[str, Any]) -> Iterable[tuple[str, list[str]]]:
    """Lines of the table: a name and one cell per temperature."""
    runs = report["runs"]

    def line(name: str, *path: str, form: str = "{:.3f}") -> tuple[str, list[str]]:
        return name, [cell(run, path, form) for run in runs]

    yield "drafts", [run["drafts"] for run in runs]
    yield line("tau", "acceptance", "tau")
    yield line("  95% interval", "acceptance", "interval", form="{:.2f}")
    yield line("  mean over prompts", "acceptance", "per_prompt_mean")
    yield line("  uncut (engines)", "uncut", "tau")
    yield line("rate per depth", "acceptance", "rate", form="{:.2f}")
    yield line("  given the one before", "acceptance", "conditional", form="{:.2f}")
    yield line("simulated tau", "simulated", "tau")
    yield line("  against measured", "simulated", "difference", form="{:+.1%}")
    yield line("passes", "acceptance", "passes", form="{:d}")
    yield line("tokens/s", "speculative", "tokens_per_second", form="{:.1f}")
    yield line("  plain", "plain", "tokens_per_second", form="{:.1f}")
    yield line("  speed-up", "speed_up", form="{:.2f}x")
    yield line("cost of one draft c", "cost", "draft", form="{:.3f}")
    yield line("cost of verification", "cost", "verify", form="{:.2f}")
    same = [run.get("same_as_plain") for run in runs]
    yield "same as plain", [f"{found['identical']} of {found['prompts']}" if found else "-" for found in same]


def cell(run: Mapping[str, Any], path: tuple[str, ...], form: str) -> str:
    value: Any = run
    for key in path:
        value = value.get(key) if isinstance(value, Mapping) else None
    if isinstance(value, list | tuple):
        return " ".join("-" if item is None else form.format(item) for item in value)
    return "-" if value is None else form.format(value)
