"""Tool calls, their results and the tools column: delivered to the template, never supervised."""

from __future__ import annotations

import json
from typing import Any

import pytest

from data.chats.conversations import Dialect, Message, ToolCall, conversation_of
from data.chats.policy import RowRejected
from data.chats.rows import Row

GOOD = {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "hello"}]}
CALL = (("function_call", '{"name": "add", "arguments": {"a": 1}}'), ("observation", "3"))


def turns(*pairs: tuple[str, Any]) -> dict[str, Any]:
    return {"conversations": [{"from": role, "value": text} for role, text in pairs]}


def read(row: Any) -> tuple[tuple[Message, ...], list[str]]:
    conversation, repairs = conversation_of(Row("f", 1, row), Dialect.of())
    return conversation.messages, repairs


def messages(row: Any) -> tuple[Message, ...]:
    return read(row)[0]


def reason(row: Any) -> str:
    with pytest.raises(RowRejected) as caught:
        read(row)
    return caught.value.reason


def test_calls_and_results_are_delivered_unsupervised() -> None:
    row = {**turns(("human", "q"), *CALL, ("gpt", "a")), "tools": '[{"name": "add", "parameters": {}}]'}
    conversation, repairs = conversation_of(Row("f", 1, row), Dialect.of())
    assert conversation.messages == (
        Message("user", "q"),
        Message("assistant", "", supervised=False, tool_calls=(ToolCall("add", {"a": 1}),)),
        Message("tool", "3", supervised=False, name="add"),
        Message("assistant", "a"),
    )
    assert conversation.tools == ({"type": "function", "function": {"name": "add", "parameters": {}}},)
    assert repairs == []


def test_text_and_the_calls_after_it_are_one_turn() -> None:
    row = turns(("human", "q"), ("gpt", "Let me see."), CALL[0], CALL[0], CALL[1], CALL[1], ("gpt", "a"))
    add = ToolCall("add", {"a": 1})
    assert messages(row)[1] == Message("assistant", "Let me see.", supervised=False, tool_calls=(add, add))
    assert [m.role for m in messages(row)] == ["user", "assistant", "tool", "tool", "assistant"]


def test_calls_one_after_the_other_and_what_trails_the_last_answer() -> None:
    row = turns(("human", "q"), *CALL, *CALL, ("gpt", "a"), ("human", "r"), *CALL)
    kept, repairs = read(row)
    assert [message.role for message in kept] == ["user", "assistant", "tool", "assistant", "tool", "assistant"]
    assert repairs == ["trailing_turns_dropped"]


def test_openai_calls_pair_with_their_results_by_id() -> None:
    calls = [
        {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}},
        {"id": "c2", "type": "function", "function": {"name": "mul", "arguments": {}}},
    ]
    rows = [{"role": "tool", "tool_call_id": i, "content": i} for i in ("c2", "c1")]
    row = {
        "messages": [
            {"role": "user", "content": "q"},
            {"role": "assistant", "content": None, "tool_calls": calls},
            *rows,
            {"role": "assistant", "content": "a"},
        ]
    }
    _, called, first, second, _ = messages(row)
    assert called.tool_calls == (ToolCall("add", {"a": 1}, "c1"), ToolCall("mul", {}, "c2"))
    assert [(m.name, m.content) for m in (first, second)] == [("add", "c1"), ("mul", "c2")]
    row["messages"][2] = {"role": "tool", "tool_call_id": "c9", "content": "?"}
    assert reason(row) == "tool_result_without_call"


@pytest.mark.parametrize(
    "value",
    [
        "add(1)",
        "[]",
        "3",
        "null",
        '{"arguments": {}}',
        '{"name": "", "arguments": {}}',
        '{"name": "n", "arguments": [1]}',
        '{"name": "n", "arguments": "{"}',
        '{"name": "n", "arguments": {}',
        None,
    ],
)
def test_unreadable_calls(value: Any) -> None:
    assert reason(turns(("human", "q"), ("function_call", value), CALL[1], ("gpt", "a"))) == "bad_tool_call"


@pytest.mark.parametrize(
    ("value", "arguments"),
    [
        ('{"name": "n", "arguments": "{\\"a\\": 1}"}', [{"a": 1}]),
        ('[{"name": "n", "arguments": {"a": 1}}, {"name": "n", "parameters": {"a": 2}}]', [{"a": 1}, {"a": 2}]),
        ('{"name": "n", "arguments": ""}', [{}]),
        ('{"name": "n"}', [{}]),
        ({"name": "n", "arguments": {"a": 1}}, [{"a": 1}]),
        ('{"function": {"name": "n", "arguments": "{}"}}', [{}]),
    ],
)
def test_readable_calls(value: Any, arguments: list[dict[str, Any]]) -> None:
    row = turns(("human", "q"), ("function_call", value), CALL[1], ("gpt", "a"))
    assert [call.arguments for call in messages(row)[1].tool_calls] == arguments


def test_call_texts_are_checked_as_all_texts() -> None:
    for escaped, expected in (("\\u0000", "nul_character"), ("\\ud800", "invalid_unicode")):
        value = f'{{"name": "n", "arguments": {{"a": "{escaped}"}}}}'
        assert reason(turns(("human", "q"), ("function_call", value), CALL[1], ("gpt", "a"))) == expected


def test_tools_column() -> None:
    wrapped = {"type": "function", "function": {"name": "n"}}
    for column in ([{"name": "n"}], [wrapped], json.dumps([wrapped]), ['{"name": "n"}'], {"name": "n"}):
        conversation, _ = conversation_of(Row("f", 1, {**GOOD, "tools": column}), Dialect.of())
        assert conversation.tools == (wrapped,)
    nothing: list[Any] = [None, "", " ", "[]", [], "null"]
    for none in nothing:
        assert conversation_of(Row("f", 1, {**GOOD, "tools": none}), Dialect.of())[0].tools == ()
    for bad in ("search", [3], [{"description": "no name"}], "[", 5):
        assert reason({**GOOD, "tools": bad}) == "bad_tools"


def test_deeply_nested_arguments_are_no_accident() -> None:
    deep = "[" * 900 + "]" * 900
    row = turns(
        ("human", "q"), ("function_call", f'{{"name": "n", "arguments": {{"a": {deep}}}}}'), CALL[1], ("gpt", "a")
    )
    assert messages(row)[1].tool_calls[0].name == "n"
    hopeless = "[" * 100_000
    assert reason(turns(("human", "q"), ("function_call", hopeless), CALL[1], ("gpt", "a"))) == "bad_tool_call"
