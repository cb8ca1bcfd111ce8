"""Drafting with a session: what it is given, how drafts are drawn, and that slots don't touch each other.

The chi-square tests have fixed seeds; for fresh ones all of them together would fail with a chance of FALSE_ALARM.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from scipy.stats import chi2
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from transformers import LogitsProcessor

from eval.drafts.drafting import DraftingProposer
from eval.drafts.draws import Draws, Start
from eval.drafts.proposers import LimitedProposer, Proposer
from eval.drafts.shapes import AdaptiveDepth, DynamicTree, Shape, StaticTree, chain, classic
from eval.drafts.tree import ROOT, DraftTree, Drawn
from eval.verify.sampling import Sampling, draw
from models.errors import EyasError
from models.vocab import DraftVocab
from tests.table_session import TableSession, Text, random_row, states

FALSE_ALARM, CHI_SQUARES = 1e-3, 4
SPREAD = 0.5  # of the draft logits: every node has several likely children
VOCAB = DraftVocab(torch.tensor([0, 2, 3, 5, 8, 9]), 11)
BUSHY = StaticTree.of_paths([[0], [1], [2], [0, 0], [0, 1], [1, 0], [2, 0], [2, 2], [0, 1, 0], [0, 1, 1], [2, 2, 0]])
SHAPES: dict[str, Shape] = {"chain": chain(4), "static": BUSHY, "dynamic": DynamicTree(4, 3, 9)}
SAMPLINGS = {
    "greedy": Sampling(0.0),
    "plain": Sampling(1.0),
    "warped": Sampling(0.7, top_k=5, top_p=0.9),
    "penalised": Sampling(1.3, min_p=0.05, repetition_penalty=1.7),
}
TEXTS: list[Text] = [(1, 4, 4), (6, 6, 6, 0, 10), (7, 5)]


def proposer(shape: Shape, sampling: Sampling = SAMPLINGS["greedy"], seed: int = 0, **options: Any) -> DraftingProposer:
    return DraftingProposer(TableSession(random_row(len(VOCAB), seed, SPREAD)), VOCAB, shape, sampling, **options)


def tell(one: Proposer, slot: int, text: Text, uniform: Callable[[], float] | None = None) -> None:
    one.begin(slot, text[:-1], uniform or random.Random(0).random)
    one.commit(slot, states(0, len(text) - 1), text[1:])


def calls(one: DraftingProposer) -> list[Any]:
    assert isinstance(one.session, TableSession)
    return one.session.calls


# --- what the session is given --------------------------------------------------------------------------------


def test_it_is_a_proposer() -> None:
    one: Proposer = proposer(chain(2))
    assert one.propose([]) == []


def test_commits_are_read_when_drafts_are_wanted() -> None:
    one = proposer(chain(2))
    for slot, text in enumerate(TEXTS):
        tell(one, slot, text)
    assert calls(one) == [("extend", [0], [2]), ("extend", [1], [4]), ("extend", [2], [1])]  # prompts at once
    calls(one).clear()
    trees = one.propose([5, 0, 1])
    assert [len(tree) for tree in trees] == [2, 0, 1]
    assert [call[1] for call in calls(one)] == [[0]]
    calls(one).clear()
    one.commit(0, states(2, 3), [8, 9, 0])
    one.commit(1, states(4, 1), [3])
    one.commit(2, states(1, 1), [2])
    one.commit(1, states(5, 2), [3, 0])  # two passes without drafts
    one.propose([0, 2, 2])
    assert calls(one)[0] == ("extend", [1, 2], [3, 1])  # the first slot's text stays where it is
    assert [call[1] for call in calls(one)[1:]] == [[1, 2]]
    calls(one).clear()
    one.move(2, 0)  # the sequence of slot 0 has ended
    one.commit(0, states(2, 1), [5])
    one.commit(1, states(7, 1), [5])
    one.propose([2, 2])
    assert calls(one)[0] == ("extend", [0, 1], [1, 1])
    session: Any = one.session
    assert session.texts == {0: (7, 5, 2, 5), 1: (*TEXTS[1], 3, 3, 0, 5)}


def test_a_new_text_forgets_the_old_one() -> None:
    one = proposer(BUSHY)
    tell(one, 0, TEXTS[0])
    one.propose([3])
    one.commit(0, states(2, 1), [8])
    tell(one, 0, TEXTS[1])
    again, fresh = one.propose([3])[0], proposer(BUSHY)
    tell(fresh, 0, TEXTS[1])
    assert again.tokens.tolist() == fresh.propose([3])[0].tokens.tolist()


def test_speculation_is_off_above_a_batch_size() -> None:
    inner = proposer(chain(2))
    one = LimitedProposer(inner, off_above=2)
    for slot, text in enumerate(TEXTS):
        tell(one, slot, text)
    calls(inner).clear()
    assert [len(tree) for tree in one.propose([9, 9, 9])] == [0, 0, 0]
    assert calls(inner) == []
    assert [len(tree) for tree in one.propose([9, 9])] == [2, 2]


def test_what_waits_to_be_read_is_bounded() -> None:
    """While nothing is drafted, 64 positions are remembered at most; what is drafted then is what a new text gives."""
    one, fresh = proposer(chain(2)), proposer(chain(2))
    tell(one, 0, TEXTS[0])
    calls(one).clear()
    for at in range(150):
        one.commit(0, states(2 + at, 1), [at % 11])
        assert len(one.texts[0].states) < 64
    assert calls(one) == [("extend", [0], [64])] * 2
    tell(fresh, 0, (*TEXTS[0], *(at % 11 for at in range(150))))
    assert one.propose([2])[0].tokens.tolist() == fresh.propose([2])[0].tokens.tolist()


def test_levels_follow_what_was_accepted() -> None:
    """Averages with a decay of .9: from 4, after three passes that accept nothing 2.916, one that accepts 1 2.7244."""
    one = LimitedProposer(proposer(chain(4)), AdaptiveDepth(4))
    tell(one, 0, TEXTS[0])
    levels, at = [], 2
    for accepted in (0, 0, 0, 1, 0, 0, 0, 0, 0):  # 3.6, 3.24, 2.916, 2.7244, 2.45196, 2.207, 1.986, 1.787, 1.609
        levels.append(len(one.propose([9])[0]))
        one.commit(0, states(at, accepted + 1), [0] * (accepted + 1))
        at += accepted + 1
    assert levels == [4, 4, 4, 4, 4, 3, 3, 3, 3]
    for _ in range(5):  # passes without drafts teach nothing
        assert len(one.propose([0])[0]) == 0
        one.commit(0, states(at, 1), [0])
        at += 1
    assert len(one.propose([9])[0]) == 3
    one.commit(0, states(at, 1), [0])  # 1.448
    assert len(one.propose([9])[0]) == 2


# --- several slots --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("draws", ["without_replacement", "with_replacement", "top"])
@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("shape", SHAPES)
def test_slots_draft_what_they_would_alone(shape: str, sampling: str, draws: str) -> None:
    limits = [2, 9, 3]
    together = proposer(SHAPES[shape], SAMPLINGS[sampling], draws=draws)
    for slot, text in enumerate(TEXTS):
        tell(together, slot, text, random.Random(slot).random)
    for slot, tree in enumerate(together.propose(limits)):
        one = proposer(SHAPES[shape], SAMPLINGS[sampling], draws=draws)
        tell(one, 0, TEXTS[slot], random.Random(slot).random)
        (alone,) = one.propose([limits[slot]])
        assert tree.tokens.tolist() == alone.tokens.tolist()
        assert (tree.parents, tree.drawn, tree.q_row) == (alone.parents, alone.drawn, alone.q_row)
        assert tree.depth <= limits[slot]
        torch.testing.assert_close(tree.q, alone.q)
        assert set(tree.drawn) == {together.drawn}


def test_how_drafts_come_about() -> None:
    for shape in SHAPES.values():
        assert proposer(shape, SAMPLINGS["greedy"]).drawn is Drawn.FIXED
        assert proposer(shape, SAMPLINGS["plain"], draws="top").drawn is Drawn.FIXED
    assert proposer(BUSHY, SAMPLINGS["plain"]).drawn is Drawn.DISTINCT
    assert proposer(BUSHY, SAMPLINGS["plain"], draws="with_replacement").drawn is Drawn.SAMPLED
    assert proposer(SHAPES["dynamic"], SAMPLINGS["plain"]).drawn is Drawn.FIXED
    with pytest.raises(EyasError, match="verify.draws=best: must be one of without_replacement, with_replacement, top"):
        proposer(BUSHY, draws="best")


# --- drawn children -------------------------------------------------------------------------------------------


def path_tokens(tree: DraftTree, node: int) -> list[int]:
    tokens: list[int] = tree.tokens.tolist()
    return [tokens[n] for n in tree.path(node)]


@pytest.mark.parametrize("draws", ["without_replacement", "with_replacement"])
@pytest.mark.parametrize("sampling", ["plain", "warped", "penalised"])
@pytest.mark.parametrize("shape", ["chain", "static"])
def test_children_are_drawn_from_their_q(shape: str, sampling: str, draws: str) -> None:
    """The whole tree again by hand: q after prompt + path over the full vocabulary, one number a child in order."""
    settings, row, text = SAMPLINGS[sampling], random_row(len(VOCAB), 0, SPREAD), TEXTS[1]
    one = proposer(SHAPES[shape], settings, draws=draws)
    tell(one, 0, text, random.Random(5).random)
    (tree,) = one.propose([9])
    assert len(tree) == SHAPES[shape].nodes, "q has tokens enough here"
    numbers = random.Random(5)
    for node in sorted({ROOT, *tree.parents}):  # in the order in which nodes are expanded
        context = [*text, *(path_tokens(tree, node) if node != ROOT else [])]
        full = torch.full((VOCAB.size,), float("-inf"))
        for token, logit in zip(VOCAB.ids.tolist(), row(tuple(context)).tolist(), strict=True):
            full[token] = logit
        q = settings.probs(full, context)
        left = q.clone()
        for child in tree.children(node):
            torch.testing.assert_close(tree.q[tree.q_row[child]], q)
            assert int(tree.tokens[child]) == int(draw(left / left.sum(), numbers.random()))
            if draws == "without_replacement":
                left[tree.tokens[child]] = 0


def chi_square(seen: Counter[tuple[int, ...]], expected: Mapping[tuple[int, ...], float]) -> float:
    total = seen.total()
    assert all(expected.get(cell, 0) > 0 for cell in seen), "drawn although impossible"
    cells = [(seen[cell], total * chance) for cell, chance in expected.items() if chance > 0]
    assert min(e for _, e in cells) >= 5
    return float(chi2.sf(sum((o - e) ** 2 / e for o, e in cells), len(cells) - 1))


@pytest.mark.parametrize("draws", ["without_replacement", "with_replacement"])
@pytest.mark.parametrize("sampling", [Sampling(1.0), Sampling(0.8, top_k=4)])
def test_siblings_have_the_right_joint_distribution(sampling: Sampling, draws: str) -> None:
    """Three children of one node, 20000 times."""
    vocab, times, rng = DraftVocab(torch.tensor([1, 2, 4, 6, 7]), 8), 20000, random.Random(1)
    logits = torch.tensor([0.3, -0.5, 0.9, 0.0, -0.2])
    q = (logits.double() / sampling.temperature).exp()
    if sampling.top_k:
        q[1] = 0.0  # the least likely of five
    q /= q.sum()
    start = Start(logits.expand(times, 5), [1] * times, [()] * times, [rng.random] * times, lambda *_: pytest.fail())
    trees = StaticTree.of_paths([[0], [1], [2]]).draft(start, Draws(vocab, sampling, draws))
    seen = Counter(tuple(tree.tokens.tolist()) for tree in trees)
    chance = dict(zip(vocab.ids.tolist(), q.tolist(), strict=True))
    expected: dict[Text, float] = {}
    for a, b, c in itertools.product(chance, repeat=3):
        p = chance[a] * chance[b] * chance[c]
        if draws == "without_replacement":
            free = len({a, b, c}) == 3 and chance[a] * chance[b] * chance[c] > 0
            p = p / (1 - chance[a]) / (1 - chance[a] - chance[b]) if free else 0.0
        expected[a, b, c] = p
    assert chi_square(seen, expected) > FALSE_ALARM / CHI_SQUARES


def test_a_node_has_no_more_children_than_its_q_has_tokens() -> None:
    """top-k of 2 leaves two draws without replacement of three; the third and all below it are left out."""
    sampling, one = Sampling(1.0, top_k=2), StaticTree.of_paths([[0], [1], [2], [1, 0], [2, 0], [2, 1], [2, 0, 0]])
    drafting = proposer(one, sampling)
    tell(drafting, 0, TEXTS[0])
    (tree,) = drafting.propose([9])
    assert tree.parents == (ROOT, ROOT, 1)
    assert sorted(tree.tokens[:2].tolist()) == sorted((tree.q[0] > 0).nonzero()[:, 0].tolist())
    repeats = proposer(one, sampling, draws="with_replacement")
    tell(repeats, 0, TEXTS[0])
    (tree,) = repeats.propose([9])
    assert tree.parents == one.parents  # a repeated sibling stays, with its own continuation
    assert len(set(tree.tokens[:3].tolist())) < 3


def test_one_certain_token() -> None:
    """Where a single token has all the probability, a tree without replacement is a chain."""
    drafting = proposer(BUSHY, Sampling(1.0, top_k=1))
    tell(drafting, 0, TEXTS[0])
    (tree,) = drafting.propose([9])
    assert tree.parents == (ROOT, 0) and tree.is_chain  # the paths [0] and [0, 0]; [0, 1] already is a second child
    greedy = proposer(chain(2))
    tell(greedy, 0, TEXTS[0])
    assert tree.tokens.tolist() == greedy.propose([9])[0].tokens.tolist()


# --- processors that read the text ----------------------------------------------------------------------------


class Listening(LogitsProcessor):
    def __init__(self) -> None:
        self.heard: list[list[int]] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        assert scores.shape == (1, VOCAB.size), "the full vocabulary"
        self.heard += input_ids.tolist()
        return scores


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("shape", SHAPES)
def test_processors_see_the_prompt_and_the_path(shape: str, temperature: float) -> None:
    ear = Listening()
    one = proposer(SHAPES[shape], Sampling(temperature, extra=(ear,)))
    for slot, text in enumerate(TEXTS):
        tell(one, slot, text)
    one.commit(1, states(4, 2), [9, 2])
    texts = [TEXTS[0], (*TEXTS[1], 9, 2), TEXTS[2]]
    trees = one.propose([9, 2, 9])
    heard = Counter(map(tuple, ear.heard))
    expected: Counter[Text] = Counter(texts)
    session: Any = one.session
    for slot, paths in session.nodes.items():
        expected.update(texts[slot] + path for path in paths)
    assert heard == expected
    for text, tree in zip(texts, trees, strict=True):
        inner = {(*text, *path_tokens(tree, node)) for node in tree.parents if node != ROOT}
        assert inner | {text} <= set(heard)


def test_a_penalty_changes_the_drafts() -> None:
    """Logits 3, 2.9, ... for 0, 2, ...: the confirmed 0 is divided by 2, then so is the drafted 2, and so on."""
    logits = torch.tensor([3.0, 2.9, 2.8, 2.7, -1.0, -2.0])
    session = TableSession(lambda text: logits)
    for shape in (chain(4), DynamicTree(4, 1, 4)):
        one = DraftingProposer(session, VOCAB, shape, Sampling(0.0, repetition_penalty=2.0))
        tell(one, 0, (1, 0))
        assert one.propose([4])[0].tokens.tolist() == [2, 3, 5, 0]


# --- the device -----------------------------------------------------------------------------------------------


WIDE = DraftVocab.full(16)


class Unread:
    """A session on tensors that have no values: whoever reads one fails."""

    def __init__(self, vocab: int) -> None:
        self.table = torch.empty(vocab, vocab)

    def reset(self, slot: int, first_token: int) -> None:
        pass

    move = reset

    def extend(
        self, slots: Sequence[int], counts: Sequence[int], taps: Tensor, final: Tensor, next_ids: Tensor
    ) -> Tensor:
        return self.table[next_ids[torch.tensor(counts).cumsum(0) - 1]]

    def expand(self, slots: Sequence[int], parents: Tensor, tokens: Tensor, depth: int) -> Tensor:
        return self.table[tokens]


@pytest.mark.parametrize("draws", ["without_replacement", "with_replacement", "top"])
@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_chains_are_drafted_without_waiting_for_the_device(temperature: float, draws: str) -> None:
    with FakeTensorMode(allow_non_fake_inputs=True):
        trees = unread(chain(4), Sampling(temperature), draws)
        assert [len(tree) for tree in trees] == [4, 2]
        with pytest.raises(DataDependentOutputException):  # such a wait would be noticed
            trees[0].tokens.tolist()


def test_other_trees_wait_once_they_are_drafted() -> None:
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert [len(tree) for tree in unread(classic("medusa"), Sampling(0.0), "top")] == [63, 38]
        with pytest.raises(DataDependentOutputException):
            unread(BUSHY, Sampling(1.0), "without_replacement")


def unread(shape: Shape, sampling: Sampling, draws: str) -> list[DraftTree]:
    one = DraftingProposer(Unread(WIDE.size), WIDE, shape, sampling, draws=draws)
    for slot, text in enumerate(TEXTS[:2]):
        tell(one, slot, text)
    return one.propose([9, 2])
