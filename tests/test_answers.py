"""Replay and Answers: what becomes of every kind of answer, and a file that no kill damages."""

from __future__ import annotations

import json
from array import array
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from data.chats.prompts import Questions
from data.chats.rejects import RejectLog
from data.regenerate.answers import Answers, beside
from data.regenerate.replay import Answer, Asked, Outcome, Replay, ask
from models.errors import EyasError

SETTINGS = {"target": "t", "temperature": 0.7, "seed": 0}
THREE = Questions("x", "chat", "Be brief.", ("one", "two", "three"), "in.jsonl", 7)


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


# --- one row -----------------------------------------------------------------------------------------------------


def replayed(*answers: Answer, cut: str = "drop") -> Replay:
    replay = Replay(next(ask([THREE])), cut)
    for answer in answers:
        assert replay.open
        replay.take(answer)
    return replay


def values(replay: Replay) -> list[str]:
    row = replay.outcome(SETTINGS).row
    assert row is not None
    return [turn["value"] for turn in row["conversations"]]


def test_all_turns_are_asked_after_the_answers_before_them() -> None:
    replay = replayed(Answer("1", "stop"))
    assert replay.messages() == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "1"},
        {"role": "user", "content": "two"},
    ]
    replay = replayed(Answer("1", "stop"), Answer("2", "eos_token"), Answer("3", "stop", reasoning="hm"))
    assert not replay.open
    assert replay.outcome(SETTINGS).row == {
        "id": "x",
        "category": "chat",
        "conversations": [
            {"from": "system", "value": "Be brief."},
            {"from": "human", "value": "one"},
            {"from": "gpt", "value": "1", "finish_reason": "stop"},
            {"from": "human", "value": "two"},
            {"from": "gpt", "value": "2", "finish_reason": "stop"},
            {"from": "human", "value": "three"},
            {"from": "gpt", "value": "3", "reasoning_content": "hm", "finish_reason": "stop"},
        ],
        "provenance": {**SETTINGS, "source": "in.jsonl:7"},
    }


def test_a_cut_answer_is_dropped_or_kept_unended_and_ends_the_conversation() -> None:
    answers = Answer("1", "stop"), Answer("2 and", "length")
    dropped, kept = replayed(*answers), replayed(*answers, cut="keep")
    assert not dropped.open and not kept.open
    assert values(dropped) == ["Be brief.", "one", "1"]
    assert values(kept) == ["Be brief.", "one", "1", "two", "2 and"]
    row = kept.outcome(SETTINGS).row
    assert row is not None
    assert row["conversations"][-1]["finish_reason"] == "length"
    assert row["provenance"]["left_out"] == "answer_cut"
    first = replayed(Answer("1 and", "length")).outcome(SETTINGS)
    assert (first.row, first.reason, first.detail) == (None, "answer_cut", "turn 1: finish_reason 'length'")


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (Answer(" \n", "stop"), "empty_answer"),
        (Answer("", "stop", reasoning="thought, said nothing"), "empty_answer"),
        (Answer("", "length", reasoning="cut while think"), "answer_cut"),  # nothing of the answer itself is there
        (Answer("I can't", "content_filter"), "answer_cut"),  # not ended by the target: not kept as its answer
        (Answer("a\0b", "stop"), "nul_character"),
        (Answer("a\ud800b", "stop"), "invalid_unicode"),
        (Answer("a\ufdd0b", "stop"), "invalid_unicode"),
    ],
)
def test_an_unusable_answer_is_never_kept(answer: Answer, reason: str) -> None:
    outcome = replayed(answer, cut="keep").outcome(SETTINGS)
    assert (outcome.row, outcome.reason) == (None, reason)
    later = replayed(Answer("1", "stop"), answer, cut="keep")
    assert values(later) == ["Be brief.", "one", "1"]
    assert later.reason == reason


def test_rows_without_an_id_or_with_a_repeated_one_are_named_by_their_place() -> None:
    ids = ["a", "", "a", "b", "", ""]
    rows = [Questions(id, "", "", ("q",), "/data/in.jsonl", row) for row, id in enumerate(ids, start=1)]
    rows.append(replace(rows[1], turns=("other",)))  # the same file given twice
    assert [asked.id for asked in ask(rows)] == [
        "a",
        "in.jsonl:2",
        "in.jsonl:3",
        "b",
        "in.jsonl:5",
        "in.jsonl:6",
        "in.jsonl:2#2",
    ]
    assert [asked.index for asked in ask(rows, limit=2)] == [0, 1]


# --- the file of answers -----------------------------------------------------------------------------------------


def asked_rows(count: int) -> list[Asked]:
    return list(ask(Questions(f"r{i}", "", "", (f"question {i}",), "in.jsonl", i + 1) for i in range(count)))


def outcome_of(asked: Asked) -> Outcome:
    if asked.index == 2:
        return Outcome(asked, None, "empty_answer", "turn 1")
    replay = Replay(asked)
    replay.take(Answer(f"answer ä {asked.index}", "stop"))
    return replay.outcome(SETTINGS)


def open_answers(out: Path, rows: list[Asked], **settings: Any) -> Answers:
    return Answers(out, SETTINGS | settings, array("Q", (asked.digest for asked in rows)))


def log_beside(out: Path, rows: int) -> RejectLog:
    return RejectLog(beside(out, ".rejects.jsonl"), rows=rows)


def test_rows_come_out_in_the_order_of_the_input(tmp_path: Path) -> None:
    out, rows = tmp_path / "deep" / "out.jsonl", asked_rows(5)
    answers = open_answers(out, rows)
    for index in (3, 0, 4, 2, 1):
        answers.append(outcome_of(rows[index]))
    answers.finish(log_beside(out, 5))
    assert [row["id"] for row in read_jsonl(out)] == ["r0", "r1", "r3", "r4"]
    assert [row["reason"] for row in read_jsonl(beside(out, ".rejects.jsonl"))] == ["empty_answer"]
    info = json.loads(beside(out, ".info").read_text())
    assert (info["settings"], info["rows"], info["rejected"]) == (SETTINGS, 5, {"empty_answer": 1})
    assert sorted(path.name for path in out.parent.iterdir()) == [
        "out.jsonl",
        "out.jsonl.info",
        "out.jsonl.rejects.jsonl",
    ]
    assert open_answers(out, rows).complete


@pytest.mark.parametrize("length", [-1, -10, 3])
def test_a_half_written_line_is_cut_off_and_answered_again(tmp_path: Path, length: int) -> None:
    """Whatever the byte at which a kill stopped the writing: of a row, or of the line of settings."""
    out, rows = tmp_path / "out.jsonl", asked_rows(3)
    answers = open_answers(out, rows)
    answers.append(outcome_of(rows[0]))
    answers.append(outcome_of(rows[1]))
    answers.close()
    content = answers.part.read_bytes()
    answers.part.write_bytes(content[:length])
    again = open_answers(out, rows)
    done = [] if length > 0 else [0]
    assert [index for index in range(3) if index in again] == done
    for row in rows:
        if row.index not in again:
            again.append(outcome_of(row))
    again.finish(log_beside(out, 3))
    assert [row["id"] for row in read_jsonl(out)] == ["r0", "r1"]


def test_a_kill_between_the_last_two_steps_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, rows = tmp_path / "out.jsonl", asked_rows(3)
    answers = open_answers(out, rows)
    for row in rows:
        answers.append(outcome_of(row))
    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", lambda path: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            answers.finish(log_beside(out, 3))
    answers.close()
    assert out.exists() and answers.part.exists()
    again = open_answers(out, rows)
    assert len(again) == 3
    again.finish(log_beside(out, 3))
    assert [row["id"] for row in read_jsonl(out)] == ["r0", "r1"]


def test_another_setting_or_other_rows_are_refused_by_name(tmp_path: Path) -> None:
    out, rows = tmp_path / "out.jsonl", asked_rows(3)
    answers = open_answers(out, rows)
    answers.append(outcome_of(rows[1]))
    with pytest.raises(EyasError, match=r"out\.jsonl\.part: another process is writing it"):
        open_answers(out, rows)
    answers.close()
    changed = r"was made with temperature 0.7, now 1.0; top_p None, now 0.9: give another regenerate\.out"
    with pytest.raises(EyasError, match=rf"out\.jsonl\.part: {changed}"):
        open_answers(out, rows, temperature=1.0, top_p=0.9)
    edited = replace(rows[1], questions=replace(rows[1].questions, turns=("question 1?",)))
    with pytest.raises(EyasError, match="row 2 of data.path is not the one that was answered"):
        open_answers(out, [rows[0], edited, rows[2]])
    assert len(open_answers(out, [*rows, *asked_rows(4)[3:]])) == 1  # more rows at the end are welcome

    again = open_answers(out, rows)
    for row in (rows[0], rows[2]):
        again.append(outcome_of(row))
    again.finish(log_beside(out, 3))
    with pytest.raises(EyasError, match=rf"out\.jsonl: {changed}"):
        open_answers(out, rows, temperature=1.0, top_p=0.9)
    with pytest.raises(EyasError, match="answers other rows than data.path gives now"):
        open_answers(out, rows[:2])
    beside(out, ".info").unlink()
    with pytest.raises(EyasError, match=r"exists, and out\.jsonl\.info is not beside it"):
        open_answers(out, rows)
    with pytest.raises(EyasError, match="is a folder; give a file to write"):
        open_answers(tmp_path, rows)


def test_without_a_single_answer_there_is_no_file(tmp_path: Path) -> None:
    out, row = tmp_path / "out.jsonl", asked_rows(1)[0]
    answers = open_answers(out, [row])
    answers.append(Outcome(row, None, "empty_answer", "turn 1"))
    with pytest.raises(EyasError, match=r"no row has an answer\n0 of 1 rows usable(.|\n)*empty_answer"):
        answers.finish(log_beside(out, 1))
    assert not out.exists() and len(read_jsonl(beside(out, ".rejects.jsonl"))) == 1
