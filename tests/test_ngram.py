"""N-gram drafting: hand-worked cases, and a plain statement of the rule on random texts."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch

from eval.drafts.ngram import NgramIndex, NgramProposer
from eval.drafts.tree import DraftTree, Drawn
from models.blocks import States
from models.errors import EyasError

STATES = States(torch.empty(0), torch.empty(0))  # never looked at


def by_the_rule(ids: Sequence[int], min_n: int, max_n: int, count: int) -> list[int]:
    """The stated rule, read off the text anew: longest n, first occurrence before the text's own end."""
    for n in range(max_n, min_n - 1, -1):
        tail = list(ids[len(ids) - n :])
        for start in range(len(ids) - n):
            if list(ids[start : start + n]) == tail:
                return list(ids[start + n : start + n + count])
    return []


def followed(ids: Sequence[int], min_n: int, max_n: int, count: int) -> list[int]:
    index = NgramIndex(min_n, max_n)
    index.append(ids)
    return index.follow(count)


@pytest.mark.parametrize(
    ("ids", "min_n", "max_n", "count", "expected"),
    [
        ([1, 2, 3, 4, 1, 2], 2, 4, 3, [3, 4, 1]),  # "1 2" stood at 0
        ([1, 2, 3, 4, 1, 2], 2, 4, 9, [3, 4, 1, 2]),  # no further than the text's end
        ([1, 2, 3, 4, 1, 2], 3, 4, 3, []),  # no three tokens occur twice
        ([5, 2, 3, 1, 2, 9, 1, 2], 1, 2, 1, [9]),  # two tokens go before one: not what followed the first 2
        ([1, 2, 7, 1, 2, 8, 1, 2], 1, 4, 2, [7, 1]),  # the first of two occurrences
        ([0, 1, 2, 7, 1, 2, 8, 0, 1, 2], 2, 3, 1, [7]),  # three tokens: the only earlier "0 1 2"
        ([4, 4, 4], 2, 2, 5, [4]),  # "4 4" at 0 overlaps the tail; one token follows it
        ([4, 4, 4, 4], 2, 3, 5, [4]),  # n = 3 goes first, though n = 2 would draft two tokens
        ([0, 0, 1, 0], 1, 4, 2, [0, 1]),  # token 0 is a token like any other
        ([3], 1, 4, 2, []),
        ([1, 2, 1, 2], 2, 4, 0, []),
        ([1, 2, 1, 2], 2, 4, -1, []),
        ([2**31 - 1, 1, 2**31 - 1], 1, 1, 2, [1, 2**31 - 1]),
    ],
)
def test_hand_worked(ids: list[int], min_n: int, max_n: int, count: int, expected: list[int]) -> None:
    assert followed(ids, min_n, max_n, count) == expected
    assert by_the_rule(ids, min_n, max_n, max(count, 0)) == expected


def test_random_texts_grown_token_by_token_and_in_blocks() -> None:
    """Small alphabets repeat themselves at every length; the index is compared after each block, and built anew."""
    rng = random.Random(0)
    drafted = 0
    for _ in range(2500):
        min_n = rng.randint(1, 3)
        max_n = rng.randint(min_n, 5)
        letters, count = rng.randint(1, 4), rng.randint(0, 6)
        index, text = NgramIndex(min_n, max_n), list[int]()
        while len(text) < 40:
            block = [rng.randrange(letters) for _ in range(rng.randint(1, 6))]
            index.append(block)
            text += block
            expected = by_the_rule(text, min_n, max_n, count)
            assert index.follow(count) == expected, (text, min_n, max_n, count)
            drafted += bool(expected)
        assert followed(text, min_n, max_n, count) == index.follow(count)
    assert drafted > 10_000


def test_slots_are_apart_and_move() -> None:
    """Sequences that come, grow by blocks, end and are replaced by the last slot, as the verification loop has it."""
    rng = random.Random(1)
    proposer = NgramProposer(2, 3, gamma=4)
    slots: list[list[int]] = []  # the text of each

    def begin() -> None:
        prompt = [rng.randrange(3) for _ in range(rng.randint(1, 9))]
        first = rng.randrange(3)
        proposer.begin(len(slots), prompt, rng.random)
        proposer.commit(len(slots), STATES, [*prompt[1:], first])
        slots.append([*prompt, first])

    for _ in range(1500):
        if len(slots) < 4 and rng.random() < 0.5:
            begin()
        elif len(slots) > 1 and rng.random() < 0.2:
            ended = rng.randrange(len(slots))
            last = slots.pop()
            if ended < len(slots):
                proposer.move(len(slots), ended)
                slots[ended] = last
        limits = [rng.choice([0, 1, 3, 1 << 30]) for _ in slots]
        for slot, tree in enumerate(proposer.propose(limits)):
            assert tree.tokens.tolist() == by_the_rule(slots[slot], 2, 3, min(4, limits[slot]))
            check_chain(tree)
        for slot, text in enumerate(slots):
            if rng.random() < 0.7:
                block = [rng.randrange(3) for _ in range(rng.randint(1, 5))]
                proposer.commit(slot, STATES, block)
                text += block


def check_chain(tree: DraftTree) -> None:
    assert tree.is_chain and not tree.q and set(tree.drawn) <= {Drawn.FIXED}
    assert tree.tokens.dtype == torch.int64


def test_begin_forgets() -> None:
    proposer = NgramProposer(1, 2, gamma=3)
    for prompt, expected in (([7, 8, 7], [8, 7]), ([9, 7], [])):
        proposer.begin(0, prompt, random.random)
        proposer.commit(0, STATES, prompt[1:])
        assert [tree.tokens.tolist() for tree in proposer.propose([9])] == [expected]
    assert proposer.propose([]) == []


@pytest.mark.parametrize(("min_n", "max_n", "gamma"), [(0, 2, 1), (3, 2, 1), (-1, -1, 1), (1, 2, 0)])
def test_mistakes_are_named(min_n: int, max_n: int, gamma: int) -> None:
    with pytest.raises(EyasError, match=r"verify\.(ngram_min|gamma)="):
        NgramProposer(min_n, max_n, gamma)
