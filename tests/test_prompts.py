"""Questions of any dialect: by role, in order, and every row used or named."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import pytest
from tokenizers.processors import TemplateProcessing

from data.chats.conversations import Dialect, Message, RejectLog
from data.chats.policy import RowRejected
from data.chats.prompts import Questions, questions_of, read_questions
from data.chats.rows import Row
from data.masks.template import ChatTemplate
from data.prepare import TargetFiles
from eval.prompts import PlainText, Prompt, describe, prompt_template, read_prompts, usable
from models.errors import EyasError
from models.tiny_target import tiny_target, tiny_tokenizer

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
        ({"turns": "q"}, "bad_turn"),
        ({"turns": None, "frage": "q"}, "no_conversation_column"),
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


@pytest.mark.parametrize(("given", "found"), [("hi", "text"), (3, "a number"), ({"a": 1}, "an object")])
def test_turns_that_are_no_list_are_told(given: Any, found: str) -> None:
    with pytest.raises(RowRejected) as caught:
        questions_of(Row("f", 1, {"turns": given}), DIALECT)
    assert caught.value.detail == f"turns: expected a list of questions or turns, found {found}"
    assert asked({"turns": given, "prompt": "q"}) == ("q",)  # it may mean something else beside a question


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
    assert [(p.id, p.category) for p in prompts] == [("p.jsonl:2", None), ("p.jsonl:3", None)]
    assert "3 questions of 2 rows, of 5 rows read" in caplog.text and "2 of none" not in caplog.text
    assert "template_error" in caplog.text and "bad_content" in caplog.text
    path.write_text(json.dumps(rows[0]))
    with pytest.raises(EyasError, match=r"no usable prompt(.|\n)*p\.jsonl, row 1: template_error"):
        read_prompts(str(path), template, limit=9)


def benchmark(path: Path, *blocks: tuple[str | None, str]) -> str:
    """A file of one-letter questions, a block of them for each category; A's id is 65."""
    rows = [
        {"question_id": ord(letter), "turns": [letter, letter.lower()]} | ({"category": name} if name else {})
        for name, letters in blocks
        for letter in letters
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


TEMPLATE = cast(ChatTemplate, NoSystem())


@pytest.mark.parametrize(
    ("limit", "expected"),
    [
        (1, "A"),
        (3, "AEG"),
        (5, "AEGBF"),  # the third category is used up
        (6, "AEGBFC"),
        (99, "AEGBFCD"),
    ],
)
def test_categories_take_turns(tmp_path: Path, limit: int, expected: str) -> None:
    path = benchmark(tmp_path / "p.jsonl", ("writing", "ABCD"), ("math", "EF"), ("coding", "G"))
    prompts = read_prompts(path, TEMPLATE, limit=limit)
    assert "".join(chr(p.ids[0]) for p in prompts) == expected
    assert [p.id for p in prompts] == [str(ord(letter)) for letter in expected]
    named = dict.fromkeys("ABCD", "writing") | dict.fromkeys("EF", "math") | {"G": "coding"}
    assert [p.category for p in prompts] == [named[letter] for letter in expected]


def test_a_prompt_that_cannot_be_asked_is_replaced_by_one_of_its_category(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows: list[dict[str, Any]] = [
        {"category": "a", "prompt": "too long"},
        {"category": "a", "prompt": "A", "system": "refused"},
        *({"category": "a", "prompt": letter} for letter in "BC"),
        *({"category": "b", "prompt": letter} for letter in "DE"),
        {"prompt": "F"},
    ]
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with caplog.at_level("INFO"):
        prompts = read_prompts(str(tmp_path / "p.jsonl"), TEMPLATE, limit=3, context=4)
    assert [(p.ids, p.category) for p in prompts] == [([66], "a"), ([68], "b"), ([70], None)]
    assert "3 questions of 3 rows, of 7 rows read" in caplog.text and "1 of a, 1 of b, 1 of none" in caplog.text
    assert "1 prompt is empty or fills the target's context of 4 tokens: passed over" in caplog.text
    assert "wanted" not in caplog.text  # the whole file was read


def test_without_categories_a_file_is_read_only_as_far_as_needed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = benchmark(tmp_path / "p.jsonl", (None, "ABCDEF"), ("math", "G"))
    with caplog.at_level("INFO"):
        prompts = read_prompts(path, TEMPLATE, limit=2)
    assert [p.ids for p in prompts] == [[65], [66]]
    assert "4 questions of 2 rows, of 2 rows read, where reading stopped: 2 were wanted" in caplog.text
    caplog.clear()
    with caplog.at_level("INFO"):
        read_prompts(str(tmp_path / "p.jsonl"), TEMPLATE, limit=3, tuning=2)
    assert "of 3 rows read, where" in caplog.text and "1 to measure on, 2 for verify.tune" in caplog.text
    caplog.clear()
    benchmark(tmp_path / "few.jsonl", (None, "ABC"))
    with caplog.at_level("INFO"):
        read_prompts(str(tmp_path / "few.jsonl"), TEMPLATE, limit=8, tuning=6)
    assert "of 3 rows read\n" in caplog.text and "2 to measure on, 1 for verify.tune" in caplog.text


def test_where_no_prompt_can_be_used_the_error_says_why(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"

    def told(*rows: Any, context: int | None = 3) -> str:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        with pytest.raises(EyasError) as caught:
            read_prompts(str(path), TEMPLATE, limit=9, context=context)
        return str(caught.value).removeprefix(f"verify.prompts={path}: no usable prompt")

    full, rows = "3 prompts are empty or fill the target's context of 3 tokens", '; rows are {"turns": [...]}'
    assert told(*({"prompt": text} for text in ("long", "very long", "abc"))) == f"; {full}"
    assert told({"prompt": "long"}).startswith("; 1 prompt is empty or fills the target's context")
    mixed = told(*({"prompt": text} for text in ("long", "very long", "abc")), {"turns": "hi"})
    assert mixed == f"; {full}{rows} or conversations\n{path}, row 4: bad_turn"
    assert told({"turns": "hi"}, context=None) == f"{rows} or conversations\n{path}, row 1: bad_turn"


def test_categories_with_blanks_around_them_and_what_a_terminal_would_obey(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = benchmark(tmp_path / "p.jsonl", ("math", "A"), ("math ", "B"), (" ", "C"), ("\x1b[31mred\n", "D"))
    with caplog.at_level("INFO"):
        prompts = read_prompts(path, TEMPLATE, limit=9)
    assert [p.category for p in prompts] == ["math", None, "\x1b[31mred", "math"]
    assert "2 of math, 1 of none, 1 of \\x1b[31mred" in caplog.text and "\x1b" not in caplog.text
    path = benchmark(tmp_path / "q.jsonl", ("two\nlines", "A"))
    with caplog.at_level("INFO"):
        read_prompts(path, TEMPLATE, limit=9)
    assert "1 of two\\nlines" in caplog.text


def test_the_next_question_is_of_the_same_prompt(tmp_path: Path) -> None:
    prompt = read_prompts(benchmark(tmp_path / "p.jsonl", ("math", "A")), TEMPLATE, limit=1)[0]
    following = prompt.next("answer")
    assert following is not None and following.next("answer") is None
    assert (following.ids, following.id, following.category) == ([97], "65", "math")
    assert [m.content for m in following.messages] == ["A", "answer", "a"]
    assert prompt.next("answer", context=1) is None


def test_a_text_file_of_prompts(tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_text("A\n\nBC\n")
    prompts = read_prompts(str(tmp_path / "p.txt"), TEMPLATE, limit=9)
    assert [(p.ids, p.id, p.category) for p in prompts] == [([65], "p.txt:1", None), ([66, 67], "p.txt:3", None)]


def test_bare_ids_that_fit() -> None:
    prompts = usable([Prompt([]), Prompt([1, 2, 3]), Prompt([4]), Prompt([5]), Prompt([6])], limit=2, context=3)
    assert prompts == [Prompt([4]), Prompt([5])] and prompts[0].category is None


# --- a target without a chat template --------------------------------------------------------------------------------

DATA = {"supervise": "assistant", "tools": "render", "too_long": "cut"}


@pytest.mark.parametrize("adds", [None, "<|im_start|> $A", "<|im_start|> $A <|im_end|>"])
def test_plain_text_has_the_tokens_before_it_but_no_end(adds: str | None) -> None:
    """adds: what the tokenizer puts around a text, $A."""
    tokenizer = tiny_tokenizer(None)
    start, end = tokenizer.convert_tokens_to_ids("<|im_start|>"), tokenizer.eos_token_id
    if adds:
        special = [("<|im_start|>", start), ("<|im_end|>", end)]
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single=adds, special_tokens=special)
    text = PlainText(tokenizer)
    spelled = tokenizer("S\n\nQ?", add_special_tokens=False).input_ids
    assert text.prompt_ids([Message("system", "S"), Message("user", "Q?")]) == [start] * bool(adds) + spelled
    assert describe(text) == "none: plain text"


def test_a_target_without_chat_template_is_asked_the_first_question_as_text(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "target"
    tiny_target(folder, "llama")
    files = TargetFiles.open(str(folder))
    chat = prompt_template(files, {"path": "t", "template_kwargs": {}}, DATA)
    assert isinstance(chat, ChatTemplate) and describe(chat) == chat.fingerprint()[:16]
    files.tokenizer.chat_template = None
    plain = prompt_template(files, {"path": "t", "template_kwargs": {}}, DATA)
    assert isinstance(plain, PlainText) and "target.path=t: no chat template" in caplog.text
    prompts = read_prompts(benchmark(tmp_path / "p.jsonl", ("math", "AB")), plain, limit=9)
    assert [files.tokenizer.decode(p.ids) for p in prompts] == ["A", "B"]
    assert [p.next("answer") for p in prompts] == [None, None]
