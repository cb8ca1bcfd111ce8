"""Reading a feature store (data/features/writer.py writes it, data/features/manifest.py says what is in it).

Reading never trusts: sizes and checksums are verified when a store is opened, row counts and finiteness when a
document is read, and whatever is wrong is named by its file and the source of the document.
"""

from __future__ import annotations

import json
import time
from collections import OrderedDict
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from data.features.manifest import (
    DOCUMENTS,
    MANIFEST,
    Documents,
    Manifest,
    Shard,
    file_blake2b,
    read_json,
    starts_of,
)
from data.processes import Tick, nothing
from models.errors import EyasError
from models.files import write_atomic

OPEN_SHARDS = 16  # memory-mapped at a time
VERIFIED = ".verified.json"
SETTLED_NS = 2_000_000_000  # a file changed later than this before its check may change again unseen


class TokenFeatures(Protocol):
    """Features of one document of n tokens (models.target.Features)."""

    @property
    def taps(self) -> Tensor: ...  # [n, A*H]
    @property
    def final(self) -> Tensor: ...  # [n, H], after the final norm
    @property
    def lse(self) -> Tensor: ...  # [n] float32
    @property
    def top1(self) -> Tensor: ...  # [n] int64


class Stored(NamedTuple):
    """One stored document of n tokens, in the store's dtypes. Tensors may be views of the mapped file."""

    taps: Tensor
    final: Tensor
    lse: Tensor
    top1: Tensor
    input_ids: Tensor
    supervised: Tensor


def check_lengths(source: str, ids: int, mask: int, features: TokenFeatures, where: str) -> None:
    """Raises EyasError unless there is one mask entry and one state for each token."""
    states = [int(t.shape[0]) for t in (features.taps, features.final, features.lse, features.top1)]
    wrong = next((n for n in states if n != ids), ids)
    if mask != ids or wrong != ids:
        raise EyasError(
            f"{source}: {where} has {ids} token ids, {mask} mask entries and {wrong} states. "
            "They must agree; nothing is cut to fit"
        )


def is_finite(features: TokenFeatures) -> bool:
    return all(bool(torch.isfinite(t).all()) for t in (features.taps, features.final, features.lse))


def damage(folder: Path, shard: Shard) -> str | None:
    """What is wrong with a shard file, or None when it is whole: size and checksum are compared."""
    path = folder / shard.file
    if not path.is_file():
        return "is missing"
    size = path.stat().st_size
    if size != shard.bytes:
        return f"has {size} bytes instead of {shard.bytes}"
    return None if file_blake2b(path) == shard.blake2b else "was changed after it was written (checksum differs)"


class FeatureStore:
    """A whole, verified store. ``len`` is its number of documents; :meth:`read` gives one of them."""

    def __init__(self, folder: Path, manifest: Manifest, documents: Documents) -> None:
        """For :meth:`open`, which verifies first."""
        self.folder, self.manifest = folder, manifest
        self.lengths, self.sources = documents.lengths, documents.sources
        skipped = {d for shard in manifest.shards for d in shard.skipped}
        self.skipped = sorted(skipped)
        self.supervised = [0 if d in skipped else n for d, n in enumerate(documents.supervised)]
        self.slots = [0 if d in skipped else n for d, n in enumerate(documents.slots)]
        self._place: list[tuple[Shard, int]] = []
        for shard in manifest.shards:
            starts = starts_of(self.lengths[shard.first : shard.first + shard.documents])
            self._place += [(shard, start) for start in starts]
        self._open: OrderedDict[str, Any] = OrderedDict()

    def __len__(self) -> int:
        return len(self.lengths)

    def __getstate__(self) -> dict[str, Any]:  # a worker process maps the shards itself
        return vars(self) | {"_open": OrderedDict()}

    @classmethod
    def open(
        cls,
        folder: Path | str,
        *,
        key: str | None = None,
        written: Mapping[str, Any] | None = None,
        tick: Tick = nothing,
        remember: bool = True,
    ) -> FeatureStore:
        """Verify and open. Raises EyasError naming the file if the store is unfinished, damaged or another one.

        Checksums of shards not touched since they were last verified are not computed again, nor those of shards that
        are still as this job wrote them (``written``: file name -> :func:`file_state`). tick: called after each shard.
        remember: note down what was verified, as one process of a job does.
        """
        folder = Path(folder)
        manifest = Manifest.read(folder)
        if key is not None and manifest.key != key:
            raise EyasError(f"{folder}: holds the feature store {manifest.key}, not {key}; dump the features again")
        if not manifest.complete:
            raise EyasError(
                f"{folder}: the dump is unfinished, {len(manifest.shards)} of {manifest.planned_shards} shards are "
                "whole; run the same command again to continue it"
            )
        documents = _read_documents(folder, manifest)
        _verify(folder, manifest, written or {}, tick, remember=remember)
        return cls(folder, manifest, documents)

    @staticmethod
    def is_complete(folder: Path | str, key: str | None = None) -> bool:
        """Whether a finished store (with this key) is there; says nothing about its checksums."""
        folder = Path(folder)
        if not (folder / MANIFEST).exists():
            return False
        manifest = Manifest.read(folder)
        return manifest.complete and key in (None, manifest.key)

    def read(self, document: int) -> Stored:
        """One document. Raises EyasError naming shard and source for wrong lengths, NaN or infinity."""
        shard, start = self._place[document]
        source, length = self.sources[document], self.lengths[document]
        file = self._mapped(shard)
        names = [column.name for column in self.manifest.layout.columns]
        stored = Stored(**{name: file.get_slice(name)[start : start + length] for name in names})
        where = f"document {document} in {self.folder / shard.file}"
        check_lengths(source, len(stored.input_ids), len(stored.supervised), stored, where)
        if len(stored.input_ids) != length:
            raise EyasError(f"{source}: {where} has {len(stored.input_ids)} tokens, but the manifest says {length}")
        if not is_finite(stored):
            raise EyasError(f"{source}: {where} has NaN or infinite features; delete {shard.file} and dump again")
        return stored

    def _mapped(self, shard: Shard) -> Any:
        if shard.file not in self._open:
            try:
                file = safe_open(self.folder / shard.file, framework="pt")
                _check_columns(file, self, shard)
            except (OSError, SafetensorError) as error:
                raise EyasError(f"{self.folder / shard.file}: cannot be read ({error}); {REPAIR}") from error
            self._open[shard.file] = file
            if len(self._open) > OPEN_SHARDS:
                self._open.popitem(last=False)
        self._open.move_to_end(shard.file)
        return self._open[shard.file]


REPAIR = "run the dump again: it writes the damaged shards anew and keeps the others"


def _check_columns(file: Any, store: FeatureStore, shard: Shard) -> None:
    """Every column has one row per token of the shard's documents, and the width and dtype of the manifest."""
    slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
    rows = {name: (found.get_shape() or [0])[0] for name, found in slices.items()}
    documents = range(shard.first, shard.first + shard.documents)
    wrong = [n for n in ("taps", "final", "lse", "top1") if rows.get(n) != shard.tokens]
    if wrong or {rows.get("input_ids"), rows.get("supervised")} != {shard.tokens}:
        named = ", ".join(store.sources[d] for d in documents[:8]) + (", ..." if len(documents) > 8 else "")
        states = rows.get(wrong[0]) if wrong else shard.tokens
        raise EyasError(
            f"{store.folder / shard.file}: documents {documents[0]} to {documents[-1]} ({named}) have "
            f"{rows.get('input_ids')} token ids, {rows.get('supervised')} mask entries and {states} states where the "
            f"manifest says {shard.tokens}; delete the file and {REPAIR}"
        )
    for column in store.manifest.layout.columns:
        found = slices[column.name]
        if found.get_dtype() != column.code or found.get_shape() != column.shape(shard.tokens):
            raise EyasError(
                f"{store.folder / shard.file}: {column.name} is {found.get_dtype()} {found.get_shape()}, expected "
                f"{column.code} {column.shape(shard.tokens)}; delete the file and {REPAIR}"
            )


def _read_documents(folder: Path, manifest: Manifest) -> Documents:
    path = folder / DOCUMENTS
    raw = read_json(path)
    if file_blake2b(path) != manifest.documents_blake2b:
        raise EyasError(f"{path}: was changed after it was written (checksum differs); {REPAIR}")
    documents = Documents(**raw)
    planned = manifest.layout.plan(documents.lengths, manifest.shard_bytes)
    written = [range(shard.first, shard.first + shard.documents) for shard in manifest.shards]
    if planned != written or sum(documents.lengths) != manifest.tokens:
        raise EyasError(
            f"{folder / MANIFEST}: its shards do not add up to its documents; delete the folder and dump again"
        )
    return documents


def _verify(folder: Path, manifest: Manifest, written: Mapping[str, Any], tick: Tick, *, remember: bool) -> None:
    """Check every shard. What is remembered is when each file checked last changed: a cache, it may vanish any time."""
    path, known, seen = folder / VERIFIED, {}, {}
    with suppress(OSError, ValueError):
        known = json.loads(path.read_bytes())
    checked = known if isinstance(known, Mapping) else {}
    for shard in manifest.shards:
        state = file_state(folder / shard.file, shard)
        if state is None or state not in (checked.get(shard.file), written.get(shard.file)):
            wrong = damage(folder, shard)
            if wrong:
                raise EyasError(f"{folder / shard.file}: {wrong}; {REPAIR}")
        if state is not None and time.time_ns() - max(state[1:3]) > SETTLED_NS:
            seen[shard.file] = state
        tick()
    if remember and seen != known:
        with suppress(OSError, EyasError):
            write_atomic(path, json.dumps(seen).encode())


def file_state(path: Path, shard: Shard) -> list[Any] | None:
    """What changes when a shard's file does, beside the checksum that was computed of it; None without the file."""
    if not path.is_file():
        return None
    stat = path.stat()
    return [stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino, shard.blake2b]
