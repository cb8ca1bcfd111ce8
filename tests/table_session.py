"""A draft session without a model: its logits are a function of the text before them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from models.blocks import States

Text = tuple[int, ...]
Row = Callable[[Text], Tensor]  # logits [Vd] after a text


def random_row(size: int, seed: int = 0, spread: float = 2.0) -> Row:
    """Random logits that depend on the whole text."""

    @cache
    def row(text: Text) -> Tensor:
        number = sum((token + 1) * 67**place for place, token in enumerate(text)) + 10**6 * seed
        return spread * torch.randn(size, generator=torch.Generator().manual_seed(number % 2**62))

    return row


def states(start: int, count: int) -> States:
    """States that tell the position they belong to."""
    at = torch.arange(start, start + count, dtype=torch.float32)[:, None]
    return States(at.repeat(1, 6), -at)


class TableSession:
    """Keeps the contract of models.drafter.DraftSession, and holds its caller to it. calls: what was asked."""

    def __init__(self, row: Row) -> None:
        self.row = row
        self.texts: dict[int, Text] = {}
        self.nodes: dict[int, list[Text]] = {}  # the paths of the scratch tail
        self.calls: list[Any] = []

    def reset(self, slot: int, first_token: int) -> None:
        self.texts[slot], self.nodes[slot] = (first_token,), []

    def move(self, source: int, to: int) -> None:
        self.texts[to], self.nodes[to] = self.texts.pop(source), self.nodes.pop(source)

    def extend(
        self, slots: Sequence[int], counts: Sequence[int], taps: Tensor, final: Tensor, next_ids: Tensor
    ) -> Tensor:
        assert list(slots) == sorted(set(slots)) and len(counts) == len(slots)
        assert len(taps) == len(final) == len(next_ids) == sum(counts)
        self.calls.append(("extend", list(slots), list(counts)))
        ids, at = next_ids.tolist(), taps[:, 0].tolist()
        for slot, count in zip(slots, counts, strict=True):
            confirmed = len(self.texts[slot]) - 1
            assert at[:count] == list(range(confirmed, confirmed + count)), "states of other positions"
            self.texts[slot] += tuple(ids[:count])
            self.nodes[slot] = []
            ids, at = ids[count:], at[count:]
        return torch.stack([self.row(self.texts[slot]) for slot in slots])

    def expand(self, slots: Sequence[int], parents: Tensor, tokens: Tensor, depth: int) -> Tensor:
        assert list(slots) == sorted(slots) and len(slots) == len(parents) == len(tokens)
        self.calls.append(("expand", list(slots), parents.tolist(), tokens.tolist(), depth))
        before = {slot: list(nodes) for slot, nodes in self.nodes.items()}
        rows = []
        for slot, parent, token in zip(slots, parents.tolist(), tokens.tolist(), strict=True):
            path = ((), *before[slot])[1 + parent] + (token,)
            assert len(path) == depth, "a level at a time"
            self.nodes[slot].append(path)
            rows.append(self.row(self.texts[slot] + path))
        return torch.stack(rows)
