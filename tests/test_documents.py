"""Tokenised documents on disk: what is written is what is read, in any selection."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from data.documents.document_set import DocumentSet, DocumentWriter
from data.masks.template import Example, Packed

EXAMPLES = [
    Example([1, 2, 3], [False, True, True], "a.json:1:x"),
    Example([4, 5], [True, True], "b.json:7:é\udcff", truncated=True),
    Example([1, 2, 9, 9], [False, False, True, True], "b.json:7:é\udcff#1"),
    Example([70000], [False], "c"),
]


def written(folder: Path) -> DocumentSet:
    writer = DocumentWriter(folder)
    writer.add([Packed.of(EXAMPLES[0])], input=0, opening=5)
    writer.add([Packed.of(EXAMPLES[1]), Packed.of(EXAMPLES[2])], input=1, opening=2**64 - 1)
    writer.add([Packed.of(EXAMPLES[3])], input=1, opening=0)
    writer.finish()
    return DocumentSet.open(folder)


def test_round_trip_and_selection(tmp_path: Path) -> None:
    documents = written(tmp_path)
    assert list(documents) == EXAMPLES and documents[-1] == EXAMPLES[3]
    assert list(documents[1:3]) == EXAMPLES[1:3]
    some = documents.take(np.array([3, 0]))
    assert list(some) == [EXAMPLES[3], EXAMPLES[0]]
    assert some.lengths.tolist() == [1, 3] and documents.lengths.tolist() == [3, 2, 4, 1]
    assert documents.supervised.tolist() == [2, 2, 2, 0] and some.supervised.tolist() == [0, 2]
    assert documents.conversations.tolist() == [0, 1, 1, 2] and documents.inputs.tolist() == [0, 1, 1, 1]
    assert documents.openings.tolist() == [5, 2**64 - 1, 2**64 - 1, 0]
    assert documents.token_counts(10).tolist() == [0, 0, 1, 1, 1, 1, 0, 0, 0, 2]
    assert some.token_counts(10).tolist() == [0, 0, 1, 1, 0, 0, 0, 0, 0, 0]
    with pytest.raises(IndexError):
        documents[4]


def test_in_memory_ones_are_the_same(tmp_path: Path) -> None:
    """Grouped by source: s and s#1 are one conversation."""
    memory = DocumentSet.of(EXAMPLES)
    assert list(memory) == EXAMPLES and memory.conversations.tolist() == [0, 1, 1, 2]
    assert memory.digest(0) == written(tmp_path).digest(0) != memory.digest(1)
    assert len(DocumentSet.of([])) == 0 and list(DocumentSet.of([])) == []


def test_a_folder_that_is_not_whole_is_refused(tmp_path: Path) -> None:
    written(tmp_path)
    tokens = tmp_path / "tokens.bin"
    tokens.write_bytes(tokens.read_bytes()[:-4])
    with pytest.raises(ValueError, match="disagree"):
        DocumentSet.open(tmp_path)
    (tmp_path / "index.npz").unlink()
    with pytest.raises(OSError, match=r"index\.npz"):
        DocumentSet.open(tmp_path)


def test_nothing_at_all(tmp_path: Path) -> None:
    DocumentWriter(tmp_path).finish()
    assert len(DocumentSet.open(tmp_path)) == 0
