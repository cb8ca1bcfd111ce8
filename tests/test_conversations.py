"""Reading: every dialect, every irregular row by name, and kept + rejected = rows."""

from __future__ import annotations

import gzip
import json
import pickle
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.chats.conversations import Conversation, Dialect, Message, RejectLog, conversation_of, read_conversations
from data.chats.policy import REJECTS, REPAIRS, RowRejected
from data.chats.rows import Row
from models.errors import EyasError

HI = [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "hello"}]
GOOD = {"id": "g", "conversations": HI}


def write(path: Path, *rows: Any) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def read(*paths: Path, roles: dict[str, str] | None = None) -> tuple[list[Conversation], RejectLog]:
    log = RejectLog()
    conversations = list(read_conversations([str(path) for path in paths], dialect=Dialect.of(roles), rejects=log))
    assert len(conversations) + log.rejected == log.rows
    return conversations, log


def turns(*pairs: tuple[str, Any]) -> dict[str, Any]:
    return {"conversations": [{"from": role, "value": text} for role, text in pairs]}


def messages(row: Any) -> tuple[Message, ...]:
    return conversation_of(Row("f", 1, row), Dialect.of())[0].messages


def of(row: Any) -> tuple[list[tuple[str, str]], list[str]]:
    conversation, repairs = conversation_of(Row("f", 1, row), Dialect.of())
    return [(message.role, message.content) for message in conversation.messages], repairs


def reason(row: Any) -> str:
    with pytest.raises(RowRejected) as caught:
        of(row)
    return caught.value.reason


# --- files ---------------------------------------------------------------------------------------------------------


def test_array_lines_gzip_and_pretty_print_read_alike(tmp_path: Path) -> None:
    rows = [dict(GOOD, id=str(i)) for i in range(5)]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    texts = {
        "array.jsonl": json.dumps(rows),
        "lines.json": lines,
        "indented.json": json.dumps(rows, indent=2),
        "objects.json": "\n".join(json.dumps(row, indent=2) for row in rows),
        "crlf.jsonl": "\ufeff" + lines.replace("\n", "\r\n\r\n"),
    }
    seen = []
    for name, text in texts.items():
        (tmp_path / name).write_bytes(text.encode())
        seen.append([c.messages for c in read(tmp_path / name)[0]])
    (tmp_path / "packed").write_bytes(gzip.compress(lines.encode()))
    conversations, _ = read(tmp_path / "packed")
    seen.append([c.messages for c in conversations])
    assert [c.id for c in conversations] == ["0", "1", "2", "3", "4"]
    assert [c.row for c in conversations] == [1, 2, 3, 4, 5]
    assert all(messages == [(Message("user", "hi"), Message("assistant", "hello"))] * 5 for messages in seen)


def test_rows_larger_than_the_read_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("data.chats.json_rows.CHUNK", 7)
    rows = [turns(("human", "é" * 50 + str(i)), ("gpt", '"}],\n\u2028' * 9)) for i in range(4)]
    (tmp_path / "a.json").write_text(json.dumps(rows, ensure_ascii=False, indent=1), encoding="utf-8")
    (tmp_path / "b.jsonl").write_text("\n".join(json.dumps(row, ensure_ascii=False) for row in rows), encoding="utf-8")
    for name in ("a.json", "b.jsonl"):
        conversations, log = read(tmp_path / name)
        assert [c.messages[0].content[-1] for c in conversations] == ["0", "1", "2", "3"]
        assert conversations[3].messages[1].content == '"}],\n\u2028' * 9 and not log.rejects


def test_folder_reads_its_data_files_by_name(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    write(tmp_path / "sub" / "b.jsonl", dict(GOOD, id="b"))
    write(tmp_path / "a.json", dict(GOOD, id="a"))
    (tmp_path / "notes.txt").write_text("not data")
    assert [c.id for c in read(tmp_path)[0]] == ["a", "b"]


def test_parquet_and_saved_dataset(tmp_path: Path) -> None:
    import datasets

    made = datasets.Dataset.from_list([dict(GOOD, id=str(i)) for i in range(3)])
    made.to_parquet(str(tmp_path / "d.parquet"))
    made.save_to_disk(str(tmp_path / "saved"))
    for path in (tmp_path / "d.parquet", tmp_path / "saved"):
        assert [(c.id, c.messages[1].content) for c in read(path)[0]] == [(str(i), "hello") for i in range(3)]


def test_cut_line_in_the_middle_is_named_with_its_line(tmp_path: Path) -> None:
    lines = [json.dumps(dict(GOOD, id=str(i))) for i in range(5)]
    lines[2] = lines[2][:25]
    (tmp_path / "d.jsonl").write_text("\n".join(lines))
    conversations, log = read(tmp_path / "d.jsonl")
    assert [c.id for c in conversations] == ["0", "1", "3", "4"]
    assert [(r.row, r.reason) for r in log.rejects] == [(3, "broken_json")]
    assert "line 3" in log.rejects[0].detail


@pytest.mark.parametrize("keep", [1, 20, 60, 80])
def test_truncated_tail_is_one_reject(tmp_path: Path, keep: int) -> None:
    rows = [dict(GOOD, id=str(i)) for i in range(3)]
    text = json.dumps(rows)
    last = text.rindex('{"id"')
    (tmp_path / "array.json").write_text(text[: last + keep])
    (tmp_path / "lines.jsonl").write_text("\n".join(map(json.dumps, rows[:2])) + "\n" + json.dumps(rows[2])[:keep])
    for name in ("array.json", "lines.jsonl"):
        conversations, log = read(tmp_path / name)
        assert [c.id for c in conversations] == ["0", "1"]
        assert [(r.row, r.reason) for r in log.rejects] == [(3, "truncated_file")]
    packed = gzip.compress(json.dumps(rows * 2000).encode())
    (tmp_path / "packed.gz").write_bytes(packed[: len(packed) // 2])
    conversations, log = read(tmp_path / "packed.gz")
    assert 0 < len(conversations) < 6000 and [r.reason for r in log.rejects] == ["truncated_file"]


def test_damaged_gzip_is_named(tmp_path: Path) -> None:
    packed = bytearray(gzip.compress(json.dumps([{"n": i} for i in range(20000)]).encode()))
    packed[len(packed) // 2 : len(packed) // 2 + 64] = b"\xff" * 64
    (tmp_path / "d.gz").write_bytes(packed)
    with pytest.raises(EyasError, match="d.gz"):
        read(tmp_path / "d.gz")


def test_empty_files_are_named(tmp_path: Path) -> None:
    for i, data in enumerate((b"", b" \n\n", b"\xef\xbb\xbf", b"[]")):
        (tmp_path / f"{i}.json").write_bytes(data)
        assert [r.reason for r in read(tmp_path / f"{i}.json")[1].rejects] == ["empty_file"]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("id,text\n1,hi\n", "expected a JSON array of conversations or one JSON object a line, found 'id,text"),
        ('[{"conversations": []}]\n[{"conversations": []}]', "found more data after the end of an array"),
        (
            '[{"conversations": []}, {"conversations" []}' + " " * 99,
            "not valid JSON in row 2, at character 41: Expecting ':' delimiter",
        ),
    ],
)
def test_wrong_top_level_says_what_was_found(tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / "d.json").write_text(text)
    with pytest.raises(EyasError, match=says.replace("[", r"\[")) as caught:
        read(tmp_path / "d.json")
    assert "d.json" in str(caught.value)


def test_utf16_and_missing_paths(tmp_path: Path) -> None:
    (tmp_path / "w.json").write_bytes("[]".encode("utf-16"))
    with pytest.raises(EyasError, match="UTF-16"):
        read(tmp_path / "w.json")
    for missing in (tmp_path / "none.json", tmp_path / "none"):
        with pytest.raises(EyasError, match="no such file or folder"):
            read(missing)
    (tmp_path / "folder").mkdir()
    with pytest.raises(EyasError, match="the folder holds no"):
        read(tmp_path / "folder")


def test_rows_of_the_wrong_shape_are_named(tmp_path: Path) -> None:
    (tmp_path / "d.json").write_text(json.dumps([HI, HI[0], None, "stray", 3, {"text": "x"}, {}, GOOD]))
    conversations, log = read(tmp_path / "d.json")
    assert [c.row for c in conversations] == [8]
    assert [r.reason for r in log.rejects] == [
        "not_an_object",
        "bare_turn",
        *["not_an_object"] * 3,
        *["no_conversation_column"] * 2,
    ]
    assert "a list" in log.rejects[0].detail and "null" in log.rejects[2].detail and "text" in log.rejects[5].detail


# --- columns, roles, contents --------------------------------------------------------------------------------------


def test_every_mix_of_column_and_key_names_gives_the_same_turns() -> None:
    expected = [("user", "hi"), ("assistant", "hello")]
    for column in ("messages", "conversations"):
        for role, text in (("role", "content"), ("from", "value")):
            row = {column: [{role: "user", text: "hi"}, {role: "assistant", text: "hello"}]}
            assert of(row) == (expected, [])
    both = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]}
    assert of({**both, "conversations": HI})[0] == expected
    assert reason({**both, "conversations": [*HI[:1], {"from": "gpt", "value": "other"}]}) == "columns_disagree"


def test_role_aliases_are_case_insensitive_and_extendable(tmp_path: Path) -> None:
    pairs = [("human", "gpt"), ("user", "assistant"), ("USER", "ChatGPT"), ("human", "bing"), ("humman", "gpt")]
    path = write(tmp_path / "d.jsonl", *(dict(turns((u, "q"), (a, "r")), id=u + a) for u, a in pairs))
    conversations, log = read(path)
    assert len(conversations) == 4
    (rejected,) = log.rejects
    assert (rejected.id, rejected.reason, rejected.row) == ("hummangpt", "unknown_role", 5)
    assert "'humman'" in rejected.detail
    assert len(read(path, roles={"Humman": "user"})[0]) == 5
    with pytest.raises(
        EyasError, match=r"data\.roles\.x=boss: must be one of system, user, assistant, tool_call, tool"
    ):
        read(path, roles={"x": "boss"})


def test_contents() -> None:
    parts = [{"type": "text", "value": "a"}, {"type": "text", "text": "b"}, "c"]
    assert of(turns(("human", parts), ("gpt", "x")))[0][0] == ("user", "abc")
    assert reason(turns(("human", [{"type": "image_url", "image_url": "u"}]), ("gpt", "x"))) == "non_text_part"
    assert reason(turns(("human", 3), ("gpt", "x"))) == "bad_content"
    assert reason(turns(("human", [None]), ("gpt", "x"))) == "bad_content"
    assert reason(turns(("human", None), ("gpt", "x"))) == "empty_turn"
    assert reason(turns(("human", "q"), ("gpt", "a\x00b"))) == "nul_character"
    assert reason(turns(("human", "q"), ("gpt", "a\ud800b"))) == "invalid_unicode"
    assert reason(turns(("human", "q"), ("gpt", "\ufdd0"))) == "invalid_unicode"


def test_broken_utf8_rejects_only_its_row(tmp_path: Path) -> None:
    good = json.dumps(GOOD).encode()
    (tmp_path / "d.jsonl").write_bytes(good.replace(b"hello", b"h\xffllo") + b"\n" + good + b"\n")
    conversations, log = read(tmp_path / "d.jsonl")
    assert [c.row for c in conversations] == [2] and log.rejects[0].reason == "invalid_unicode"


def answer(**fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", **fields}]}


def test_reasoning_in_its_own_field_stays_there() -> None:
    for key in ("reasoning", "reasoning_content", "thinking"):
        assert messages(answer(content="a", **{key: " r "}))[-1] == Message("assistant", "a", reasoning=" r ")
    said = "<think>\nr\n</think>\n\na"
    assert of(answer(content=said, reasoning="r")) == ([("user", "q"), ("assistant", said)], [])
    assert reason(answer(content="", reasoning="r")) == "empty_turn"
    assert reason(answer(content="a", reasoning={"r": 1})) == "bad_content"
    cut = messages(answer(content="", reasoning="r", finish_reason="length"))[-1]
    assert cut == Message("assistant", "<think>\nr", ended=False)


def test_loss_weights() -> None:
    for key, value, supervised in (("loss_weight", 0.0, False), ("weight", 1, True), ("train", False, False)):
        row = turns(("human", "q"), ("gpt", "a"), ("human", "r"), ("gpt", "b"))
        row["conversations"][1][key] = value
        assert [m.supervised for m in messages(row) if m.role == "assistant"] == [supervised, True]
    row["conversations"][1] = {"from": "gpt", "value": "a", "loss": "no"}
    assert reason(row) == "bad_turn"
    assert reason(answer(content="a", weight=0)) == "nothing_supervised"


# --- order of turns ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("roles", "expected"),
    [
        ("", "empty_conversation"),
        ("s", "no_assistant_turn"),
        ("u", "no_assistant_turn"),
        ("a", "no_user_turn"),
        ("au", "no_assistant_turn"),
        ("uaa", "consecutive_assistant"),
        ("uasua", "system_in_middle"),
        ("uoa", "tool_result_without_call"),
        ("ufooa", "tool_result_without_call"),
        ("ufa", "tool_call_without_result"),
        ("ufua", "tool_call_without_result"),
        ("uaf", "no_assistant_turn"),
        ("ufo", "no_assistant_turn"),
        ("fo", "no_assistant_turn"),
    ],
)
def test_order_that_rejects(roles: str, expected: str) -> None:
    names = {"s": "system", "u": "human", "a": "gpt", "f": "function_call", "o": "observation"}
    texts = {"f": '{"name": "n", "arguments": {}}'}
    assert reason(turns(*((names[r], texts.get(r, "x")) for r in roles))) == expected


@pytest.mark.parametrize("stray", [None, "stray", ["human", "hi"], {"value": "hi"}, {"from": 3, "value": "hi"}])
def test_stray_turn_rejects_the_row(stray: Any) -> None:
    assert reason({"conversations": [HI[0], stray, HI[1]]}) == "bad_turn"


def test_conflicting_keys_of_a_turn() -> None:
    assert reason({"conversations": [{"from": "human", "value": "a", "content": "b"}, HI[1]]}) == "bad_turn"


def test_order_that_is_repaired() -> None:
    row = turns(("gpt", "0"), ("human", "1"), ("user", "2"), ("gpt", "3"), ("human", "4"))
    assert of(row) == (
        [("user", "1\n\n2"), ("assistant", "3")],
        ["leading_assistant_dropped", "trailing_turns_dropped", "user_turns_joined"],
    )


def test_system_prompts() -> None:
    listed = turns(("system", "S2"), ("human", "q"), ("gpt", "a"))
    rest = [("user", "q"), ("assistant", "a")]
    assert of(listed) == ([("system", "S2"), *rest], [])
    assert of({**listed, "system": "S1"}) == ([("system", "S1\n\nS2"), *rest], ["system_turns_joined"])
    assert of({**listed, "system": "S2"}) == ([("system", "S2"), *rest], [])
    assert of({**turns(("human", "q"), ("gpt", "a")), "system": " "}) == (rest, ["empty_system_dropped"])


def test_what_follows_a_cut_answer_is_left_out() -> None:
    """An answer that reached its token limit has no end-of-turn token, so nothing can follow it."""
    ending = {"finish_reason": "length"}
    for key, value in (("finish_reason", "length"), ("finish_reason", "max_tokens"), ("ended", False)):
        row = turns(("human", "q"), ("gpt", "a"), ("human", "r"), ("gpt", "b"))
        row["conversations"][1][key] = value
        conversation, repairs = conversation_of(Row("f", 1, row), Dialect.of())
        assert conversation.messages == (Message("user", "q"), Message("assistant", "a", ended=False))
        assert repairs == ["turns_after_cut_dropped"]
    last = messages({**turns(("human", "q"), ("gpt", "a"), ("human", "r"), ("gpt", "b")), **ending})
    assert [m.ended for m in last] == [True, True, True, False]
    assert all(m.ended for m in messages({**turns(("human", "q"), ("gpt", "a")), "finish_reason": "stop"}))
    before_the_first_question = turns(("gpt", "0"), ("human", "q"), ("gpt", "a"))
    before_the_first_question["conversations"][0].update(ending)
    assert of(before_the_first_question)[1] == ["leading_assistant_dropped"]


# --- the log -------------------------------------------------------------------------------------------------------


def test_log_counts_rows_and_names_the_first_of_each_reason(tmp_path: Path) -> None:
    rows = [{"id": "e1", "conversations": []}, turns(("system", "be brief")), {"id": "e3"}, GOOD]
    conversations, log = read(write(tmp_path / "d.jsonl", *rows))
    assert (log.rows, log.kept, log.rejected) == (4, 1, 3) and conversations[0].source.endswith("d.jsonl:4:g")
    assert log.counts() == {"empty_conversation": 1, "no_assistant_turn": 1, "no_conversation_column": 1}
    table = log.table()
    assert table.startswith("1 of 4 rows usable, 3 rejected") and "row 3 (id 'e3')" in table
    assert [(r.row, r.id, r.reason) for r in log.rejects] == [
        (1, "e1", "empty_conversation"),
        (2, "", "no_assistant_turn"),
        (3, "e3", "no_conversation_column"),
    ]


def test_all_that_goes_to_worker_processes_can_be_pickled() -> None:
    call = ("function_call", '{"name": "n"}')
    row = Row("f", 1, {**turns(("human", "q"), call, ("observation", "3"), ("gpt", "a")), "tools": [{"name": "n"}]})
    conversation, _ = conversation_of(row, Dialect.of({"x": "user"}, {"y": "prompt"}, True))
    assert conversation.tools and pickle.loads(pickle.dumps(conversation)) == conversation
    rejected = pickle.loads(pickle.dumps(RowRejected("bad_turn", "why")))
    assert (rejected.reason, rejected.detail) == ("bad_turn", "why")


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=4,
)
turn_values = json_values | st.fixed_dictionaries(
    {
        "from": st.sampled_from(["human", "gpt", "system", "tool", "function_call", "x"]),
        "value": json_values | st.sampled_from(['{"name": "n"}', "x"]),
    }
)
row_values = json_values | st.fixed_dictionaries({"conversations": st.lists(turn_values, max_size=5) | json_values})


@settings(max_examples=150, deadline=None)
@given(st.lists(row_values, max_size=6))
def test_any_json_is_kept_or_rejected_by_name(tmp_path_factory: pytest.TempPathFactory, rows: list[Any]) -> None:
    path = tmp_path_factory.mktemp("any") / "d.json"
    path.write_text(json.dumps(rows), encoding="utf-8")
    conversations, log = read(path)
    assert log.rows == max(1, len(rows))
    assert set(log.counts()) <= set(REJECTS) and set(log.repairs) <= set(REPAIRS)
    for conversation in conversations:
        kinds = "".join("c" if m.tool_calls else m.role[0] for m in conversation.messages)
        # c: tool-calling turn, t: tool result. An answer is missing only where the user speaks after a result.
        assert re.fullmatch("s?(u(ct+)*a|u(ct+)+)*", kinds) and kinds.endswith("a")


def test_huge_turns_are_read_whole(tmp_path: Path) -> None:
    text = "é word " * 30_000
    conversations, _ = read(write(tmp_path / "d.jsonl", turns(("human", text), ("gpt", text))))
    assert [m.content for m in conversations[0].messages] == [text, text]
