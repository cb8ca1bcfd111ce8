"""report.html, read back by an HTML parser."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from html.parser import HTMLParser
from typing import Any

import pytest

import eval.look.page
from eval.look.page import embedded, page, token_texts
from eval.look.plots import Plot
from eval.look.table import columns, ordered
from models.tiny_target import tiny_tokenizer
from models.visible import visible
from tests.reports import EXPORT, FAKES, NASTY, TUNED, WORDS, Faker, token_text

PNG = Plot("verify_cost.png", 'a "picture" <b>', b"\x89PNG not really")
VOID = {"meta", "img", "input", "br", "!doctype"}


@dataclass
class Token:
    kind: str
    about: str
    number: str | None
    text: str = ""


@dataclass
class Page(HTMLParser):
    """Answers with their tokens, rows of tables, what is embedded, and all attributes."""

    html: str
    tags: list[str] = field(default_factory=list)
    attributes: list[tuple[str, str | None]] = field(default_factory=list)
    articles: list[dict[str, str | None]] = field(default_factory=list)
    tokens: list[list[Token]] = field(default_factory=list)
    dropped: list[list[Token]] = field(default_factory=list)
    scripts: list[str] = field(default_factory=list)
    rows: list[list[str]] = field(default_factory=list)
    text: str = ""
    stack: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.feed(self.html)
        self.close()
        assert self.stack == []
        self.data = json.loads(self.scripts[0])

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        named = dict(attrs)
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in VOID:
            self.stack.append(tag)
        if tag == "article":
            self.articles.append(named)
            self.tokens.append([])
            self.dropped.append([])
        elif "title" in named and "article" in self.stack:
            kind = str(named["class"]).removeprefix("t ")
            where = self.tokens if tag == "span" else self.dropped
            where[-1].append(Token(kind, str(named["title"]), named.get("data-r")))
        elif tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append("")
        elif tag == "script":
            self.scripts.append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.stack.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data
        if "script" in self.stack:
            self.scripts[-1] += data
        elif {"td", "th"} & set(self.stack):
            self.rows[-1][-1] += data
        elif "article" in self.stack and self.stack[-1] in ("span", "del"):
            (self.tokens if self.stack[-1] == "span" else self.dropped)[-1][-1].text += data


@pytest.fixture(scope="module")
def fake() -> tuple[dict[str, Any], list[dict[str, Any]]]:
    report, rows = Faker(questions=8).build()
    return report, json.loads(json.dumps(rows))


@pytest.fixture(scope="module")
def shown(fake: tuple[dict[str, Any], list[dict[str, Any]]]) -> Page:
    return Page(page(*fake, [PNG], token_text))


def by_page(rows: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The rows in the page's order: by prompt and turn."""
    yield from sorted(rows, key=lambda row: (row["prompt"], row["turn"]))


def test_one_span_a_token_and_their_texts_are_the_text(fake: Any, shown: Page) -> None:
    report, rows = fake
    assert len(shown.articles) == len(rows) == 8 * 6 + 2 * 6
    for row, article, tokens in zip(by_page(rows), shown.articles, shown.tokens, strict=True):
        assert [token.text for token in tokens] == [visible(text) for text in token_text(row["output_ids"])]
        assert report["drafters"][int(article["data-drafter"] or "")]["name"] == row["drafter"]
        assert ["0", "1"].index(article["data-temperature"] or "") == row["temperature"]
    assert "8 of" not in shown.text and "left out" not in shown.text


def test_a_drafter_of_a_tuned_target_is_marked() -> None:
    """In the table of drafters, on its card and in every comparison: its tau is another model's."""
    report, rows = Faker(questions=4, fakes=(FAKES[0], TUNED, EXPORT), temperatures=(0.0,)).build()
    found = Page(page(report, rows, [], token_text))
    targets = {row[0]: row[-1] for row in found.rows if row[1:2] == ["drafter"]}
    assert targets == {
        "eagle3-smollm2": "the original",
        "medusa2": "CHANGED by training (LoRA), perplexity 7.12 -> 6.50",
        "medusa2 (2)": "CHANGED by training",
    }
    assert found.text.count("target CHANGED") == 2
    names = [f"{name} (tuned target)" for name in ("medusa2", "medusa2 (2)")]
    pairs = [row[:2] for row in found.rows if len(row) > 2 and row[1] in names]
    assert pairs == [["eagle3-smollm2", names[0]], ["eagle3-smollm2", names[1]], names]


def test_tokens_say_in_class_and_words_how_they_came(fake: Any, shown: Page) -> None:
    _, rows = fake
    dropped = 0
    for row, tokens, late in zip(by_page(rows), shown.tokens, shown.dropped, strict=True):
        assert tokens[0].kind == "prefill" and tokens[0].number is None and "from prefill" in tokens[0].about
        at = 1
        for number, spent in enumerate(row["rounds"]):
            mine = tokens[at : at + spent["kept"]]
            at += spent["kept"]
            assert {token.number for token in mine} == {str(number)}
            for depth, token in enumerate(mine[: spent["accepted"]]):
                assert token.kind == f"d{depth}" and f"pass {number}: a draft, accepted at depth {depth}" in token.about
            if spent["kept"] > spent["accepted"]:
                last = spent["path"][-1] if spent["path"] else -1
                assert mine[-1].kind == ("own" if last in spent["parents"] else "bonus")
        last = row["rounds"][-1]
        assert [token.text for token in late] == [
            visible(WORDS[last["tokens"][node]]) for node in last["path"][last["kept"] :]
        ]
        dropped += len(late)
    assert dropped > 0 and all("after the end" in token.about for late in shown.dropped for token in late)
    number = WORDS.index(NASTY[-1])  # quotes of all kinds
    assert any(token.about.startswith(f"{NASTY[-1]!r}, id {number}. pass ") for token in shown.tokens[0])


def test_embedded_trees_round_trip(fake: Any, shown: Page) -> None:
    _, rows = fake
    labels = shown.data["labels"]
    assert len(set(labels)) > 50 and {visible(text) for text in NASTY} <= set(labels)
    for row, answer in zip(by_page(rows), shown.data["answers"], strict=True):
        assert [labels[i] for i in answer["out"]] == [visible(WORDS[token]) for token in row["output_ids"]]
        for spent, (tokens, parents, path, kept) in zip(row["rounds"], answer["passes"], strict=True):
            assert [labels[i] for i in tokens] == [visible(WORDS[token]) for token in spent["tokens"]]
            assert (parents or [*range(-1, len(tokens) - 1)]) == spent["parents"]
            assert (path, kept) == (spent["path"], spent["kept"])


def test_json_in_a_script_element() -> None:
    nasty = ["</script>", "<!--<script>", "&lt;", "\u2028\u2029", "\ud800", "\x00\u202e"]
    text = embedded(nasty)
    assert json.loads(text) == nasty
    assert text.isascii() and not set("<>&") & set(text)


def test_nothing_in_the_page_reaches_out_or_runs_but_its_own_script(shown: Page) -> None:
    policy = next(value for name, value in shown.attributes if name == "content" and "default-src" in (value or ""))
    digest = base64.b64encode(hashlib.sha256(shown.scripts[1].encode()).digest()).decode()
    assert policy == f"default-src 'none'; style-src 'unsafe-inline'; img-src data:; script-src 'sha256-{digest}'"
    assert len(shown.scripts) == 2 and shown.tags.count("script") == 2
    assert not {name for name, _ in shown.attributes if name.startswith("on") or name in ("href", "action", "srcset")}
    assert all((value or "").startswith("data:image/png;base64,") for name, value in shown.attributes if name == "src")
    assert (
        set(re.findall(r"https?:[^\s\"']*", shown.html)) == {"http://www.w3.org/2000/svg"} and "url(" not in shown.html
    )
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f\u2028\u2029\u202a-\u202e\u2066-\u2069]", shown.html)


def test_tables_plots_settings_and_filters(fake: Any, shown: Page) -> None:
    report, _ = fake
    assert report["definition"] in shown.text and "without_replacement" in shown.text
    taus = [f"{run['acceptance']['tau']:.3f}" for run in ordered(report)]
    assert ["tau", *taus] in shown.rows
    depth = next(row for row in shown.rows if row[0] == "depth 0")
    assert all(re.fullmatch(r"0\.\d{3}, 0\.\d\d-\d\.\d\d \(0\.\d\d, 0\.\d\d-\d\.\d\d\)", cell) for cell in depth[1:])
    assert ["", *(f"{c.drafter}{c.temperature}" for c in columns(ordered(report)))] in shown.rows
    assert any(row[:3] == ["eagle3-smollm2", "ngram", "0"] for row in shown.rows)
    assert ("alt", PNG.about) in shown.attributes
    assert ("src", "data:image/png;base64," + base64.b64encode(PNG.png).decode()) in shown.attributes
    assert shown.tags.count("select") == 3 and shown.tags.count("option") == 3 + 3 + 2 + 8
    assert "accepted at depth 5" in shown.text and "or more" not in shown.text


def test_only_so_many_prompts_fit(fake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    report, rows = Faker(questions=20).build()
    monkeypatch.setattr(eval.look.page, "MAX_PROMPTS", 10)
    found = Page(page(report, rows, [], token_text))
    assert "10 prompts are left out here" in found.text
    assert len(found.articles) == len(
        [row for row in rows if row["prompt"] in (*range(8), 8, 9)]
    )  # each category first
    monkeypatch.setattr(eval.look.page, "MAX_BYTES", 200_000)
    html = page(report, rows, [], token_text)
    assert 150_000 < len(html) - len(page(report, [], [], token_text)) < 220_000
    monkeypatch.setattr(eval.look.page, "MAX_BYTES", 10)
    none = Page(page(report, rows, [], token_text))
    assert none.articles == [] and "20 prompts are left out here" in none.text


def one(output: list[int], tokens: list[int], **more: Any) -> dict[str, Any]:
    """A row of a single chain pass after prefill that accepted all but the output's last token."""
    spent = {"drafted": len(tokens), "accepted": len(output) - 2, "kept": len(output) - 1, "tokens": tokens}
    spent |= {"parents": [*range(-1, len(tokens) - 1)], "path": [*range(len(output) - 2)]}
    row = {"prompt": 0, "turn": 0, "category": None, "drafter": "ngram", "temperature": 0.0, "finish": "length"}
    return {**row, "prompt_ids": output[:1], "output_ids": output, "rounds": [spent], **more}


def test_characters_of_several_tokens(fake: Any) -> None:
    """Byte tokens: a character stands whole at its first token, and trees name tokens that are no text by their id."""
    tokenizer = tiny_tokenizer()
    ids: list[int] = tokenizer("aé鹰</script>").input_ids
    texts = token_texts(tokenizer)
    assert texts(ids[:6]) == ["a", "é", "", "鹰", "", ""]
    found = Page(page(fake[0], [one(ids, [*ids[1:-1], 5])], [], texts))
    assert [token.text for token in found.tokens[0]][:6] == ["a", "é", "", "鹰", "", ""]
    assert "".join(token.text for token in found.tokens[0]) == "aé鹰</script>"
    assert "completes the character before" in found.tokens[0][2].about
    labels = [found.data["labels"][i] for i in found.data["answers"][0]["out"]]
    assert labels == ["a", *(f"id {i}" for i in ids[1:6]), *"</script>"]
    assert found.html.count("<b></b>") == 3 + 1  # and the legend
    texts_of = [token.about for token in found.tokens[0]]
    assert texts_of[-1] == f"'>', id {ids[-1]}. pass 0: the target's own, drafts of depth {len(ids) - 2} rejected"


def test_long_prompts_missing_trees_and_no_texts(fake: Any) -> None:
    bare = {"drafted": 3, "accepted": 1, "kept": 2, "tokens": [], "parents": [], "path": []}
    row = one([7, 8, 9], [], prompt_ids=[3] * 500, rounds=[bare], category="x<y")
    found = Page(page(fake[0], [row, {**row, "temperature": 1.0, "output_ids": [], "rounds": []}], []))
    assert [token.text for token in found.tokens[0]] == ["7 ", "8 ", "9 "] and found.tokens[1] == []
    assert [token.kind for token in found.tokens[0]] == ["prefill", "d0", "own"]
    assert "... 100 tokens before ..." in found.text and "prompt 0: x<y" in found.text
    assert found.data["answers"][0]["passes"] == [[[], 0, [], 2]] and "<h2>Plots" not in found.html


def test_prompts_without_a_category(fake: Any) -> None:
    """Alone they have no name for it; beside others they are found as none."""
    rows = [one([7, 8, 9], [8]), one([7, 8, 9], [8], prompt=1, category="math")]
    assert re.findall("prompt \\d.*", Page(page(fake[0], rows[:1], [])).text) == ["prompt 0"]
    mixed = Page(page(fake[0], rows, []))
    assert re.findall("prompt \\d.*", mixed.text) == ["prompt 0", "prompt 1: math"]
    assert re.findall("<option[^>]*>(none|math)<", mixed.html) == ["none", "math"]


def test_lossy_answers_are_marked() -> None:
    report, rows = Faker(questions=2, lossy=True).build()
    found = Page(page(report, rows, [], token_text))
    assert found.html.count('<strong class="mark">LOSSY</strong>') == 3 + 3 * 2
    assert "LOSSY: typical: eps 0.09" in found.text
