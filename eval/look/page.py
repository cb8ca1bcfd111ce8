"""report.html: tables, plots and the generated texts token by token, in one file that needs nothing else.

The only script that can run is our own: the page's content policy names its digest. Texts of any origin are escaped,
and what a browser would obey or not show stands as an escape (see models.visible).
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from html import escape
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup
from transformers import PreTrainedTokenizerBase

from data.look.preview import UNFINISHED, pieces
from eval.look.origin import ACCEPTED, Origin, cut, origins
from eval.look.table import (
    LOSSY,
    NOTE,
    Table,
    columns,
    comparisons,
    interval,
    ordered,
    predictions,
    sections,
    shape,
    target_of,
)
from eval.numbers.metrics import NO_CATEGORY
from models.visible import visible

if TYPE_CHECKING:
    from eval.look.plots import Plot

ASSETS = Path(__file__).parent / "assets"
MAX_PROMPTS = 200
MAX_BYTES = 8 << 20  # of texts and trees
SHADES = 8  # colours of accepted drafts; deeper ones share the last
PROMPT_TOKENS = 400  # of a prompt, its end
LABEL = 40  # characters of a node in a tree

TokenText = Callable[[list[int]], list[str]]


def token_texts(tokenizer: PreTrainedTokenizerBase) -> TokenText:
    """Texts of a sequence's tokens. Of those that are text only together the first has it all, the others none."""

    def texts(ids: list[int]) -> list[str]:
        found = [""] * len(ids)
        for piece in pieces(tokenizer, ids):
            found[piece.first] = piece.text
        return found

    return texts


class Answer(NamedTuple):
    """A generation as the page shows it. tokens, dropped: spans; about: one line; tree: what the script needs."""

    drafter: int
    temperature: int
    lossy: bool
    about: str
    tokens: Markup
    dropped: Markup
    tree: dict[str, Any]


class Question(NamedTuple):
    """A prompt's turn and all the answers to it."""

    title: str
    category: int
    prompt: str
    answers: list[Answer]


def page(
    report: Mapping[str, Any],
    generations: Sequence[Mapping[str, Any]],
    pictures: Sequence[Plot],
    token_text: TokenText | None = None,
) -> str:
    """The page's HTML. Of the generations those of as many prompts as fit MAX_PROMPTS and MAX_BYTES."""
    runs = ordered(report)
    texts = Texts(token_text)
    filters = Filters.of(report, generations)
    shown, left_out = fitting(generations, texts, filters)
    deepest = max((drafter["levels"] for drafter in report["drafters"]), default=0)
    script = (ASSETS / "report.js").read_text(encoding="utf-8")
    environment = Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined, finalize=_visible
    )
    template = (ASSETS / "report.html").read_text(encoding="utf-8")
    return environment.from_string(template).render(
        report=report,
        title=f"Acceptance length on {report['settings']['target'] or 'a target'}",
        lossy="" if report["settings"]["lossless"] else LOSSY,
        style=Markup((ASSETS / "report.css").read_text(encoding="utf-8")),
        script=Markup(script),
        digest=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        shape=shape,
        target_of=target_of,
        note=NOTE,
        headline=_headline(runs),
        settings=[(key, _setting(value)) for key, value in report["settings"].items()],
        columns=columns(runs),
        sections=sections(runs, wide=True),
        tables=[table for table in (comparisons(report), predictions(report)) if table.rows],
        numeric=_numeric,
        pictures=[(plot.about, base64.b64encode(plot.png).decode()) for plot in pictures],
        filters=filters,
        questions=shown,
        left_out=left_out,
        shades=range(min(SHADES, deepest)),
        deeper=deepest > SHADES,
        data=Markup(embedded({"labels": texts.labels, "answers": [a.tree for q in shown for a in q.answers]})),
    )


class Filters(NamedTuple):
    """Values that answers can be filtered by, in order, and the (drafter, temperature) of lossy runs."""

    drafters: list[str]
    temperatures: list[float]
    categories: list[str]
    lossy: frozenset[tuple[str, float]]

    @classmethod
    def of(cls, report: Mapping[str, Any], generations: Iterable[Mapping[str, Any]]) -> Filters:
        runs = ordered(report)
        return cls(
            [drafter["name"] for drafter in report["drafters"]],
            list(dict.fromkeys(run["temperature"] for run in runs)),
            list(dict.fromkeys(row["category"] or NO_CATEGORY for row in generations)),
            frozenset((run["drafter"], run["temperature"]) for run in runs if not run["lossless"]),
        )


class Texts:
    """Texts of tokens, and the numbered labels of those that trees are made of."""

    def __init__(self, token_text: TokenText | None) -> None:
        self.of: TokenText = token_text or (lambda ids: [f"{token} " for token in ids])
        self.labels: list[str] = []
        self.numbers: dict[int, int] = {}
        self.joined = cache(lambda ids: "".join(self.of(list(ids))))

    def label(self, token: int) -> int:
        """Number of a token's label: its text as far as it has one of its own."""
        if token not in self.numbers:
            self.numbers[token] = len(self.labels)
            self.labels.append(self.alone(token))
        return self.numbers[token]

    def alone(self, token: int) -> str:
        """The text that a token adds to another; of part of a character its id."""
        text = self.of([token, token])[1]  # the first token of a text may lose its blank
        if not text or UNFINISHED in text:
            return f"id {token}"
        return visible(text if len(text) <= LABEL else f"{text[: LABEL - 1]}\u2026")


def fitting(generations: Sequence[Mapping[str, Any]], texts: Texts, filters: Filters) -> tuple[list[Question], int]:
    """Questions of the prompts that fit, in the order of their numbers, and how many prompts were left out."""
    prompts: dict[int, list[Mapping[str, Any]]] = {}
    for row in generations:
        prompts.setdefault(row["prompt"], []).append(row)
    shown, size = dict[int, list[Question]](), 0
    for number in by_turns(prompts, filters.categories):
        questions = [*_questions(prompts[number], texts, filters)]
        size += sum(map(_size, questions))
        if len(shown) == MAX_PROMPTS or size > MAX_BYTES:
            break
        shown[number] = questions
    return [question for number in sorted(shown) for question in shown[number]], len(prompts) - len(shown)


def by_turns(prompts: Mapping[int, Sequence[Mapping[str, Any]]], categories: Sequence[str]) -> Iterator[int]:
    """The prompts' numbers, one of each category in turn, so that none is missing where not all fit."""
    grouped: dict[str, list[int]] = {name: [] for name in categories}
    for number, rows in prompts.items():
        grouped[rows[0]["category"] or NO_CATEGORY].append(number)
    for several in zip_longest(*grouped.values()):
        yield from (number for number in several if number is not None)


def _size(question: Question) -> int:
    """Bytes in the page, about."""
    trees = sum(len(json.dumps(answer.tree, separators=(",", ":"))) for answer in question.answers)
    spans = (len(part.encode()) for answer in question.answers for part in (answer.tokens, answer.dropped))
    return trees + sum(spans) + len(question.prompt)


def _questions(rows: Iterable[Mapping[str, Any]], texts: Texts, filters: Filters) -> Iterator[Question]:
    """One for each turn of a prompt. A later turn's prompt holds the answer before; the first one's is shown."""
    turns: dict[int, list[Mapping[str, Any]]] = {}
    for row in rows:
        turns.setdefault(row["turn"], []).append(row)
    for turn, found in sorted(turns.items()):
        first = found[0]
        category = first["category"]
        cut_at = max(len(first["prompt_ids"]) - PROMPT_TOKENS, 0)
        prompt = texts.joined(tuple(first["prompt_ids"][cut_at:]))
        yield Question(
            f"prompt {first['prompt']}" + (f", turn {turn}" if turn else "") + (f": {category}" if category else ""),
            filters.categories.index(category or NO_CATEGORY),
            (f"... {cut_at:,} tokens before ...\n" if cut_at else "") + prompt,
            [_answer(row, texts, filters) for row in found],
        )


def _answer(row: Mapping[str, Any], texts: Texts, filters: Filters) -> Answer:
    output, passes = row["output_ids"], len(row["rounds"])
    tau = f", {(len(output) - 1) / passes:.2f} tokens a pass" if passes else ""
    dropped = cut(row)
    shown = texts.of(output)
    return Answer(
        filters.drafters.index(row["drafter"]),
        filters.temperatures.index(row["temperature"]),
        (row["drafter"], row["temperature"]) in filters.lossy,
        f"{len(output)} tokens in {passes} passes{tau}, ended by {row['finish']}",
        Markup("".join(_span(*about) for about in zip(shown, output, origins(row), strict=True))),
        Markup("".join(_dropped(text, token) for text, token in zip(texts.of(dropped), dropped, strict=True))),
        _tree(row, texts),
    )


def _span(text: str, token: int, origin: Origin) -> str:
    name = f"d{min(origin.depth or 0, SHADES - 1)}" if origin.kind == ACCEPTED else origin.kind
    about = f"{text!r}, id {token}. " if text else f"id {token}, completes the character before. "
    number = "" if origin.pass_number is None else f' data-r="{origin.pass_number}"'
    return f'<span class="t {name}"{number} title="{escape(visible(about + origin.words))}">{_shown(text)}</span>'


def _dropped(text: str, token: int) -> str:
    about = f"{text!r}, id {token}. accepted, but after the end: not in the output"
    return f'<del class="t cut" title="{escape(visible(about))}">{_shown(text)}</del>'


def _shown(text: str) -> str:
    return escape(visible(text)).replace("\n", "<i></i>\n") if text else "<b></b>"


def _tree(row: Mapping[str, Any], texts: Texts) -> dict[str, Any]:
    """For the script: labels of the output, and of each pass the tree's labels, parents (0: a chain), accepted nodes
    and kept tokens."""
    passes = []
    for spent in row["rounds"]:
        parents = list(spent.get("parents") or ())
        chain = parents == list(range(-1, len(parents) - 1))
        tokens = [texts.label(token) for token in spent.get("tokens") or ()]
        passes.append([tokens, 0 if chain else parents, list(spent.get("path") or ()), spent["kept"]])
    return {"out": [texts.label(token) for token in row["output_ids"]], "passes": passes}


def embedded(value: Any) -> str:
    """JSON that may stand in a script element: nothing in it ends the element, and it is ASCII."""
    text = json.dumps(value, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _headline(runs: Iterable[Mapping[str, Any]]) -> list[tuple[str, str, str]]:
    """Name, value and a note of each run's tau."""
    cards = []
    for run in runs:
        tau, bounds = run["acceptance"]["tau"], run["acceptance"]["interval"]
        first = run["speed"][0] if run["speed"] else None
        speed = f"speed-up {first['speed_up']:.2f}x" if first and first["speed_up"] else ""
        target = "target CHANGED" if run.get("target") else ""
        told = ("" if bounds is None else f"95%: {interval(bounds)}", speed, target)
        note = ", ".join(part for part in told if part)
        marked = "" if run["lossless"] else f" {LOSSY}"
        value = "-" if tau is None else f"{tau:.2f}"
        cards.append((f"{run['drafter']}, T = {run['temperature']:g}{marked}", value, note))
    return cards


def _setting(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _numeric(table: Table, column: int) -> str:
    return "number" if column >= table.words else ""


def _visible(value: object) -> object:
    return visible(value) if isinstance(value, str) and not isinstance(value, Markup) else value
