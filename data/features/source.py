"""Where training batches come from: a feature store on disk, or the target itself. Same numbers either way."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from data.features.dump import FeatureTarget, forward
from data.features.manifest import Documents, torch_dtype
from data.features.store import FeatureStore, Stored, TokenFeatures, is_finite
from models.batch import Batch
from models.errors import EyasError

if TYPE_CHECKING:
    from data.masks.template import Example


class FeatureSource(Protocol):
    """Documents with features, by number.

    lengths: tokens of each document; supervised: its supervised tokens; slots: those that carry loss at draft
    depth 0 (the loss denominator of a step is the sum over its documents, known without reading any feature).
    """

    lengths: list[int]
    supervised: list[int]
    slots: list[int]
    sources: list[str]

    def __len__(self) -> int: ...

    def batch(self, documents: Sequence[int], dtype: torch.dtype | None = None) -> Batch:
        """These documents packed in this order; taps and final in ``dtype`` (default: the source's own)."""
        ...


class StoredFeatures:
    """Batches read from a feature store, on the CPU; taps and final are converted to ``dtype``."""

    def __init__(self, store: FeatureStore, dtype: torch.dtype = torch.float32) -> None:
        self.store, self.dtype = store, dtype
        self.lengths, self.supervised = store.lengths, store.supervised
        self.slots, self.sources = store.slots, store.sources

    def __len__(self) -> int:
        return len(self.store)

    def batch(self, documents: Sequence[int], dtype: torch.dtype | None = None) -> Batch:
        """Raises EyasError naming shard and source of a document that is damaged."""
        return pack([self.store.read(document) for document in documents], dtype or self.dtype)


class OnlineFeatures:
    """Batches straight from the target, on its device, rounded to the store's dtype first.

    store_dtype: what a store would hold ("bfloat16" or "float32"); batch_tokens: padded tokens of one forward.
    """

    def __init__(
        self,
        target: FeatureTarget,
        examples: Sequence[Example],
        *,
        store_dtype: str = "bfloat16",
        batch_tokens: int = 4096,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.target, self.examples = target, examples
        self.rounding, self.batch_tokens, self.dtype = torch_dtype(store_dtype), batch_tokens, dtype
        documents = Documents.of(examples)
        self.lengths, self.supervised = documents.lengths, documents.supervised
        self.slots, self.sources = documents.slots, documents.sources

    def __len__(self) -> int:
        return len(self.examples)

    def batch(self, documents: Sequence[int], dtype: torch.dtype | None = None) -> Batch:
        """Raises EyasError naming the source of a document with NaN or infinite features."""
        found = dict(forward(self.target, self.examples, sorted(set(documents)), self.batch_tokens))
        return pack([self._rounded(document, found) for document in documents], dtype or self.dtype)

    def _rounded(self, document: int, found: Mapping[int, TokenFeatures]) -> Stored:
        example, features = self.examples[document], found[document]
        ids = torch.tensor(example.input_ids, dtype=torch.int32)
        mask = torch.tensor(example.supervised, dtype=torch.bool)
        rounded = Stored(
            features.taps.to(self.rounding), features.final.to(self.rounding), features.lse, features.top1, ids, mask
        )
        if not is_finite(rounded):
            raise EyasError(f"{example.source}: the target's features of document {document} are NaN or infinite")
        return rounded


class TokensOnly:
    """Batches without features, for a target that is trained along and makes them itself (models/joint.py).

    labels: supervised tokens of each document that follow another token, what the target's own term counts.
    """

    def __init__(self, examples: Sequence[Example]) -> None:
        self.examples = examples
        documents = Documents.of(examples)
        self.lengths, self.supervised = documents.lengths, documents.supervised
        self.slots, self.sources = documents.slots, documents.sources
        self.labels = [sum(map(bool, example.supervised[1:])) for example in examples]

    def __len__(self) -> int:
        return len(self.examples)

    def batch(self, documents: Sequence[int], dtype: torch.dtype | None = None) -> Batch:
        return pack([self._bare(self.examples[document]) for document in documents], dtype or torch.float32)

    @staticmethod
    def _bare(example: Example) -> Stored:
        count = len(example.input_ids)
        ids = torch.tensor(example.input_ids, dtype=torch.int32)
        none, zeros = torch.zeros(count, 0), torch.zeros(count)
        return Stored(none, none, zeros, zeros.int(), ids, torch.tensor(example.supervised, dtype=torch.bool))


def pack(documents: Sequence[Stored], dtype: torch.dtype) -> Batch:
    """Documents back to back; taps and final converted to ``dtype`` while they are copied."""
    if not documents:
        raise ValueError("a batch needs at least one document")
    lengths = torch.tensor([0, *(len(document.input_ids) for document in documents)])
    total, device = int(lengths.sum()), documents[0].taps.device

    def column(name: str, kind: torch.dtype) -> Tensor:
        parts = [getattr(document, name) for document in documents]
        out = torch.empty((total, *parts[0].shape[1:]), dtype=kind, device=device)
        for into, part in zip(out.split(lengths[1:].tolist()), parts, strict=True):
            into.copy_(part)
        return out

    return Batch(
        input_ids=column("input_ids", torch.int64),
        supervised=column("supervised", torch.bool),
        cu_seqlens=lengths.cumsum(0).to(device, torch.int32),
        taps=column("taps", dtype),
        final=column("final", dtype),
        lse=column("lse", torch.float32),
        top1=column("top1", torch.int64),
    )
