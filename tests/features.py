"""A target that is not one: features by formula, so that a test of the store knows every number beforehand."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from data.features.dump import dump
from data.features.store import FeatureStore
from data.masks.template import Example

HIDDEN, TAPS = 4, (1, 2, 3)


class FakeFeatures(NamedTuple):
    taps: Tensor
    final: Tensor
    lse: Tensor
    top1: Tensor


class FakeTarget:
    """final[p] = (sum of the tokens up to p) / 8 + (0, 1, 2, 3); taps are final times 1, 2, 3; lse[p] = p + 1/4;
    top1[p] = token p plus 1.

    ``bad_token`` makes the states of its position infinite; ``cut`` drops that many trailing states; after
    ``forwards`` calls the process gets SIGKILL (``kill``) or KeyboardInterrupt is raised.
    """

    def __init__(
        self, *, bad_token: int | None = None, cut: int = 0, forwards: int | None = None, kill: bool = False
    ) -> None:
        self.model: nn.Module = nn.Linear(1, 1)
        self.tap_ids, self.hidden_size = TAPS, HIDDEN
        self.bad_token, self.cut, self.forwards, self.kill = bad_token, cut, forwards, kill
        self.padded: list[tuple[int, int]] = []  # (documents, longest) of each call

    def fingerprint(self) -> str:
        return "fake"

    def features(self, ids: list[Tensor]) -> list[FakeFeatures]:
        if self.forwards is not None and len(self.padded) >= self.forwards:
            if self.kill:
                os.kill(os.getpid(), signal.SIGKILL)
            raise KeyboardInterrupt
        self.padded.append((len(ids), max(map(len, ids))))
        return [self._document(row) for row in ids]

    def _document(self, ids: Tensor) -> FakeFeatures:
        final = ids.cumsum(0)[:, None] / 8 + torch.arange(HIDDEN)
        if self.bad_token is not None:
            final[ids == self.bad_token] = torch.inf
        taps = torch.cat([final, 2 * final, 3 * final], 1)
        rows = len(ids) - self.cut
        return FakeFeatures(taps[:rows], final[:rows], torch.arange(rows) + 0.25, ids[:rows] + 1)


def documents(lengths: list[int], *, seed: int = 0, vocab: int = 50) -> list[Example]:
    """Random token ids; a random third of each document unsupervised."""
    random = torch.Generator().manual_seed(seed)
    made = []
    for row, length in enumerate(lengths):
        ids = torch.randint(3, vocab, (length,), generator=random).tolist()
        mask = (torch.rand(length, generator=random) > 0.33).tolist()
        made.append(Example(ids, mask, f"chat.jsonl:{row + 1}:id{row}"))
    return made


LENGTHS = [5, 9, 2, 7, 7, 1, 12, 3, 6, 11]
# A token of the fake store in float32: lse, id, top1 of 4 bytes, 4 + 12 states of 4 bytes, 1 of mask.
TOKEN_BYTES = 3 * 4 + (HIDDEN + 3 * HIDDEN) * 4 + 1
SHARD_BYTES = 16 * TOKEN_BYTES  # documents 0-2, 3-5, 6-7, 8, 9


def make_store(
    folder: Path, target: FakeTarget | None = None, lengths: list[int] = LENGTHS, **options: Any
) -> FeatureStore:
    """Dump random documents of these lengths through the fake target, by default into five float32 shards."""
    settings: dict[str, Any] = {"dtype": "float32", "shard_bytes": SHARD_BYTES, "batch_tokens": 12} | options
    return dump(target or FakeTarget(), documents(lengths), folder, **settings)


def contents(folder: Path) -> dict[str, bytes]:
    """The bytes of a store's files, caches and lock apart."""
    return {p.name: p.read_bytes() for p in folder.iterdir() if not p.name.startswith(".")}
