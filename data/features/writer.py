"""Writing a feature store: FeatureWriter keeps the journal of whole shards, ShardFile fills one of them.

Every file is written under a temporary name, fsynced and renamed; manifest.json lists a shard only after that.
So a dump killed at any moment leaves whole shards, and continues with the missing ones.

Of several processes one holds the folder and writes the manifest (FeatureWriter). The others write shards of their
own (ShardWriter) and leave a receipt beside each, which that one takes into the manifest: no file has two writers.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
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
from data.features.store import Stored, TokenFeatures, damage, file_state, is_finite
from data.processes import Tick, nothing
from models.errors import EyasError
from models.files import lock, out_of_space, publish, write_atomic

SHARD_FILE = "shard-{:05d}.safetensors"
SHARD_FILES = "shard-*.safetensors"
RECEIPT = "shard-{:05d}.json"
RECEIPTS = "shard-*.json"


class ShardFile:
    """A shard being written: documents go straight to their place in a preallocated file, in any order."""

    def __init__(self, final: Path, manifest: Manifest, index: int, documents: range, lengths: list[int]) -> None:
        self.final, self.index, self.documents = final, index, documents
        self.path = final.with_name(f"{final.name}.{secrets.token_hex(4)}.tmp")  # no other process's
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
        self._file: IO[bytes] = self.path.open("w+b")
        try:
            with suppress(OSError):  # a filesystem without locks
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # see _is_written
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

    def finish(self) -> Shard:
        """Make the shard durable under its final name."""
        if self.missing:
            raise RuntimeError(f"shard {self.index} lacks documents {sorted(self.missing)}")
        self._file.flush()
        os.fsync(self._file.fileno())
        digest = file_blake2b(self.path)
        publish(self.path, self.final)
        self._file.close()
        first, count, skipped = self.documents.start, len(self.documents), tuple(sorted(self.skipped))
        return Shard(self.index, self.final.name, first, count, self.tokens, self.bytes, digest, skipped)

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


class ShardWriter:
    """Writes shards of a store whose manifest another process of the job keeps.

    manifest: lists the shards that are whole as far as this process knows, its own among them. written: the state of
    its files (:func:`file_state`) when it wrote and summed them.
    """

    def __init__(self, folder: Path, manifest: Manifest, documents: Documents) -> None:
        self.folder, self.manifest, self.documents = folder, manifest, documents
        self.plan = manifest.layout.plan(documents.lengths, manifest.shard_bytes)
        self.written: dict[str, Any] = {}

    def bytes_of(self, index: int) -> int:
        """Size of a shard without its header (some hundred bytes)."""
        return self.tokens_of(index) * self.manifest.layout.token_bytes

    def tokens_of(self, index: int) -> int:
        return sum(self.documents.lengths[d] for d in self.plan[index])

    @contextmanager
    def shard(self, index: int) -> Iterator[ShardFile]:
        """Write one shard: it counts as whole when the block ends, and is thrown away when it raises."""
        final = self.folder / SHARD_FILE.format(index)
        with out_of_space(final, MORE_SPACE):
            file = ShardFile(final, self.manifest, index, self.plan[index], self.documents.lengths)
            try:
                yield file
                shard = file.finish()
            except BaseException:
                file.discard()
                raise
        self.written[shard.file] = file_state(final, shard)
        self.manifest = self.manifest.with_shards([*self.manifest.shards, shard])
        self._record(shard)

    def _record(self, shard: Shard) -> None:
        receipt = {"shard": asdict(shard), "state": self.written[shard.file]}
        self._write(RECEIPT.format(shard.index), json.dumps(receipt).encode())

    def _write(self, name: str, content: bytes) -> None:
        with out_of_space(self.folder / name, MORE_SPACE):
            write_atomic(self.folder / name, content)


class FeatureWriter(ShardWriter):
    """Fills a store folder shard by shard; one job at a time. Use as a context manager.

    Continues what is there if it has the same key: whole shards are kept, with the shard size they were begun
    with; leftovers and damaged shards are written anew. tick: called for each shard that is checked. Raises EyasError
    if the folder holds another store or another job is writing it.
    """

    def __init__(self, folder: Path, manifest: Manifest, documents: Documents, tick: Tick = nothing) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._lock = lock(folder, "writing this feature store")
        try:
            self.damaged: dict[int, str] = {}
            super().__init__(folder, self._kept(folder, manifest), documents)
            self._continue(tick)
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

    def collect(self) -> bool:
        """List what other processes of the job have finished meanwhile. Whether there was any."""
        found = self._receipts()
        if found:
            self.manifest = self.manifest.with_shards([*self.manifest.shards, *found])
            self._write(MANIFEST, self.manifest.to_json())
            self._drop_receipts(found)
        return bool(found)

    def _record(self, shard: Shard) -> None:
        self._write(MANIFEST, self.manifest.to_json())

    @staticmethod
    def _kept(folder: Path, fresh: Manifest) -> Manifest:
        """The manifest that is there, or the fresh one."""
        if not (folder / MANIFEST).exists():
            return fresh
        manifest = Manifest.read(folder)
        if manifest.key != fresh.key:
            raise EyasError(f"{folder}: holds another feature store; {_differences(manifest, fresh)}")
        return manifest

    def _continue(self, tick: Tick) -> None:
        for leftover in self.folder.glob("*.tmp"):
            if not _is_written(leftover):
                leftover.unlink(missing_ok=True)
        receipts = self._receipts()
        whole = []
        for shard in [*self.manifest.shards, *receipts]:
            state, wrong = file_state(self.folder / shard.file, shard), damage(self.folder, shard)
            tick()
            if wrong:
                self.damaged[shard.index] = wrong
            else:
                self.written[shard.file] = state
                whole.append(shard)
        self.manifest = self.manifest.with_shards(whole)
        for useless in set(self.folder.glob(SHARD_FILES)) - {self.folder / shard.file for shard in whole}:
            useless.unlink()  # damaged, or renamed but not yet listed when the dump was killed: free its space
        data, listed = self.documents.to_json(), self.folder / DOCUMENTS
        if not listed.exists() or file_blake2b(listed) != self.manifest.documents_blake2b:
            self.manifest = replace(self.manifest, documents_blake2b=blake2b(data))
            self._write(DOCUMENTS, data)
        self._write(MANIFEST, self.manifest.to_json())
        self._drop_receipts(receipts)
        for stale in self.folder.glob(RECEIPTS):  # of another plan, or damaged
            stale.unlink(missing_ok=True)

    def _receipts(self) -> list[Shard]:
        """Shards of this plan that have a receipt and are not listed yet."""
        listed = {shard.index for shard in self.manifest.shards}
        found = []
        for path in sorted(self.folder.glob(RECEIPTS)):
            with suppress(OSError, ValueError, KeyError, TypeError):
                receipt = json.loads(path.read_bytes())
                shard = Shard(**receipt["shard"] | {"skipped": tuple(receipt["shard"]["skipped"])})
                planned = self.plan[shard.index] if 0 <= shard.index < len(self.plan) else range(0)
                is_planned = (shard.first, shard.documents) == (planned.start, len(planned))
                if is_planned and shard.file == SHARD_FILE.format(shard.index) and shard.index not in listed:
                    self.written[shard.file] = receipt["state"]
                    found.append(shard)
        return found

    def _drop_receipts(self, shards: list[Shard]) -> None:
        for shard in shards:
            (self.folder / RECEIPT.format(shard.index)).unlink(missing_ok=True)


def _is_written(temporary: Path) -> bool:
    """Whether a living process is writing this file: one that outlives the process that held the folder."""
    try:
        with temporary.open("r+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # gone, or a filesystem without locks
        pass
    return False


def _differences(old: Manifest, new: Manifest) -> str:
    names = ("target", "tap_ids", "dtype", "compute_dtype", "documents", "tokens")
    parts = [f"{n} {getattr(old, n)} there, {getattr(new, n)} now" for n in names if getattr(old, n) != getattr(new, n)]
    return ("; ".join(parts) or "its token ids or masks differ") + ". Choose another folder"
