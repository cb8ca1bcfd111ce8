"""Drafting sessions of several sequences at once: the index rule, whatever is drafted, rejected, moved, begun anew."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from models.draft_session import LayerSession, Rows
from models.eagle3 import Eagle3Drafter
from tests.drafters import Reader, draft, drafted_logits, random_drafter, random_frozen, random_levels, random_vocab

VOCAB = 40


def check(drafter: Eagle3Drafter, reader: Reader, roots: dict[int, Tensor], widest: int, rng: random.Random) -> int:
    """Draft trees in the slots and compare every node with what training unrolls for its path."""
    drafts = draft(reader.session, random_levels(rng, sorted(roots), widest, 4))
    for slot, root in roots.items():
        nodes = {(): root} | drafts.get(slot, {})
        for path in nodes:
            want = drafted_logits(drafter, reader.frozen, reader.texts[slot], reader.read[slot] - 1, path)
            for depth, row in enumerate(want):
                torch.testing.assert_close(nodes[path[:depth]], row, rtol=1e-4, atol=1e-4)
    return sum(len(nodes) for nodes in drafts.values())


@pytest.mark.parametrize("widest", [1, 8])  # 8: more nodes than there is room for at first
@pytest.mark.parametrize("flags", [{}, {"fc_norm": True, "norm_output": True}])
def test_a_session_drafts_what_training_unrolls(widest: int, flags: dict[str, Any]) -> None:
    frozen = random_frozen()
    drafter, rng = random_drafter(frozen, random_vocab(VOCAB, 17), **flags), random.Random(widest)
    reader, compared = Reader(drafter.session(frozen, 3), frozen), 0
    for slot, length in enumerate((60, 330, 90)):
        reader.begin(slot, length, seed=slot)
    reader.extend({1: 251})  # its buffers, of 256 places at first, grow while drafting
    for step in range(14):
        if step == 9:  # a sequence ends, the last one takes its slot, and a new one begins in the slot left
            reader.move(2, 0)
        if step == 11:
            reader.begin(2, 50, seed=7)
        ready = sorted(reader.texts)
        slots = rng.sample(ready, rng.randint(1, len(ready)))
        out = reader.extend({slot: rng.randint(1, 4) for slot in slots})
        compared += check(drafter, reader, dict(zip(sorted(slots), out, strict=True)), widest, rng)
    assert reader.read[1] > 257 and compared > 60


def test_slots_draft_as_if_alone() -> None:
    frozen = random_frozen()
    drafter, lengths = random_drafter(frozen, random_vocab(VOCAB, 17)), (9, 270, 41, 5)
    together = Reader(drafter.session(frozen, 4), frozen)
    alone = [Reader(drafter.session(frozen), frozen) for _ in lengths]
    for slot, length in enumerate(lengths):
        together.begin(slot, length + 8, seed=slot)
        alone[slot].begin(0, length + 8, seed=slot)
    for round_, counts in enumerate(({0: 9, 1: 270, 2: 41, 3: 5}, {0: 1, 2: 3, 3: 2}, {0: 2, 1: 1, 2: 1, 3: 1})):
        out = together.extend(counts)
        levels = random_levels(random.Random(round_), sorted(counts), 3, 4)
        drafts = draft(together.session, levels)
        for row, slot in zip(out, sorted(counts), strict=True):
            torch.testing.assert_close(alone[slot].extend({0: counts[slot]})[0], row, rtol=1e-5, atol=1e-5)
            own = [[(0, parent, token) for s, parent, token in level if s == slot] for level in levels]
            expected = draft(alone[slot].session, [level for level in own if level]).get(0, {})
            assert expected.keys() == drafts.get(slot, {}).keys()
            for path, logits in expected.items():
                torch.testing.assert_close(logits, drafts[slot][path], rtol=1e-5, atol=1e-5)


def test_a_moved_slot_keeps_its_drafts() -> None:
    frozen = random_frozen()
    drafter = random_drafter(frozen, random_vocab(VOCAB, 17))
    readers = [Reader(drafter.session(frozen, 2), frozen) for _ in range(2)]
    rows = []
    for slot, reader in enumerate(readers):
        reader.begin(1, 12, seed=3)
        reader.extend({1: 10})
        reader.session.expand([1, 1], torch.tensor([-1, -1]), torch.tensor([4, 5]), 1)
        if slot == 0:
            reader.move(1, 0)
        rows.append(reader.session.expand([slot] * 2, torch.tensor([1, 0]), torch.tensor([6, 7]), 2))
    assert torch.equal(*rows)


def test_dtype_of_the_drafter() -> None:
    frozen = random_frozen().to("cpu", torch.bfloat16)
    drafter = random_drafter(frozen, random_vocab(VOCAB, 17)).to(torch.bfloat16)
    reader = Reader(drafter.session(frozen, 2), frozen)
    reader.begin(0, 8, seed=0)
    reader.begin(1, 8, seed=1)
    assert reader.extend({0: 3, 1: 5}).dtype == torch.bfloat16
    out = reader.session.expand([0, 1, 1], torch.tensor([-1, -1, -1]), torch.tensor([1, 2, 3]), 1)
    assert out.dtype == torch.bfloat16 and bool(out.isfinite().all())


# --- the base, with more layers than EAGLE-3 has ---


class TwoLayers(LayerSession):
    """Two attention layers of 3 query heads on 1 key head; every number random, positions added to the input."""

    def __init__(self, slots: int) -> None:
        super().__init__(torch.zeros((), dtype=torch.float64), slots, 6, kv_heads=1, head_dim=2, layers=2)
        generator = torch.Generator().manual_seed(0)
        self.weights = torch.randn(2, 6, 10, generator=generator, dtype=torch.float64)
        self.table = torch.randn(VOCAB, 6, generator=generator, dtype=torch.float64)

    def feature(self, taps: Tensor, final: Tensor) -> Tensor:
        return final

    def next_feature(self, states: Tensor) -> Tensor:
        return 0.5 * states

    def input(self, feature: Tensor, tokens: Tensor, positions: Tensor) -> Tensor:
        return feature + self.table[tokens] + (positions[:, None] * torch.arange(1, 7)).sin()

    def read(self, feature: Tensor, tokens: Tensor, rows: Rows) -> Tensor:
        x = self.input(feature, tokens, rows.positions)
        for layer in range(2):
            query, key, value = (x @ self.weights[layer]).split([6, 2, 2], -1)
            rows.write(key[:, None], value[:, None], layer)
            if layer == 1:  # only the first needs every token's state
                query, x = query[rows.asked], x[rows.asked]
            x = x + rows.attend(query.unflatten(-1, (3, 2)), layer).flatten(1)
        return x

    def logits(self, states: Tensor) -> Tensor:
        return states

    def dense(self, x: Tensor) -> Tensor:
        """The state of the last of the inputs [n, 6], each of which sees itself and all before it."""
        for layer in range(2):
            query, key, value = (x @ self.weights[layer]).split([6, 2, 2], -1)
            mixed = []
            for head in query.split(2, -1):
                scores = (head @ key.T / 2**0.5).masked_fill(torch.ones(len(x), len(x)).triu(1).bool(), float("-inf"))
                mixed.append(scores.softmax(-1) @ value)
            x = x + torch.cat(mixed, -1)
        return x[-1]

    def expected(self, final: Tensor, ids: Tensor, path: Sequence[int]) -> Tensor:
        """After the confirmed final [n, 6] with the tokens ids [n] that follow them, then the drafted ``path``."""
        inputs = self.input(final, ids, torch.arange(len(ids)))
        for depth, token in enumerate(path):
            feature = self.next_feature(self.dense(inputs))[None]
            new = self.input(feature, torch.tensor([token]), torch.tensor([len(ids) + depth]))
            inputs = torch.cat([inputs, new])
        return self.dense(inputs)


@pytest.mark.parametrize("widest", [1, 3])
def test_several_layers(widest: int) -> None:
    generator, rng = torch.Generator().manual_seed(5), random.Random(5)
    session, lengths = TwoLayers(3), [0, 0, 0]
    final = torch.randn(3, 20, 6, generator=generator, dtype=torch.float64)
    ids = torch.randint(VOCAB, (3, 20), generator=generator)
    for counts in ({0: 4}, {1: 2, 2: 5}, {0: 3, 2: 1}, {0: 1, 1: 1, 2: 1}, {1: 6}):
        parts = [(s, lengths[s], lengths[s] + n) for s, n in counts.items()]
        rows, following = (torch.cat([t[s, a:b] for s, a, b in parts]) for t in (final, ids))
        roots = session.extend(list(counts), list(counts.values()), rows, rows, following)
        for slot, _, stop in parts:
            lengths[slot] = stop
        drafts = draft(session, random_levels(rng, list(counts), widest, 3))
        for root, (slot, _, n) in zip(roots, parts, strict=True):
            for path, state in ({(): root} | drafts.get(slot, {})).items():
                torch.testing.assert_close(state, session.expected(final[slot, :n], ids[slot, :n], path))
