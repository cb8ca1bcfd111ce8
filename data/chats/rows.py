"""Files to raw rows: JSON arrays, JSON lines, gzip, parquet, folders and `datasets`, told apart by content.

Streaming: an array or a JSONL file of any size is read in pieces of about a mebibyte. A row that cannot be read is
yielded with its problem, so that whoever counts rows sees it.
"""

from __future__ import annotations

import codecs
import gzip
import hashlib
import io
import json
import math
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from models.errors import EyasError

SUFFIXES = (".json", ".jsonl", ".ndjson", ".parquet", ".json.gz", ".jsonl.gz", ".ndjson.gz")
CHUNK = 1 << 20
Stream = io.BufferedReader | gzip.GzipFile
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?(:[\w.-]+)?")
_SPACE = re.compile(r"\s*")


@dataclass(frozen=True)
class Row:
    """A raw row. ``row`` from 1; ``problem`` is a reason out of `data.chats.policy.REJECTS` when there is no value.

    input: which of the given inputs it came from, from 0.
    """

    file: str
    row: int
    value: Any = None
    problem: str | None = None
    detail: str = ""
    input: int = 0


@dataclass(frozen=True)
class Input:
    """One of the inputs of ``data.path``: a file, a folder or a `datasets` name.

    weight: how often its conversations are seen in an epoch; 0.5 is a half of them, another half each epoch.
    """

    path: str
    weight: float = 1.0


Given = str | Path | Input | Mapping[str, Any]


def inputs_of(given: Given | Iterable[Given], key: str = "data.path") -> list[Input]:
    """The inputs that a path, a {path, weight} or a list of them names. Raises EyasError naming ``key``."""
    listed = [given] if isinstance(given, str | Path | Input | Mapping) else list(given)
    if not listed:
        raise EyasError(f"{key}: no file given")
    return [_input(item, key) for item in listed]


def _input(given: Given, key: str) -> Input:
    if isinstance(given, Input):
        return given
    if isinstance(given, str | Path):
        return Input(str(given))
    path, weight = given.get("path"), given.get("weight", 1.0)
    if not isinstance(path, str) or not path or set(given) - {"path", "weight"}:
        raise EyasError(f"{key}={dict(given)}: an input is a path or {{path: FILE, weight: NUMBER}}")
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 < weight < math.inf:
        raise EyasError(f"{key}={dict(given)}: a weight must be a number above 0")
    return Input(path, float(weight))


@dataclass(frozen=True)
class Source:
    """A place that rows are read from: a file, a saved dataset (a folder) or the name of a hub dataset.

    input: number of the input that named it.
    """

    kind: Literal["file", "saved", "hub"]
    name: str
    input: int = 0

    def fingerprint(self) -> str:
        """Digest of the content; of a hub dataset only the name."""
        digest = hashlib.blake2b(f"{self.kind} {self.name}".encode("utf-8", "surrogateescape"), digest_size=16)
        for path in self.files():
            with path.open("rb") as file:
                digest.update(hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).digest())
        return digest.hexdigest()

    def size(self) -> int:
        """Bytes on disk; 0 if not known."""
        return sum(path.stat().st_size for path in self.files())

    def files(self) -> list[Path]:
        if self.kind == "hub":
            return []
        path = Path(self.name)
        return [path] if self.kind == "file" else sorted(f for f in path.rglob("*") if f.is_file())


def sources_of(given: Given | Iterable[Given], key: str = "data.path") -> list[Source]:
    """Where the rows of these inputs lie, folders opened up (all data files below, by name), in order.

    Raises EyasError, naming ``key``, for a path that does not exist or a folder without data.
    """
    return [source for number, item in enumerate(inputs_of(given, key)) for source in _sources(item.path, number, key)]


def _sources(name: str, number: int, key: str) -> list[Source]:
    path = Path(name).expanduser()
    if path.is_dir():
        if (path / "dataset_dict.json").exists() or (path / "state.json").exists():
            return [Source("saved", str(path), number)]
        files = sorted(f for f in path.rglob("*") if f.is_file() and f.name.lower().endswith(SUFFIXES))
        if not files:
            raise EyasError(f"{key}={name}: the folder holds no {', '.join(SUFFIXES[:4])} file")
        return [Source("file", str(file), number) for file in files]
    if path.exists():
        return [Source("file", str(path), number)]
    if _HUB_NAME.fullmatch(name) and not name.lower().endswith(SUFFIXES):
        return [Source("hub", name, number)]
    raise EyasError(f"{key}={name}: no such file or folder (looked in {Path.cwd()})")


def read_rows(given: Given | Iterable[Given], *, split: str = "train", key: str = "data.path") -> Iterator[Row]:
    """Raw rows of the inputs, in order. ``key`` is the configuration key that gave them: mistakes are told under it.

    Raises EyasError if a path does not exist or is of a shape no row can be taken from.
    """
    for source in sources_of(given, key):
        yield from read_source(source, split=split, key=key)


def read_source(source: Source, *, split: str = "train", key: str = "data.path") -> Iterator[Row]:
    """Raw rows of one source."""
    if source.kind == "file":
        rows = _read_file(Path(source.name))
    elif source.kind == "saved":
        rows = _read_saved_dataset(Path(source.name), split)
    else:
        rows = _read_hub_dataset(source.name, split, key)
    if source.input == 0:
        yield from rows
    else:
        yield from (replace(row, input=source.input) for row in rows)


def _read_file(path: Path) -> Iterator[Row]:
    with path.open("rb") as raw:
        magic = raw.read(4)
        raw.seek(0)
        if magic == b"PAR1":
            yield from _read_parquet(path)
            return
        yield from _read_json(gzip.GzipFile(fileobj=raw) if magic[:2] == b"\x1f\x8b" else raw, str(path))


def _read_json(stream: Stream, file: str) -> Iterator[Row]:
    """Told apart by content, not by suffix: an array, objects over several lines, or one object a line."""
    try:
        head = stream.peek(CHUNK)
    except (EOFError, OSError, zlib.error) as error:
        raise EyasError(f"{file}: cannot be read: {error}") from None
    if head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise EyasError(f"{file}: is UTF-16; save it as UTF-8")
    head = head.removeprefix(codecs.BOM_UTF8).lstrip()
    if not head:
        yield Row(file, 1, problem="empty_file")
    elif head[:1] == b"[" or head.split(b"\n", 1)[0].strip() == b"{":
        yield from _read_values(_pieces(stream, file), file)
    elif head[:1] == b"{" or _is_json(head.split(b"\n", 1)[0]):
        for number, line in _lines(stream, file):
            yield _parse_line(file, number, line)
    else:
        shown = head[:40].decode("utf-8", "replace").strip()
        raise EyasError(f"{file}: expected a JSON array of conversations or one JSON object a line, found {shown!r}")


def _is_json(line: bytes) -> bool:
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return False
    return True


def _pieces(stream: Stream, file: str) -> Iterator[bytes]:
    """The bytes without the byte order mark. A gzip stream cut short just ends: the JSON then does not."""
    first = True
    try:
        while piece := stream.read1(CHUNK):
            yield piece.removeprefix(codecs.BOM_UTF8) if first else piece
            first = False
    except EOFError:
        return
    except (OSError, zlib.error) as error:
        raise EyasError(f"{file}: cannot be read: {error}") from None


def _lines(stream: Stream, file: str) -> Iterator[tuple[int, bytes]]:
    """Numbered lines that are not blank; split at newlines only, since JSON text may hold U+2028 and the like."""
    held: list[bytes] = []
    number = 0
    for piece in _pieces(stream, file):
        *whole, tail = piece.split(b"\n")
        if whole:
            whole[0] = b"".join((*held, whole[0]))
            held = []
        for line in whole:
            number += 1
            if line.strip():
                yield number, line + b"\n"
        held.append(tail)
    last = b"".join(held)
    if last.strip():
        yield number + 1, last


def _parse_line(file: str, number: int, line: bytes) -> Row:
    try:
        # Broken UTF-8 becomes lone surrogates, which the text check rejects by name.
        return Row(file, number, json.loads(line.decode("utf-8", "surrogateescape"), strict=False))
    except (ValueError, RecursionError) as error:
        reason = "broken_json" if line.endswith(b"\n") else "truncated_file"
        return Row(file, number, problem=reason, detail=f"line {number}: {error}")


def _read_values(pieces: Iterator[bytes], file: str) -> Iterator[Row]:
    """The elements of a JSON array, or JSON objects one after the other, read piece by piece."""
    cursor = _Cursor(pieces, file)
    array = cursor.peek() == "["
    if array:
        cursor.pos += 1
    row = 0
    while True:
        char = cursor.peek()
        if char == "" or (array and char == "]"):
            break
        if char == ",":
            cursor.pos += 1
            continue
        row += 1
        try:
            yield Row(file, row, cursor.value(row))
        except EOFError:
            yield Row(file, row, problem="truncated_file", detail=f"the file ends inside row {row}")
            return
    if array and char == "":
        yield Row(file, row + 1, problem="truncated_file", detail="the file ends before the array does")
    elif array:
        cursor.pos += 1
        if cursor.peek():
            raise EyasError(
                f"{file}: expected one JSON array of conversations or one JSON object a line, found more data after "
                f"the end of an array of {row} elements"
            )
        if row == 0:
            yield Row(file, 1, problem="empty_file", detail="an empty array")


class _Cursor:
    """A position in a text that arrives in pieces; what lies behind the position is forgotten."""

    def __init__(self, pieces: Iterator[bytes], file: str) -> None:
        self._decode = codecs.getincrementaldecoder("utf-8")("surrogateescape").decode
        self._pieces, self._file = pieces, file
        self._json = json.JSONDecoder(strict=False)
        self._before = 0  # characters forgotten, for error messages
        self._ended = False
        self.text, self.pos = "", 0

    def peek(self) -> str:
        """The next character that is not white space, "" at the end."""
        while True:
            match = _SPACE.match(self.text, self.pos)
            self.pos = match.end() if match else self.pos
            if self.pos < len(self.text) or not self._more():
                return self.text[self.pos : self.pos + 1]

    def value(self, row: int) -> Any:
        """Decode one JSON value, that of ``row``. EOFError: the text ends inside it. EyasError: it is not JSON."""
        while True:
            try:
                value, end = self._json.raw_decode(self.text, self.pos)
            except (ValueError, RecursionError) as error:
                if not self._unfinished(error):
                    where = self._before + getattr(error, "pos", self.pos)
                    why = getattr(error, "msg", error)
                    raise EyasError(f"{self._file}: not valid JSON in row {row}, at character {where}: {why}") from None
                if not self._more():
                    raise EOFError from None
                continue
            if end < len(self.text) or not self._more():  # a number may go on in the next piece
                self.pos = end
                return value

    def _unfinished(self, error: Exception) -> bool:
        """Whether more text could still make it valid: the decoder stopped at the end, or in a word cut by it."""
        if not isinstance(error, json.JSONDecodeError):
            return False
        return error.msg.startswith("Unterminated string") or error.pos >= len(self.text) - len("-Infinity")

    def _more(self) -> bool:
        """Read on, at least as much as is already held, so that a huge value is not parsed again too often."""
        pieces, size = [], 0
        while size < max(CHUNK, len(self.text) - self.pos):
            piece = next(self._pieces, None)
            if piece is None:
                break
            pieces.append(piece)
            size += len(piece)
        final = not pieces
        added = self._decode(b"".join(pieces), final) if not self._ended else ""
        self._ended = final
        self._before += self.pos
        self.text, self.pos = self.text[self.pos :] + added, 0
        return bool(added) or not final


def _read_parquet(path: Path) -> Iterator[Row]:
    import pyarrow
    import pyarrow.parquet

    try:
        batches = pyarrow.parquet.ParquetFile(path).iter_batches(batch_size=1024)
        number = 0
        for batch in batches:
            for value in batch.to_pylist():
                number += 1
                yield Row(str(path), number, value)
    except pyarrow.ArrowException as error:
        raise EyasError(f"{path}: not a readable parquet file: {error}") from None


def _read_saved_dataset(path: Path, split: str) -> Iterator[Row]:
    import datasets

    loaded = datasets.load_from_disk(str(path))
    if isinstance(loaded, datasets.DatasetDict):
        if split not in loaded:
            raise EyasError(f"data.split={split}: {path} has {', '.join(map(str, loaded))}")
        loaded = loaded[split]
    for number, value in enumerate(loaded, start=1):
        yield Row(str(path), number, value)


def _read_hub_dataset(name: str, split: str, key: str) -> Iterator[Row]:
    import datasets

    base, _, config = name.partition(":")
    try:
        loaded = datasets.load_dataset(base, config or None, split=split, streaming=True)
        for number, value in enumerate(loaded, start=1):
            yield Row(name, number, value)
    except (OSError, ValueError, RuntimeError) as error:
        raise EyasError(
            f"{key}={name}: neither a file or folder here nor a dataset that can be loaded ({error})"
        ) from None
