"""Writing a feature store: FeatureWriter keeps the journal of whole shards, ShardFile fills one of them.

Every file is written under a temporary name, fsynced and renamed; manifest.json lists a shard only after that.
So a dump killed at any moment leaves whole shards, and continues with the missing ones.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from data.features.manifest import (
    DOCUMENTS,
    MANIFEST,
    MORE_SPACE,
    Documents,
    Manifest,
    Shard,
    blake2b,
    file_blake2b,
    starts_of,
)
from data.features.store import Stored, TokenFeatures, damage, is_finite
from models.errors import EyasError
from models.files import lock, out_of_space, publish, write_atomic

SHARD_FILE = "shard-{:05d}.safetensors"
SHARD_FILES = "shard-*.safetensors"


class ShardFile:
    """A shard being written: documents go straight to their place in a preallocated file, in any order."""

    def __init__(self, path: Path, manifest: Manifest, index: int, documents: range, lengths: list[int]) -> None:
        self.path, self.index, self.documents = path, index, documents
        self.columns = manifest.layout.columns
        self.starts = dict(zip(documents, starts_of([lengths[d] for d in documents]), strict=True))
        self.missing = set(documents)
        self.skipped: list[int] = []
        self.tokens = sum(lengths[d] for d in documents)
        metadata = {"format": manifest.format, "key": manifest.key, "shard": str(index)}
        header = manifest.layout.header(self.tokens, metadata)
        self.offsets, self.bytes = {}, len(header)
        for column in self.columns:
            self.offsets[column.name] = self.bytes
            self.bytes += self.tokens * column.row_bytes
        self._file: IO[bytes] = path.open("w+b")
        try:
            self._reserve()
            self._pwrite(header, 0)
        except BaseException:
            self.discard()
            raise

    def write(self, document: int, features: TokenFeatures, ids: Tensor, supervised: Tensor) -> bool:
        """Store one document; False if its features are not finite (see :meth:`skip`)."""
        stored = self._convert(features, ids, supervised)
        if not is_finite(stored):
            return False
        for column in self.columns:
            raw = getattr(stored, column.name).contiguous().view(torch.uint8).numpy()
            if not raw.size:
                continue  # no taps
            self._pwrite(raw.data.cast("B"), self.offsets[column.name] + self.starts[document] * column.row_bytes)
        self.missing.discard(document)
        return True

    def skip(self, document: int, ids: Tensor) -> None:
        """Store zeros without a supervised token in place of features that are not finite."""
        shapes = {c.name: torch.zeros(c.shape(len(ids)), dtype=c.dtype) for c in self.columns}
        self.write(document, Stored(**shapes), ids, shapes["supervised"])
        self.skipped.append(document)

    def finish(self, final: Path) -> Shard:
        """Make the shard durable under its final name."""
        if self.missing:
            raise RuntimeError(f"shard {self.index} lacks documents {sorted(self.missing)}")
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        digest = file_blake2b(self.path)
        publish(self.path, final)
        first, count, skipped = self.documents.start, len(self.documents), tuple(sorted(self.skipped))
        return Shard(self.index, final.name, first, count, self.tokens, self.bytes, digest, skipped)

    def discard(self) -> None:
        self._file.close()
        self.path.unlink(missing_ok=True)

    def _reserve(self) -> None:
        """Take the whole space at once: a full disk shows now, not after an hour."""
        self._file.truncate(self.bytes)
        if not hasattr(os, "posix_fallocate"):  # macOS
            return
        try:
            os.posix_fallocate(self._file.fileno(), 0, self.bytes)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):  # a filesystem that cannot reserve
                raise

    def _convert(self, features: TokenFeatures, ids: Tensor, supervised: Tensor) -> Stored:
        given = Stored(features.taps, features.final, features.lse, features.top1, ids, supervised)
        return Stored(**{c.name: getattr(given, c.name).to("cpu", c.dtype) for c in self.columns})

    def _pwrite(self, data: Any, offset: int) -> None:
        view = memoryview(data)
        while len(view):
            written = os.pwrite(self._file.fileno(), view, offset)
            view, offset = view[written:], offset + written


class FeatureWriter:
    """Fills a store folder shard by shard; one process at a time. Use as a context manager.

    Continues what is there if it has the same key: whole shards are kept, with the shard size they were begun
    with; leftovers and damaged shards are written anew. Raises EyasError if the folder holds another store or
    another process is writing it.
    """

    def __init__(self, folder: Path, manifest: Manifest, documents: Documents) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.documents = folder, documents
        self._lock = lock(folder, "writing this feature store")
        try:
            self.damaged: dict[int, str] = {}
            self.manifest = self._continue(manifest)
            self.plan = self.manifest.layout.plan(documents.lengths, self.manifest.shard_bytes)
        except BaseException:
            self._lock.close()
            raise

    def __enter__(self) -> FeatureWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self._lock.close()

    @property
    def pending(self) -> list[int]:
        """Numbers of the shards still to be written."""
        done = {shard.index for shard in self.manifest.shards}
        return [index for index in range(self.manifest.planned_shards) if index not in done]

    def bytes_of(self, index: int) -> int:
        """Size of a shard without its header (some hundred bytes)."""
        tokens = sum(self.documents.lengths[d] for d in self.plan[index])
        return tokens * self.manifest.layout.token_bytes

    @contextmanager
    def shard(self, index: int) -> Iterator[ShardFile]:
        """Write one shard: journalled in the manifest when the block ends, thrown away when it raises."""
        final = self.folder / SHARD_FILE.format(index)
        temporary = final.with_name(final.name + ".tmp")
        with out_of_space(final, MORE_SPACE):
            file = ShardFile(temporary, self.manifest, index, self.plan[index], self.documents.lengths)
            try:
                yield file
                shard = file.finish(final)
            except BaseException:
                file.discard()
                raise
        self.manifest = self.manifest.with_shards([*self.manifest.shards, shard])
        self._write(MANIFEST, self.manifest.to_json())

    def _continue(self, fresh: Manifest) -> Manifest:
        for leftover in self.folder.glob("*.tmp"):
            leftover.unlink(missing_ok=True)
        manifest = fresh
        if (self.folder / MANIFEST).exists():
            manifest = Manifest.read(self.folder)
            if manifest.key != fresh.key:
                raise EyasError(f"{self.folder}: holds another feature store; {_differences(manifest, fresh)}")
            checked = {shard: damage(self.folder, shard) for shard in manifest.shards}
            self.damaged = {shard.index: wrong for shard, wrong in checked.items() if wrong}
            manifest = manifest.with_shards([shard for shard, wrong in checked.items() if not wrong])
            for useless in set(self.folder.glob(SHARD_FILES)) - {self.folder / s.file for s in manifest.shards}:
                useless.unlink()  # damaged, or renamed but not yet listed when the dump was killed: free its space
        documents = self.folder / DOCUMENTS
        if not documents.exists() or file_blake2b(documents) != manifest.documents_blake2b:
            data = self.documents.to_json()
            manifest = replace(manifest, documents_blake2b=blake2b(data))
            self._write(DOCUMENTS, data)
        self._write(MANIFEST, manifest.to_json())
        return manifest

    def _write(self, name: str, content: bytes) -> None:
        with out_of_space(self.folder / name, MORE_SPACE):
            write_atomic(self.folder / name, content)


def _differences(old: Manifest, new: Manifest) -> str:
    names = ("target", "tap_ids", "dtype", "compute_dtype", "documents", "tokens")
    parts = [f"{n} {getattr(old, n)} there, {getattr(new, n)} now" for n in names if getattr(old, n) != getattr(new, n)]
    return ("; ".join(parts) or "its token ids or masks differ") + ". Choose another folder"
