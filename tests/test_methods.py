"""What every method must keep: the index rule, drafting = training, and the way to disk and back."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from eval.drafts.drafting import DraftingProposer
from eval.drafts.dynamic_tree import DynamicTree
from eval.drafts.shapes import Shape, chain
from eval.verify.sampling import Sampling
from models.batch import Batch, Slots, slots_of
from models.blocks import States
from models.checkpoint import load_drafter, save_drafter
from models.drafter import Drafter
from models.errors import EyasError
from models.frozen import FrozenTarget
from models.vocab import DraftVocab
from tests.drafters import Reader, draft, drafted_logits, random_batch, random_frozen, random_levels, random_vocab
from tests.methods import METHODS, NO_ATTENTION, NO_TOKENS, ZERO_FIRST, depths_of

DEPTHS, VOCAB = 5, 40
each_method = pytest.mark.parametrize("name", METHODS)


def method(name: str, draft_vocab: int = 17, odd_head: bool = False) -> tuple[Drafter, FrozenTarget]:
    """odd_head: the target's logits have a bias, a scale and a soft cap."""
    frozen = random_frozen()
    if odd_head:
        frozen.head_bias = torch.randn(VOCAB, generator=torch.Generator().manual_seed(5))
        frozen.scale, frozen.softcap = 0.5, 3.0
    return METHODS[name](frozen, random_vocab(VOCAB, draft_vocab)).eval(), frozen


def supervised_batch(frozen: FrozenTarget, lengths: list[int], seed: int = 0) -> Batch:
    return random_batch(frozen, lengths, seed, supervised=torch.ones(sum(lengths), dtype=torch.bool))


def by_row(drafter: Drafter, batch: Batch, slots: Slots, frozen: FrozenTarget) -> dict[tuple[int, int], Tensor]:
    """States of (depth, token index), in the order of ``slots.rows()``."""
    k, s = slots.rows()
    states = drafter.unroll(batch, slots, frozen)
    assert states.shape == (len(k), frozen.hidden_size)
    return dict(zip(zip(k.tolist(), slots.index[s].tolist(), strict=True), states, strict=True))


# --- the index rule -------------------------------------------------------------------------------------------


@each_method
@torch.no_grad()
def test_rows_are_those_of_the_slots(name: str) -> None:
    """A state is the same whichever slots count beside it, and however deep they go."""
    drafter, frozen = method(name)
    depths = depths_of(drafter, DEPTHS)
    batch = supervised_batch(frozen, [12, 3, 19])
    whole = by_row(drafter, batch, slots_of(batch, depths), frozen)
    assert len(whole) == sum(max(0, n - 2 - k) for n in (12, 3, 19) for k in range(depths))
    some = replace(batch, supervised=torch.rand(34, generator=torch.Generator().manual_seed(0)) < 0.8)
    nothing = replace(batch, supervised=torch.zeros(34, dtype=torch.bool))
    chosen = {
        "some": (some, slots_of(some, depths)),
        "thinned": (batch, slots_of(batch, depths).thinned(0.5, seed=1)),
        "depth 0": (batch, slots_of(batch, 1)),
        "none": (nothing, slots_of(nothing, depths)),
    }
    for case, (given, slots) in chosen.items():
        found = by_row(drafter, given, slots, frozen)
        assert len(found) < len(whole) and bool(found) == (case != "none")
        for row, state in found.items():
            torch.testing.assert_close(state, whole[row], rtol=1e-4, atol=1e-5, msg=f"{case}: {row}")


@each_method
def test_a_state_hangs_on_what_the_index_rule_lets_it_read(name: str) -> None:
    """By gradients: h[p] and x[p+1] .. x[p+1+k], with attention what earlier slots of the document read; no more."""
    drafter, frozen = method(name)
    lengths, generator = [6, 19, 8], torch.Generator().manual_seed(0)
    start, stop = 6, 25
    batch = supervised_batch(frozen, lengths)
    ids = torch.randperm(VOCAB, generator=generator)[: sum(lengths)]  # a token of its own at every position
    table = frozen.embedding.clone().requires_grad_()
    taps, final = batch.taps.requires_grad_(), batch.final.requires_grad_()
    states = by_row(
        drafter,
        replace(batch, input_ids=ids),
        slots_of(batch, depths_of(drafter, DEPTHS)),
        replace(frozen, embedding=table),
    )
    checked = 0
    for (k, p), state in states.items():
        if p not in (start, start + 7, stop - 4, stop - 3):
            continue
        weights = torch.randn(state.shape, generator=generator)
        grads = torch.autograd.grad(state @ weights, [table, taps, final], retain_graph=True, allow_unused=True)
        by_token, *by_feature = [None if g is None else g.abs().sum(-1) > 0 for g in grads]
        tokens = torch.zeros_like(batch.supervised) if by_token is None else by_token[ids]
        features = sum((f for f in by_feature if f is not None), torch.zeros_like(batch.supervised))
        earlier = range(start, p if name not in NO_ATTENTION else start)
        read = [] if name in NO_TOKENS else [*(q + 1 for q in earlier), *range(p + 1, p + 2 + k)]
        assert features.nonzero()[:, 0].tolist() == [*earlier, p], f"features read by slot {p} at depth {k}"
        if name in ZERO_FIRST:
            read = [t for t in read if t > start + 1 and p > start]
        assert tokens.nonzero()[:, 0].tolist() == sorted(set(read)), f"tokens read by slot {p} at depth {k}"
        checked += 1
    assert checked >= 4


# --- drafting = training --------------------------------------------------------------------------------------


@pytest.mark.parametrize("odd_head", [False, True])
@each_method
@torch.no_grad()
def test_chains_draft_what_training_unrolls(name: str, odd_head: bool) -> None:
    """The logits of all slots of a batch at once = those of a session that confirms its documents in uneven portions
    and drafts, after each, the tokens that follow."""
    drafter, frozen = method(name, odd_head=odd_head)
    depths, lengths = depths_of(drafter, DEPTHS), [11, 26]
    batch = supervised_batch(frozen, lengths)
    slots = slots_of(batch, depths)
    logits = drafter.head(frozen).logits(drafter.unroll(batch, slots, frozen), slots.counts)
    k, s = slots.rows()
    unrolled = dict(zip(zip(k.tolist(), slots.index[s].tolist(), strict=True), logits, strict=True))
    session, compared = drafter.session(frozen, 2), 0
    for slot, (start, stop) in enumerate(((0, 11), (11, 37))):
        session.reset(slot, int(batch.input_ids[start]))
        at = start
        for portion in (4, 1, 3, 1, 1, 6, 2):
            if at + portion > stop - 2:
                break
            part, ahead = slice(at, at + portion), slice(at + 1, at + portion + 1)
            out = session.extend([slot], [portion], batch.taps[part], batch.final[part], batch.input_ids[ahead])[0]
            at += portion
            for depth in range(depths):
                if depth:
                    token = batch.input_ids[at + depth : at + depth + 1]
                    out = session.expand([slot], torch.tensor([depth - 2]), token, depth)[0]
                if (depth, at - 1) not in unrolled:
                    break
                torch.testing.assert_close(out, unrolled[depth, at - 1], rtol=1e-4, atol=1e-4)
                compared += 1
    assert compared > 9 * depths


def check(drafter: Drafter, reader: Reader, roots: dict[int, Tensor], widest: int, rng: random.Random) -> int:
    """Draft trees in the slots and compare every node with what training unrolls for its path."""
    levels = random_levels(rng, sorted(roots), widest, depths_of(drafter, DEPTHS) - 1)
    drafts = draft(reader.session, levels)
    for slot, root in roots.items():
        nodes = {(): root} | drafts.get(slot, {})
        inner = {path[:-1] for path in nodes if path}
        for leaf in nodes.keys() - inner:
            want = drafted_logits(drafter, reader.frozen, reader.texts[slot], reader.read[slot] - 1, leaf)
            for depth, row in enumerate(want):
                torch.testing.assert_close(nodes[leaf[:depth]], row, rtol=1e-4, atol=1e-4)
    return sum(len(nodes) for nodes in drafts.values())


@pytest.mark.parametrize("widest", [1, 4])
@each_method
def test_sessions_draft_what_training_unrolls(name: str, widest: int) -> None:
    """Chains and trees in several slots of different lengths, some of which rest, are moved or begun anew."""
    drafter, frozen = method(name)
    reader, rng, drafted = Reader(drafter.session(frozen, 3), frozen), random.Random(widest), 0
    for slot, length in enumerate((30, 45, 22)):
        reader.begin(slot, length, seed=slot)
    reader.extend({1: 21})
    for step in range(9):
        if step == 5:  # a sequence ends, the last one takes its slot, and a new one begins in the slot left
            reader.move(2, 0)
        if step == 7:
            reader.begin(2, 12, seed=7)
        ready = sorted(reader.texts)
        slots = rng.sample(ready, rng.randint(1, len(ready)))
        out = reader.extend({slot: rng.randint(1, 3) if step else 1 for slot in slots})
        assert out.shape == (len(slots), len(drafter.vocab))
        drafted += check(drafter, reader, dict(zip(sorted(slots), out, strict=True)), widest, rng)
    assert drafted > 5 * (depths_of(drafter, DEPTHS) - 1)


@each_method
def test_a_moved_slot_keeps_its_drafts(name: str) -> None:
    drafter, frozen = method(name)
    readers, rows = [Reader(drafter.session(frozen, 2), frozen) for _ in range(2)], []
    for slot, reader in enumerate(readers):
        reader.begin(1, 12, seed=3)
        reader.extend({1: 8})
        reader.session.expand([1, 1], torch.tensor([-1, -1]), torch.tensor([4, 5]), 1)
        if slot == 0:
            reader.move(1, 0)
        rows.append(reader.session.expand([slot] * 2, torch.tensor([1, 0]), torch.tensor([6, 7]), 2))
    assert torch.equal(*rows)


# --- the draft vocabulary -------------------------------------------------------------------------------------


@each_method
def test_a_restricted_vocabulary(name: str) -> None:
    """17 of 40 tokens: so many rows of the head and logits of a session, and no other token is ever drafted."""
    drafter, frozen = method(name)
    vocab = random_vocab(VOCAB, 17)
    assert torch.equal(drafter.vocab.ids, vocab.ids) and drafter.vocab.size == VOCAB
    assert drafter.head(frozen).weight.shape[-2:] == (17, frozen.hidden_size)
    batch = supervised_batch(frozen, [9])

    def drafted(shape: Shape) -> list[int]:
        fitted, _ = shape.trimmed(drafter.max_depth, 17)
        proposer = DraftingProposer(drafter.session(frozen), drafter.vocab, fitted, Sampling(0.0))
        proposer.begin(0, batch.input_ids[:-1].tolist(), lambda: 0.5)
        proposer.commit(0, States(batch.taps[:-1], batch.final[:-1]), batch.input_ids[1:].tolist())
        (tree,) = proposer.propose([9])
        return tree.tokens.tolist()

    assert set(drafted(chain(4))) <= set(vocab.ids.tolist())
    assert sorted(drafted(DynamicTree(1, 17, 17))) == vocab.ids.tolist()  # a first level as wide as the vocabulary


# --- disk -----------------------------------------------------------------------------------------------------


def same_states(one: Drafter, two: Drafter, frozen: FrozenTarget) -> None:
    """Bit-equal states, and bit-equal logits of the draft tokens of ``one``."""
    batch = random_batch(frozen, [9, 21])
    slots = slots_of(batch, depths_of(one, DEPTHS))
    assert len(slots) > 8
    states, again = (drafter.unroll(batch, slots, frozen) for drafter in (one, two))
    assert torch.equal(states, again)
    place = torch.full((one.vocab.size,), -1).index_copy(0, two.vocab.ids, torch.arange(len(two.vocab)))
    columns = place[one.vocab.ids]
    assert bool((columns >= 0).all())
    logits = one.head(frozen).logits(states, slots.counts)
    torch.testing.assert_close(two.head(frozen).logits(states, slots.counts)[:, columns], logits, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("draft_vocab", [17, VOCAB])
@each_method
@torch.no_grad()
def test_a_saved_drafter_loads_as_it_was(name: str, draft_vocab: int, tmp_path: Path) -> None:
    drafter, frozen = method(name, draft_vocab)
    save_drafter(drafter, tmp_path)
    loaded = load_drafter(tmp_path)
    assert type(loaded) is type(drafter) and not loaded.training
    assert loaded.tap_ids == drafter.tap_ids and loaded.max_depth == drafter.max_depth
    assert torch.equal(loaded.vocab.ids, drafter.vocab.ids) and loaded.vocab.size == VOCAB
    assert loaded.architecture() == drafter.architecture()
    old, new = drafter.state_dict(), loaded.state_dict()
    assert old.keys() == new.keys() and all(torch.equal(old[key], new[key]) for key in old)
    same_states(drafter, loaded, frozen)


@each_method
def test_the_architecture_is_plain_json(name: str) -> None:
    drafter, _ = method(name)
    text = json.dumps(drafter.architecture())
    again = type(drafter).from_architecture(json.loads(text), DraftVocab.full(VOCAB))
    assert json.dumps(again.architecture()) == text
    assert again.state_dict().keys() == drafter.state_dict().keys()


@pytest.mark.parametrize("draft_vocab", [17, VOCAB])
@each_method
@torch.no_grad()
def test_what_is_served_reads_back_as_it_was(name: str, draft_vocab: int) -> None:
    """In every layout that takes it; where engines draft with the target's head, over the whole vocabulary."""
    drafter, frozen = method(name, draft_vocab)
    written = 0
    for layout in drafter.layouts:
        try:
            served = drafter.serving(frozen, layout)
        except EyasError as error:
            assert str(error).startswith(f"export.layout={layout}: "), "a reason why it can't be written so"
            continue
        config = json.loads(json.dumps(served.config))
        again = type(drafter).from_serving(served.tensors, config, frozen.config).eval()
        assert all(parameter.dtype == torch.float32 for parameter in again.parameters())
        same_states(drafter, again, frozen)
        written += 1
    assert written or not drafter.layouts
    if not drafter.layouts:
        with pytest.raises(EyasError):
            drafter.serving(frozen)
