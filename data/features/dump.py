"""Run the target over documents and keep its features: the tapping path that dump and online training share.

A shard is a unit of work: its documents are batched by length (right padding, little of it), and each goes to
its place in the file as soon as it is computed. Memory holds one batch; document order and bytes do not depend
on how often the dump was broken off.

The processes of a job share the shards: process 0 holds the folder, says who writes which, and lists what is whole. The
plan of shards knows nothing of processes, so the bytes do not depend on their number either.
"""

from __future__ import annotations

import json
import logging
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from data.features.manifest import Documents, Manifest, blake2b, store_key, torch_dtype
from data.features.store import FeatureStore, TokenFeatures, check_lengths
from data.features.writer import FeatureWriter, ShardWriter
from data.processes import ALONE, Stage
from models.errors import EyasError
from models.quantize import computed_in
from models.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from data.masks.template import Example

log = logging.getLogger(__name__)

PLAN, WHOLE = "{}-plan", "{}-whole"  # what process 0 tells the others of the store with this key
PROBE_TOKENS = 512  # run once beforehand to estimate the time
SHARDS = 128  # a store that fits into few large shards is split into about so many, for the processes to share ...
BATCHES = 8  # ... but into none smaller than so many batches, where fewer documents of a length are found together


class FeatureTarget(Protocol):
    """What the dump asks of a target (models.target.Target)."""

    @property
    def model(self) -> nn.Module: ...
    @property
    def tap_ids(self) -> tuple[int, ...]: ...
    @property
    def hidden_size(self) -> int: ...
    def fingerprint(self) -> str: ...
    def features(self, ids: list[Tensor]) -> Sequence[TokenFeatures]: ...


@dataclass(frozen=True)
class Estimate:
    """What is still to be written, the free bytes of the disk, and the seconds it will take."""

    tokens: int
    bytes: int
    free: int
    seconds: float

    def __str__(self) -> str:
        size = f"{format_bytes(self.bytes)} of {format_bytes(self.free)} free"
        return f"{self.tokens:,} tokens, {size}, about {format_seconds(self.seconds)}"


def compute_dtype(target: FeatureTarget) -> str:
    """The dtype the target computes in, e.g. "float32", and how its weights are kept if they are quantised."""
    dtype = str(next(target.model.parameters()).dtype).removeprefix("torch.")
    return computed_in(dtype, getattr(target, "quantize", None))


def key_of(target: FeatureTarget, examples: Sequence[Example], dtype: str) -> str:
    """The store key of these examples under this target (see data.features.manifest.store_key)."""
    return store_key(examples, target.fingerprint(), target.tap_ids, dtype, compute_dtype=compute_dtype(target))


def batches_by_length(documents: Iterable[int], lengths: Mapping[int, int], batch_tokens: int) -> list[list[int]]:
    """Documents in batches of at most ``batch_tokens`` padded tokens (at least one document), longest first so
    that a batch too big for the memory shows at once."""
    if batch_tokens < 1:
        raise EyasError(f"store.batch_tokens={batch_tokens}: must be at least 1")
    batches: list[list[int]] = []
    for document in sorted(documents, key=lambda d: (-lengths[d], d)):
        if batches and (len(batches[-1]) + 1) * lengths[batches[-1][0]] <= batch_tokens:
            batches[-1].append(document)
        else:
            batches.append([document])
    return batches


def forward(
    target: FeatureTarget, examples: Sequence[Example], documents: Sequence[int], batch_tokens: int
) -> Iterator[tuple[int, TokenFeatures]]:
    """Features of these documents, one after another, in the order of their batches.

    Raises EyasError naming the source of a document whose ids, mask and states differ in length.
    """
    lengths = {document: len(examples[document].input_ids) for document in documents}
    for batch in batches_by_length(documents, lengths, batch_tokens):
        found = target.features([torch.tensor(examples[document].input_ids) for document in batch])
        for document, features in zip(batch, found, strict=True):
            example = examples[document]
            where = f"document {document} from the target"
            check_lengths(example.source, len(example.input_ids), len(example.supervised), features, where)
            yield document, features


def dump(
    target: FeatureTarget,
    examples: Sequence[Example],
    folder: Path | str,
    *,
    dtype: str = "bfloat16",
    shard_bytes: int = 1 << 30,
    batch_tokens: int = 4096,
    max_bad: int = 0,
    provenance: dict[str, Any] | None = None,
    progress: Callable[[int, int], None] | None = None,
    free_bytes: Callable[[Path], int] | None = None,
    stage: Stage = ALONE,
) -> FeatureStore:
    """Store the features of all examples in ``folder`` and open the store; what is already there is kept.

    Run again after a break it writes the missing shards only, and none if the store is whole. ``shard_bytes``: the
    size of a shard at most. ``max_bad`` documents may have NaN or infinite features (stored as zeros without loss,
    listed in the manifest); one more stops the dump. ``provenance``: JSON-able facts for the manifest (target id,
    template, data path ...). ``progress(done, total)`` is called after each document, in tokens; ``free_bytes(folder)``
    tells the free space (default: ask the disk). ``stage``: the processes that call this together, with equal
    arguments; each counts bad documents in the shards that were whole when it began and in its own, process 0 in all
    that are whole. Raises EyasError if the disk cannot hold the store, before the first shard.
    """
    if not examples:
        raise EyasError("data.path: no usable document to take features of")
    folder, documents = Path(folder), Documents.of(examples)
    manifest = _manifest(target, examples, documents, dtype, shard_bytes, batch_tokens, provenance or {})
    if stage.rank:
        return _help(target, examples, folder, documents, manifest.key, batch_tokens, max_bad, stage)
    with FeatureWriter(folder, manifest, documents, stage.moved) as writer:
        for index, wrong in writer.damaged.items():
            log.warning("%s: shard %d %s; writing it again", folder, index, wrong)
        meter = _Meter(writer, stage, max_bad, progress)
        if writer.pending:
            _announce(target, examples, writer, free_bytes or disk_free, stage.size)
        shares = split(writer.pending, [writer.tokens_of(index) for index in writer.pending], stage.size)
        stage.tell(PLAN.format(manifest.key), {"manifest": json.loads(writer.manifest.to_json()), "shares": shares})
        for index in shares[0]:
            _fill(writer, index, target, examples, batch_tokens, meter)
            _collect(writer, meter)
        stage.wait(lambda: _collect(writer, meter))
    store = FeatureStore.open(folder, key=manifest.key, written=writer.written, tick=stage.moved)
    stage.tell(WHOLE.format(manifest.key))
    return store


def _help(
    target: FeatureTarget,
    examples: Sequence[Example],
    folder: Path,
    documents: Documents,
    key: str,
    batch_tokens: int,
    max_bad: int,
    stage: Stage,
) -> FeatureStore:
    """Write this process's share of a store that process 0 holds, and open the store when it is whole."""
    plan = stage.hear(PLAN.format(key))
    writer = ShardWriter(folder, Manifest.of(plan["manifest"], folder), documents)
    meter = _Meter(writer, stage, max_bad)
    for index in plan["shares"][stage.rank]:
        _fill(writer, index, target, examples, batch_tokens, meter)
    stage.hear(WHOLE.format(key))
    return FeatureStore.open(folder, key=key, written=writer.written, tick=stage.moved, remember=False)


def split(shards: Sequence[int], tokens: Sequence[int], processes: int) -> list[list[int]]:
    """The shards of each process, about equally many tokens; the same wherever it is computed."""
    shares: list[list[int]] = [[] for _ in range(processes)]
    loads = [0] * processes
    for count, shard in sorted(zip(tokens, shards, strict=True), key=lambda pair: (-pair[0], pair[1])):
        least = loads.index(min(loads))
        shares[least].append(shard)
        loads[least] += count
    return [sorted(share) for share in shares]


def disk_free(folder: Path) -> int:
    return shutil.disk_usage(folder).free


class _Meter:
    """Counts tokens done and documents skipped, over this dump and the ones it continues."""

    def __init__(
        self,
        writer: ShardWriter,
        stage: Stage,
        max_bad: int,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        self.writer, self.stage, self.max_bad, self.progress = writer, stage, max_bad, progress
        self.count()

    def count(self) -> None:
        """Count the whole shards. Raises EyasError if too many documents in them were skipped."""
        shards = self.writer.manifest.shards
        self.done = sum(shard.tokens for shard in shards)
        self.bad = sum(len(shard.skipped) for shard in shards)
        if self.bad > self.max_bad:
            skipped = [self.writer.documents.sources[document] for shard in shards for document in shard.skipped]
            named = ", ".join(skipped[:8]) + (", ..." if len(skipped) > 8 else "")
            raise EyasError(
                f"{self.writer.folder}: {self.bad} documents with NaN or infinite features, {self.max_bad} allowed: "
                f"{named}. {REMOVE}"
            )

    def skip(self, wrong: str) -> None:
        """A document more without features. Raises EyasError if that is one too many."""
        self.bad += 1
        if self.bad > self.max_bad:
            raise EyasError(f"{wrong} ({self.bad} such so far, {self.max_bad} allowed). {REMOVE}")
        log.warning("%s; stored without loss", wrong)

    def add(self, document: int) -> None:
        self.done += self.writer.documents.lengths[document]
        self.tell()
        self.stage.moved()

    def tell(self) -> None:
        if self.progress:
            self.progress(self.done, self.writer.manifest.tokens)


REMOVE = "Remove the row, or compute in float32 (target.dtype=float32)"


def _fill(
    writer: ShardWriter,
    index: int,
    target: FeatureTarget,
    examples: Sequence[Example],
    batch_tokens: int,
    meter: _Meter,
) -> None:
    with writer.shard(index) as shard:
        for document, features in forward(target, examples, shard.documents, batch_tokens):
            example = examples[document]
            ids, supervised = torch.tensor(example.input_ids), torch.tensor(example.supervised, dtype=torch.bool)
            if not shard.write(document, features, ids, supervised):
                meter.skip(f"{example.source}: the target's features of document {document} are NaN or infinite")
                shard.skip(document, ids)
            meter.add(document)


def _collect(writer: FeatureWriter, meter: _Meter) -> bool | None:
    """Take in what the other processes have finished. True when all is there."""
    if writer.collect():
        meter.count()
        meter.tell()
    return None if writer.pending else True


def _manifest(
    target: FeatureTarget,
    examples: Sequence[Example],
    documents: Documents,
    dtype: str,
    shard_bytes: int,
    batch_tokens: int,
    provenance: dict[str, Any],
) -> Manifest:
    torch_dtype(dtype)
    manifest = Manifest(
        key=key_of(target, examples, dtype),
        target=target.fingerprint(),
        tap_ids=tuple(target.tap_ids),
        hidden_size=target.hidden_size,
        dtype=dtype,
        compute_dtype=compute_dtype(target),
        documents=len(examples),
        tokens=sum(documents.lengths),
        documents_blake2b=blake2b(documents.to_json()),
        shard_bytes=shard_bytes,
        planned_shards=0,
        provenance=provenance,
    )
    layout = manifest.layout
    shard_bytes = min(shard_bytes, max(manifest.tokens // SHARDS, BATCHES * batch_tokens) * layout.token_bytes)
    planned = len(layout.plan(documents.lengths, shard_bytes))
    return replace(manifest, shard_bytes=shard_bytes, planned_shards=planned)


def _announce(
    target: FeatureTarget,
    examples: Sequence[Example],
    writer: FeatureWriter,
    free_bytes: Callable[[Path], int],
    processes: int,
) -> None:
    """Log the estimate of what is still to be written; raise EyasError if it does not fit."""
    tokens = sum(map(writer.tokens_of, writer.pending))
    need, free = sum(map(writer.bytes_of, writer.pending)), free_bytes(writer.folder)
    if need > free:
        raise EyasError(
            f"store.dir: the features of {tokens:,} tokens need {format_bytes(need)} ({need} bytes), but only "
            f"{format_bytes(free)} ({free} bytes) are free at {writer.folder}. Free some space, choose another "
            "store.dir, store.dtype=bfloat16 or fewer data.max_documents, or train with features=online"
        )
    probe = torch.tensor(examples[writer.plan[writer.pending[0]].start].input_ids[:PROBE_TOKENS])
    began = time.perf_counter()
    target.features([probe])
    seconds = (time.perf_counter() - began) * tokens / len(probe) / processes
    estimate = Estimate(tokens, need, free, seconds)
    shards = f"{len(writer.pending)} of {writer.manifest.planned_shards} shards"
    log.info("features into %s: %s to write, %s", writer.folder, shards, estimate)
