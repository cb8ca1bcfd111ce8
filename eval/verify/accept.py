"""Acceptance rules: which path of a draft tree is kept, and the token that the target adds to it.

Lossless rules. The tokens they emit follow exactly the target's processed distribution, whatever the drafter:

* T = 0: the drafts that are the target's argmax.
* T > 0: rejection sampling over a tree (SpecInfer, arXiv:2305.09781, algorithm 2; for a chain Leviathan et al.,
  arXiv:2211.17192). At each node the children are tried in turn. Child ``x`` drawn from ``q`` is accepted with
  probability ``min(1, p(x) / q(x))``; when it is rejected, ``p`` becomes ``norm(max(p - q, 0))`` for the next child.
  When no child is left the pass ends with a token drawn from what ``p`` has become. For a token fixed by a rule ``q``
  is a point mass: accepted with probability ``p(x)``, else ``p`` goes on without it.

They hold if ``q`` is the whole truth about how a token came to stand in the tree. A proposer may decide by drawn tokens
what to draft *below* them, but it must not take a drawn token out of the tree, or change its place among its siblings,
because of which token it is.

Lossy rule. Typical acceptance (Medusa, arXiv:2401.10774, section 3.3) keeps whatever the target finds likely enough.
Its output is *not* distributed as the target's: reports must say so (:attr:`Rule.lossless`).

Pure functions of probabilities and random numbers; they know neither models nor caches.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from eval.drafts.tree import ROOT, DraftTree, Drawn
from eval.verify.sampling import Sampling, draw
from models.errors import EyasError

LOSSLESS = {"lossless": True, "typical": False}  # verify.rule: whether the output keeps the target's distribution


@dataclass(frozen=True)
class Rule:
    """verify.rule: ``lossless`` or ``typical``; eps and delta belong to the latter. Raises EyasError."""

    name: str = "lossless"
    eps: float = 0.09
    delta: float = 0.3  # the paper's choice: the square root of eps

    def __post_init__(self) -> None:
        if self.name not in LOSSLESS:
            raise EyasError(f"verify.rule={self.name}: must be one of {', '.join(LOSSLESS)}")
        if not 0 <= self.eps < 1:
            raise EyasError(f"verify.typical_eps={self.eps}: must lie in [0, 1)")
        if not 0 < self.delta < math.inf:
            raise EyasError(f"verify.typical_delta={self.delta}: must be positive")

    @property
    def lossless(self) -> bool:
        return LOSSLESS[self.name]


class Accepted(NamedTuple):
    """path: accepted nodes, root's child first; tokens: theirs and then the bonus token (never empty)."""

    path: list[int]
    tokens: list[int]


def accept(
    rule: Rule,
    sampling: Sampling,
    tree: DraftTree,
    logits: Tensor,
    ids: Sequence[int],
    uniform: Callable[[], float],
    best: Sequence[int] | None = None,
) -> Accepted:
    """Judge a verified tree.

    logits [1 + N, V]: the target's after the root and after each node; ids: the confirmed tokens, the root last (read
    only where ``sampling.needs_context``); best: the argmax of each row, from callers who read those of a whole batch
    at once (T = 0 without penalties).
    At T = 0 both rules are the argmax match: typical acceptance turns into it, as a point mass has no entropy.
    """
    drafted: list[int] = tree.tokens.tolist() if sampling.needs_context else []

    def context(node: int) -> Sequence[int]:
        return [*ids, *(drafted[n] for n in tree.path(node))] if sampling.needs_context else ids

    def probs(node: int) -> Tensor:
        return sampling.probs(logits[node + 1], context(node))

    if sampling.greedy and sampling.needs_context:
        return accept_greedy(tree, lambda node: int(sampling.argmax(logits[node + 1], context(node))))
    if sampling.greedy:
        argmax: Sequence[int] = logits.argmax(-1).tolist() if best is None else best
        return accept_greedy(tree, lambda node: argmax[node + 1])
    if rule.lossless:
        return accept_sampled(tree, probs, uniform)
    return accept_typical(tree, probs, uniform, rule.eps, rule.delta)


def accept_greedy(tree: DraftTree, choice: Callable[[int], int]) -> Accepted:
    """Follow the target's argmax. ``choice(node)`` is its token after that node (or ROOT)."""
    drafted: list[int] = tree.tokens.tolist()
    node, path, tokens = ROOT, list[int](), [choice(ROOT)]
    while (child := next((c for c in tree.children(node) if drafted[c] == tokens[-1]), None)) is not None:
        path.append(child)
        tokens.append(choice(child))
        node = child
    return Accepted(path, tokens)


def accept_sampled(tree: DraftTree, probs: Callable[[int], Tensor], uniform: Callable[[], float]) -> Accepted:
    """Rejection sampling down the tree.

    ``probs(node)`` is the target's processed distribution [V] after that node (or ROOT); it is asked for only
    on the accepted path, since each row costs a pass over the vocabulary. ``uniform()`` in [0, 1).
    """
    drafted: list[int] = tree.tokens.tolist()
    node, path, p = ROOT, list[int](), probs(ROOT)
    while tree.children(node):
        child, p = try_children(tree, drafted, node, p, uniform)
        if child is None:
            break
        path.append(child)
        node, p = child, probs(child)
    return Accepted(path, [*(drafted[n] for n in path), int(draw(p, uniform()))])


def try_children(
    tree: DraftTree, drafted: list[int], node: int, p: Tensor, uniform: Callable[[], float]
) -> tuple[int | None, Tensor]:
    """The first accepted child of ``node`` or None, and what is left of ``p`` after the rejections before it."""
    tried: list[int] = []  # DISTINCT siblings so far: later ones were drawn without them
    gone: list[int] = []  # FIXED siblings rejected since p last changed: taken out all at once, when that matters
    left = 1.0  # the mass of p without them
    for child in tree.children(node):
        token, kind = drafted[child], tree.drawn[child]
        if kind is Drawn.FIXED:
            chance = 0.0 if token in gone else float(p[token])
            if uniform() * left < chance:
                return child, p
            gone.append(token)
            left = max(left - chance, 0.0)  # rounding below zero would let an impossible token pass
            continue
        p, gone, left = without(p, gone), [], 1.0
        q = tree.q[tree.q_row[child]]
        repeated = kind is Drawn.DISTINCT and token in tried
        if kind is Drawn.DISTINCT:
            q = without(q, tried)
            tried.append(token)
        p_token, q_token = torch.stack((p[token], q[token])).tolist()
        if repeated or not q_token > 0:
            continue  # q had run out of tokens: this one wasn't drawn from it and decides nothing
        if uniform() * q_token < p_token:
            return child, p
        p = residual(p, q)
    return None, without(p, gone)


def residual(p: Tensor, q: Tensor) -> Tensor:
    """norm(max(p - q, 0)): what the target still has to emit once a draft from ``q`` is rejected, [V].

    Where nothing is left (p = q up to rounding, so that a rejection has no probability) ``p`` itself.
    """
    return normalised((p - q).clamp_(min=0), p)


def without(p: Tensor, tokens: list[int]) -> Tensor:
    """``p`` conditioned on none of ``tokens``: also the residual of point masses. A copy; ``p`` is shared."""
    if not tokens:
        return p
    left = p.clone()
    left[tokens] = 0
    return normalised(left, p)


def normalised(mass: Tensor, fallback: Tensor) -> Tensor:
    total = mass.sum()
    return torch.where(total > 0, mass / total, fallback)


def accept_typical(
    tree: DraftTree, probs: Callable[[int], Tensor], uniform: Callable[[], float], eps: float, delta: float
) -> Accepted:
    """Typical acceptance at T > 0; lossy. ``probs`` and ``uniform`` as for :func:`accept_sampled`.

    Draft ``x`` is accepted where ``p(x) > min(eps, delta * exp(-H(p)))``, with ``p`` the processed distribution
    (temperature included, as in the authors' code) and ``H`` its entropy in nats. Kept is the longest path of accepted
    nodes, of equally long ones the one through the sibling that stands first; then a token drawn from ``p`` follows.
    The paper makes the first token of a pass greedy and accepts it always, so that a pass yields something; the
    target's own token at the end does the same here, at any temperature.
    """
    drafted: list[int] = tree.tokens.tolist()
    rows: dict[int, Tensor] = {}

    def longest(node: int) -> list[int]:
        children, found = tree.children(node), list[int]()
        if children:
            p = rows[node] = probs(node)
            threshold = (-torch.special.entr(p).sum()).exp().mul(delta).clamp_(max=eps)
            likely: list[bool] = (p[[drafted[c] for c in children]] > threshold).tolist()
            for child in (c for c, ok in zip(children, likely, strict=True) if ok):
                found = max(found, [child, *longest(child)], key=len)  # the first of the longest
        return found

    path = longest(ROOT)
    last = path[-1] if path else ROOT
    bonus = draw(rows[last] if last in rows else probs(last), uniform())
    return Accepted(path, [*(drafted[n] for n in path), int(bonus)])
