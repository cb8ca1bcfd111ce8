"""Column layouts, role names and shapes of turns: each against the turns written out by hand."""

from __future__ import annotations

import json
from typing import Any

import pytest

from data.chats.conversations import Dialect, Message, conversation_of
from data.chats.dialects import ALIASES, ROLES, category_of, id_of
from data.chats.policy import RowRejected
from data.chats.prompts import questions_of
from data.chats.rows import Row
from models.errors import EyasError

ASKED = ("user", "q")
QA = [ASKED, ("assistant", "a")]
BEFORE = [("user", "q1"), ("assistant", "a1")]


def of(row: Any, **dialect: Any) -> tuple[list[tuple[str, str]], list[str]]:
    conversation, repairs = conversation_of(Row("f", 1, row), Dialect.of(**dialect))
    return [(message.role, message.content) for message in conversation.messages], repairs


def reason(row: Any, **dialect: Any) -> str:
    with pytest.raises(RowRejected) as caught:
        of(row, **dialect)
    return caught.value.reason


def said(*pairs: tuple[str, str]) -> list[dict[str, str]]:
    return [{"role": role, "content": text} for role, text in pairs]


# --- columns -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("column", ["conversations", "messages", "conversation", "dialogue", "dialog", "turns"])
@pytest.mark.parametrize("keys", [("from", "value"), ("role", "content"), ("role", "value"), ("speaker", "text")])
def test_columns_and_keys_of_turns_in_any_mix(column: str, keys: tuple[str, str]) -> None:
    assert of({column: [dict(zip(keys, turn, strict=True)) for turn in QA]}) == (QA, [])


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"instruction": "q", "input": "", "output": "a"}, QA),
        ({"instruction": "q", "output": "a", "input": None}, QA),
        ({"instruction": "q", "input": "x", "output": "a"}, [("user", "q\n\nx"), QA[1]]),
        ({"instruction": "q", "context": "x", "response": "a"}, [("user", "q\n\nx"), QA[1]]),
        ({"instruction": "", "input": "q", "output": "a"}, QA),
        ({"input": "q", "output": "a"}, QA),
        ({"instruction": "q", "output": "a", "system": "S"}, [("system", "S"), *QA]),
        ({"system_prompt": "S", "question": "q", "response": "a"}, [("system", "S"), *QA]),
        (
            {"instruction": "q", "output": "a", "history": [["q1", "a1"], ["q2", "a2"]]},
            [*BEFORE, ("user", "q2"), ("assistant", "a2"), *QA],
        ),
        ({"prompt": "q", "history": [{"user": "q1", "bot": "a1"}], "answer": "a"}, [*BEFORE, *QA]),
        ({"prompt": said(*BEFORE, ASKED), "completion": said(QA[1])}, [*BEFORE, *QA]),
        ({"prompt": said(("system", "S"), ASKED), "completion": "a"}, [("system", "S"), *QA]),
        ({"prompt": "q", "completion": said(QA[1])[0]}, QA),
        ({"prompt": [{"type": "text", "text": "q"}], "completion": "a"}, QA),
    ],
)
def test_prompt_and_response_layouts(row: Any, expected: list[tuple[str, str]]) -> None:
    assert of(row) == (expected, [])


@pytest.mark.parametrize("prompt", ["prompt", "question", "query", "instruction"])
@pytest.mark.parametrize("response", ["response", "completion", "answer", "output"])
def test_usual_names_of_prompt_and_response(prompt: str, response: str) -> None:
    assert of({"id": 1, prompt: "q", response: "a", "source": "x"}) == (QA, [])


def test_a_conversation_column_goes_before_a_prompt_column() -> None:
    assert of({"prompt": "the first question", "messages": said(*QA)}) == (QA, [])
    assert of({"prompt": "q", "response": "a", "messages": None, "conversations": None}) == (QA, [])


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "q", "chosen": "a", "rejected": "b"},
        {"prompt": said(ASKED), "chosen": said(QA[1]), "rejected": said(("assistant", "b"))},
        {"chosen": said(*QA), "rejected": said(ASKED, ("assistant", "b"))},
        {"prompt": "q", "chosen": said(*QA), "rejected": said(ASKED, ("assistant", "b")), "messages": said(*QA)},
        {"conversations": [{"from": "human", "value": "q"}], "chosen": {"from": "gpt", "value": "a"}},
    ],
)
def test_preference_rows_give_their_chosen_answer(row: Any) -> None:
    assert of(row) == (QA, ["chosen_taken"])


@pytest.mark.parametrize(
    "row",
    [
        {"messages": said(*QA), "conversation": said(ASKED, ("assistant", "b"))},
        {"messages": said(*QA), "chosen": said(ASKED, ("assistant", "b"))},
        {"prompt": "q", "question": "other", "answer": "a"},
        {"prompt": "q", "answer": "a", "output": "b"},
        {"prompt": "q", "input": "x", "context": "y", "answer": "a"},
    ],
)
def test_columns_that_disagree(row: Any) -> None:
    assert reason(row) == "columns_disagree"


def test_columns_that_agree() -> None:
    assert of({"prompt": "q", "question": "q", "answer": "a", "output": ""}) == (QA, [])
    assert of({"messages": said(*QA), "conversations": [{"from": "human", "value": "q"}, {"bot": "a"}]}) == (QA, [])


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"prompt": "q"}, "no_assistant_turn"),
        ({"turns": ["q", "r"], "reference": ["a", "b"]}, "no_assistant_turn"),
        ({"turns": []}, "empty_conversation"),
        ({"prompt": "q", "response": ""}, "empty_turn"),
        ({"prompt": "q", "response": 5}, "bad_content"),
        ({"prompt": "q", "answer": ["a", "b"]}, "bad_turn"),
        ({"prompt": "q", "input": ["x"], "answer": "a"}, "bad_content"),
        ({"prompt": "q", "answer": "a", "history": [["q1"]]}, "bad_turn"),
        ({"prompt": "q", "answer": "a", "history": "q1"}, "bad_turn"),
        ({"conversations": "hi"}, "bad_turn"),
        ({"conversations": '[{"from": "human"'}, "bad_turn"),
        ({"conversations": {"from": ["human"], "value": []}}, "bad_turn"),
        ({"context": "only this"}, "no_conversation_column"),
        ({"chosen": "a", "rejected": "b"}, "no_conversation_column"),
        ({"role": "user", "content": "q"}, "bare_turn"),
    ],
)
def test_rows_that_hold_no_conversation(row: Any, expected: str) -> None:
    assert reason(row) == expected


def test_lists_of_turns_as_other_tools_store_them() -> None:
    """As JSON text in a table, and as an object of lists: what `datasets` makes of a sequence of objects."""
    assert of({"messages": json.dumps(said(*QA))}) == (QA, [])
    assert of({"conversations": {"from": ["human", "gpt"], "value": ["q", "a"]}}) == (QA, [])


# --- data.columns and data.roles -----------------------------------------------------------------------------------


def test_extra_column_names() -> None:
    names = {"frage": "prompt", "antwort": "response", "verlauf": "messages", "answer": "ignore"}
    assert of({"frage": "q", "antwort": "a", "answer": 42}, columns=names) == (QA, [])
    assert of({"verlauf": said(*QA)}, columns=names) == (QA, [])
    assert of({"frage": "q", "prompt": None, "antwort": "a"}, columns=names) == (QA, [])
    assert reason({"frage": "q", "prompt": "other", "antwort": "a"}, columns=names) == "columns_disagree"
    with pytest.raises(EyasError, match=r"data\.columns\.frage=prompts: must be one of .*prompt, question"):
        Dialect.of(columns={"frage": "prompts"})


def test_id_and_category_by_other_names() -> None:
    names = {"uid": "id", "thema": "category", "frage": "prompt", "id": "ignore"}
    dialect = Dialect.of(columns=names)
    row = {"uid": 0, "id": "x", "question_id": "y", "thema": "Physik", "category": "z", "frage": "q"}
    assert (id_of(row, dialect), category_of(row, dialect)) == ("0", "Physik")
    assert (id_of({"id": "x"}, dialect), id_of({"question_id": 7}, dialect)) == ("", "7")
    assert (id_of(row), category_of(row, Dialect.of())) == ("x", "z")
    assert (category_of({"category": 3}, dialect), id_of([], dialect), id_of({}, dialect)) == ("", "", "")
    # Other ids and categories do not speak against them.
    asked = questions_of(Row("f", 1, row), Dialect.of(columns={**names, "id": "id"}))
    assert (asked.id, asked.category, asked.turns) == ("0", "Physik", ("q",))
    assert of({"question": "known as the id", "prompt": "q", "answer": "a"}, columns={"question": "id"}) == (QA, [])


def test_extra_role_names() -> None:
    row = {"messages": said((" Kunde ", "q"), ("BERATER", "a"))}
    assert of(row, roles={"kunde": "user", " Berater": "assistant"}) == (QA, [])
    assert reason(row) == "unknown_role"
    assert of({"messages": said(("user", "q"), ("model", "a"))}, roles={"model": "assistant"}) == (QA, [])
    with pytest.raises(EyasError, match=r"data\.roles\.Kunde=customer: must be one of system, user"):
        Dialect.of(roles={"Kunde": "customer"})


@pytest.mark.parametrize("name", ["human", "user", "USER", "prompter", " Human "])
def test_names_of_the_user(name: str) -> None:
    assert of({"messages": said((name, "q"), QA[1])}) == (QA, [])


@pytest.mark.parametrize(
    "name", ["gpt", "assistant", "ChatGPT", "bot", "bard", "bing", "model", "claude", "llama", "AI", "answer"]
)
def test_names_of_the_assistant(name: str) -> None:
    assert of({"messages": said(ASKED, (name, "a"))}) == (QA, [])


@pytest.mark.parametrize("name", ["tool", "function", "observation", "tool_response", "ipython"])
@pytest.mark.parametrize("call", ["function_call", "tool_call", "tool_calls"])
def test_names_of_calls_and_results(name: str, call: str) -> None:
    row = {"messages": said(ASKED, (call, '{"name": "n"}'), (name, "r"), QA[1])}
    assert [role for role, _ in of(row)[0]] == ["user", "assistant", "tool", "assistant"]


def test_developer_is_system_and_every_alias_has_one_role() -> None:
    assert of({"messages": said(("developer", "S"), *QA)}) == ([("system", "S"), *QA], [])
    names = [alias for aliases in ALIASES.values() for alias in aliases]
    assert len(names) == len(set(names)) and set(ROLES) <= set(names) and all(name == name.lower() for name in names)


# --- turns ---------------------------------------------------------------------------------------------------------


def test_turns_keyed_by_role() -> None:
    assert of({"conversations": [{"user": "q", "assistant": "a"}]}) == (QA, [])
    assert of({"conversations": [{"human": "q"}, {"bot": "a", "user": None}]}) == (QA, [])
    assert of({"conversations": [{"system": "S", "question": "q", "answer": "a"}]}) == ([("system", "S"), *QA], [])
    assert reason({"conversations": [{"user": "q", "assistant": "a", "note": "x"}]}) == "bad_turn"


def test_both_names_of_a_key_may_be_there_if_they_mean_the_same() -> None:
    both = {"from": "human", "role": "user", "value": "q", "content": "q"}
    assert of({"messages": [both, *said(QA[1])]}) == (QA, [])
    assert reason({"messages": [{**both, "role": "assistant"}, *said(QA[1])]}) == "bad_turn"
    assert reason({"messages": [{**both, "content": "r"}, *said(QA[1])]}) == "bad_turn"
    beside = {"role": "user", "speaker": "Alice", "content": "q", "text": "Q"}
    assert of({"messages": [beside, *said(QA[1])]}) == (QA, [])


def test_the_rejected_turn_is_named() -> None:
    with pytest.raises(RowRejected) as caught:
        of({"messages": [*said(*QA), {"role": "boss", "content": "x"}]})
    assert caught.value.reason == "unknown_role" and caught.value.detail == "messages[2]: role 'boss'"


def test_answers_that_call_a_function_the_older_way() -> None:
    call = {"role": "assistant", "content": "", "function_call": {"name": "n", "arguments": "{}"}}
    row = {"messages": [*said(ASKED), call, {"role": "function", "name": "n", "content": "r"}, *said(QA[1])]}
    messages = conversation_of(Row("f", 1, row), Dialect.of())[0].messages
    assert messages[1].tool_calls[0].name == "n" and messages[2] == Message("tool", "r", supervised=False, name="n")
