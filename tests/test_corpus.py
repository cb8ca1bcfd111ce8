"""The data section as a whole: every row counted, the same documents from any number of processes, kept on disk."""

from __future__ import annotations

import gzip
import json
import logging
import os
from collections.abc import Iterator
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

from conf.schema import DataConfig
from data.chats.rows import Row, Source, inputs_of
from data.documents.corpus import Corpus, check_training_data, read_corpus, read_documents, split_held_out
from data.documents.document_set import DocumentSet
from data.documents.encode import Encoder, outcomes, pick_workers
from data.masks.template import ChatTemplate, Example, decode
from models.errors import EyasError
from tests.chat_templates import CHATML, LLAMA3, byte_tokenizer

TOKENIZER = byte_tokenizer()
TEMPLATE = ChatTemplate(TOKENIZER, CHATML)


def section(tmp_path: Path, path: Any, **changes: Any) -> dict[str, Any]:
    return asdict(DataConfig(path=path, cache_dir=str(tmp_path / "cache"), max_length=2000)) | changes


def sharegpt(*texts: str, id: str = "") -> dict[str, Any]:
    roles = ("human", "gpt") * len(texts)
    return {"id": id, "conversations": [{"from": r, "value": t} for r, t in zip(roles, texts, strict=False)]}


def rows_file(path: Path, *rows: Any) -> str:
    data = "".join(json.dumps(row) + "\n" for row in rows).encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return str(path)


def runs(example: Example) -> list[str]:
    pairs = zip(example.input_ids, example.supervised, strict=True)
    return [decode(TOKENIZER, [t for t, _ in run]) for on, run in groupby(pairs, key=lambda pair: pair[1]) if on]


def listed(path: Path) -> list[tuple[int, str]]:
    return [(row["row"], row["reason"]) for row in map(json.loads, path.read_text().splitlines())]


# --- counts ---------------------------------------------------------------------------------------------------------


def test_every_row_is_kept_or_rejected(tmp_path: Path) -> None:
    good = [sharegpt("q", f"answer {i}", id=str(i)) for i in range(600)]
    rows = [*good[:300], sharegpt("q" * 300, "late"), sharegpt("x"), *good[300:], good[7]]
    data = section(tmp_path, rows_file(tmp_path / "d.gz", *rows), max_length=120)
    found = read_documents(TEMPLATE, data, rejects_copy=tmp_path / "rejects.jsonl")
    assert [runs(e) for e in found.documents] == [[f"answer {i}<|im_end|>"] for i in range(600)]
    assert found.documents[-1].source == f"{tmp_path}/d.gz:602:599"
    log = found.log
    reasons = {"cut_before_answer": 1, "no_assistant_turn": 1, "duplicate": 1}
    assert (log.rows, log.kept, log.counts()) == (603, 600, reasons)
    assert listed(tmp_path / "rejects.jsonl") == [
        (301, "cut_before_answer"), (302, "no_assistant_turn"), (603, "duplicate"),
    ]  # fmt: skip
    supervised = sum(e.num_supervised for e in found.documents)
    tokens = sum(len(e.input_ids) for e in found.documents)
    assert found.summary().startswith(f"SUPERVISED: {supervised:,} of {tokens:,} tokens")
    assert "600 of 603 rows usable, 3 rejected" in found.summary()
    statistics = found.manifest["statistics"]
    assert (statistics["documents"], statistics["tokens"], statistics["supervised_tokens"]) == (600, tokens, supervised)
    assert "of " + f"{tmp_path}/d.gz, row 8" in (tmp_path / "rejects.jsonl").read_text()


@pytest.mark.parametrize("workers", [0, 2])
def test_max_documents_counts_usable_conversations(tmp_path: Path, workers: int) -> None:
    """Rows behind the last one kept are not read, whatever the workers have seen of them."""
    rows = [sharegpt("x"), *(sharegpt("q" * (300 if i % 2 else 1), f"a{i}", id=str(i)) for i in range(40))]
    data = section(tmp_path, rows_file(tmp_path / "d.gz", *rows), max_length=150, max_documents=7, workers=workers)
    found = read_documents(TEMPLATE, data)
    assert [e.source.split(":")[-1] for e in found.documents] == [str(i) for i in range(0, 14, 2)]
    assert found.log.kept == 7 and found.log.rows == found.log.kept + found.log.rejected == 14


def test_nothing_usable_stops_with_the_reasons(tmp_path: Path) -> None:
    path = rows_file(tmp_path / "d.gz", sharegpt(), sharegpt("x"), sharegpt("x", "y"))
    data = section(tmp_path, path, max_length=8)
    with pytest.raises(EyasError, match=r"data\.path: 0 of 3 usable") as caught:
        read_documents(TEMPLATE, data, rejects_copy=tmp_path / "run" / "r.jsonl")
    for reason in ("empty_conversation", "no_assistant_turn", "cut_before_answer"):
        assert reason in str(caught.value)
    assert len(listed(tmp_path / "run" / "r.jsonl")) == 3
    assert [p for p in (tmp_path / "cache").iterdir() if not p.name.endswith(".lock")] == []


def test_a_template_that_fits_no_row_stops_early(tmp_path: Path) -> None:
    """No answer among the first thousand can be marked: the rest is not read."""
    rows = [sharegpt("x"), *(sharegpt(f"q{i}", "<think>no</think>") for i in range(3000))]
    data = section(tmp_path, rows_file(tmp_path / "d.jsonl", *rows), max_length=3)
    with pytest.raises(EyasError, match=r"data\.path: 0 of 1001 usable"):
        read_documents(TEMPLATE, data)


def test_duplicates_across_files_by_choice(tmp_path: Path) -> None:
    """Equal turns under another dialect and id are the same conversation."""
    one = rows_file(tmp_path / "1.jsonl", sharegpt("a", "b", id="1"), sharegpt("a", "b", id="2"))
    other = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    two = rows_file(tmp_path / "2.jsonl", other, sharegpt("a", "c"))
    assert len(read_documents(TEMPLATE, section(tmp_path, [one, two])).documents) == 2
    assert len(read_documents(TEMPLATE, section(tmp_path, [one, two], duplicates="keep")).documents) == 4


# --- processes ------------------------------------------------------------------------------------------------------


def everything(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_any_number_of_workers_gives_the_same_bytes(tmp_path: Path) -> None:
    rows: list[Any] = [sharegpt("q", f"answer {i} " * (i % 50), f"{i}", "x" * (i % 7)) for i in range(1500)]
    rows[::97] = [None, 7, {}, *rows[1:14]]
    path = rows_file(tmp_path / "d.jsonl", *rows)
    found = []
    for workers in (0, 1, 3):
        data = section(tmp_path, path, workers=workers) | {"cache_dir": str(tmp_path / str(workers))}
        found.append(read_documents(TEMPLATE, data))
    assert found[0].log.rows == 1500 and found[0].log.rejected > 3
    assert everything(found[0].folder) == everything(found[1].folder) == everything(found[2].folder)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_file_that_breaks_off_in_nonsense_is_told_alike(tmp_path: Path, workers: int) -> None:
    path = rows_file(tmp_path / "d.jsonl", sharegpt("a", "b"))
    broken = tmp_path / "broken.json"
    broken.write_text('[{"a": 1}, {"a": 2 "b": 3}, {"a": 4}, {"a": 5}]')
    with pytest.raises(EyasError, match=r"broken\.json: not valid JSON in row 2, at character 19"):
        read_documents(TEMPLATE, section(tmp_path, [path, str(broken)], workers=workers))


class Deadly:
    """Ends the process that receives it."""

    def __reduce__(self) -> Any:
        return os._exit, (3,)


def test_a_dead_worker_is_an_error_that_names_the_key() -> None:
    encoder = Encoder(TEMPLATE, Deadly(), 100)  # type: ignore[arg-type]
    rows = [Row("f", i, sharegpt("a", "b")) for i in range(3)]
    with pytest.raises(EyasError, match=r"data\.workers=1: a worker process died"):
        list(outcomes(encoder, rows, 1))


def test_workers_by_size(tmp_path: Path) -> None:
    small = tmp_path / "small.json"
    small.write_text("[]")
    assert pick_workers(None, [Source("file", str(small))]) == 0
    assert pick_workers(3, [Source("file", str(small))]) == 3
    large = tmp_path / "large.json"
    with large.open("wb") as file:
        file.truncate(1 << 30)  # sparse
    assert pick_workers(None, [Source("file", str(large))]) >= 0 and pick_workers(0, [Source("file", str(large))]) == 0


# --- the folder -----------------------------------------------------------------------------------------------------


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """How many rows each reading encoded."""
    counts: list[int] = []
    call = Encoder.__call__

    def counted(self: Encoder, rows: Any) -> Any:
        counts.append(len(rows))
        return call(self, rows)

    monkeypatch.setattr(Encoder, "__call__", counted)
    yield counts


def test_unchanged_input_is_not_read_again_and_every_change_is_noticed(tmp_path: Path, reads: list[int]) -> None:
    path = Path(rows_file(tmp_path / "d.jsonl", sharegpt("a", "bb"), sharegpt("c", "dd")))
    data = section(tmp_path, str(path))
    first = read_documents(TEMPLATE, data)
    again = read_documents(TEMPLATE, data | {"workers": 0}, rejects_copy=tmp_path / "r.jsonl")
    assert reads == [2] and again.folder == first.folder and (tmp_path / "r.jsonl").read_text() == ""
    for changed in ({"max_length": 64}, {"duplicates": "keep"}, {"roles": {"x": "user"}}, {"max_documents": 1}):
        read_documents(TEMPLATE, data | changed)
    read_documents(ChatTemplate(TOKENIZER, CHATML.replace("You help", "You assist")), data)
    read_documents(ChatTemplate(TOKENIZER, CHATML, supervise="last"), data)
    assert len(reads) == 7
    size = path.stat().st_size
    path.write_text(path.read_text().replace("dd", "de"))  # one row edited in place
    changed_row = read_documents(TEMPLATE, data)
    assert path.stat().st_size == size and len(reads) == 8
    assert runs(changed_row.documents[1]) == ["de<|im_end|>"] and runs(first.documents[1]) == ["dd<|im_end|>"]


def test_a_damaged_or_half_written_folder_is_made_again(tmp_path: Path, reads: list[int]) -> None:
    data = section(tmp_path, rows_file(tmp_path / "d.jsonl", sharegpt("a", "bb")))
    first = read_documents(TEMPLATE, data)
    whole = everything(first.folder)
    (first.folder / "tokens.bin").write_bytes(b"")
    assert everything(read_documents(TEMPLATE, data).folder) == whole
    (first.folder / "manifest.json").write_text("{")
    left = first.folder.with_name(f".{first.folder.name}.part")
    left.mkdir()
    (left / "tokens.bin").write_bytes(b"half")
    assert everything(read_documents(TEMPLATE, data).folder) == whole and not left.exists()
    assert len(reads) == 3


# --- inputs ---------------------------------------------------------------------------------------------------------


def test_weights_reach_the_documents_of_their_file(tmp_path: Path) -> None:
    one = rows_file(tmp_path / "1.jsonl", sharegpt("a", "b1"), sharegpt("a", "b2"))
    two = rows_file(tmp_path / "2.jsonl", sharegpt("a", "b3"))
    corpus = read_corpus(TEMPLATE, section(tmp_path, [{"path": one, "weight": 0.5}, two], valid_fraction=0.0))
    assert corpus.weights == [0.5, 0.5, 1.0] and len(corpus.valid) == 0


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"path": "f", "weight": 0}, "a weight must be a number above 0"),
        ({"path": "f", "weight": True}, "a weight must be a number above 0"),
        ({"path": "f", "weight": float("inf")}, "a weight must be a number above 0"),
        ({"file": "f"}, "an input is a path or"),
        ({"path": "f", "wieght": 2}, "an input is a path or"),
        ([], "no file given"),
    ],
)
def test_mistakes_in_inputs(given: Any, says: str) -> None:
    with pytest.raises(EyasError, match=r"^data\.path") as caught:
        inputs_of(given)
    assert says in str(caught.value)


# --- held out, and evaluation prompts -------------------------------------------------------------------------------


def test_evaluation_prompts_in_the_training_data(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    question = "Please write a long story about the brave little falcon and its many friends"
    path = rows_file(tmp_path / "d.jsonl", sharegpt("a", "b"), sharegpt("x", "y", f"So: {question}!", "z"))
    prompts = rows_file(tmp_path / "p.jsonl", {"question_id": 81, "turns": ["first one", question]})
    data = section(tmp_path, path, valid_fraction=0.0)
    with caplog.at_level(logging.WARNING):
        assert len(read_corpus(TEMPLATE, data, prompts=prompts).train) == 2
    assert "1 conversations of data.path hold prompts that the drafter is measured on" in caplog.text
    assert f"d.jsonl, row 2 holds 81 of {prompts}" in caplog.text
    dropped = read_corpus(TEMPLATE, data | {"decontaminate": "drop"}, prompts=prompts, rejects_dir=tmp_path)
    assert len(dropped.train) == 1 and listed(tmp_path / "rejects.jsonl") == [(2, "holds_evaluation_prompt")]
    caplog.clear()
    assert len(read_corpus(TEMPLATE, data | {"decontaminate": "keep"}, prompts=prompts).train) == 2
    assert caplog.text == ""


def test_an_evaluation_looks_into_the_training_data(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = rows_file(tmp_path / "d.jsonl", sharegpt("a", "b"), sharegpt("What is 2+2?", "4"))
    prompts = rows_file(tmp_path / "p.jsonl", {"turns": ["what is 2 + 2"]})
    data = section(tmp_path, path)
    with caplog.at_level(logging.WARNING):
        check_training_data(data | {"decontaminate": "keep"}, prompts)
        check_training_data(data | {"path": None}, prompts)
        check_training_data(data | {"path": str(tmp_path / "gone.jsonl")}, prompts)
        assert caplog.text == ""
        check_training_data(data, prompts)
    assert "1 conversations of data.path hold" in caplog.text and f"d.jsonl, row 2 holds 1 of {prompts}" in caplog.text


def test_a_held_out_file_counts_as_evaluation_prompts(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    train = rows_file(tmp_path / "t.jsonl", sharegpt("Same question?", "b"), sharegpt("other", "c"))
    held = rows_file(tmp_path / "v.jsonl", sharegpt("same QUESTION", "another answer", id="h"))
    with caplog.at_level(logging.WARNING):
        corpus = read_corpus(TEMPLATE, section(tmp_path, train, valid_path=held))
    assert (len(corpus.train), len(corpus.valid)) == (2, 1) and "t.jsonl, row 1 holds h of" in caplog.text


def test_questions_asked_on_both_sides(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Conversation 1 of 4 is held out; 3 asks the same question, 0 and 2 don't."""
    rows = [sharegpt("a", "1"), sharegpt("b", "2"), sharegpt("c", "3"), sharegpt("B!", "4")]
    data = section(tmp_path, rows_file(tmp_path / "d.jsonl", *rows), valid_fraction=0.25)
    with caplog.at_level(logging.WARNING):
        corpus = read_corpus(TEMPLATE, data)
    assert [runs(e) for e in corpus.valid] == [["3<|im_end|>"]] and len(corpus.train) == 3 and caplog.text == ""
    rows[2] = sharegpt("b?", "3")
    data = section(tmp_path, rows_file(tmp_path / "e.jsonl", *rows), valid_fraction=0.25)
    with caplog.at_level(logging.WARNING):
        corpus = read_corpus(TEMPLATE, data)
    assert "2 training documents open with the question of a held-out one" in caplog.text and len(corpus.train) == 3
    assert [runs(e) for e in read_corpus(TEMPLATE, data | {"decontaminate": "drop"}).train] == [["1<|im_end|>"]]


def example(source: str, *ids: int, supervised: int = 2) -> Example:
    return Example(list(ids), [i >= len(ids) - supervised for i in range(len(ids))], source)


def held_out(examples: list[Example], fraction: float) -> tuple[list[str], list[str]]:
    train, valid = split_held_out(DocumentSet.of(examples), fraction)
    return [e.source for e in train], [e.source for e in valid]


def test_a_fraction_is_held_out_evenly_spaced() -> None:
    """A quarter of 8 conversations: the middles of two equal halves, 2 and 6; independent of any seed."""
    train, valid = held_out([example(f"f:{i}:x", 1, 2, i) for i in range(8)], 0.25)
    assert valid == ["f:2:x", "f:6:x"] and train == [f"f:{i}:x" for i in (0, 1, 3, 4, 5, 7)]


def test_documents_of_one_conversation_stay_together() -> None:
    """Conversation 1 has three documents; a repeat of a held-out document is not trained on either."""
    examples = [
        example("f:0:a", 1, 2, 3), example("f:1:b", 4, 5, 6), example("f:1:b#1", 4, 5, 7), example("f:1:b#2", 4, 5, 8),
        example("f:2:c", 4, 5, 7), example("f:3:d", 9, 5, 6),
    ]  # fmt: skip
    train, valid = held_out(examples, 0.1)
    assert valid == ["f:2:c"] and train == ["f:0:a", "f:1:b", "f:1:b#2", "f:3:d"]


@pytest.mark.parametrize(("count", "fraction", "held"), [(1, 0.5, 0), (2, 0.01, 1), (3, 0.99, 2), (5, 0.0, 0)])
def test_something_always_remains_to_train_on(count: int, fraction: float, held: int) -> None:
    train, valid = held_out([example(f"f:{i}:x", 1, 2, i) for i in range(count)], fraction)
    assert (len(valid), len(train)) == (held, count - held)


def test_only_copies_of_the_held_out_document_is_an_error() -> None:
    with pytest.raises(EyasError, match=r"data.path: nothing is left to train on"):
        held_out([example(f"f:{i}:x", 1, 2, 3) for i in range(4)], 0.25)


def test_counts_and_prompts_by_hand() -> None:
    documents = DocumentSet.of([example("a", 5, 6, 7, 7), example("b", 7, 5, 6, supervised=1)])
    assert documents.token_counts(9).tolist() == [0, 0, 0, 0, 0, 0, 1, 2, 0]
    assert Corpus(documents[:0], documents, [], {}).prompts() == [[5, 6], [7, 5]]


def test_the_date_of_a_template_does_not_follow_the_clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half dumped on one day, half on another: the same text, and another day set in the configuration is another."""
    data = section(tmp_path, rows_file(tmp_path / "d.jsonl", sharegpt("a", "bb")))
    first = read_documents(ChatTemplate(TOKENIZER, LLAMA3), data)
    monkeypatch.setattr("time.time", lambda: 2e9)
    assert read_documents(ChatTemplate(TOKENIZER, LLAMA3), data).folder == first.folder
    other = read_documents(ChatTemplate(TOKENIZER, LLAMA3, {"today": "2024-07-26"}), data)
    assert "26 Jul 2024" in decode(TOKENIZER, other.documents[0].input_ids) and other.folder != first.folder
