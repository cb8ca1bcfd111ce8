"""Questions of any dialect: by role, in order, and every row used or named."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import pytest

from data.chats.conversations import Dialect, Message, RejectLog
from data.chats.policy import RowRejected
from data.chats.prompts import Questions, questions_of, read_questions
from data.chats.rows import Row
from data.masks.template import ChatTemplate
from eval.prompts import read_prompts
from models.errors import EyasError

DIALECT = Dialect.of()


def asked(row: Any) -> tuple[str, ...]:
    return questions_of(Row("f", 1, row), DIALECT).turns


def turns(*pairs: tuple[str, Any]) -> dict[str, Any]:
    return {"conversations": [{"from": role, "value": text} for role, text in pairs]}


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"turns": ["q1", "q2"], "reference": ["a1"]}, ("q1", "q2")),
        (turns(("system", "S"), ("human", "q1"), ("gpt", "a"), ("human", "q2"), ("gpt", "b")), ("q1", "q2")),
        (turns(("gpt", "0"), ("human", "q1"), ("gpt", "a")), ("q1",)),
        (turns(("human", "q1"), ("gpt", "a"), ("human", "q2")), ("q1", "q2")),
        (turns(("human", "q1"), ("human", "q2"), ("gpt", "")), ("q1\n\nq2",)),
        (turns(("human", "q1"), ("gpt", "a"), ("gpt", "b"), ("human", "q2")), ("q1", "q2")),
        ({"turns": [{"role": "user", "content": "q1"}, {"role": "user", "content": "q2"}]}, ("q1", "q2")),
        ({"prompt": "q1"}, ("q1",)),
        ({"question": "q1", "answer": "a"}, ("q1",)),
        ({"instruction": "q1", "input": "x", "output": ""}, ("q1\n\nx",)),
        ({"prompt": "q2", "history": [["q1", "a1"]]}, ("q1", "q2")),
    ],
)
def test_user_turns_by_role(row: Any, expected: tuple[str, ...]) -> None:
    assert asked(row) == expected


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        (turns(("human", "q"), ("function_call", '{"name": "n"}'), ("observation", "r"), ("gpt", "a")), "tool_turns"),
        (turns(("human", "q"), ("gpt", "a"), ("human", " ")), "empty_turn"),
        (turns(("gpt", "a")), "no_user_turn"),
        ({"turns": []}, "empty_conversation"),
        ({"turns": "q"}, "no_conversation_column"),
        ({"turns": ["q", 3]}, "bad_turn"),
        ({"turns": [""]}, "empty_turn"),
        (turns(("humman", "q")), "unknown_role"),
        ("q", "not_an_object"),
    ],
)
def test_rows_without_questions_are_named(row: Any, expected: str) -> None:
    with pytest.raises(RowRejected) as caught:
        questions_of(Row("f", 1, row), DIALECT)
    assert caught.value.reason == expected


def test_read_questions_counts_every_row(tmp_path: Path) -> None:
    rows = [
        {"question_id": 81, "category": "math", "turns": ["q1", "q2"]},
        {"system": "S", **turns(("human", "q"), ("gpt", "a")), "id": "b", "category": 3},
        {"id": "c", "turns": [""]},
    ]
    path = tmp_path / "p.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"turns": ["q')
    log = RejectLog()
    found = list(read_questions([str(path)], dialect=DIALECT, rejects=log, key="verify.prompts"))
    assert found == [
        Questions("81", "math", "", ("q1", "q2"), str(path), 1),
        Questions("b", "", "S", ("q",), str(path), 2),
    ]
    assert (log.rows, log.kept) == (4, 2)
    assert [(r.row, r.id, r.reason) for r in log.rejects] == [(3, "c", "empty_turn"), (4, "", "truncated_file")]
    with pytest.raises(EyasError, match="verify.prompts="):
        list(read_questions(str(tmp_path / "none.jsonl"), dialect=DIALECT, rejects=log, key="verify.prompts"))


def test_a_text_file_is_a_question_a_line(tmp_path: Path) -> None:
    path = tmp_path / "p.txt"
    path.write_bytes(b"\xef\xbb\xbfWhy?\r\n\r\n  How so?  \n\xff\n" + "A\u2028B".encode())
    log = RejectLog()
    found = list(read_questions(str(path), dialect=DIALECT, rejects=log, key="data.path"))
    assert [(q.row, q.turns) for q in found] == [(1, ("Why?",)), (3, ("How so?",)), (5, ("A\u2028B",))]
    assert [(r.row, r.reason) for r in log.rejects] == [(4, "invalid_unicode")] and log.rows == 4
    (tmp_path / "empty.txt").write_text("\n")
    assert not list(read_questions(tmp_path / "empty.txt", dialect=DIALECT, rejects=log, key="data.path"))
    assert log.rejects[-1].reason == "empty_file"


class NoSystem:
    """A chat template that refuses system prompts; a prompt's ids are its characters."""

    def prompt_ids(self, messages: Sequence[Message]) -> list[int]:
        if messages[0].role == "system":
            raise EyasError("target.chat_template refuses the prompt: no system turns")
        return [ord(char) for char in messages[-1].content]


def test_verifier_prompts_are_counted_and_a_refused_one_is_passed_over(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [{"system": "S", "prompt": "A"}, {"frage": "BC"}, {"turns": ["D", "E"]}, {"prompt": 3}, {"prompt": "long"}]
    path = tmp_path / "p.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    template = cast(ChatTemplate, NoSystem())
    dialect = Dialect.of(columns={"frage": "prompt"})
    with caplog.at_level("INFO"):
        prompts = read_prompts(str(path), template, limit=9, context=4, dialect=dialect)
    assert [(p.ids, p.later) for p in prompts] == [([66, 67], ()), ([68], ("E",))]
    assert "3 questions of 2 rows, of 5 rows read" in caplog.text
    assert "template_error" in caplog.text and "bad_content" in caplog.text
    path.write_text(json.dumps(rows[0]))
    with pytest.raises(EyasError, match="no usable prompt"):
        read_prompts(str(path), template, limit=9)
