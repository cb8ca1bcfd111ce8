"""The acceptance rules, judged by what they emit: the joint distribution of the first three tokens is the target's.

Vocabulary of 4, distributions that depend on the whole context, trees two levels deep. Chi-square on TRIALS
sequences per case with a fixed seed. The level is Bonferroni-corrected: if all rules are right, the chance that
any of the cases fails for a fresh seed is at most FALSE_ALARM.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Callable
from functools import cache

import pytest
import torch
from scipy.stats import chi2
from torch import Tensor

import eval.accept
from eval.accept import Accepted, accept_greedy, accept_sampled, residual, without
from eval.sampling import Sampling, draw
from eval.tree import ROOT, DraftTree, Drawn

VOCAB, LENGTH, TRIALS, FALSE_ALARM = 4, 3, 2000, 1e-3
Context = tuple[int, ...]
Kind = tuple[Drawn, ...]
S, D, F = Drawn.SAMPLED, Drawn.DISTINCT, Drawn.FIXED

PLAIN = Sampling(temperature=1.0)
WARPED = Sampling(temperature=0.7, top_k=3, top_p=0.8)
# For every level of the tree the kinds of the children that each of its parents has.
SHAPES: dict[str, tuple[Kind, ...]] = {
    "chain": ((S,), (S,)),
    "chain_fixed": ((F,), (F,)),
    "tree_repeats": ((S, S), (S, S)),
    "tree_distinct": ((D, D, D), (D, D)),
    "tree_topk": ((F, F), (F,)),
    "mixed": ((F, S, D, D), (S,)),
}
CASES = [*((shape, PLAIN) for shape in SHAPES), ("chain", WARPED), ("tree_distinct", WARPED)]


@cache
def probs(side: str, context: Context, sampling: Sampling) -> Tensor:
    seed = sum((token + 1) * (VOCAB + 1) ** i for i, token in enumerate(context)) + 10**6 * (side == "draft")
    logits = 1.5 * torch.randn(VOCAB, generator=torch.Generator().manual_seed(seed))
    return sampling.probs(logits, context)


@cache
def weights(context: Context, sampling: Sampling) -> list[float]:
    return [float(w) for w in probs("draft", context, sampling)]


def drafted(
    context: Context, shape: tuple[Kind, ...], drawn: Sampling, claimed: Sampling, rng: random.Random
) -> DraftTree:
    """A full tree of that shape, drawn level by level from the draft side as ``drawn`` says; its q says ``claimed``.

    Drawn by the standard library: an implementation other than the one under test.
    """
    tokens, parents, kinds, q, q_row = list[int](), list[int](), list[Drawn](), list[Tensor](), list[int]()
    level: list[tuple[int, Context]] = [(ROOT, context)]
    for children in shape:
        below: list[tuple[int, Context]] = []
        for parent, prefix in level:
            row = weights(prefix, drawn)
            left, ranked = list(row), sorted(range(VOCAB), key=lambda v, row=row: -row[v])  # type: ignore[misc]
            for kind in children:
                if kind is D and not any(left):
                    continue  # every token with a chance is drafted
                token = ranked.pop(0) if kind is F else rng.choices(range(VOCAB), left if kind is D else row)[0]
                if kind is D:
                    left[token] = 0.0
                tokens.append(token)
                parents.append(parent)
                kinds.append(kind)
                q_row.append(len(q))
                below.append((len(tokens) - 1, (*prefix, token)))
            q.append(probs("draft", prefix, claimed))
        level = below
    return DraftTree(torch.tensor(tokens), tuple(parents), tuple(kinds), tuple(q), tuple(q_row))


Rule = Callable[[DraftTree, Callable[[int], Tensor], Callable[[], float]], Accepted]


def p_value(shape: str, sampling: Sampling, rule: Rule = accept_sampled, *, claimed: Sampling | None = None) -> float:
    """Chi-square p-value of TRIALS sequences of LENGTH tokens made by speculation, against the target's joint."""
    rng = random.Random(7)
    seen: Counter[Context] = Counter()
    for _ in range(TRIALS):
        text: Context = ()
        while len(text) < LENGTH:
            tree = drafted(text, SHAPES[shape], sampling, claimed or sampling, rng)
            prefixes = {ROOT: text}
            for node, (parent, token) in enumerate(zip(tree.parents, tree.tokens.tolist(), strict=True)):
                prefixes[node] = (*prefixes[parent], token)
            text += tuple(rule(tree, lambda node, at=prefixes: probs("target", at[node], sampling), rng.random).tokens)  # type: ignore[misc]
        seen[text[:LENGTH]] += 1
    return chi_square(seen, sampling)


def chi_square(seen: Counter[Context], sampling: Sampling) -> float:
    expected = {c: TRIALS * joint(c, sampling) for c in itertools.product(range(VOCAB), repeat=LENGTH)}
    if any(expected[c] == 0 for c in seen):
        return 0.0  # an impossible token came out
    small = [c for c in expected if 0 < expected[c] < 5]
    cells = [(seen[c], expected[c]) for c in expected if expected[c] >= 5]
    if small:  # the usual condition of the test: merge cells with few expected
        cells.append((sum(seen[c] for c in small), sum(expected[c] for c in small)))
    statistic = sum((o - e) ** 2 / e for o, e in cells)
    return float(chi2.sf(statistic, len(cells) - 1))


def joint(text: Context, sampling: Sampling) -> float:
    chance = 1.0
    for i, token in enumerate(text):
        chance *= float(probs("target", text[:i], sampling)[token])
    return chance


@pytest.mark.parametrize(("shape", "sampling"), CASES)
def test_speculation_follows_the_target(shape: str, sampling: Sampling) -> None:
    assert p_value(shape, sampling) > FALSE_ALARM / len(CASES)


def caught(p: float) -> bool:
    return p < FALSE_ALARM / len(CASES)


def test_catches_resampling_from_p(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eval.accept, "residual", lambda p, q: p)
    assert caught(p_value("chain", PLAIN))


def test_catches_a_residual_that_changes_the_shared_row(monkeypatch: pytest.MonkeyPatch) -> None:
    def in_place(p: Tensor, q: Tensor) -> Tensor:
        return p.copy_(residual(p, q))

    monkeypatch.setattr(eval.accept, "residual", in_place)
    probs.cache_clear()
    try:
        assert caught(p_value("chain", PLAIN))
    finally:
        probs.cache_clear()


def relabelled(kind: Drawn) -> Rule:
    """The right rule told that the drafts came about in another way."""

    def rule(tree: DraftTree, target: Callable[[int], Tensor], uniform: Callable[[], float]) -> Accepted:
        wrong = DraftTree(tree.tokens, tree.parents, (kind,) * len(tree), tree.q, tree.q_row)
        return accept_sampled(wrong, target, uniform)

    return rule


def test_catches_the_wrong_q() -> None:
    assert caught(p_value("tree_topk", PLAIN, relabelled(S)))
    assert caught(p_value("tree_distinct", WARPED, relabelled(S)))


def test_catches_raw_q_against_warped_p() -> None:
    assert caught(p_value("chain", WARPED, claimed=PLAIN))


def test_residual_by_hand() -> None:
    p, q = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.2, 0.7, 0.1])
    torch.testing.assert_close(residual(p, q), torch.tensor([0.75, 0.0, 0.25]))  # (.3, 0, .1) / .4
    torch.testing.assert_close(residual(p, p), p)  # nothing left: only rounding can lead here
    torch.testing.assert_close(without(p, [0]), torch.tensor([0.0, 0.6, 0.4]))
    torch.testing.assert_close(p, torch.tensor([0.5, 0.3, 0.2]))


def test_acceptance_probability_by_hand() -> None:
    """p(x)/q(x) = .3/.6: accepted just below u = .5, else the residual (1, 0) / 1 of (.7, .3) - (.4, .6)."""
    p, q = torch.tensor([0.7, 0.3]), torch.tensor([0.4, 0.6])
    tree = DraftTree.chain([1], [q])
    assert accept_sampled(tree, lambda node: p, iter([0.499, 0.9]).__next__) == Accepted([0], [1, 1])
    assert accept_sampled(tree, lambda node: p, iter([0.501, 0.9]).__next__) == Accepted([], [0])


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


def test_draw_inverts_the_cumulative_sum() -> None:
    p = torch.tensor([0.0, 0.25, 0.0, 0.75, 0.0])
    assert [int(draw(p, u)) for u in (0.0, 0.2499, 0.2501, 0.9999999)] == [1, 1, 3, 3]


def test_processors() -> None:
    scores = torch.tensor([1.0, 3.0, 2.0, 0.0])
    assert int(Sampling(0.0).argmax(scores, [])) == 1
    torch.testing.assert_close(Sampling(1.0, top_k=1).probs(scores, []), torch.eye(4)[1])
    torch.testing.assert_close(Sampling(1.0, top_k=99).probs(scores, []), scores.softmax(0))
    torch.testing.assert_close(Sampling(1e-4).probs(scores, []), torch.eye(4)[1])
    assert Sampling(1e-6).greedy
    top = Sampling(0.5, top_p=0.9).probs(scores, [])  # softmax of (6, 4) after the other two are cut
    torch.testing.assert_close(top, torch.tensor([0.0, 0.8808, 0.1192, 0.0]), atol=1e-4, rtol=0)
