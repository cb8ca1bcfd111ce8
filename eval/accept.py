"""Acceptance rules: which path of a draft tree is kept, and the token that the target adds to it.

Both rules are lossless: the tokens they emit follow exactly the target's processed distribution, whatever the
drafter. Pure functions of probabilities and random numbers; they know neither models nor caches.

Rejection sampling over a tree (SpecInfer, arXiv:2305.09781, algorithm 2; for a chain Leviathan et al.,
arXiv:2211.17192): at each node the children are tried in turn. Child ``x`` drawn from ``q`` is accepted with
probability ``min(1, p(x) / q(x))``; when it is rejected, ``p`` becomes ``norm(max(p - q, 0))`` for the next child.
When no child is left the pass ends with a token drawn from what ``p`` has become.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from eval.sampling import draw
from eval.tree import ROOT, DraftTree, Drawn


class Accepted(NamedTuple):
    """path: accepted nodes, root's child first; tokens: theirs and then the bonus token (never empty)."""

    path: list[int]
    tokens: list[int]


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
    removed: list[int] = []  # DISTINCT siblings already tried: later ones were drawn without them
    for child in tree.children(node):
        token, kind = drafted[child], tree.drawn[child]
        q = None if kind is Drawn.FIXED else without(tree.q[tree.q_row[child]], removed)
        p_token, q_token = torch.stack((p[token], p[token] if q is None else q[token])).tolist()
        if uniform() * (1.0 if q is None else q_token) < p_token:
            return child, p
        p = without(p, [token]) if q is None else residual(p, q)
        if kind is Drawn.DISTINCT:
            removed.append(token)
    return None, p


def residual(p: Tensor, q: Tensor) -> Tensor:
    """norm(max(p - q, 0)): what the target still has to emit once a draft from ``q`` is rejected, [V].

    Where nothing is left (p = q up to rounding, so that a rejection has no probability) ``p`` itself.
    """
    return normalised((p - q).clamp_(min=0), p)


def without(p: Tensor, tokens: list[int]) -> Tensor:
    """``p`` conditioned on none of ``tokens``: also the residual of a point mass. A copy; ``p`` is shared."""
    if not tokens:
        return p
    left = p.clone()
    left[tokens] = 0
    return normalised(left, p)


def normalised(mass: Tensor, fallback: Tensor) -> Tensor:
    total = mass.sum()
    return torch.where(total > 0, mass / total, fallback)
