"""The HTML page, read back by an HTML parser."""

import base64
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
import torch

from data.chats.rejects import RejectLog
from data.look.coverage import Coverage
from data.look.page import write_page
from data.look.preview import pieces, token_repr
from data.look.statistics import describe
from data.masks.template import Example, decode
from models.tiny_target import tiny_tokenizer

BYTES = tiny_tokenizer()  # one token a byte
NASTY = "</div><script>alert('1')</script><!-- & \"&amp;\" ' \x1b\x00\u202e\n\n\tשלום 你好 é"
VOID = {"meta", "img", "rect", "!doctype"}


@dataclass
class Token:
    kinds: list[str]
    about: str
    text: str = ""


@dataclass
class Page(HTMLParser):
    """Tokens of each document, rows of each table, and the order of all tags."""

    html: str
    tags: set[str] = field(default_factory=set)
    attributes: list[tuple[str, str | None]] = field(default_factory=list)
    documents: list[list[Token]] = field(default_factory=list)
    rows: list[str] = field(default_factory=list)
    text: str = ""
    stack: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.feed(self.html)
        self.close()
        assert self.stack == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes += attrs
        named = dict(attrs)
        if tag not in VOID:
            self.stack.append(tag)
        if tag == "details":
            self.documents.append([])
        elif tag == "span" and "title" in named:
            self.documents[-1].append(Token((named.get("class") or "").split(), named["title"] or ""))
        elif tag == "tr":
            self.rows.append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.stack.pop() == tag

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)

    def handle_data(self, data: str) -> None:
        self.text += data
        if "span" in self.stack and self.documents:
            self.documents[-1][-1].text += data
        if "tr" in self.stack:
            self.rows[-1] += f"{data} "


def document(read: str, answer: str, source: str = "a.json:1:x") -> Example:
    head, tail = ([1, *BYTES.encode(text, add_special_tokens=False), 2] for text in (read, answer))
    return Example(head + tail[1:], [False] * len(head) + [True] * len(tail[1:]), source)


def page(tmp_path: Path, *examples: Example, log: RejectLog | None = None, coverage: Coverage | None = None,
         plot: bytes | None = None, title: str = "t") -> Page:  # fmt: skip
    lengths = np.array([len(example.input_ids) for example in examples], dtype=np.int64)
    supervised = np.array([sum(example.supervised) for example in examples], dtype=np.int64)
    statistics = describe(lengths, supervised, log or RejectLog(rows=len(examples)), len(examples))
    path = tmp_path / "new" / "preview.html"
    write_page(path, examples, BYTES, title=title, statistics=statistics, coverage=coverage, plot_png=plot)
    assert [file.name for file in path.parent.iterdir()] == ["preview.html"]
    return Page(path.read_text(encoding="utf-8"))


def shown(text: str) -> str:
    return text.replace("\x1b", "\\x1b").replace("\x00", "\\x00").replace("\u202e", "\\u202e")


def test_every_token_is_a_span_that_says_what_it_is(tmp_path: Path) -> None:
    (tokens,) = page(tmp_path, document("hé\n", "a<b")).documents
    found = [(" ".join(token.kinds), token.text, token.about.split(" · ")) for token in tokens]
    ids = BYTES.encode("hé\na<b", add_special_tokens=False)
    assert found[:2] == [
        ("c", "<|im_start|>", ["'<|im_start|>'", "position 0", "id 1", "read"]),
        ("", "h", ["'h'", "position 1", f"id {ids[0]}", "read"]),
    ]
    # é is two tokens: shown once, told with both.
    kinds, text, about = found[2]
    assert (kinds, text) == ("parts", "é")
    assert about == ["'é' is\n'Ã'", "position 2", f"id {ids[1]}", "read\n'©'", "position 3", f"id {ids[2]}", "read"]
    assert found[3] == ("", "", ["'©'", "position 3", f"id {ids[2]}", "read"])
    assert found[4:7] == [
        ("", "\n", ["'\\n'", "position 4", f"id {ids[3]}", "read"]),
        ("c", "<|im_end|>", ["'<|im_end|>'", "position 5", "id 2", "read"]),
        ("s", "a", ["'a'", "position 6", f"id {ids[4]}", "supervised"]),
    ]
    assert found[7][:2] == ("s", "<") and found[-1][:2] == ("s c", "<|im_end|>")


def test_the_text_is_all_there_and_supervised_text_in_supervised_spans(tmp_path: Path) -> None:
    examples = [document(NASTY, NASTY), document("q", "answer"), document("", "\n\n")]
    found = page(tmp_path, *examples)
    assert len(found.documents) == 3
    for example, tokens in zip(examples, found.documents, strict=True):
        assert len(tokens) == len(example.input_ids)
        assert ["s" in token.kinds for token in tokens] == example.supervised
        assert ["c" in token.kinds for token in tokens] == [i in (0, 1, 2) for i in example.input_ids]
        assert "".join(token.text for token in tokens) == shown(decode(BYTES, example.input_ids))
        for piece in pieces(BYTES, example.input_ids):
            assert tokens[piece.first].text == shown(piece.text)
        answer = [token for token, wanted in zip(example.input_ids, example.supervised, strict=True) if wanted]
        supervised = "".join(token.text for token in tokens if "s" in token.kinds)
        assert supervised == shown(decode(BYTES, answer))


def test_nothing_in_the_data_becomes_markup(tmp_path: Path) -> None:
    log = RejectLog(rows=3)
    log.add(NASTY, 1, NASTY, "broken_json", NASTY)
    counts = torch.ones(288, dtype=torch.int64)
    coverage = Coverage.of(counts, (0, 1, 2), (64,), chosen=64, token_text=partial(token_repr, BYTES))
    found = page(tmp_path, document(NASTY, NASTY, NASTY), log=log, coverage=coverage, title=NASTY)
    assert not found.tags & {"script", "link", "iframe", "object", "embed", "base", "form", "a"}
    assert not [name for name, _ in found.attributes if name.startswith("on") or name in ("src", "href")]
    assert "<script" not in found.html and "<!--" not in found.html
    assert "http" not in found.html.replace("http-equiv", "").lower()  # nothing is fetched
    assert not set(found.html) & {"\x1b", "\x00", "\u202e"}
    assert "default-src 'none'" in dict(found.attributes).values() or "default-src 'none'" in found.html
    assert found.text.count("<script>alert('1')</script>") >= 6  # title twice, file, id, detail, source


def test_counts_rejects_and_lengths(tmp_path: Path) -> None:
    log = RejectLog(rows=1005)
    for row in (4, 9):
        log.add("x.jsonl", row, f"id{row}", "unknown_role", "humman")
    log.add("y.jsonl", 1, "z", "empty_turn")
    log.repair("user_turns_joined")
    found = page(tmp_path, document("q", "a" * 1500), document("q", "aaaa"), log=log)
    # 1 + 1 + 1 + 1500 + 1 and 1 + 1 + 1 + 4 + 1 tokens
    assert "tokens1,512" in found.text.replace("\n", "") and "1,506 (99.6%)" in found.text
    assert "1,002 of 1,005 rows usable." in found.text
    rows = [" ".join(row.split()) for row in found.rows]
    assert rows[1].startswith("2 rejected unknown_role a turn has a role that is not known")
    assert rows[1].endswith("first: x.jsonl, row 4 (id id4): humman")
    assert rows[2].endswith("first: y.jsonl, row 1 (id z)")
    assert rows[3] == "1 repaired user_turns_joined consecutive user turns were joined by a blank line"
    assert "shortest 8, median 8, mean 756.0, p95 1,504, p99 1,504, longest 1,504" in found.text
    widths = [value for name, value in found.attributes if name == "width" and value and value.isdigit()]
    assert widths == ["420", *["0"] * 7, "420"]  # bins 5-8, 9-16 ... 1,025-2,048
    assert found.text.count("1 (50.0%)") == 2


def test_coverage_and_its_plot(tmp_path: Path) -> None:
    counts = torch.zeros(288, dtype=torch.int64)
    counts[10:20] = 10
    coverage = Coverage.of(counts, (0, 1, 2), (8, 13), chosen=8)
    plot = coverage.png()
    found = page(tmp_path, document("q", "a"), coverage=coverage, plot=plot)
    rows = [row.split() for row in found.rows]
    assert rows[1][:5] == ["*", "8", "50.00%", "50.00", "500.0"] and rows[2][:3] == ["+", "13", "100.00%"]
    assert "cannot be drafted" in found.text
    (source,) = [value for name, value in found.attributes if name == "src"]
    assert source is not None and base64.b64decode(source.removeprefix("data:image/png;base64,")) == plot
    assert "img" not in page(tmp_path, document("q", "a"), coverage=coverage).tags


def test_limits(tmp_path: Path) -> None:
    found = page(tmp_path, document("q", "a" * 5000), *[document("q", "a")] * 205)
    assert [len(tokens) for tokens in found.documents] == [4000, *[5] * 199]
    assert "... 1,004 tokens left out here, 1,004 of them supervised ..." in found.text
    assert [token.about.split(" · ")[1] for token in found.documents[0][1999:2001]] == [
        "position 1999",
        "position 3004",
    ]
    assert [name for name, _ in found.attributes].count("open") == 3


def test_text_that_cannot_be_encoded(tmp_path: Path) -> None:
    log = RejectLog(rows=1)
    log.add("dir/\udcff", 1, "\ud800", "invalid_unicode", "\udfff")
    found = page(tmp_path, document("q", "a", "dir/\udcff:1:\ud800"), log=log, title="\udc00")
    assert "dir/\\udcff:1:\\ud800: 2 of 5 tokens supervised" in found.text
    assert "first: dir/\\udcff, row 1 (id \\ud800): \\udfff" in found.text


def test_no_documents(tmp_path: Path) -> None:
    found = page(tmp_path)
    assert "No documents." in found.text and "table" not in found.tags


def test_a_failed_page_leaves_the_old_one(tmp_path: Path) -> None:
    path = tmp_path / "preview.html"
    path.write_text("old")
    statistics = describe(np.array([5]), np.array([2]), RejectLog(rows=1), 1)

    def unreadable() -> Iterator[Example]:
        yield document("q", "a")
        raise OSError("the disk is gone")

    with pytest.raises(OSError, match="disk"):
        write_page(path, unreadable(), BYTES, title="t", statistics=statistics)
    assert [file.name for file in tmp_path.iterdir()] == ["preview.html"] and path.read_text() == "old"
