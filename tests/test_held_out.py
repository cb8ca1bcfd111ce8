"""What is held out, and prompts of an evaluation among the training conversations."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from data.documents.corpus import Corpus, read_corpus
from data.documents.document_set import DocumentSet
from data.documents.held_out import check_training_data, split_held_out
from data.masks.template import ChatTemplate, Example
from models.errors import EyasError
from tests.chat_templates import CHATML
from tests.chats import TEMPLATE, TOKENIZER, listed, rows_file, runs, section, sharegpt


def test_evaluation_prompts_in_the_training_data(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    question = "Please write a long story about the brave little falcon and its many friends"
    path = rows_file(tmp_path / "d.jsonl", sharegpt("a", "b"), sharegpt("x", "y", f"So: {question}!", "z"))
    prompts = rows_file(tmp_path / "p.jsonl", {"question_id": 81, "turns": ["first one", question]})
    data = section(tmp_path, path, valid_fraction=0.0)
    with caplog.at_level(logging.WARNING):
        assert len(read_corpus(TEMPLATE, data, prompts=prompts).train) == 2
    assert "1 conversations of data.path hold prompts that the drafter is measured on" in caplog.text
    assert f"d.jsonl, row 2 holds question 81 of {prompts}" in caplog.text
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
    assert (
        "1 conversations of data.path hold" in caplog.text
        and f"d.jsonl, row 2 holds question 1 of {prompts}" in caplog.text
    )


def test_a_held_out_file_counts_as_evaluation_prompts(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    train = rows_file(tmp_path / "t.jsonl", sharegpt("Same question?", "b"), sharegpt("other", "c"))
    held = rows_file(tmp_path / "v.jsonl", sharegpt("same QUESTION", "another answer", id="h"))
    with caplog.at_level(logging.WARNING):
        corpus = read_corpus(TEMPLATE, section(tmp_path, train, valid_path=held))
    assert (len(corpus.train), len(corpus.valid)) == (2, 1) and "t.jsonl, row 1 holds question h of" in caplog.text


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
    caplog.clear()
    with caplog.at_level(logging.INFO):
        dropped = read_corpus(TEMPLATE, data | {"decontaminate": "drop"})
    assert [runs(e) for e in dropped.train] == [["1<|im_end|>"]]
    assert "2 documents are not trained on, since they open with the question of a held-out one" in caplog.text
    assert dropped.about["split"] == {"training": 1, "held_out": 1, "weights": [1.0]}


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


def test_equal_documents_of_different_conversations_stay_on_one_side(tmp_path: Path) -> None:
    """Split by rounds: four conversations with a round of their own and one that all share. One is held out."""
    template = ChatTemplate(TOKENIZER, CHATML, too_long="split")
    rows = [sharegpt(f"question {i}", "x" * 40, "the same question", "y" * 40) for i in range(4)]
    data = section(tmp_path, rows_file(tmp_path / "d.jsonl", *rows), max_length=160, valid_fraction=0.25)
    corpus = read_corpus(template, data)
    held, trained = ([tuple(e.input_ids) for e in side] for side in (corpus.valid, corpus.train))
    assert len(held) == 2 and len(trained) == 3 and not set(held) & set(trained)


def test_counts_and_prompts_by_hand() -> None:
    documents = DocumentSet.of([example("a", 5, 6, 7, 7), example("b", 7, 5, 6, supervised=1)])
    assert documents.token_counts(9).tolist() == [0, 0, 0, 0, 0, 0, 1, 2, 0]
    assert documents.token_counts(9, [3.0, 0.5]).tolist() == [0, 0, 0, 0, 0, 0, 1, 6, 0]  # 0.5 of a 6 is still a 6
    assert Corpus(documents[:0], documents, [], {}).prompts() == [[5, 6], [7, 5]]
