"""The documents of a conversation as token ids and masks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np


@dataclass(frozen=True)
class Example:
    """input_ids [n] and supervised [n] of one document; source is ``file:row:id``."""

    input_ids: list[int]
    supervised: list[bool]
    source: str
    truncated: bool = False

    @property
    def num_supervised(self) -> int:
        return sum(self.supervised)


class Packed(NamedTuple):
    """An example as arrays: ids [n] int32 and supervised [n] bool."""

    ids: np.ndarray
    supervised: np.ndarray
    source: str
    truncated: bool

    @classmethod
    def of(cls, example: Example) -> Packed:
        ids, mask = np.asarray(example.input_ids, dtype=np.int32), np.asarray(example.supervised, dtype=bool)
        return cls(ids, mask, example.source, example.truncated)

    def example(self) -> Example:
        return Example(self.ids.tolist(), self.supervised.tolist(), self.source, self.truncated)


class Encoded(NamedTuple):
    """The documents of a conversation, and the names of the repairs made (`data.chats.policy.REPAIRS`)."""

    documents: list[Packed]
    repairs: list[str]

    @property
    def examples(self) -> list[Example]:
        return [document.example() for document in self.documents]
