"""What a measurement leaves behind, besides a table in the terminal:

generations.jsonl    a row for each answer: prompt and output tokens, and every verification pass
plots/*.png          see eval.look.plots; only those that the report has numbers for
report.html          tables, plots and texts in one file that needs nothing else (see eval.look.page)
report.json          every number; eval/look/report.schema.json describes each field
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from data.look.statistics import encodable
from eval.look.page import TokenText, page
from eval.look.table import LOSSY, NONE, NOTE, WIDE, columns, comparisons, legend, ordered, predictions, sections
from eval.look.table import Table as Words
from models.files import write_atomic
from models.run_folder import REPORT
from models.signals import raise_again
from models.visible import visible

log = logging.getLogger(__name__)

GENERATIONS, PAGE, PLOTS_FOLDER = "generations.jsonl", "report.html", "plots"
ESCAPED = re.compile("[\x85\u2028\u2029\ud800-\udfff]")
NAME_WIDTH, CELL_WIDTH = 25, 18  # of the big table's columns; what doesn't fit beside each other comes below


def write_report(
    report: Mapping[str, Any],
    generations: Iterable[Mapping[str, Any]],
    folder: Path,
    token_text: TokenText | None = None,
) -> Path:
    """Write everything, report.json last: where it is, the texts are complete. Returns its path.

    report, generations: as report.schema.json describes them. token_text: the texts of the tokens of
    a sequence, one each, that are its text when joined (see `page.token_texts`); without it the page shows ids.
    """
    rows = list(generations)
    (folder / PLOTS_FOLDER).mkdir(parents=True, exist_ok=True)
    (folder / REPORT).unlink(missing_ok=True)  # an older one would vouch for a mixture of both
    write_atomic(folder / GENERATIONS, "".join(f"{json_line(row)}\n" for row in rows))
    try:
        draw(report, rows, folder, token_text)
    except OSError:
        raise
    except Exception:  # hours of measuring must not be lost to a picture
        raise_again()
        log.exception("%s could not be drawn; the numbers are in %s", PAGE, REPORT)
    write_atomic(folder / REPORT, json.dumps(report, indent=1, allow_nan=False) + "\n")
    return folder / REPORT


def json_line(row: Mapping[str, Any]) -> str:
    """JSON that reads as text, but one line to every reader of lines, and always encodable."""
    return ESCAPED.sub(lambda c: f"\\u{ord(c[0]):04x}", json.dumps(row, ensure_ascii=False))


def draw(report: Mapping[str, Any], rows: list[Mapping[str, Any]], folder: Path, token_text: TokenText | None) -> None:
    """The plots and the page; plots of an earlier report that this one has no data for go."""
    from eval.look.plots import PLOTS, plots  # matplotlib is slow to import

    pictures = plots(report)
    drawn = {plot.file for plot in pictures}
    for file, _, _ in PLOTS:
        if file not in drawn:
            (folder / PLOTS_FOLDER / file).unlink(missing_ok=True)
    for plot in pictures:
        write_atomic(folder / PLOTS_FOLDER / plot.file, plot.png)
    write_atomic(folder / PAGE, page(report, rows, pictures, token_text))


def print_report(report: Mapping[str, Any], console: Console | None = None) -> None:
    """The tables of the report, as wide as the console allows."""
    console = console or Console()
    settings, runs = report["settings"], ordered(report)
    lossy = "" if settings["lossless"] else f", {LOSSY}: {settings['rule']}"
    title = f"acceptance: {settings['target'] or 'target'}, {settings['prompts']} prompts{lossy}"
    console.print(plain(title, console, "bold"))
    for drafter in report["drafters"]:
        console.print(plain(f"  {legend(drafter)}", console))
    beside = max((console.width - NAME_WIDTH) // CELL_WIDTH, 1)
    if beside > len(report["drafters"]):  # all drafters of a temperature stay together
        beside -= beside % len(report["drafters"])
    for first in range(0, len(runs), beside):
        console.print(big_table(runs[first : first + beside], console))
    for words in (comparisons(report), predictions(report)):
        if words.rows:
            print_words(words, console)
    for text in (report["definition"], NOTE):
        console.print(plain(text, console, "dim"))


def big_table(runs: Sequence[Mapping[str, Any]], console: Console) -> Table:
    """A column for each run, sections apart; rows without a value are left out."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), collapse_padding=False)
    table.add_column("", max_width=NAME_WIDTH + 5)
    for column in columns(runs):
        marked = "" if column.lossless else f"\n{LOSSY}"
        heading = plain(f"{column.drafter}\n{column.temperature}{marked}", console, "bold")
        table.add_column(heading, justify="right", overflow="fold")
    for section in sections(runs, wide=console.width >= NAME_WIDTH + 8 + WIDE * len(runs)):
        table.add_row(Text(section.title, style="bold"), *[""] * len(runs))
        for name, cells in section.lines:
            table.add_row(plain(name, console), *(plain(cell, console) for cell in cells))
        table.add_section()
    return table


def print_words(words: Words, console: Console) -> None:
    """A table where it fits; below that width the same as lines."""
    widths = [max(map(len, column)) + 2 for column in zip(words.headings, *words.rows, strict=True)]
    console.print(plain(words.title, console, "bold"))
    if sum(widths) + 2 <= console.width:
        table = Table(box=box.SIMPLE_HEAD, padding=(0, 1))
        for i, heading in enumerate(words.headings):
            table.add_column(heading, justify="left" if i < words.words else "right")
        for row in words.rows:
            table.add_row(*(plain(cell, console) for cell in row))
        console.print(table)
        return
    for row in words.rows:
        told = [f"{heading} {cell}" for heading, cell in zip(words.headings, row, strict=True) if cell != NONE]
        console.print(plain(f"  {'; '.join(told)}", console))


def plain(text: str, console: Console, style: str = "") -> Text:
    """Text of any origin: no markup in it counts, and the console's encoding can write it."""
    return Text(encodable(visible(text), console.encoding), style=style)
