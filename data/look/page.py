"""preview.html: counts, histogram, draft vocabulary and documents token by token, in one file that needs nothing else.

Nothing of it is a script, and its content policy forbids any: what stands in the data can't run.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Iterator, Mapping
from html import escape
from itertools import islice
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup
from transformers import PreTrainedTokenizerBase

from data.chats.policy import REJECTS, REPAIRS
from data.look.coverage import Coverage
from data.look.preview import Piece, excerpt, gap_note, heading
from data.look.statistics import bin_label, length_line
from data.masks.template import Example
from models.files import write_atomic
from models.target import special_ids
from models.visible import visible

MAX_DOCUMENTS = 200
MAX_TOKENS = 4000  # of one document; longer ones are cut in the middle
OPEN = 3  # documents that are unfolded

STYLE = """
:root { color-scheme: light dark; --ground: #fff; --text: #1d2127; --soft: #6a7280; --line: #d9dde3; --card: #f6f7f9;
  --bar: #4a8fd6; --answer: #c9efcf; --answer-edge: #7cc78a; --token: #00000014; --control: #b3541e; }
@media (prefers-color-scheme: dark) { :root { --ground: #14171b; --text: #e3e6ea; --soft: #98a1ad; --line: #343a42;
  --card: #1c2026; --bar: #5b9fe3; --answer: #1c4a2a; --answer-edge: #3f8d57; --token: #ffffff1c;
  --control: #f0a06c; } }
body { margin: 0 auto; padding: 1.5rem 1rem 4rem; max-width: 62rem; background: var(--ground); color: var(--text);
  font: 15px/1.55 system-ui, sans-serif; }
h1 { font-size: 1.5rem; margin: 0 0 .25rem; overflow-wrap: anywhere; } h2 { font-size: 1.1rem; margin: 2.2rem 0 .6rem; }
p { margin: .4rem 0; } .soft, td small { color: var(--soft); } .wide { overflow-x: auto; }
dl { display: flex; flex-wrap: wrap; gap: .6rem; margin: 1rem 0 0; }
dl > div { background: var(--card); border: 1px solid var(--line); border-radius: 8px; padding: .45rem .8rem; }
dt { color: var(--soft); font-size: .8rem; } dd { margin: 0; font-size: 1.15rem; font-variant-numeric: tabular-nums; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .9rem; }
th, td { padding: .3rem .7rem; border-bottom: 1px solid var(--line); text-align: left; vertical-align: top; }
th { color: var(--soft); font-weight: 500; } td { white-space: nowrap; }
td:last-child { white-space: normal; overflow-wrap: anywhere; min-width: 16rem; }
.number { text-align: right; } tr.chosen td { font-weight: 600; } td small { display: block; }
svg { display: block; width: 100%; max-width: 46rem; height: auto; } svg text { fill: var(--text); font-size: 12px; }
svg rect { fill: var(--bar); } img { display: block; max-width: 100%; width: 45rem; background: #fff;
  border: 1px solid var(--line); border-radius: 8px; margin-top: 1rem; }
details { border: 1px solid var(--line); border-radius: 8px; margin: .7rem 0; content-visibility: auto;
  contain-intrinsic-size: auto 3rem; }
summary { cursor: pointer; padding: .5rem .9rem; background: var(--card); border-radius: 8px; overflow-wrap: anywhere; }
.tokens { padding: .7rem .9rem; font: 13.5px/1.75 ui-monospace, monospace; white-space: pre-wrap; tab-size: 4;
  overflow-wrap: anywhere; unicode-bidi: plaintext; }
.tokens span { box-shadow: inset -1px 0 var(--token); color: var(--soft); }
.tokens span:hover { outline: 2px solid var(--bar); }
.tokens .s { background: var(--answer); color: var(--text); box-shadow: inset -1px 0 var(--answer-edge); }
.tokens .c { outline: 1px solid var(--control); outline-offset: -2px; border-radius: 3px; }
.tokens .parts { text-decoration: underline dotted var(--control) 2px; text-underline-offset: 3px; }
.tokens i::before { content: "\\21b5"; opacity: .45; }
.legend { white-space: normal; padding: 0; } .legend, .legend span { color: var(--text); }
.gap { text-align: center; color: var(--soft); padding: .8rem; border-block: 1px dashed var(--line); }
"""

PAGE = """\
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; img-src data:">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{{ title }}</title>
<style>{{ style }}</style>
</head>
<body>
<h1>{{ title }}</h1>
<dl>
{% for name, value in counts %}
<div><dt>{{ name }}</dt><dd>{{ value }}</dd></div>
{% endfor %}
</dl>

<h2>Rows</h2>
<p>{{ "{:,}".format(stats.kept) }} of {{ "{:,}".format(stats.rows) }} rows usable.</p>
{% if reasons %}
<div class="wide"><table id="rows">
<tr><th class="number">rows</th><th></th><th>name</th><th>meaning</th></tr>
{% for count, kind, name, meaning, first in reasons %}
<tr><td class="number">{{ "{:,}".format(count) }}</td><td>{{ kind }}</td><td>{{ name }}</td><td>{{ meaning }}
{% if first %}
<small>first: {{ first.file }}, row {{ first.row }} (id {{ first.id }})
{%- if first.detail %}: {{ first.detail }}{% endif %}</small>
{% endif %}
</td></tr>
{% endfor %}
</table></div>
{% endif %}

<h2>Length of a document, tokens</h2>
{% if bars %}
<p class="soft">{{ lengths }}</p>
<svg viewBox="0 0 700 {{ 22 * bars|length }}" role="img" aria-label="documents by length">
{% for label, width, count in bars %}
<text x="130" y="{{ 22 * loop.index0 + 15 }}" text-anchor="end">{{ label }}</text>
<rect x="140" y="{{ 22 * loop.index0 + 3 }}" width="{{ width }}" height="16" rx="2"/>
<text x="{{ 146 + width }}" y="{{ 22 * loop.index0 + 15 }}">{{ count }}</text>
{% endfor %}
</svg>
{% else %}
<p>No documents.</p>
{% endif %}

{% if coverage %}
<h2>Draft vocabulary</h2>
<p>{{ coverage.justify() }}</p>
<div class="wide"><table id="coverage">
<tr>
{% for name in coverage.columns %}<th{% if not loop.last %} class="number"{% endif %}>{{ name }}</th>{% endfor %}
</tr>
{% for size in coverage.sizes %}
<tr{% if size.size == coverage.chosen %} class="chosen"{% endif %}>
{% for cell in coverage.cells(size) %}<td{% if not loop.last %} class="number"{% endif %}>{{ cell }}</td>{% endfor %}
</tr>
{% endfor %}
</table></div>
<p class="soft">{{ coverage.notes }}</p>
{% if plot %}
<img alt="supervised tokens covered, by size of the draft vocabulary" src="data:image/png;base64,{{ plot }}">
{% endif %}
{% endif %}

<h2>Documents</h2>
<p class="tokens legend"><span class="s">supervised</span> tokens are learned, <span>the others</span> only read;
<span class="c">boxed</span>: a control token; <span class="parts">dotted</span>: several tokens that are text only
together; <i></i>: a line ends. Point at a token for its position, id and text.</p>
{% for heading, head, note, tail in documents %}
<details{% if loop.index <= open %} open{% endif %}><summary>{{ heading }}</summary>
<div class="tokens" dir="auto">{{ head }}</div>
{% if note %}
<div class="gap">{{ note }}</div>
<div class="tokens" dir="auto">{{ tail }}</div>
{% endif %}
</details>
{% endfor %}
</body>
</html>
"""


def write_page(
    path: Path | str,
    examples: Iterable[Example],
    tokenizer: PreTrainedTokenizerBase,
    *,
    title: str,
    statistics: Mapping[str, Any],
    coverage: Coverage | None = None,
    plot_png: bytes | None = None,
) -> None:
    """Write the page, atomically, with the first `MAX_DOCUMENTS` examples, of each at most `MAX_TOKENS` tokens.

    statistics: of `data.look.statistics.describe`. plot_png: of ``coverage.png()``; shown below the coverage table.
    """
    environment = Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined, finalize=_visible
    )
    text = environment.from_string(PAGE).render(
        title=title,
        style=Markup(STYLE),
        open=OPEN,
        stats=statistics,
        counts=_counts(statistics),
        reasons=[*_reasons(statistics)],
        lengths=length_line(statistics) if statistics["documents"] else "",
        bars=_bars(statistics),
        coverage=coverage,
        plot=base64.b64encode(plot_png).decode() if plot_png else "",
        documents=[_document(example, tokenizer) for example in islice(examples, MAX_DOCUMENTS)],
    )
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, text)


def _visible(value: object) -> object:
    """Every text on the page can be encoded and shows what it holds; tokens have been seen to."""
    return visible(value) if isinstance(value, str) and not isinstance(value, Markup) else value


def _counts(statistics: Mapping[str, Any]) -> list[tuple[str, str]]:
    names = {"documents": "documents", "conversations": "conversations", "tokens": "tokens"}
    counts = [(name, f"{statistics[key]:,}") for name, key in names.items()]
    share = f"{statistics['supervised_tokens']:,} ({statistics['supervised_share']:.1%})"
    return [*counts, ("supervised tokens", share), ("rejected rows", f"{statistics['rejected_rows']:,}")]


def _reasons(statistics: Mapping[str, Any]) -> Iterator[tuple[int, str, str, str, Mapping[str, Any] | None]]:
    """Count, kind, name, meaning and first place of what was rejected or repaired."""
    for name, count in statistics["rejected"].items():
        yield count, "rejected", name, REJECTS[name], statistics["first"].get(name)
    for name, count in statistics["repaired"].items():
        yield count, "repaired", name, REPAIRS[name], None


def _bars(statistics: Mapping[str, Any]) -> list[tuple[str, int, str]]:
    """Label, width and caption of each bar of the length histogram; what is not empty shows."""
    if not statistics["documents"]:
        return []
    bins = statistics["length"]["histogram"]
    most = max(bin["documents"] for bin in bins)
    return [
        (
            bin_label(bin),
            max(round(420 * bin["documents"] / most), 1) if bin["documents"] else 0,
            f"{bin['documents']:,} ({bin['documents'] / statistics['documents']:.1%})",
        )
        for bin in bins
    ]


def _document(example: Example, tokenizer: PreTrainedTokenizerBase) -> tuple[str, Markup, str, Markup]:
    """Heading, tokens, a note about what is left out in the middle (or nothing), and the tokens behind that."""
    control = frozenset(special_ids(tokenizer, set()))
    names = tokenizer.convert_ids_to_tokens(example.input_ids)
    head, gap, tail = excerpt(tokenizer, example.input_ids, MAX_TOKENS)

    def spans(part: Iterable[Piece]) -> Markup:
        return Markup("".join(span for piece in part for span in _spans(example, piece, control, names)))

    return heading(example), spans(head), gap_note(example, gap) if gap else "", spans(tail)


def _spans(example: Example, piece: Piece, control: frozenset[int], names: list[str]) -> Iterator[str]:
    """One span a token. Of tokens that are text only together the first holds it, for all; the others are empty."""
    shown = escape(visible(piece.text)).replace("\n", "<i></i>\n")
    abouts = []
    for position in range(piece.first, piece.stop):
        name = repr(piece.text if piece.stop - piece.first == 1 else names[position])
        kind = "supervised" if example.supervised[position] else "read"
        abouts.append(f"{name} · position {position} · id {example.input_ids[position]} · {kind}")
    if len(abouts) > 1:
        abouts = ["\n".join([f"{piece.text!r} is", *abouts]), *abouts[1:]]
    for position, about in enumerate(abouts, piece.first):
        supervised, boxed = example.supervised[position], example.input_ids[position] in control
        first = position == piece.first
        kinds = {"s": supervised, "c": boxed, "parts": first and len(abouts) > 1}
        marked = " ".join(kind for kind, so in kinds.items() if so)
        attribute = f' class="{marked}"' if marked else ""
        yield f'<span{attribute} title="{escape(about)}">{shown if first else ""}</span>'
