"""Files to raw rows: JSON of any shape, gzip, parquet, folders and `datasets`, told apart by content.

Streaming, whatever the size. A row that cannot be read is yielded with its problem, so that whoever counts rows sees
it.
"""

from __future__ import annotations

import gzip
import hashlib
import logging
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from data.chats.json_rows import read_json
from data.chats.row import Row
from models.errors import EyasError

__all__ = ["Given", "Input", "Row", "Source", "inputs_of", "read_rows", "read_source", "sources_of"]

SUFFIXES = (".json", ".jsonl", ".ndjson", ".parquet", ".json.gz", ".jsonl.gz", ".ndjson.gz")
log = logging.getLogger(__name__)

LEAST, MOST = 1e-3, 1e3  # weights: an epoch lists every copy, and epochs are planned until one holds a document
BATCH, BATCH_BYTES = 1024, 32 << 20  # of a parquet file at a time: rows, and what they may take on disk, unpacked
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?(:[\w.-]+)?")


@dataclass(frozen=True)
class Input:
    """One of the inputs of ``data.path``: a file, a folder or a `datasets` name.

    weight: how often its conversations are seen in an epoch; 0.5 is a half of them, another half each epoch. 0.001 to
    1000.
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
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not LEAST <= weight <= MOST:
        raise EyasError(f"{key}={dict(given)}: a weight must be a number above 0, from {LEAST:g} to {MOST:g}")
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


def sources_of(
    given: Given | Iterable[Given], key: str = "data.path", suffixes: tuple[str, ...] = SUFFIXES
) -> list[Source]:
    """Where the rows of these inputs lie, folders opened up (all files below that end so, by name), in order.

    Raises EyasError, naming ``key``, for a path that does not exist or a folder without data.
    """
    inputs = enumerate(inputs_of(given, key))
    return [source for number, item in inputs for source in _sources(item.path, number, key, suffixes)]


def _data_files(folder: Path, suffixes: tuple[str, ...], key: str) -> list[Path]:
    """All data files below a folder, by name; hidden ones are left alone. Raises EyasError if there is none."""
    found, others = list[Path](), 0
    for file in sorted(folder.rglob("*")):
        if any(part.startswith(".") for part in file.relative_to(folder).parts) or file.is_dir():
            continue
        if not file.name.lower().endswith(suffixes):
            others += 1
        elif not file.is_file():
            raise EyasError(f"{key}={folder}: {file.relative_to(folder)} is a link to nothing, or no file")
        else:
            found.append(file)
    if not found:
        raise EyasError(f"{key}={folder}: the folder holds no {', '.join(suffixes)} file")
    if others:
        log.info("%s=%s: %d files of other kinds are passed over", key, folder, others)
    return found


def _sources(name: str, number: int, key: str, suffixes: tuple[str, ...]) -> list[Source]:
    path = Path(name).expanduser()
    if path.is_dir():
        if (path / "dataset_dict.json").exists() or (path / "state.json").exists():
            return [Source("saved", str(path), number)]
        return [Source("file", str(file), number) for file in _data_files(path, suffixes, key)]
    if path.is_file():
        return [Source("file", str(path), number)]
    if path.exists():
        raise EyasError(f"{key}={name}: not a regular file; data is read more than once, so a pipe will not do")
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
        rows = _read_file(Path(source.name), key)
    elif source.kind == "saved":
        rows = _read_saved_dataset(Path(source.name), split)
    else:
        rows = _read_hub_dataset(source.name, split, key)
    if source.input == 0:
        yield from rows
    else:
        yield from (replace(row, input=source.input) for row in rows)


def _read_file(path: Path, key: str) -> Iterator[Row]:
    with path.open("rb") as raw:
        magic = raw.read(4)
        raw.seek(0)
        try:
            if magic == b"PAR1":
                yield from _read_parquet(path)
            else:
                yield from read_json(gzip.GzipFile(fileobj=raw) if magic[:2] == b"\x1f\x8b" else raw, str(path))
        except EyasError as error:  # which begins with the file
            raise EyasError(f"{key}={error}") from None


def _read_parquet(path: Path) -> Iterator[Row]:
    import pyarrow
    import pyarrow.parquet

    number = 0
    # What damage comes to depends on where it is and how the pages are packed: pyarrow raises all of these.
    try:
        file = pyarrow.parquet.ParquetFile(path)
        for batch in file.iter_batches(batch_size=_batch_size(file.metadata)):
            for value, problem in _values(batch):
                number += 1
                yield Row(str(path), number, value, problem, f"row {number}" if problem else "")
    except (pyarrow.ArrowException, OSError, ValueError, OverflowError) as error:
        raise EyasError(f"{path}: not a readable parquet file, behind row {number}: {error}") from None
    if not number:
        yield Row(str(path), 1, problem="empty_file", detail="a table without rows")


def _batch_size(metadata: Any) -> int:
    """Rows of at most about 32 MiB, judged by the largest row group."""
    groups = [metadata.row_group(i) for i in range(metadata.num_row_groups)]
    largest = max((group.total_byte_size // max(group.num_rows, 1) for group in groups), default=0)
    return max(1, min(BATCH, BATCH_BYTES // max(largest, 1)))


def _values(batch: Any) -> Iterator[tuple[Any, str | None]]:
    """(value, None) of each row, or (None, reason)."""
    try:
        yield from ((value, None) for value in batch.to_pylist())
    except UnicodeDecodeError:  # raised before the first row
        for i in range(len(batch)):
            try:
                yield batch.slice(i, 1).to_pylist()[0], None
            except UnicodeDecodeError:
                yield None, "invalid_unicode"


def _read_saved_dataset(path: Path, split: str) -> Iterator[Row]:
    import datasets
    import pyarrow

    try:
        loaded = datasets.load_from_disk(str(path))
    except (pyarrow.ArrowException, OSError, ValueError, LookupError) as error:
        raise EyasError(f"{path}: not a readable saved dataset: {error}") from None
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
