"""Cleaning of scraped texts: furniture out, code as it stands, everything else byte for byte."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data.chats.clean import clean_html
from data.chats.conversations import Dialect, conversation_of
from data.chats.policy import RowRejected
from data.chats.rows import Row

FENCE = "```html\n<div>\n  <p>a_b*</p>\n</div>\n```"


@pytest.mark.parametrize(
    ("scraped", "clean"),
    [
        ('1 / 2<div class="x"><p>Use <code>ls</code></p></div>', "Use `ls`"),
        ("2 / 2\n\nHello", "Hello"),
        ("```pythonCopy codex=1\nprint(x)\n```", "```python\nx=1\nprint(x)\n```"),
        ("```\npythonCopy codex=1\n```", "```python\nx=1\n```"),
        ("```python\nCopy code\nx=1\n```", "```python\nx=1\n```"),
        ("Run\n```c++Copy code\nint x;\n```\nCopy code", "Run\n```c++\nint x;\n```\nCopy code"),
        (
            "<pre><div><span>python</span><button>Copy code</button></div><code>if a &lt; b:\n    pass</code></pre>",
            "```python\nif a < b:\n    pass\n```",
        ),
        ("<p>a</p><p>b &amp; c</p>", "a\n\nb & c"),
        ("<div>a <b>bold</b> word</div>", "a **bold** word"),
        ("<ol><li>one</li></ol><p>x</p><ol><li>two</li></ol>", "1. one\n\nx\n\n1. two"),
        ("Text *a*\n\n\n- x\n- y\n\n<ul><li>z</li></ul>tail_", "Text *a*\n\n\n- x\n- y\n\n- z\n\ntail_"),
        ("<p>Hi</p><button>Regenerate</button><svg><path d='M0'></path></svg>", "Hi"),
        ("<span>a</span><br>b", "a  \nb"),
        ("<p>List<T> and 1 < 2</p>", "List<T> and 1 < 2"),
        (f"<div><p>Like this:</p>\n{FENCE}\n</div>", f"Like this:\n\n{FENCE}"),
        (f"<p>One</p>\n{FENCE}\nand `<div>`", f"One\n\n{FENCE}\nand `<div>`"),
    ],
)
def test_furniture_goes(scraped: str, clean: str) -> None:
    assert clean_html(scraped) == clean
    assert clean_html(clean) == clean


@pytest.mark.parametrize(
    "text",
    [
        FENCE,
        f"Homework:\n{FENCE}\nThe `<div>` holds a `<p>a</p>`.",
        "~~~\n<p>a</p>\n~~~",
        "```\n<p>an unclosed fence</p>",
        "````\n```\n<p>a</p>\n```\n````",
        "Open with <div> and go on",
        "| a<br>b | H<sub>2</sub>O |",
        "std::vector<int> x; a < b && c > d &amp; _e_ *f*",
        "1 / 2 = 0.5",
        "3 / 2\nis more than one",
        "Press Copy code.",
        "1. one\n1. two\n\n\n* three",
        "",
        " \n",
    ],
)
def test_a_text_without_furniture_stays(text: str) -> None:
    assert clean_html(text) == text


@given(st.text(st.sampled_from("ab *_#\\&`~-\n\r\t1.<>[]é\u2028"), max_size=60))
def test_text_without_tags_comes_back_byte_for_byte(text: str) -> None:
    assert clean_html(text) == text


def test_off_changes_nothing_and_on_counts() -> None:
    answer = "<p>Use <code>ls</code></p>"
    row = Row("f", 1, {"system": answer, "conversations": [{"from": r, "value": answer} for r in ("human", "gpt")]})
    conversation, repairs = conversation_of(row, Dialect.of())
    assert [m.content for m in conversation.messages] == [answer] * 3 and repairs == []
    conversation, repairs = conversation_of(row, Dialect.of(clean_html=True))
    assert [m.content for m in conversation.messages] == [answer, "Use `ls`", "Use `ls`"]
    assert repairs == ["html_cleaned"]


def test_hopelessly_nested_elements_are_named() -> None:
    turns = [{"from": "human", "value": "q"}, {"from": "gpt", "value": "<div>" * 5000 + "a" + "</div>" * 5000}]
    with pytest.raises(RowRejected, match="bad_content"):
        conversation_of(Row("f", 1, {"conversations": turns}), Dialect.of(clean_html=True))
