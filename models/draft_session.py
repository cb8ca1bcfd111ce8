"""Incremental drafting with attention layers, for several sequences at once: what the sessions of methods build on.

Every *slot* holds one sequence: its confirmed positions, then a scratch tail of drafted nodes. A method says what its
layers compute (:class:`LayerSession`); where keys and values lie, which of them a token sees and at which position it
stands is settled here. All tokens of a call go through the linear layers back to back, without padding.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from models.blocks import side_by_side

FIRST_POSITIONS = 256  # room for keys and values of a slot before the first growth
FIRST_NODES = 15


class Tails:
    """The drafted nodes of each slot, numbered in the order of expansion: which earlier ones each descends from.

    nodes: how many each slot has. Node i has row and column 1 + i of ``seen[slot]`` [1 + room, 1 + room]; its row marks
    its ancestors and itself. Row 0, of the last confirmed position, stays empty.
    """

    def __init__(self, slots: int, device: torch.device) -> None:
        self.nodes = [0] * slots
        self.seen = torch.zeros(slots, 1 + FIRST_NODES, 1 + FIRST_NODES, dtype=torch.bool, device=device)

    def drop(self, slot: int) -> None:
        self.nodes[slot] = 0  # rows are written anew with every node

    def move(self, source: int, to: int) -> None:
        self.seen[to] = self.seen[source]
        self.nodes[to], self.nodes[source] = self.nodes[source], 0

    def add(self, slots: Sequence[int]) -> list[int]:
        """One new node in each of ``slots`` [N], for which room is made: their rows."""
        rows = []
        for slot in slots:
            self.nodes[slot] += 1
            rows.append(self.nodes[slot])
        room, needed = self.seen.shape[1] - 1, max(rows)
        if needed > room:
            more = max(needed, 2 * room) - room
            self.seen = F.pad(self.seen, (0, more, 0, more))
        return rows

    def link(self, slots: Tensor, rows: Tensor, parents: Tensor) -> Tensor:
        """Note the rows of the parents of new nodes (all [N] int64); the nodes that each sees, [N, room] bool."""
        seen = self.seen[slots, parents]
        seen.scatter_(1, rows[:, None], True)
        self.seen[slots, rows] = seen
        return seen[:, 1:]


@dataclass
class Rows:
    """The N tokens that one call reads, slot by slot, and their access to the stored keys and values.

    store: keys and values [layers, slots, capacity, nkv, D]. slots: those in use, counts: the tokens of each, starts:
    the place of its first one. positions [N]. asked: the tokens whose states are wanted, the last of each slot or all.
    seen [N, room] bool: the drafted nodes that each may look at, besides all ``confirmed`` positions of its slot;
    None: everything up to itself.
    """

    store: tuple[Tensor, Tensor]
    slots: Sequence[int]
    counts: Sequence[int]
    starts: Sequence[int]
    positions: Tensor
    asked: slice | Tensor
    seen: Tensor | None = None
    confirmed: Sequence[int] = ()

    def __post_init__(self) -> None:
        self.ends = [a + n for a, n in zip(self.starts, self.counts, strict=True)]
        self.width = max(self.ends)
        run = list(range(self.slots[0], self.slots[0] + len(self.slots)))
        self.window = slice(run[0], run[-1] + 1) if list(self.slots) == run else list(self.slots)
        self.places: Tensor | None = None  # in the flat [slots * capacity]; a single slot's are a slice
        if len(self.slots) > 1:
            capacity = self.store[0].shape[2]
            first = [slot * capacity + start for slot, start in zip(self.slots, self.starts, strict=True)]
            places = [f + i for f, n in zip(first, self.counts, strict=True) for i in range(n)]
            self.places = torch.tensor(places, device=self.positions.device)

    def write(self, keys: Tensor, values: Tensor, layer: int = 0) -> None:
        """Store the keys and values [N, nkv, D] of all tokens."""
        for stored, new in zip(self.store, (keys, values), strict=True):
            if self.places is None:
                stored[layer, self.slots[0], self.starts[0] : self.ends[0]] = new
            else:
                stored[layer].flatten(0, 1).index_copy_(0, self.places, new.to(stored.dtype))

    def attend(self, query: Tensor, layer: int = 0, skip: int = 0) -> Tensor:
        """Attention of the asked tokens or of all: query [M, nq, D] -> [M, nq, D]. Call :meth:`write` before.

        ``skip``: the first places of every slot that hold nothing for this layer; a token there sees itself alone.
        """
        counts = self.counts if query.shape[0] == self.positions.shape[0] else [1] * len(self.slots)
        # Where no token at hand lies among the skipped places, they are simply left out.
        first = skip if min(self.confirmed or self.starts) >= skip else 0
        keys, values = (t[layer, self.window, first : self.width].transpose(1, 2) for t in self.store)
        mask = self._mask(counts, first, skip - first)
        query = pad(query, counts).transpose(1, 2).to(keys.dtype)
        out = F.scaled_dot_product_attention(query, keys, values, attn_mask=mask, enable_gqa=True)
        return side_by_side(out.transpose(1, 2), counts)

    def _mask(self, counts: Sequence[int], first: int = 0, skip: int = 0) -> Tensor | None:
        """Which of the places ``first`` .. ``width`` the queries may look at, [A, 1, longest, those] bool; None: all.
        ``skip``: as many of them, from place 0 on, that only the token there sees."""
        device, slots = self.positions.device, len(self.slots)
        if self.seen is not None:
            mask = torch.zeros(slots, 1, max(counts), self.width - first, dtype=torch.bool, device=device)
            for own, seen, length, end in zip(
                mask, self.seen.split(list(counts)), self.confirmed, self.ends, strict=True
            ):
                own[..., skip : length - first] = True
                own[0, : len(seen), length - first : end - first] = without(seen[:, : end - length], skip - length)
            return mask
        place = torch.arange(first, self.width, device=device)
        if skip:
            position = self.positions if len(self.positions) == sum(counts) else self.positions[self.asked]
            here = (place <= position[:, None]) & (place >= skip) | (place == position[:, None])
            return pad(here, counts)[:, None]
        if max(counts) > 1:
            return pad(place <= self.positions[:, None], counts)[:, None]
        if min(self.ends) == self.width:
            return None
        return (place < torch.tensor(self.ends, device=device)[:, None])[:, None, None]


def without(seen: Tensor, ancestors: int) -> Tensor:
    """``seen`` [n, room] bool of nodes without their first so many ancestors; every node, the last it sees, remains."""
    if ancestors <= 0:
        return seen
    rank = seen.cumsum(1)
    return seen & ((rank > ancestors) | (rank == rank[:, -1:]))


def pad(rows: Tensor, counts: Sequence[int]) -> Tensor:
    """[sum of counts, ...] -> [A, longest, ...], filled up with zeros."""
    if min(counts) == max(counts):
        return rows.unflatten(0, (len(counts), counts[0]))
    return pad_sequence(rows.split(list(counts)), batch_first=True)


class LayerSession(ABC):
    """A :class:`~models.drafter.DraftSession` of a method whose layers attend to the slots before them.

    The token that slot p reads at draft depth k stands at position p + k, so a drafted node's position is its depth
    behind the last confirmed position, whatever its number in the tree.
    """

    def __init__(
        self, like: Tensor, slots: int, hidden_size: int, kv_heads: int, head_dim: int, layers: int = 1
    ) -> None:
        """like: a tensor of the dtype and device to draft in."""
        self.lengths = [0] * slots
        self.tails = Tails(slots, like.device)
        self.keys = like.new_zeros(layers, slots, FIRST_POSITIONS, kv_heads, head_dim)
        self.values = torch.zeros_like(self.keys)
        self.states = like.new_zeros(slots, 1 + FIRST_NODES, hidden_size)  # of the last confirmed position, the nodes

    # --- what a method says ---

    @abstractmethod
    def feature(self, taps: Tensor, final: Tensor) -> Tensor:
        """What depth 0 reads of the target's states: taps [n, A*H], final [n, H] -> [n, H]."""

    @abstractmethod
    def next_feature(self, states: Tensor) -> Tensor:
        """What the next depth reads of the drafter's own states [n, H] -> [n, H]."""

    @abstractmethod
    def read(self, feature: Tensor, tokens: Tensor, rows: Rows) -> Tensor:
        """The layers: feature [N, H] and tokens [N] of ``rows`` -> states [M, H] of the asked ones."""

    @abstractmethod
    def logits(self, states: Tensor) -> Tensor:
        """[n, H] -> [n, Vd]."""

    # --- DraftSession ---

    def reset(self, slot: int, first_token: int) -> None:
        self.lengths[slot] = 0
        self.tails.drop(slot)

    def move(self, source: int, to: int) -> None:
        used = self.lengths[source] + self.tails.nodes[source]
        for stored in (self.keys, self.values):
            stored[:, to, :used] = stored[:, source, :used]
        self.states[to] = self.states[source]
        self.tails.move(source, to)
        self.lengths[to], self.lengths[source] = self.lengths[source], 0

    @torch.no_grad()
    def extend(
        self, slots: Sequence[int], counts: Sequence[int], taps: Tensor, final: Tensor, next_ids: Tensor
    ) -> Tensor:
        starts, device = [self.lengths[slot] for slot in slots], self.keys.device
        for slot, count in zip(slots, counts, strict=True):
            self.lengths[slot] += count
            self.tails.drop(slot)
        self._reserve(max(self.lengths[slot] for slot in slots))
        if len(slots) == 1:
            asked: slice | Tensor = slice(-1, None)
            positions = torch.arange(starts[0], starts[0] + counts[0], device=device)
        else:
            asked = torch.tensor(counts, device=device).cumsum(0) - 1
            places = [start + i for start, count in zip(starts, counts, strict=True) for i in range(count)]
            positions = torch.tensor(places, device=device)
        rows = Rows((self.keys, self.values), slots, counts, starts, positions, asked)
        states = self.read(self.feature(taps, final), next_ids.to(device), rows)
        self.states[list(slots), 0] = states.to(self.states.dtype)
        return self.logits(states)

    @torch.no_grad()
    def expand(self, slots: Sequence[int], parents: Tensor, tokens: Tensor, depth: int) -> Tensor:
        device, counted = self.keys.device, Counter(slots)
        used, counts = list(counted), list(counted.values())
        starts, lengths = [self.lengths[slot] + self.tails.nodes[slot] for slot in used], self.lengths
        table = [slots, self.tails.add(slots), [lengths[slot] - 1 + depth for slot in slots]]
        self._reserve(max(starts) + max(counts))
        where, own, positions = torch.tensor(table, device=device)
        parents = parents.to(device) + 1
        seen: Tensor | None = self.tails.link(where, own, parents)
        if len(used) == len(slots) and all(self.tails.nodes[slot] == depth for slot in used):
            seen = None  # nothing but chains: every node sees all before it
        confirmed = [lengths[slot] for slot in used]
        rows = Rows((self.keys, self.values), used, counts, starts, positions, slice(None), seen, confirmed)
        states = self.read(self.next_feature(self.states[where, parents]), tokens.to(device), rows)
        self.states[where, own] = states.to(self.states.dtype)
        return self.logits(states)

    def _reserve(self, needed: int) -> None:
        """Room for so many keys and values in each slot, and for the states of as many nodes as ``tails`` holds."""
        capacity = self.keys.shape[2]
        if needed > capacity:
            room = (0, 0, 0, 0, 0, max(needed, 2 * capacity) - capacity)
            self.keys, self.values = F.pad(self.keys, room), F.pad(self.values, room)
        missing = self.tails.seen.shape[1] - self.states.shape[1]
        if missing:
            self.states = F.pad(self.states, (0, 0, 0, missing))
