"""Tokenised documents in a folder, memory-mapped: a training set of any size needs little memory.

    <data.cache_dir>/<key>/manifest.json    what it was made from, counts and statistics
                           tokens.bin       int32, the documents back to back
                           supervised.bin   one byte a token
                           sources.bin      UTF-8, the sources back to back
                           index.npz        per document: lengths and where it came from
                           rejects.jsonl    the rows that are not used

A folder is there only when it is whole: it is written under another name and then renamed.
"""

from __future__ import annotations

import hashlib
import re
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, overload

import numpy as np

from data.masks.template import Example, Packed
from models.files import sync

MANIFEST, REJECTS_FILE, INDEX = "manifest.json", "rejects.jsonl", "index.npz"
BINARY = {"tokens": np.dtype("<i4"), "supervised": np.dtype("?"), "sources": np.dtype("u1")}
COUNTED = 4096  # documents whose tokens are counted at a time
_PART = re.compile(r"#\d+$")  # the further documents of a conversation are named source#1, source#2 ...


@dataclass(frozen=True)
class Index:
    """Per document [D]. supervised: tokens; conversation: counts from 0; input: number of the input it is from;
    opening: digest of the conversation's first question; *_end: where its tokens and source stop in the files."""

    supervised: np.ndarray
    conversation: np.ndarray
    input: np.ndarray
    opening: np.ndarray
    truncated: np.ndarray
    token_end: np.ndarray
    source_end: np.ndarray

    # Typecodes of the growing arrays that become these.
    CODES = {
        "supervised": "i",
        "conversation": "q",
        "input": "i",
        "opening": "Q",
        "truncated": "b",
        "token_end": "q",
        "source_end": "q",
    }


class DocumentSet(Sequence[Example]):
    """Documents of a folder, or some of them: ``numbers`` into the folder's, in this order."""

    def __init__(self, columns: dict[str, np.ndarray], index: Index, numbers: np.ndarray | None = None) -> None:
        self._columns, self._index = columns, index
        self.numbers = np.arange(len(index.token_end)) if numbers is None else numbers

    @classmethod
    def open(cls, folder: Path) -> DocumentSet:
        """Raises OSError or ValueError if the folder is not whole."""
        with np.load(folder / INDEX, allow_pickle=False) as arrays:
            index = Index(**{name: arrays[name] for name in Index.CODES})
        columns = {}
        for name, dtype in BINARY.items():
            path = folder / f"{name}.bin"
            empty = path.stat().st_size == 0
            columns[name] = np.empty(0, dtype) if empty else np.memmap(path, dtype=dtype, mode="r")
        tokens, sources = (int(ends[-1]) if len(ends) else 0 for ends in (index.token_end, index.source_end))
        if (len(columns["tokens"]), len(columns["supervised"]), len(columns["sources"])) != (tokens, tokens, sources):
            raise ValueError(f"{folder}: files and index disagree")
        return cls(columns, index)

    @classmethod
    def of(cls, examples: Iterable[Example]) -> DocumentSet:
        """Documents in memory. A conversation's documents are known by their sources: s, s#1, s#2 ..."""
        parts: dict[str, list[np.ndarray]] = {name: [np.empty(0, dtype)] for name, dtype in BINARY.items()}
        rows, seen, openings = _Rows(), dict[str, int](), list[int]()
        for example in examples:
            packed = Packed.of(example)
            number = seen.setdefault(_PART.sub("", example.source), len(seen))
            if number == len(openings):
                openings.append(int.from_bytes(_digest(packed.ids)[:8], "little"))
            rows.add(packed, number, 0, openings[number])
            parts["tokens"].append(packed.ids)
            parts["supervised"].append(packed.supervised)
            parts["sources"].append(np.frombuffer(_utf8(packed.source), dtype=np.uint8))
        return cls({name: np.concatenate(arrays) for name, arrays in parts.items()}, rows.index())

    def __len__(self) -> int:
        return len(self.numbers)

    @overload
    def __getitem__(self, item: int) -> Example: ...
    @overload
    def __getitem__(self, item: slice) -> DocumentSet: ...
    def __getitem__(self, item: int | slice) -> Example | DocumentSet:
        if isinstance(item, slice):
            return self.take(self.numbers[item])
        number = int(self.numbers[item])
        span, source = self._span("token_end", number), self._span("source_end", number)
        return Example(
            self._columns["tokens"][span].tolist(),
            self._columns["supervised"][span].tolist(),
            self._columns["sources"][source].tobytes().decode("utf-8", "surrogateescape"),
            bool(self._index.truncated[number]),
        )

    def take(self, numbers: np.ndarray) -> DocumentSet:
        """Those of the same folder with these ``numbers``."""
        return DocumentSet(self._columns, self._index, numbers)

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each document, [D] int64."""
        ends = self._index.token_end
        return np.diff(ends, prepend=0)[self.numbers]

    @property
    def supervised(self) -> np.ndarray:
        """Supervised tokens of each document, [D] int32."""
        return np.asarray(self._index.supervised[self.numbers])

    @property
    def conversations(self) -> np.ndarray:
        """The conversation each document is of, [D] int64."""
        return np.asarray(self._index.conversation[self.numbers])

    @property
    def inputs(self) -> np.ndarray:
        """The input that each document is from, [D] int32."""
        return np.asarray(self._index.input[self.numbers])

    @property
    def openings(self) -> np.ndarray:
        """A digest of each document's first question, [D] uint64."""
        return np.asarray(self._index.opening[self.numbers])

    def digest(self, position: int) -> bytes:
        """Of the token ids of a document."""
        return _digest(self._columns["tokens"][self._span("token_end", int(self.numbers[position]))])

    def token_counts(self, vocab_size: int, weights: Sequence[float] | None = None) -> np.ndarray:
        """How often each token is supervised, [V] int64: what a draft vocabulary is chosen by.

        weights: how often each document counts; a token that occurs at all counts at least once.
        """
        factors = np.ones(len(self)) if weights is None else np.asarray(weights, dtype=np.float64)
        counts = np.zeros(vocab_size, dtype=np.float64)
        for factor in np.unique(factors):
            numbers = self.numbers[factors == factor]
            for start in range(0, len(numbers), COUNTED):
                spans = [self._span("token_end", int(number)) for number in numbers[start : start + COUNTED]]
                tokens, mask = self._columns["tokens"], self._columns["supervised"]
                ids = np.concatenate([tokens[span][mask[span]] for span in spans])
                counts += factor * np.bincount(ids, minlength=vocab_size)
        return np.ceil(counts).astype(np.int64)

    def _span(self, ends: str, number: int) -> slice:
        end = getattr(self._index, ends)
        return slice(int(end[number - 1]) if number else 0, int(end[number]))


class _Rows:
    """The index while it grows."""

    def __init__(self) -> None:
        self.columns = {name: array(code) for name, code in Index.CODES.items()}
        self.tokens, self.sources = 0, 0

    def add(self, document: Packed, conversation: int, input: int, opening: int) -> None:
        self.tokens += len(document.ids)
        self.sources += len(_utf8(document.source))
        supervised = int(np.count_nonzero(document.supervised))
        values = (supervised, conversation, input, opening, document.truncated, self.tokens, self.sources)
        for column, value in zip(self.columns.values(), values, strict=True):
            column.append(value)

    def index(self) -> Index:
        return Index(**{name: np.array(column, dtype=column.typecode) for name, column in self.columns.items()})


class DocumentWriter:
    """Writes documents to a folder that is not read before :meth:`finish` and a rename."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.rows, self.conversations = folder, _Rows(), 0
        self._files: dict[str, IO[bytes]] = {name: (folder / f"{name}.bin").open("wb") for name in BINARY}

    def add(self, documents: Sequence[Packed], input: int, opening: int) -> None:
        """The documents of the next conversation."""
        for document in documents:
            self.rows.add(document, self.conversations, input, opening)
            self._files["tokens"].write(document.ids.astype("<i4", copy=False).tobytes())
            self._files["supervised"].write(document.supervised.tobytes())
            self._files["sources"].write(_utf8(document.source))
        self.conversations += 1

    def finish(self) -> None:
        """Make everything durable."""
        arrays: dict[str, Any] = vars(self.rows.index())
        with (self.folder / INDEX).open("wb") as file:
            np.savez(file, **arrays)
        self.close()
        for path in self.folder.iterdir():
            sync(path)

    def close(self) -> None:
        for file in self._files.values():
            file.close()


def _digest(ids: np.ndarray) -> bytes:
    return hashlib.blake2b(np.ascontiguousarray(ids).tobytes(), digest_size=16).digest()


def _utf8(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")
