"""The proof that speculation is lossless: the joint distribution of the first three tokens is the target's.

Tiny targets and drafters (tests.markov), trees two levels deep. Every combination of tree, kind of draft and
processors below makes TRIALS texts through the real acceptance rule; a chi-square test compares their counts with the
exact distribution, which comes from the tables by an implementation of the processors that shares nothing with the
one under test. Drafts too are drawn by that other implementation, while the tree that the rule judges holds Eyas's
own q. The level is Bonferroni-corrected: if all rules are right, the chance that any of the tests fails for a fresh
seed is FALSE_ALARM at most. The same test must catch rules that were broken on purpose.
"""

from __future__ import annotations

import itertools
import random
from bisect import bisect
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any

import pytest
import torch
from scipy.stats import chi2
from torch import Tensor

import eval.verify.accept
from eval.drafts.drafting import DraftingProposer
from eval.drafts.dynamic_tree import DynamicTree
from eval.drafts.shapes import Shape, StaticTree, chain
from eval.drafts.tree import ROOT, DraftTree, Drawn
from eval.verify.accept import Accepted, Rule, accept_sampled, accept_typical, residual
from eval.verify.sampling import Sampling
from eval.verify.speculate import Decoder, Generation, Limits, Request, generate_all
from tests.markov import DRAFT_IDS, VOCAB, MarkovDrafter, MarkovTarget, full_rows, reference_probs, table

Text = tuple[int, ...]

LENGTH, TRIALS, FALSE_ALARM = 3, 20_000, 1e-3
SLOTS = 3  # of the tests that go through the whole loop
PROMPT: Text = (2, 0)
S, D, F = Drawn.SAMPLED, Drawn.DISTINCT, Drawn.FIXED

PLAIN = Sampling(1.0)
CUT = Sampling(0.6, top_k=3, top_p=0.9)
PROCESSORS = {
    "plain": PLAIN,
    "cut": CUT,
    "min_p": Sampling(1.0, min_p=0.2),
    "penalty": Sampling(1.0, repetition_penalty=1.3),
}
# kind of draft -> how a node's children are drawn: independently of each other (SpecInfer with replacement), without
# replacement, by rank, or some of each
KINDS = {"sampled": (S,) * 3, "distinct": (D,) * 3, "top": (F,) * 3, "mixed": (F, S, D)}
TREES = ("chain", "bushy", "dynamic")
CASES = [
    (tree, kind, name) for tree in TREES for kind in KINDS for name in PROCESSORS if (tree, kind) != ("chain", "mixed")
]
# The same through the verification loop and the proposer of drafters, several sequences at a time
LOOPS: list[tuple[Shape, str, str]] = [
    (chain(2), "with_replacement", "plain"),
    (StaticTree.of_paths([[0], [1], [2], [0, 0], [0, 1], [1, 0]]), "without_replacement", "cut"),
    (StaticTree.of_paths([[0], [1], [0, 0], [1, 0], [1, 1]]), "with_replacement", "penalty"),
    (DynamicTree(2, branch=3, nodes=5), "top", "min_p"),
    (DynamicTree(3, branch=2, nodes=6), "top", "penalty"),
]
LEVEL = FALSE_ALARM / (len(CASES) + len(LOOPS) + 2)  # two more tests below say that something is lossless


@dataclass
class Side:
    """One model under one set of processors: its distributions as Eyas computes them, and as the reference does."""

    logits: Tensor  # [VOCAB, VOCAB, VOCAB]
    sampling: Sampling
    rows: dict[Text, Tensor] = field(default_factory=dict)
    references: dict[Text, list[float]] = field(default_factory=dict)

    def key(self, text: Text) -> Text:
        return text if self.sampling.needs_context else text[-2:]

    def probs(self, text: Text) -> Tensor:
        key = self.key(text)
        if key not in self.rows:
            self.rows[key] = self.sampling.probs(self.logits[text[-2], text[-1]], text)
        return self.rows[key]

    def reference(self, text: Text) -> list[float]:
        key = self.key(text)
        if key not in self.references:
            logits: list[float] = self.logits[text[-2], text[-1]].double().tolist()
            self.references[key] = reference_probs(logits, text, self.sampling)
        return self.references[key]


def pick(weights: list[float], uniform: float) -> int:
    """A token by its weight; where none has any, the first: what samplers give that ran out of tokens."""
    sums = list(accumulate(weights))
    return min(bisect(sums, uniform * sums[-1]), VOCAB - 1) if sums[-1] > 0 else 0


@dataclass
class Sketch:
    """A tree in the making: nodes as (parent, token, kind), the rows of q, and the text up to each node."""

    draft: Side
    kinds: tuple[Drawn, ...]
    uniform: Callable[[], float]
    texts: dict[int, Text]
    parents: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    drawn: list[Drawn] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)  # probability of the path, by the drafter
    q: list[Tensor] = field(default_factory=list)
    q_row: list[int] = field(default_factory=list)

    def grow(self, parent: int, children: int, claimed: Side | None = None) -> None:
        text = self.texts[parent]
        row = self.draft.reference(text)
        left, ranked = list(row), sorted(range(VOCAB), key=lambda token: -row[token])
        for kind in self.kinds[:children]:
            token = ranked.pop(0) if kind is F else pick(left if kind is D else row, self.uniform())
            if kind is D:
                left[token] = 0.0
            self.scores.append(row[token] * (self.scores[parent] if parent != ROOT else 1.0))
            self.texts[len(self.tokens)] = (*text, token)
            self.tokens.append(token)
            self.parents.append(parent)
            self.drawn.append(kind)
            self.q_row.append(len(self.q))
        self.q.append((claimed or self.draft).probs(text))

    def tree(self) -> DraftTree:
        tokens = torch.tensor(self.tokens)
        return DraftTree(tokens, tuple(self.parents), tuple(self.drawn), tuple(self.q), tuple(self.q_row))


def sketch(
    shape: str, kind: str, draft: Side, text: Text, uniform: Callable[[], float], claimed: Side | None = None
) -> Sketch:
    """Draft a tree after ``text``; its q is ``claimed``'s.

    chain: two levels. bushy: three children of the root, of which the first has two and the second one. dynamic:
    three children, of which the two likeliest get two each; drafts by rank lose their least likely node then.
    """
    out = Sketch(draft, KINDS[kind], uniform, {ROOT: text})
    out.grow(ROOT, 1 if shape == "chain" else 3, claimed)
    if shape == "chain":
        out.grow(0, 1, claimed)
    elif shape == "bushy":
        out.grow(0, 2, claimed)
        out.grow(1, 1, claimed)
    else:
        for node in sorted(sorted(range(3), key=lambda n: -out.scores[n])[:2]):
            out.grow(node, 2, claimed)
    return out


def drafted(shape: str, kind: str, draft: Side, text: Text, uniform: Callable[[], float], claimed: Side) -> DraftTree:
    """The tree of a sketch, reranked where that is allowed: what is fixed may be left out for what it is."""
    made = sketch(shape, kind, draft, text, uniform, claimed)
    tree = made.tree()
    if (shape, kind) == ("dynamic", "top"):
        worst = min(range(len(tree)), key=lambda node: (made.scores[node], -node))
        return tree.only([node for node in range(len(tree)) if node != worst])
    return tree


Judge = Callable[[DraftTree, Callable[[int], Tensor], Callable[[], float]], Accepted]
Drafts = Callable[[str, str, Side, Text, Callable[[], float], Side], DraftTree]


def p_value(
    shape: str,
    kind: str,
    sampling: Sampling,
    judge: Judge = accept_sampled,
    *,
    claimed: Sampling | None = None,
    drafts: Drafts = drafted,
    seed: int = 1,
) -> float:
    """Of TRIALS texts made by speculation. ``claimed``: the processors that the trees' q went through."""
    target = Side(table(seed + 1, VOCAB), sampling)
    draft = Side(full_rows(table(seed + 2, len(DRAFT_IDS))), sampling)
    said = Side(draft.logits, claimed or sampling)
    uniform, seen = random.Random(seed).random, Counter[Text]()
    for _ in range(TRIALS):
        text = PROMPT
        while len(text) < len(PROMPT) + LENGTH:
            tree = drafts(shape, kind, draft, text, uniform, said)
            tokens: list[int] = tree.tokens.tolist()

            def probs(node: int, text: Text = text, tree: DraftTree = tree, tokens: list[int] = tokens) -> Tensor:
                return target.probs((*text, *(tokens[n] for n in tree.path(node))))

            text += tuple(judge(tree, probs, uniform).tokens)
        seen[text[len(PROMPT) :][:LENGTH]] += 1
    return chi_square(seen, target)


def chi_square(seen: Counter[Text], target: Side) -> float:
    trials, cells, small = seen.total(), list[tuple[int, float]](), (0, 0.0)
    for text in itertools.product(range(VOCAB), repeat=LENGTH):
        expected = float(trials)
        for i, token in enumerate(text):
            expected *= target.reference((*PROMPT, *text[:i]))[token]
        if expected == 0 and seen[text]:
            return 0.0  # an impossible text
        if expected >= 5:
            cells.append((seen[text], expected))
        else:  # the usual condition of the test: cells with few expected texts go together
            small = small[0] + seen[text], small[1] + expected
    if small[1] > 0:
        cells.append(small)
    assert len(cells) > 4
    statistic = sum((count - expected) ** 2 / expected for count, expected in cells)
    return float(chi2.sf(statistic, len(cells) - 1))


@pytest.mark.parametrize(("shape", "kind", "processors"), CASES)
def test_speculation_follows_the_target(shape: str, kind: str, processors: str) -> None:
    case = CASES.index((shape, kind, processors))
    assert p_value(shape, kind, PROCESSORS[processors], seed=case) > LEVEL


# --- rules broken on purpose ----------------------------------------------------------------------------------------


def caught(p: float) -> bool:
    return p < LEVEL


@pytest.mark.parametrize(("shape", "kind"), [("chain", "sampled"), ("bushy", "distinct"), ("dynamic", "sampled")])
def test_catches_resampling_from_p(monkeypatch: pytest.MonkeyPatch, shape: str, kind: str) -> None:
    monkeypatch.setattr(eval.verify.accept, "residual", lambda p, q: p)
    assert caught(p_value(shape, kind, PLAIN))


def test_catches_point_masses_that_stay_in_p(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eval.verify.accept, "without", lambda p, tokens: p)
    assert caught(p_value("bushy", "top", PLAIN))


def test_catches_a_residual_that_changes_the_shared_p(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eval.verify.accept, "residual", lambda p, q: p.copy_(residual(p, q)))
    assert caught(p_value("chain", "sampled", PLAIN))


def test_catches_siblings_that_change_their_shared_q(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eval.verify.accept, "residual", lambda p, q: q.copy_(residual(p, q)))
    assert caught(p_value("bushy", "sampled", PLAIN))


def relabelled(kind: Drawn) -> Judge:
    """The right rule told that the drafts came about in another way."""

    def judge(tree: DraftTree, probs: Callable[[int], Tensor], uniform: Callable[[], float]) -> Accepted:
        return accept_sampled(replace(tree, drawn=(kind,) * len(tree)), probs, uniform)

    return judge


@pytest.mark.parametrize("shape", TREES)
def test_catches_fixed_drafts_judged_as_sampled(shape: str) -> None:
    assert caught(p_value(shape, "top", PLAIN, relabelled(S)))


def test_catches_siblings_without_replacement_judged_as_with() -> None:
    assert caught(p_value("bushy", "distinct", PLAIN, relabelled(S)))


@pytest.mark.parametrize("shape", TREES)
def test_catches_raw_q_against_processed_p(shape: str) -> None:
    assert caught(p_value(shape, "sampled", CUT, claimed=PLAIN))


def pruned(shape: str, kind: str, draft: Side, text: Text, uniform: Callable[[], float], claimed: Side) -> DraftTree:
    """Reranks drawn tokens: which siblings stay in the tree depends on what they are."""
    made = sketch(shape, kind, draft, text, uniform, claimed)
    best = sorted(range(len(made.tokens)), key=lambda node: -made.scores[node])
    return made.tree().only(sorted(best[:4]))


def merged(shape: str, kind: str, draft: Side, text: Text, uniform: Callable[[], float], claimed: Side) -> DraftTree:
    """Drops siblings that repeat an earlier one."""
    tree = sketch(shape, kind, draft, text, uniform, claimed).tree()
    tokens: list[int] = tree.tokens.tolist()
    stay = list[int]()
    for node, parent in enumerate(tree.parents):
        twins = (n for n in tree.children(parent) if n < node and tokens[n] == tokens[node])
        if parent in (ROOT, *stay) and not any(twins):
            stay.append(node)
    return tree.only(stay)


@pytest.mark.parametrize(("drafts", "kind"), [(pruned, "sampled"), (pruned, "distinct"), (merged, "sampled")])
def test_catches_drawn_tokens_left_out_for_what_they_are(drafts: Drafts, kind: str) -> None:
    assert caught(p_value("dynamic", kind, PLAIN, drafts=drafts))


def test_a_point_mass_is_the_truth_about_any_draft() -> None:
    """Judged as fixed, tokens may come from anywhere: also what the last test catches is lossless then."""
    assert p_value("dynamic", "sampled", PLAIN, relabelled(F), drafts=pruned) > LEVEL


def test_repeats_left_out_make_drawing_without_replacement() -> None:
    assert p_value("bushy", "sampled", PLAIN, relabelled(D), drafts=merged) > LEVEL


def test_typical_acceptance_is_lossy() -> None:
    def typical(tree: DraftTree, probs: Callable[[int], Tensor], uniform: Callable[[], float]) -> Accepted:
        return accept_typical(tree, probs, uniform, Rule().eps, Rule().delta)

    assert caught(p_value("chain", "top", PLAIN, typical))


# --- the loop and the proposer --------------------------------------------------------------------------------------


def loop_p_value(shape: Shape, draws: str, sampling: Sampling, seed: int, rule: str = "lossless") -> float:
    logits, drafter = table(seed + 1, VOCAB), MarkovDrafter(table(seed + 2, len(DRAFT_IDS)))
    target: Any = MarkovTarget(logits)
    proposer = DraftingProposer(drafter.session(None, SLOTS), drafter.vocab, shape, sampling, draws=draws)
    uniform, outs = random.Random(seed).random, list[Generation]()
    requests = deque(Request(PROMPT, uniform) for _ in range(TRIALS))
    decoder = Decoder(target, sampling, Limits(LENGTH), Rule(rule))
    generate_all(decoder, proposer, requests, SLOTS, done=lambda _, out: outs.append(out))
    assert sum(r.accepted for out in outs for r in out.rounds) > TRIALS / 4, "nearly nothing was accepted"
    return chi_square(Counter(tuple(out.tokens) for out in outs), Side(logits, sampling))


@pytest.mark.parametrize(("shape", "draws", "processors"), LOOPS)
def test_the_loop_follows_the_target(shape: Shape, draws: str, processors: str) -> None:
    assert loop_p_value(shape, draws, PROCESSORS[processors], seed=100) > LEVEL


def test_the_loop_with_typical_acceptance_is_caught() -> None:
    assert caught(loop_p_value(DynamicTree(2, branch=3, nodes=5), "top", PLAIN, 100, "typical"))
