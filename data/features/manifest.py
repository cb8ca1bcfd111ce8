"""What a feature store says about itself: the manifest, the documents it holds and the bytes of a shard.

    <store>/manifest.json      format, target, taps and their convention, dtype, one entry per whole shard
    <store>/documents.json     length, supervised tokens, depth-0 slots and source of every document
    <store>/shard-00000.safetensors ...

A store is named by :func:`store_key`, a digest of everything that determines its content, so changed inputs
make another store. Shards are planned from the document lengths alone, before anything is computed: each can
be written, checked and rewritten without the others.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from models.errors import EyasError

if TYPE_CHECKING:
    from data.masks.template import Example

FORMAT = "eyas-features"
VERSION = 1
TAP_CONVENTION = "boundary: tap i is the state entering decoder layer i, Hugging Face hidden_states[i]"
FINAL_CONVENTION = "after the final norm"
MANIFEST = "manifest.json"
DOCUMENTS = "documents.json"
MORE_SPACE = (
    "The whole shards are safe: free some space and run the same command again to continue, or set store.dir to a "
    "larger disk, store.shard_mib lower or features=online"
)

# The store's dtypes: safetensors code and torch dtype of taps and final.
DTYPES = {"bfloat16": ("BF16", torch.bfloat16), "float32": ("F32", torch.float32)}


def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype of a store dtype; raises EyasError for any other."""
    if name not in DTYPES:
        raise EyasError(f"store.dtype={name}: choose one of {', '.join(DTYPES)}")
    return DTYPES[name][1]


@dataclass(frozen=True)
class Column:
    """One tensor of a shard: [tokens, width], or [tokens] without a width."""

    name: str
    code: str
    dtype: torch.dtype
    width: int | None = None

    @property
    def row_bytes(self) -> int:
        return self.dtype.itemsize * (1 if self.width is None else self.width)

    def shape(self, tokens: int) -> list[int]:
        return [tokens] if self.width is None else [tokens, self.width]


@dataclass(frozen=True)
class Layout:
    """The bytes of a shard: a safetensors file whose tensors all have one row per token.

    Because every size is known beforehand, documents are written straight to their place, in any order.
    """

    taps_width: int
    hidden_size: int
    dtype: str

    @property
    def columns(self) -> tuple[Column, ...]:
        """In file order: wide elements first, so that every tensor starts on a multiple of its element size."""
        code, dtype = DTYPES[self.dtype]
        return (
            Column("lse", "F32", torch.float32),
            Column("input_ids", "I32", torch.int32),
            Column("top1", "I32", torch.int32),
            Column("final", code, dtype, self.hidden_size),
            Column("taps", code, dtype, self.taps_width),
            Column("supervised", "BOOL", torch.bool),
        )

    @property
    def token_bytes(self) -> int:
        return sum(column.row_bytes for column in self.columns)

    def header(self, tokens: int, metadata: dict[str, str]) -> bytes:
        """The safetensors header: 8 bytes of length, then JSON padded with blanks to a multiple of 8."""
        entries: dict[str, Any] = {"__metadata__": metadata}
        offset = 0
        for column in self.columns:
            end = offset + tokens * column.row_bytes
            entries[column.name] = {"dtype": column.code, "shape": column.shape(tokens), "data_offsets": [offset, end]}
            offset = end
        text = json.dumps(entries, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        return len(text).to_bytes(8, "little") + text

    def plan(self, lengths: Sequence[int], shard_bytes: int) -> list[range]:
        """Documents of each shard: consecutive, as many as fit into ``shard_bytes``, at least one."""
        if shard_bytes < 1:
            raise EyasError(f"store.shard_mib: a shard must hold at least 1 byte, not {shard_bytes}")
        room = shard_bytes // self.token_bytes
        shards, first, tokens = [], 0, 0
        for i, length in enumerate(lengths):
            if i > first and tokens + length > room:
                shards.append(range(first, i))
                first, tokens = i, 0
            tokens += length
        return [*shards, range(first, len(lengths))]


@dataclass(frozen=True)
class Documents:
    """Per document: tokens, supervised tokens, slots that carry loss at depth 0, and where it came from."""

    lengths: list[int]
    supervised: list[int]
    slots: list[int]
    sources: list[str]

    @classmethod
    def of(cls, examples: Sequence[Example]) -> Documents:
        """Raises EyasError for an empty document, or ids and mask of different lengths (both named by source)."""
        lengths, supervised, slots = [], [], []
        for example in examples:
            if len(example.input_ids) != len(example.supervised) or not example.input_ids:
                raise EyasError(
                    f"{example.source}: {len(example.input_ids)} token ids and {len(example.supervised)} mask "
                    "entries; a document needs at least one token and as many mask entries as tokens"
                )
            mask = np.asarray(example.supervised, dtype=bool)
            lengths.append(len(mask))
            supervised.append(int(mask.sum()))
            slots.append(count_slots(mask))
        return cls(lengths, supervised, slots, [example.source for example in examples])

    def to_json(self) -> bytes:
        return _json(asdict(self))


def count_slots(mask: np.ndarray) -> int:
    """Depth-0 slots of one document: pairs x[p+1], x[p+2] of supervised tokens with p >= 0."""
    return int((mask[1:-1] & mask[2:]).sum())


@dataclass(frozen=True)
class Shard:
    """A whole shard. ``skipped``: its documents whose features were not finite, stored as unsupervised zeros."""

    index: int
    file: str
    first: int
    documents: int
    tokens: int
    bytes: int
    blake2b: str
    skipped: tuple[int, ...] = ()


@dataclass(frozen=True)
class Manifest:
    """Everything a reader must know. ``shards`` lists the whole ones, so it is also the dump's journal."""

    key: str
    target: str
    tap_ids: tuple[int, ...]
    hidden_size: int
    dtype: str
    compute_dtype: str
    documents: int
    tokens: int
    documents_blake2b: str
    shard_bytes: int
    planned_shards: int
    provenance: dict[str, Any] = field(default_factory=dict)
    shards: tuple[Shard, ...] = ()
    taps: str = TAP_CONVENTION
    final: str = FINAL_CONVENTION
    format: str = FORMAT
    version: int = VERSION

    @property
    def layout(self) -> Layout:
        return Layout(len(self.tap_ids) * self.hidden_size, self.hidden_size, self.dtype)

    @property
    def complete(self) -> bool:
        return len(self.shards) == self.planned_shards

    def with_shards(self, shards: Sequence[Shard]) -> Manifest:
        """With these shards in order; of two with the same number the later one."""
        numbered = {shard.index: shard for shard in shards}
        return replace(self, shards=tuple(numbered[index] for index in sorted(numbered)))

    def to_json(self) -> bytes:
        return _json(asdict(self) | {"complete": self.complete})

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """Raises EyasError when there is no manifest, or not one this version understands."""
        return cls.of(read_json(folder / MANIFEST), folder / MANIFEST)

    @classmethod
    def of(cls, raw: dict[str, Any], path: Path) -> Manifest:
        """The manifest that a JSON object from ``path`` is; raises EyasError as :meth:`read` does."""
        if raw.get("format") != FORMAT or raw.get("version") != VERSION:
            raise EyasError(
                f"{path}: format {raw.get('format')!r} version {raw.get('version')!r}, but this Eyas reads "
                f"{FORMAT!r} version {VERSION}; dump the features again into another store.dir"
            )
        torch_dtype(str(raw.get("dtype")))
        try:
            shards = tuple(Shard(**s | {"skipped": tuple(s["skipped"])}) for s in raw["shards"])
            known = {f.name: raw[f.name] for f in fields(cls)}
            known |= {"tap_ids": tuple(raw["tap_ids"]), "shards": shards}
            return cls(**known)
        except (KeyError, TypeError) as error:
            raise EyasError(f"{path}: damaged ({error}); delete the folder and dump the features again") from error


def store_key(
    examples: Sequence[Example],
    fingerprint: str,
    tap_ids: Sequence[int],
    dtype: str,
    *,
    compute_dtype: str = "float32",
) -> str:
    """Digest of all that determines a store's content (32 hex digits): a good folder name.

    Token ids and masks of every document in their order, the target's fingerprint and compute dtype, taps, store
    dtype and format. The template, tokenizer, maximal length and roles act through the ids and masks. Shard size
    and batching do not enter: they change no stored number beyond rounding.
    """
    torch_dtype(dtype)
    head = [FORMAT, VERSION, TAP_CONVENTION, FINAL_CONVENTION, fingerprint, list(tap_ids), dtype, compute_dtype]
    digest = hashlib.blake2b(json.dumps([*head, len(examples)]).encode(), digest_size=16)
    for example in examples:
        digest.update(len(example.input_ids).to_bytes(8, "little"))
        digest.update(np.asarray(example.input_ids, dtype="<i4").tobytes())
        digest.update(np.packbits(np.asarray(example.supervised, dtype=bool)).tobytes())
    return digest.hexdigest()


def starts_of(lengths: Sequence[int]) -> list[int]:
    """First row of each document when they lie back to back."""
    return [0, *accumulate(lengths)][:-1]


def blake2b(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=32).hexdigest()


def file_blake2b(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=32)).hexdigest()


def read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except OSError as error:
        raise EyasError(f"{path}: cannot be read ({error.strerror}); is it a finished feature store?") from error
    except ValueError as error:
        raise EyasError(f"{path}: not valid JSON ({error}); delete the folder and dump the features again") from error
    if not isinstance(value, dict):
        raise EyasError(f"{path}: expected a JSON object, found {type(value).__name__}")
    return value


def _json(value: dict[str, Any]) -> bytes:
    return (json.dumps(value, indent=1, sort_keys=True, ensure_ascii=False) + "\n").encode()
