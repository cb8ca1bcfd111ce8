"""Inputs that broke other tools, from public reports, each with the right outcome. The report is named in each test."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from data.chats.clean import clean_html
from data.chats.conversations import Conversation, Dialect, Message, RejectLog, read_conversations
from data.chats.prompts import read_questions
from models.errors import EyasError


def read(path: Path, rows: Any, dialect: Dialect | None = None) -> tuple[list[Conversation], RejectLog]:
    """rows: bytes of a file, or the rows of a JSONL file."""
    if isinstance(rows, bytes):
        path.write_bytes(rows)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    log = RejectLog()
    conversations = list(read_conversations(path, dialect=dialect, rejects=log))
    assert len(conversations) + log.rejected == log.rows
    return conversations, log


def chat(id: str, *roles: str) -> dict[str, Any]:
    """A turn for each role; its text is its number."""
    return {"id": id, "conversations": [{"from": role, "value": str(i)} for i, role in enumerate(roles)]}


def text(conversation: Conversation) -> list[str]:
    return [f"{message.role}: {message.content}" for message in conversation.messages]


def test_rows_with_no_turn_to_look_at(tmp_path: Path) -> None:
    """sgl-project/SpecForge#368: empty, or nothing but a system turn."""
    rows = [
        {"id": "e1", "conversations": []},
        {"id": "e2", "conversations": [{"from": "system", "value": "be brief"}]},
        {"id": "e3"},
        chat("good", "human", "gpt"),
    ]
    conversations, log = read(tmp_path / "d.jsonl", rows)
    assert [c.id for c in conversations] == ["good"]
    assert [(r.id, r.reason) for r in log.rejects] == [
        ("e1", "empty_conversation"),
        ("e2", "no_assistant_turn"),
        ("e3", "no_conversation_column"),
    ]


def test_speakers_by_many_names_and_a_typo(tmp_path: Path) -> None:
    """axolotl-ai-cloud/axolotl#325, #752; hiyouga/LlamaFactory#2381."""
    pairs = [("human", "gpt"), ("user", "assistant"), ("USER", "ChatGPT"), ("human", "bing"), ("humman", "gpt")]
    rows = [chat(f"r{i}", *pair) for i, pair in enumerate(pairs)]
    conversations, log = read(tmp_path / "d.jsonl", rows)
    assert [c.id for c in conversations] == ["r0", "r1", "r2", "r3"]
    assert all(text(c) == ["user: 0", "assistant: 1"] for c in conversations)
    assert [(r.id, r.reason, r.detail) for r in log.rejects] == [
        ("r4", "unknown_role", "conversations[0]: role 'humman'")
    ]
    assert len(read(tmp_path / "d.jsonl", rows, Dialect.of({"humman": "user"}))[0]) == 5


def test_a_rejected_role_is_not_looked_up_again(tmp_path: Path) -> None:
    """hiyouga/LlamaFactory#6878: warned about, then a KeyError all the same."""
    rows = [chat("a", "human", "gpt"), chat("b", "user", "gpt"), chat("c", "kunde", "gpt")]
    conversations, log = read(tmp_path / "d.jsonl", rows)
    assert ([c.id for c in conversations], log.rows, log.counts()) == (["a", "b"], 3, {"unknown_role": 1})


def test_columns_and_keys_in_any_mix(tmp_path: Path) -> None:
    """NVIDIA-NeMo/Automodel PR#2375: hard-coded column and key names."""
    turns = [("user", "hi"), ("assistant", "hello")]
    rows = [
        {column: [dict(zip(keys, turn, strict=True)) for turn in turns]}
        for column in ("messages", "conversations")
        for keys in (("role", "content"), ("from", "value"))
    ]
    rows.append({**rows[0], "conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "other"}]})
    conversations, log = read(tmp_path / "d.jsonl", rows)
    assert [c.messages for c in conversations] == [(Message("user", "hi"), Message("assistant", "hello"))] * 4
    assert [(r.row, r.reason) for r in log.rejects] == [(5, "columns_disagree")]


def test_system_turns_in_every_place(tmp_path: Path) -> None:
    """hiyouga/LlamaFactory#2464, #7651."""
    listed = chat("listed", "system", "human", "gpt")
    rows = [listed, {**listed, "system": "S1"}, chat("middle", "human", "gpt", "system", "human", "gpt")]
    conversations, log = read(tmp_path / "d.jsonl", rows)
    rest = ["user: 1", "assistant: 2"]
    assert [text(c) for c in conversations] == [["system: 0", *rest], ["system: S1\n\n0", *rest]]
    assert [(r.id, r.reason) for r in log.rejects] == [("middle", "system_in_middle")]
    assert log.repairs == {"system_turns_joined": 1}


def test_stray_entries_between_turns(tmp_path: Path) -> None:
    """ai-dynamo/aiperf PR#828."""
    row = chat("a", "human", "gpt")
    row["conversations"][1:1] = [None, "stray"]
    conversations, log = read(tmp_path / "d.jsonl", [row, chat("b", "human", "gpt")])
    assert [c.id for c in conversations] == ["b"]
    assert [(r.reason, r.detail) for r in log.rejects] == [
        ("bad_turn", "conversations[1]: expected an object, found null")
    ]


def test_top_levels_of_every_shape(tmp_path: Path) -> None:
    """unslothai/unsloth#337; oobabooga/textgen#4325: the suffix or the first byte decided what was read."""
    row = chat("a", "human", "gpt")
    line = json.dumps(row).encode() + b"\n"
    path = tmp_path / "d.jsonl"
    assert len(read(path, json.dumps([row]).encode())[0]) == 1  # an array in a .jsonl
    assert len(read(tmp_path / "d.json", line * 2)[0]) == 2  # lines in a .json
    assert len(read(path, gzip.compress(line * 2))[0]) == 2
    for shape in ([row["conversations"]], row["conversations"]):  # a list of lists, a bare list of turns
        _, log = read(path, json.dumps(shape).encode())
        assert set(log.counts()) <= {"not_an_object", "bare_turn"} and log.kept == 0
    conversations, log = read(path, line * 2 + line[:30] + b"\n" + line * 2)
    assert len(conversations) == 4 and [(r.row, r.reason) for r in log.rejects] == [(3, "broken_json")]
    assert "line 3" in log.rejects[0].detail
    assert [r.reason for r in read(path, b"")[1].rejects] == ["empty_file"]
    with pytest.raises(EyasError, match="expected a JSON array of conversations or one JSON object a line, found 'id,"):
        read(path, b"id,text\n1,hi\n")


def test_page_furniture_of_scraped_chats(tmp_path: Path) -> None:
    """lm-sys/FastChat, cleaning of scraped ShareGPT pages."""
    scraped = [
        '1 / 2<div class="x"><p>Use <code>ls</code></p></div>',
        "```pythonCopy codex=1\n```",
        "Your homework:\n```html\n<div>done</div>\n```",
    ]
    rows = [{"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": value}]} for value in scraped]
    off, _ = read(tmp_path / "d.jsonl", rows)
    on, log = read(tmp_path / "d.jsonl", rows, Dialect.of(clean_html=True))
    assert [c.messages[1].content for c in off] == scraped
    assert [c.messages[1].content for c in on] == ["Use `ls`", "```python\nx=1\n```", scraped[2]]
    assert log.repairs == {"html_cleaned": 2} and clean_html(scraped[2]) == scraped[2]


def test_every_row_unusable_says_why(tmp_path: Path) -> None:
    """hiyouga/LlamaFactory#7777, #9618: an empty loader and no reason."""
    rows = [chat("a", "human"), chat("b", "human", "gpt", "gpt"), {"id": "c", "text": "x"}]
    conversations, log = read(tmp_path / "d.jsonl", rows)
    assert not conversations and log.counts() == {
        "no_assistant_turn": 1,
        "consecutive_assistant": 1,
        "no_conversation_column": 1,
    }
    table = log.table()
    assert table.startswith("0 of 3 rows usable") and all(reason in table for reason in log.counts())


def test_prompts_by_role_not_by_place(tmp_path: Path) -> None:
    """ai-dynamo/aiperf#798; vllm-project/vllm PR#54783: only turns 0 and 1 were looked at."""
    rows = [
        chat("a", "system", "human", "gpt", "human", "gpt"),
        chat("b", "gpt", "human", "gpt"),
        {"id": "c", "turns": ["q1", "q2"]},
    ]
    read(tmp_path / "d.jsonl", rows)
    log = RejectLog()
    found = list(read_questions(tmp_path / "d.jsonl", dialect=Dialect.of(), rejects=log, key="verify.prompts"))
    assert [(q.system, q.turns) for q in found] == [("0", ("1", "3")), ("", ("1",)), ("", ("q1", "q2"))]
    assert (log.rows, log.kept) == (3, 3)
