"""Ranks of the true tokens: against float64 by the slow way, and what follows from them by hand."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from eval.costs.ranks import (
    OUTSIDE,
    Ranks,
    drafter_ranks,
    growth_order,
    model_ranks,
    path_counts,
    ranks_of,
    walk,
)
from eval.costs.tree_search import grow
from eval.numbers.simulated import Text, text_batch
from models.batch import slots_of
from models.drafter import Drafter
from models.simulate import simulated_tau
from models.target import Target
from models.vocab import DraftVocab
from tests.drafters import random_drafter, random_vocab
from tests.tiny import tiny_target

DEPTHS = 3
LENGTHS = ((4, 9), (1, 1), (7, 3), (2, 30))  # prompt, output; the second is too short for any slot


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    return Target.load(str(tiny_target(tmp_path_factory.mktemp("target"), "llama", layers=6)), taps=(2, 3, 5))


@pytest.fixture(scope="module")
def texts(target: Target) -> list[Text]:
    generator = torch.Generator().manual_seed(0)

    def ids(size: int) -> list[int]:
        return torch.randint(3, target.vocab_size, (size,), generator=generator).tolist()

    return [Text(ids(prompt), ids(output)) for prompt, output in LENGTHS]


def make_drafter(target: Target, draft: int) -> Drafter:
    frozen = target.frozen()
    vocab = random_vocab(target.vocab_size, draft) if draft < target.vocab_size else DraftVocab.full(draft)
    return random_drafter(frozen, vocab).eval()


@pytest.mark.parametrize("draft", [150, 288])
def test_drafter_ranks_equal_float64_by_sorting(target: Target, texts: list[Text], draft: int) -> None:
    """Each text alone, in float64, every row sorted; with few logits at a time and with many."""
    drafter, frozen = make_drafter(target, draft), target.frozen()
    found = drafter_ranks(target, drafter, frozen, texts, DEPTHS, at_once=draft * 7)
    expected = [slow(target, drafter, text) for text in texts]
    assert np.array_equal(found.rank, np.concatenate([rank for rank, _ in expected], 1))
    assert np.array_equal(found.valid, np.concatenate([valid for _, valid in expected], 1))
    assert (found.rank[~found.valid] == OUTSIDE).all()
    assert ((found.rank[found.valid] == OUTSIDE).mean() > 0.3) == (draft < target.vocab_size)
    once = drafter_ranks(target, drafter, frozen, texts, DEPTHS)
    assert np.array_equal(once.rank, found.rank)


def slow(target: Target, drafter: Drafter, text: Text) -> tuple[np.ndarray, np.ndarray]:
    batch, x = text_batch(target, text), [*text.prompt, *text.output]
    slots = slots_of(batch, DEPTHS)
    first = len(text.prompt) - 1  # the first slot whose x[p+1] is the target's own
    assert slots.index.tolist() == list(range(first, len(x) - 2))
    rank = np.full((DEPTHS, len(slots)), OUTSIDE)
    valid = np.zeros(rank.shape, dtype=np.bool_)
    if not len(slots):
        return rank, valid
    states = drafter.unroll(batch, slots, target.frozen()).double()
    head, ids = drafter.head(target.frozen()).weight.double(), drafter.vocab.ids.tolist()
    rows = iter(states)
    for k in range(DEPTHS):
        for s in range(len(slots)):
            if first + s + 2 + k >= len(x):
                continue
            valid[k, s] = True
            logits = (head @ next(rows)).tolist()
            token = x[first + s + 2 + k]
            order = sorted(range(len(ids)), key=lambda i: (-logits[i], i))
            rank[k, s] = order.index(ids.index(token)) if token in ids else OUTSIDE
    assert next(rows, None) is None
    return rank, valid


def test_an_independent_model_reads_the_whole_text(
    target: Target, texts: list[Text], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Rank of x[p+2+k] after x[.. p+1+k], each prefix read anew; the model has 20 vocabulary rows more."""
    folder: Path = tiny_target(
        tmp_path_factory.mktemp("model"), "qwen3", layers=2, vocab=target.vocab_size + 20, seed=3
    )
    model = Target.load(str(folder))
    found = model_ranks(model, texts, DEPTHS, target.vocab_size, at_once=2000)
    columns = []
    for text in texts:
        x = [*text.prompt, *text.output]
        for p in range(len(text.prompt) - 1, len(x) - 2):
            column = [OUTSIDE] * DEPTHS
            for k in range(min(DEPTHS, len(x) - p - 2)):
                prefix = torch.tensor([x[: p + 2 + k]])
                logits = model.model(prefix).logits[0, -1, : target.vocab_size].double()
                column[k] = int((logits > logits[x[p + 2 + k]]).sum())
            columns.append(column)
    assert found.rank.T.tolist() == columns
    assert (found.valid == (found.rank >= 0)).all()


def test_a_text_may_hold_ids_that_the_draft_model_lacks(
    target: Target, texts: list[Text], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The model has 20 rows fewer. Such ids have no rank, and what follows them is what drafting makes of it: the model
    reads its last id instead."""
    size = target.vocab_size - 20
    model = Target.load(str(tiny_target(tmp_path_factory.mktemp("smaller"), "llama", layers=2, vocab=size, seed=4)))
    prompt, output = texts[3]
    text = Text([*prompt, size + 3], [*output[:5], size, *output[5:9], size + 19, output[9]])
    found = model_ranks(model, [text], DEPTHS, target.vocab_size)
    x = [*text.prompt, *text.output]
    read = torch.tensor([min(token, size - 1) for token in x])
    columns = []
    for p in range(len(text.prompt) - 1, len(x) - 2):
        column = [OUTSIDE] * DEPTHS
        for k in range(min(DEPTHS, len(x) - p - 2)):
            logits = model.model(read[None, : p + 2 + k]).logits[0, -1].double()
            true = x[p + 2 + k]
            column[k] = int((logits > logits[true]).sum()) if true < size else OUTSIDE
        columns.append(column)
    assert found.rank.T.tolist() == columns and (found.rank[0] == OUTSIDE).sum() == 2


def test_texts_stand_apart(target: Target, texts: list[Text]) -> None:
    found = drafter_ranks(target, make_drafter(target, 288), target.frozen(), texts, DEPTHS)
    starts = np.flatnonzero(np.diff(found.index) != 1) + 1
    assert starts.tolist() == [8, 8 + 2]  # 9 tokens of output have 8 slots, 3 have 2, 30 have 29
    assert len(found) == 8 + 2 + 29 and (np.diff(found.index) > 0).all()
    none = drafter_ranks(target, make_drafter(target, 288), target.frozen(), texts[1:2], DEPTHS)
    assert (len(none), none.depths, path_counts(none)) == (0, DEPTHS, {(): 0})


def test_equal_logits_go_by_id() -> None:
    states, weight = torch.ones(5, 1), torch.tensor([[2.0], [3.0], [2.0], [2.0]])
    assert ranks_of(states, weight, torch.tensor([0, 1, 2, 3, -1]), 8).tolist() == [1, 0, 2, 3, OUTSIDE]
    bias = torch.tensor([0.0, -2.0, 0.5, 0.0])
    assert ranks_of(states, weight, torch.tensor([0, 1, 2, 3, -1]), 8, bias).tolist() == [1, 3, 0, 2, OUTSIDE]


def by_hand() -> Ranks:
    """Two texts: slots 3, 4, 5 and 9, 10. The last slot of each is valid at depth 0 only."""
    rank = np.array([[0, 1, 0, 0, 2], [0, 0, -1, -1, -1]])
    valid = np.array([[True] * 5, [True, True, False, True, False]])  # slot 9: valid, but outside the draft vocabulary
    return Ranks(np.array([3, 4, 5, 9, 10]), valid, rank)


def test_counts_by_hand() -> None:
    ranks = by_hand()
    assert path_counts(ranks) == {(): 5, (0,): 3, (1,): 1, (2,): 1, (0, 0): 1, (1, 0): 1}
    assert path_counts(ranks.complete()) == {(): 3, (0,): 2, (1,): 1, (0, 0): 1, (1, 0): 1}


def test_walk_by_hand() -> None:
    """Tree (0,), (0, 0): slot 3 accepts both and ends its text (3 + 1 + 2 = 6); text two: 9 accepts 1 and ends it."""
    ranks = by_hand()
    order = growth_order(ranks, [(0,), (0, 0)])
    assert order.tolist() == [[0, 2, 0, 0, 2], [1, 2, 2, 2, 2]]
    assert (order < 2).sum(0).tolist() == [2, 0, 1, 1, 0]
    assert walk((order < 2).sum(0), ranks.index) == (3, 2)
    assert walk((order < 1).sum(0), ranks.index) == (1 + 1 + 1, 3)  # slot 3 accepts 1, then 5; then 9
    assert walk(np.zeros(5, dtype=np.int64), ranks.index) == (0, 5)
    assert walk(np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)) == (0, 0)


def test_walk_is_the_simulated_walk_of_a_chain() -> None:
    """models.simulate walks chains by recursion over probabilities; here they are 0 and 1."""
    rng = np.random.default_rng(1)
    index = np.concatenate([np.arange(5, 105), np.arange(110, 111), np.arange(200, 260)])
    rank = rng.integers(0, 2, (4, len(index)))
    valid = np.ones(rank.shape, dtype=np.bool_)
    for end in (100, 101, 161):
        for k in range(1, 4):
            valid[k, max(end - k, {100: 0, 101: 100, 161: 101}[end]) : end] = False
    ranks = Ranks(index, valid, np.where(valid, rank, OUTSIDE))
    accept = torch.tensor((ranks.rank == 0).astype(np.float64))
    expected = simulated_tau(accept, torch.tensor(index), torch.tensor(valid))
    order = growth_order(ranks, [(0,), (0, 0), (0, 0, 0), (0, 0, 0, 0)])
    assert walk((order < 4).sum(0), index) == expected


def test_growth_order_counts_what_growth_expects() -> None:
    rng = np.random.default_rng(2)
    ranks = Ranks(np.arange(300), np.ones((3, 300), dtype=np.bool_), rng.integers(-1, 3, (3, 300)))
    grown = grow(path_counts(ranks), 300, 20, 3)
    order = growth_order(ranks, [node.path for node in grown])
    for size in (1, 5, 20):
        assert (order < size).sum() / 300 == pytest.approx(sum(node.gain for node in grown[:size]))
