"""The acceptance rules by hand, and exactly: the law of what they emit, worked out from their decisions alone.

That sampled text follows the target through many passes is tests/test_distribution.py.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import SuppressTokensLogitsProcessor

from eval.drafts.tree import ROOT, DraftTree, Drawn
from eval.verify.accept import (
    Accepted,
    Rule,
    accept,
    accept_greedy,
    accept_sampled,
    accept_typical,
    residual,
    try_children,
    without,
)
from eval.verify.sampling import Sampling
from models.errors import EyasError

S, D, F = Drawn.SAMPLED, Drawn.DISTINCT, Drawn.FIXED
ALMOST_ONE = 1 - 2**-53  # the largest random number: rejects whatever can be rejected


# --- the exact law of one level -------------------------------------------------------------------------------------


def tuples(kinds: tuple[Drawn, ...], rows: list[list[float]], fixed: list[int]) -> Iterator[tuple[list[int], float]]:
    """All that a node's children can be and its probability. Child i is drawn from rows[i], or is fixed[i]; without
    replacement token 0 stands where nothing is left."""
    for tokens in itertools.product(range(len(rows[0])), repeat=len(kinds)):
        chance, drawn = 1.0, set[int]()
        for kind, token, row, rule in zip(kinds, tokens, rows, fixed, strict=True):
            if kind is F:
                chance *= token == rule
            elif kind is S:
                chance *= row[token]
            else:
                left = [0.0 if t in drawn else w for t, w in enumerate(row)]
                chance *= left[token] / sum(left) if sum(left) > 0 else token == 0
                drawn.add(token)
        if chance > 0:
            yield list(tokens), chance


def decide(tree: DraftTree, p: Tensor, uniforms: list[float]) -> tuple[int | None, Tensor, int]:
    """What the rule does if its random numbers are these and then ALMOST_ONE for ever; how many it asked for."""
    asked = itertools.count()
    numbers = itertools.chain(uniforms, itertools.repeat(ALMOST_ONE))

    def uniform() -> float:
        next(asked)
        return next(numbers)

    child, left = try_children(tree, tree.tokens.tolist(), ROOT, p, uniform)
    return child, left, next(asked)


def law(kinds: tuple[Drawn, ...], p: Tensor, rows: list[list[float]], fixed: list[int]) -> tuple[list[float], float]:
    """The probability of every token to be emitted, and of a child to be accepted.

    Each decision of the rule is a threshold on its random number, found by bisection; nothing else is known of it.
    """
    out, accepted = [0.0] * len(p), 0.0
    q = tuple(torch.tensor(row, dtype=torch.float64) for row in rows)
    for tokens, chance in tuples(kinds, rows, fixed):
        tree = DraftTree(torch.tensor(tokens), (ROOT,) * len(kinds), kinds, q, tuple(range(len(kinds))))
        _, left, decisions = decide(tree, p, [])
        for turn in range(decisions):
            before = [ALMOST_ONE] * turn
            child, _, _ = decide(tree, p, [*before, 0.0])
            low, high = 0.0, float(child is not None)
            while high - low > 1e-15:
                middle = (low + high) / 2
                yes = decide(tree, p, [*before, middle])[0] == child
                low, high = (middle, high) if yes else (low, middle)
            if child is not None:
                out[tokens[child]] += chance * high
                accepted += chance * high
                chance *= 1 - high
        if chance > 1e-15:
            out = [o + chance * float(w) for o, w in zip(out, left, strict=True)]
    return out, accepted


def distribution(weights: list[float]) -> list[float]:
    return [w / sum(weights) for w in weights]


def distributions(size: int) -> st.SearchStrategy[list[float]]:
    """Of all kinds, and with zeros, ties and very unlikely tokens."""
    weights = st.integers(0, 10**6).map(lambda seed: [random.Random(seed + i).random() for i in range(size)])
    special = st.sampled_from([0.0, 0.0, 1e-9, 0.01, 1.0, 1.0, 2.0, 5.0])
    return st.one_of(weights, st.lists(special, min_size=size, max_size=size).filter(any)).map(distribution)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.data())
@pytest.mark.parametrize("kinds", [(S,), (F,), (S, S), (D, D), (F, F), (D, D, D), (F, S, D), (D, S, D), (S, F, S)])
def test_exactly_the_target_is_emitted(kinds: tuple[Drawn, ...], data: st.DataObject) -> None:
    size = 4 if len(kinds) < 3 else 3
    p = data.draw(distributions(size))
    row = data.draw(st.one_of(st.just(p), distributions(size)))  # p = q included
    fixed = data.draw(st.lists(st.integers(0, size - 1), min_size=len(kinds), max_size=len(kinds)))
    out, accepted = law(kinds, torch.tensor(p, dtype=torch.float64), [row] * len(kinds), fixed)
    assert out == pytest.approx(p, abs=1e-12)
    assert all(o == 0 for o, w in zip(out, p, strict=True) if w == 0)
    # A rule that accepts nothing would be exact too.
    if kinds == (S,):
        assert accepted == pytest.approx(sum(map(min, p, row)), abs=1e-12)
    if set(kinds) == {F}:
        assert accepted == pytest.approx(sum(p[token] for token in set(fixed)), abs=1e-12)
    if kinds == (S, S):  # the second one meets what the first has left of p
        left = [max(a - b, 0.0) for a, b in zip(p, row, strict=True)]
        again = sum(map(min, distribution(left), row)) if sum(left) > 1e-12 else 1.0
        missed = 1 - sum(map(min, p, row))
        assert accepted == pytest.approx(1 - missed * (1 - again), abs=1e-12)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.data())
@pytest.mark.parametrize("kinds", [(S, S), (D, D), (S, D, D)])
def test_siblings_may_come_from_different_distributions(kinds: tuple[Drawn, ...], data: st.DataObject) -> None:
    p, *rows = (data.draw(distributions(3)) for _ in range(1 + len(kinds)))
    out, _ = law(kinds, torch.tensor(p, dtype=torch.float64), rows, [0] * len(kinds))
    assert out == pytest.approx(p, abs=1e-12)


# --- rejection sampling by hand -------------------------------------------------------------------------------------


def test_residual_by_hand() -> None:
    p, q = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.2, 0.7, 0.1])
    torch.testing.assert_close(residual(p, q), torch.tensor([0.75, 0.0, 0.25]))  # (.3, 0, .1) / .4
    torch.testing.assert_close(residual(p, p), p)  # nothing left: only rounding can lead here
    torch.testing.assert_close(without(p, [0]), torch.tensor([0.0, 0.6, 0.4]))
    torch.testing.assert_close(without(p, [0, 1, 2]), p)
    assert without(p, []) is p
    torch.testing.assert_close(p, torch.tensor([0.5, 0.3, 0.2]))
    torch.testing.assert_close(q, torch.tensor([0.2, 0.7, 0.1]))


def test_acceptance_probability_by_hand() -> None:
    """p(x)/q(x) = .3/.6: accepted just below u = .5, else the residual (1, 0) / 1 of (.7, .3) - (.4, .6)."""
    p, q = torch.tensor([0.7, 0.3]), torch.tensor([0.4, 0.6])
    tree = DraftTree.chain([1], [q])
    assert accept_sampled(tree, lambda node: p, iter([0.499, 0.9]).__next__) == Accepted([0], [1, 1])
    assert accept_sampled(tree, lambda node: p, iter([0.501, 0.9]).__next__) == Accepted([], [0])


def test_fixed_siblings_by_hand() -> None:
    """p = (.5, .3, .2): 0 is accepted below u = .5, then 1 below .3/.5; 2 is all that is left, and is drawn."""
    p = torch.tensor([0.5, 0.3, 0.2])
    tree = DraftTree(torch.tensor([0, 1]), (ROOT, ROOT), (F, F))

    def first(*uniforms: float) -> list[int]:
        return accept_sampled(tree, lambda node: p, iter([*uniforms, 0.0]).__next__).tokens

    assert first(0.499) == [0, 0]
    assert first(0.501, 0.599) == [1, 0]
    assert first(0.501, 0.601) == [2]


@pytest.mark.parametrize("kind", [S, D, F])
def test_an_impossible_token_is_never_accepted(kind: Drawn) -> None:
    """Not for u = 0, and not where rounding leaves less than nothing of p."""
    p, q = torch.tensor([0.6, 0.3, 0.1, 0.0]), torch.tensor([0.25, 0.25, 0.25, 0.25])
    tree = DraftTree(torch.tensor([0, 1, 2, 3]), (ROOT,) * 4, (kind,) * 4, (q,), (0,) * 4)
    for uniforms in itertools.product((0.0, 0.3, ALMOST_ONE), repeat=5):
        assert 3 not in accept_sampled(tree, lambda node: p, iter(uniforms).__next__).tokens
    over = torch.tensor([0.6, 0.4 + 1e-7, 0.0, 0.0])  # sums to more than 1
    tree = DraftTree(torch.tensor([0, 1, 3]), (ROOT,) * 3, (F,) * 3)
    assert accept_sampled(tree, lambda node: over, iter([ALMOST_ONE, ALMOST_ONE, 0.5, 0.0]).__next__).tokens[0] < 2


def test_a_draw_that_q_cannot_have_given_decides_nothing() -> None:
    """Without replacement q = (.9, .1, 0) has two tokens; a third sibling is not asked about, p stays as it was."""
    p, q = torch.tensor([0.1, 0.1, 0.8]), torch.tensor([0.9, 0.1, 0.0])
    for third in (0, 1, 2):
        tree = DraftTree(torch.tensor([0, 1, third]), (ROOT,) * 3, (D,) * 3, (q,), (0,) * 3)
        # residual (0, 0, 1) after the first, of which the second takes nothing: two random numbers and the bonus
        assert accept_sampled(tree, lambda node: p, iter([0.5, 0.5, 0.5]).__next__) == Accepted([], [2])


def test_equal_distributions_accept_everything() -> None:
    """p = q up to the last bit: no rounding makes a rejection of it."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(50):
        p = torch.randn(1000, generator=generator).softmax(-1)
        tree = DraftTree.chain([int(p.argmax()), int(p.argmin())], [p, p])
        assert accept_sampled(tree, lambda node: p, lambda: ALMOST_ONE).path == [0, 1]  # noqa: B023


def test_nothing_shared_is_changed() -> None:
    generator = torch.Generator().manual_seed(1)
    rows = torch.randn(4, 5, generator=generator).softmax(-1)
    p, q = rows[:2], tuple(rows[2:])
    before, rng = rows.clone(), random.Random(0)
    tree = DraftTree(torch.tensor([1, 1, 2, 3, 4, 0]), (ROOT, ROOT, ROOT, 0, 0, 1), (F, S, D, D, D, S), q, (0,) * 6)
    for _ in range(200):
        accept_sampled(tree, lambda node: p[(node + 1) % 2], rng.random)
        accept_typical(tree, lambda node: p[(node + 1) % 2], rng.random, 0.3, 0.5)
    assert torch.equal(rows, before)


def test_only_rows_on_the_path_are_asked_for() -> None:
    asked: list[int] = []
    certain = torch.tensor([0.0, 1.0, 0.0])

    def target(node: int) -> Tensor:
        asked.append(node)
        return certain

    tree = DraftTree(torch.tensor([0, 1, 2, 1]), (ROOT, ROOT, 0, 1), (F,) * 4)
    assert accept_sampled(tree, target, lambda: 0.5) == Accepted([1, 3], [1, 1, 1])
    assert asked == [ROOT, 1, 3]


def test_greedy_follows_the_argmax_through_a_tree() -> None:
    #       root -> 5, 7;  5 -> 1;  7 -> 2, 3;  3 -> 4
    tree = DraftTree(torch.tensor([5, 7, 1, 2, 3, 4]), (ROOT, ROOT, 0, 1, 1, 4), (F,) * 6)
    after = {ROOT: 7, 1: 3, 4: 9}
    assert accept_greedy(tree, after.__getitem__) == Accepted([1, 4], [7, 3, 9])
    assert accept_greedy(tree, {ROOT: 6}.__getitem__) == Accepted([], [6])
    assert accept_greedy(DraftTree.empty(), {ROOT: 6}.__getitem__) == Accepted([], [6])


# --- typical acceptance ---------------------------------------------------------------------------------------------


def test_typical_threshold_by_hand() -> None:
    """p = (1/2, 1/4, 1/8, 1/8): H = 1.75 ln 2, so exp(-H) = 2^-1.75 = 0.2973; delta = 1/2 puts the line at 0.1487."""
    p = torch.tensor([0.5, 0.25, 0.125, 0.125])

    def accepted(eps: float, delta: float) -> list[int]:
        trees = [DraftTree.chain([token]) for token in range(4)]
        verdicts = [accept_typical(tree, lambda node: p, lambda: 0.9, eps, delta) for tree in trees]
        assert all(v.tokens[-1] == 3 for v in verdicts)  # the bonus token is drawn from p: the last eighth
        return [token for token, v in enumerate(verdicts) if v.path]

    assert accepted(0.9, 0.5) == [0, 1]  # the entropy decides
    assert accepted(0.9, 0.5 * 2**1.75 / 4.001) == [0, 1, 2, 3]  # a line just below 1/8
    assert accepted(0.3, 2.0) == [0]  # eps decides: the other line would be at 0.59, where nothing passes
    assert accepted(0.5, 9.0) == []  # the line itself is not above it


def test_typical_keeps_the_longest_path_and_of_equals_the_first() -> None:
    likely = torch.tensor([0.3, 0.3, 0.3, 0.1])  # with eps = .2 all but 3 pass
    #  root -> 0, 1, 2;  0 -> 3;  1 -> 0, 1;  2 -> 2;  and below 2's child an unlikely one
    tree = DraftTree(torch.tensor([0, 1, 2, 2, 3, 0, 1, 3]), (ROOT, ROOT, ROOT, 2, 0, 1, 1, 3), (F,) * 8)
    assert accept_typical(tree, lambda node: likely, lambda: 0.0, 0.2, 9.0) == Accepted([1, 5], [1, 0, 0])
    last = DraftTree(torch.tensor([0, 1, 2, 2, 3, 0, 1, 1]), tree.parents, tree.drawn)
    assert accept_typical(last, lambda node: likely, lambda: 0.95, 0.2, 9.0) == Accepted([2, 3, 7], [2, 2, 1, 3])


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.integers(0, 10**6), st.floats(0, 0.9), st.floats(0.05, 2))
def test_typical_equals_a_search_over_all_paths(seed: int, eps: float, delta: float) -> None:
    rng = random.Random(seed)
    parents = tuple(rng.randrange(ROOT, node) for node in range(8))
    tree = DraftTree(torch.tensor([rng.randrange(4) for _ in parents]), parents, (F,) * 8)
    rows = [distribution([rng.random() ** 3 + 1e-3 for _ in range(4)]) for _ in range(9)]

    def passes(node: int) -> bool:
        p = rows[parents[node] + 1]
        entropy = -sum(w * math.log(w) for w in p)
        return p[int(tree.tokens[node])] > min(eps, delta * math.exp(-entropy))

    paths = [tree.path(node) for node in range(ROOT, 8)]
    whole = [path for path in paths if all(map(passes, path))]
    places = {node: place for parent in range(ROOT, 8) for place, node in enumerate(tree.children(parent))}
    best = min(whole, key=lambda path: (-len(path), [places[node] for node in path]))
    given_rows = torch.tensor(rows, dtype=torch.float64)
    assert accept_typical(tree, lambda node: given_rows[node + 1], lambda: 0.5, eps, delta).path == best


def test_rules_and_their_mistakes() -> None:
    assert Rule().lossless and not Rule("typical").lossless
    mistakes: list[tuple[dict[str, Any], str]] = [
        ({"name": "nearly"}, "verify.rule=nearly"),
        ({"eps": 1.0}, "verify.typical_eps=1.0"),
    ]
    mistakes += [({"eps": -0.1}, "typical_eps"), ({"delta": 0.0}, "verify.typical_delta=0.0")]
    for settings_, message in mistakes:
        with pytest.raises(EyasError, match=message):
            Rule(**settings_)


# --- the entry ------------------------------------------------------------------------------------------------------

IDS = [3, 1]
TREE = DraftTree(torch.tensor([0, 1, 2, 1, 3, 0]), (ROOT, ROOT, 0, 0, 1, 3), (F,) * 6)
LOGITS = torch.randn(7, 4, generator=torch.Generator().manual_seed(3))


def numbers() -> Callable[[], float]:
    return random.Random(5).random


@pytest.mark.parametrize("extra", [(), (SuppressTokensLogitsProcessor([1]),)])
@pytest.mark.parametrize("penalty", [1.0, 1.4])
def test_accept_gives_each_rule_the_processed_rows_and_their_context(penalty: float, extra: tuple[Any, ...]) -> None:
    sampling = Sampling(0.8, top_k=3, repetition_penalty=penalty, extra=extra)
    texts = {ROOT: IDS, 0: [3, 1, 0], 1: [3, 1, 1], 2: [3, 1, 0, 2], 3: [3, 1, 0, 1], 4: [3, 1, 1, 3]}
    texts[5] = [3, 1, 0, 1, 0]

    def probs(node: int) -> Tensor:
        return sampling.probs(LOGITS[node + 1], texts[node])

    mine = accept(Rule(), sampling, TREE, LOGITS, IDS, numbers())
    assert mine == accept_sampled(TREE, probs, numbers())
    mine = accept(Rule("typical", 0.2, 0.5), sampling, TREE, LOGITS, IDS, numbers())
    assert mine == accept_typical(TREE, probs, numbers(), 0.2, 0.5)
    greedy = Sampling(0.0, repetition_penalty=penalty, extra=extra)
    expected = accept_greedy(TREE, lambda node: int(greedy.argmax(LOGITS[node + 1], texts[node])))
    for rule in (Rule(), Rule("typical")):
        assert accept(rule, greedy, TREE, LOGITS, IDS, numbers()) == expected


def test_accept_takes_an_argmax_that_is_known() -> None:
    best: list[int] = LOGITS.argmax(-1).tolist()
    mine = accept(Rule(), Sampling(0.0), TREE, torch.empty(7, 4), IDS, numbers(), best)
    assert mine == accept(Rule(), Sampling(0.0), TREE, LOGITS, IDS, numbers())


def test_typical_acceptance_turns_into_the_argmax_match_as_the_temperature_falls() -> None:
    cold, zero = Sampling(1e-4), Sampling(0.0)
    for seed in range(20):
        logits = torch.randn(7, 4, generator=torch.Generator().manual_seed(seed))
        expected = accept(Rule("typical"), zero, TREE, logits, IDS, numbers())
        assert accept(Rule("typical"), cold, TREE, logits, IDS, numbers()) == expected
