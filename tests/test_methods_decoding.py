"""Whatever a method drafts, the text is the target's own: chains and trees, one sequence and several at a time."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import pytest
import torch

from eval.drafts.drafting import DraftingProposer
from eval.drafts.dynamic_tree import DynamicTree
from eval.drafts.proposers import PlainProposer, Proposer
from eval.drafts.shapes import Shape, StaticTree, chain
from eval.verify.sampling import Sampling
from eval.verify.speculate import Decoder, Generation, Limits, Request, generate_all
from models.drafter import Drafter
from models.target import Target
from models.vocab import DraftVocab
from tests.methods import METHODS
from tests.tiny import tiny_target

NEW = 20
GREEDY, WARM = Sampling(0.0), Sampling(1.0)
PROMPTS = [[1, 40, 50], [1], list(range(3, 40)), [1, 7, 7, 7, 9], [5] * 17]
BUSHY = StaticTree.of_paths([[0], [1], [2], [0, 0], [0, 1], [1, 0], [1, 0, 0], [0, 1, 0], [0, 1, 0, 0]])
SHAPES: dict[str, Shape] = {"chain": chain(4), "static": BUSHY, "dynamic": DynamicTree(4, 3, 9)}
each_method = pytest.mark.parametrize("name", METHODS)
each_shape = pytest.mark.parametrize("shape", SHAPES)


class World(NamedTuple):
    """A target, what it says without any cache, and a draft vocabulary so small that random drafters often guess it."""

    target: Target
    texts: list[list[int]]
    vocab: DraftVocab

    def proposer(self, drafter: Drafter, shape: str, sampling: Sampling, slots: int) -> DraftingProposer:
        fitted, _ = SHAPES[shape].trimmed(drafter.max_depth, len(self.vocab))
        return DraftingProposer(drafter.session(self.target.frozen(), slots), drafter.vocab, fitted, sampling)

    def decode(self, proposer: Proposer, slots: int, sampling: Sampling, *ends: int) -> list[Generation]:
        found: dict[int, Generation] = {}
        waiting = deque(Request(prompt, random.Random(i).random, i) for i, prompt in enumerate(PROMPTS))
        decoder = Decoder(self.target, sampling, Limits(NEW, eos_ids=frozenset(ends)))
        generate_all(decoder, proposer, waiting, slots, done=lambda request, out: found.update({request.about: out}))
        return [found[i] for i in range(len(PROMPTS))]


def plain_greedy(target: Target, prompt: list[int]) -> list[int]:
    ids = torch.tensor([prompt])
    with torch.no_grad():
        for _ in range(NEW):
            ids = torch.cat([ids, target.model(input_ids=ids, use_cache=False).logits[:, -1:].argmax(-1)], 1)
    return [int(i) for i in ids[0, len(prompt) :]]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    target = Target.load(str(tiny_target(tmp_path_factory.mktemp("target"), layers=4, hidden=32, vocab=270)))
    texts = [plain_greedy(target, prompt) for prompt in PROMPTS]
    common = sorted({token for text in texts for token in text[::2]})[:12]  # others of its tokens are never drafted
    return World(target, texts, DraftVocab(torch.tensor(common), target.vocab_size))


@pytest.fixture(scope="module")
def built(world: World) -> Callable[[str], Drafter]:
    return cache(lambda name: METHODS[name](world.target.frozen(), world.vocab).eval())


@each_shape
@each_method
def test_greedy_output_is_the_targets_own(name: str, shape: str, world: World, built: Callable[[str], Drafter]) -> None:
    for slots in (1, 3):
        found = world.decode(world.proposer(built(name), shape, GREEDY, slots), slots, GREEDY)
        assert [out.tokens for out in found] == world.texts
        rounds = [r for out in found for r in out.rounds]
        assert any(r.drafted for r in rounds)
        assert any(r.accepted > 0 for r in rounds) and any(r.accepted < r.drafted for r in rounds)


@each_shape
@each_method
def test_company_changes_nothing_at_temperature_1(
    name: str, shape: str, world: World, built: Callable[[str], Drafter]
) -> None:
    """Three at a time, that end in different passes: the tokens and rounds of decoding each alone."""
    plain = world.decode(PlainProposer(), 1, WARM)
    ends = [plain[i].tokens[5 + 4 * i] for i in range(3)]
    alone, together = (
        world.decode(world.proposer(built(name), shape, WARM, slots), slots, WARM, *ends) for slots in (1, 3)
    )
    assert [(out.tokens, out.finish, out.rounds) for out in together] == [
        (out.tokens, out.finish, out.rounds) for out in alone
    ]
