"""The target's keys and values of several sequences at once, each with a length of its own, and their roll-back.

A *slot* holds one sequence: its confirmed tokens first, then the pending ones (a block that was read and not yet
judged), which :meth:`KVCache.keep` confirms or drops. Every layer keeps all of its keys, sliding-window layers too:
what lies outside the window is masked, so that a roll-back never misses a key. Nothing is copied when a sequence
grows, when a chain is accepted or when a draft is rejected.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

FIRST_CAPACITY = 256


class KVCache(Cache):
    """lengths: confirmed tokens of each slot. depths: for each slot the depths of its pending tokens, in the order
    they were read (a pending token stands at position ``lengths[slot] + depth``)."""

    def __init__(self, slots: int = 1) -> None:
        self.lengths = [0] * slots
        self.depths: list[list[int]] = [[] for _ in range(slots)]
        # What the forward under way reads: its first slot, the tokens before it there, the most keys of a slot
        self.first, self.before, self.width = 0, 0, 0
        self.rows = torch.empty(0, dtype=torch.int64)  # flat places of the tokens under way: slot * capacity + place
        self.batch, self.capacity = 1, 0
        super().__init__(layer_class_to_replicate=partial(SlotLayer, self))

    @property
    def slots(self) -> int:
        return len(self.lengths)

    @property
    def pending(self) -> list[int]:
        return [len(depths) for depths in self.depths]

    def start(self, first: int, blocks: Sequence[Sequence[int]], device: torch.device) -> int:
        """Make room for blocks (the depths of their tokens) of the slots first, first + 1, ...; the widest row.

        The tokens become pending. Rows shorter than the longest block are padded behind; the next block of their
        slot overwrites the padding.
        """
        longest = max(len(block) for block in blocks)
        starts = [self.lengths[s] + len(self.depths[s]) for s in range(first, first + len(blocks))]
        self._reserve(max(starts) + longest)
        self.first, self.before, self.batch, self.width = first, starts[0], len(blocks), max(starts) + longest
        at = torch.tensor([(first + i) * self.capacity + start for i, start in enumerate(starts)], device=device)
        self.rows = (at[:, None] + torch.arange(longest, device=device)).flatten()
        for i, block in enumerate(blocks):
            self.depths[first + i] += block
        return self.width

    def keep(self, slot: int, nodes: Sequence[int]) -> None:
        """Confirm the pending tokens ``nodes`` (numbers in the order they were read, ascending), drop the others."""
        if any(a >= b for a, b in pairwise([-1, *nodes, len(self.depths[slot])])):
            raise ValueError(f"slot {slot}: {list(nodes)} are not ascending numbers of {len(self.depths[slot])} tokens")
        length = self.lengths[slot]
        if list(nodes) != list(range(len(nodes))):
            for layer in self._filled():
                index = torch.tensor(nodes, device=layer.keys.device) + length
                for stored in (layer.keys, layer.values):
                    stored[slot, length : length + len(nodes)] = stored[slot, index]
        self.lengths[slot] += len(nodes)
        self.depths[slot] = []

    def reset(self, slot: int | None = None) -> None:
        """Forget a slot, or all."""
        for one in range(self.slots) if slot is None else (slot,):
            self.lengths[one], self.depths[one] = 0, []

    def move(self, source: int, to: int) -> None:
        """Put the confirmed tokens of a slot into another one, whose content is lost; forget the first."""
        length = self.lengths[source]
        for layer in self._filled():
            layer.keys[to, :length], layer.values[to, :length] = (
                layer.keys[source, :length],
                layer.values[source, :length],
            )
        self.lengths[to], self.depths[to] = length, []
        self.reset(source)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens before those of the forward under way: asked for where no mask of ours is given, with one slot."""
        return self.before

    def _filled(self) -> list[SlotLayer]:
        return [layer for layer in self.layers if isinstance(layer, SlotLayer) and layer.is_initialized]

    def _reserve(self, needed: int) -> None:
        if needed <= self.capacity:
            return
        self.capacity = max(needed, 2 * self.capacity, FIRST_CAPACITY)
        for layer in self._filled():
            layer.grow(self.capacity)


class SlotLayer(CacheLayerMixin):
    """keys, values [slots, capacity, heads, D] of one attention layer."""

    keys: Tensor
    values: Tensor

    def __init__(self, owner: KVCache) -> None:
        super().__init__()
        self.owner = owner

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        places = self.owner.slots, self.owner.capacity
        self.keys = key_states.new_zeros(*places, *key_states.shape[1::2])
        self.values = value_states.new_zeros(*places, *value_states.shape[1::2])
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write the block [B, heads, n, D] of the forward under way; what its slots hold, [B, heads, width, D]."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        owner = self.owner
        for stored, new in ((self.keys, key_states), (self.values, value_states)):
            stored.flatten(0, 1).index_copy_(0, owner.rows, new.transpose(1, 2).flatten(0, 1).to(stored.dtype))
        window = slice(owner.first, owner.first + owner.batch)
        keys, values = self.keys[window, : owner.width], self.values[window, : owner.width]
        return keys.transpose(1, 2), values.transpose(1, 2)

    def grow(self, capacity: int) -> None:
        self.keys, self.values = (
            torch.cat([stored, stored.new_zeros(stored.shape[0], capacity - stored.shape[1], *stored.shape[2:])], 1)
            for stored in (self.keys, self.values)
        )

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.owner.width, 0

    def get_seq_length(self) -> int:
        return self.owner.get_seq_length()

    def get_max_length(self) -> int:
        return -1
