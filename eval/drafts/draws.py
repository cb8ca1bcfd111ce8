"""How drafts are drawn: from draft logits to the tokens of one level of a draft tree.

At T = 0 the drafts of a node are its likeliest tokens. At T > 0 they are that too, or are drawn from q, the drafter's
distribution over the *full* vocabulary after the very logits processors that the target's p goes through.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from eval.drafts.tree import Drawn
from eval.verify.sampling import Sampling
from models.errors import EyasError
from models.vocab import DraftVocab

WAYS = {"without_replacement": Drawn.DISTINCT, "with_replacement": Drawn.SAMPLED, "top": Drawn.FIXED}
Contexts = Sequence[Sequence[int]]  # the tokens before each row; empty where the processors don't read them


class Start(NamedTuple):
    """Where the drafting of trees starts, for A sequences.

    logits [A, Vd]: of the token after the last confirmed one. limits: levels that each tree may have, at least 1.
    texts: the confirmed tokens, read only where ``Draws.needs_context``. uniforms in [0, 1): each sequence's own
    source of randomness. expand(rows, parents, tokens, depth) is ``DraftSession.expand`` with 0 .. A-1 for slots.
    """

    logits: Tensor
    limits: Sequence[int]
    texts: Contexts
    uniforms: Sequence[Callable[[], float]]
    expand: Callable[[Sequence[int], Tensor, Tensor, int], Tensor]


class Level(NamedTuple):
    """Children of n nodes, back to back, m in all. tokens [m] int64 target ids; q [n, V]: what the children of each
    node were drawn from, None for fixed ones; real [m] bool: False where nothing was left to draw, None: all are."""

    tokens: Tensor
    q: Tensor | None = None
    real: Tensor | None = None


class Draws:
    """Chooses drafts. ``way`` (one of WAYS, verify.draws) is how they are drawn at T > 0.

    Nothing here waits for the device, unless a logits processor does.
    """

    def __init__(self, vocab: DraftVocab, sampling: Sampling, way: str = "without_replacement") -> None:
        if way not in WAYS:
            raise EyasError(f"verify.draws={way}: must be one of {', '.join(WAYS)}")
        self.vocab, self.sampling = vocab, sampling
        self.kind = Drawn.FIXED if sampling.greedy else WAYS[way]
        self.needs_context = sampling.needs_context
        self._ids = vocab.ids

    def level(
        self,
        logits: Tensor,
        ranks: Sequence[Sequence[int]],
        uniforms: Sequence[Callable[[], float]],
        contexts: Contexts = (),
    ) -> Level:
        """The children of n nodes with these draft logits [n, Vd].

        Fixed: the tokens of the given ranks (0 = likeliest). Drawn: as many as there are ranks, in the order drawn,
        each with one number of the row's ``uniforms``, node by node. Without replacement a node has no more (real)
        children than q has tokens of positive probability; with replacement siblings may repeat.
        """
        if self.kind is Drawn.FIXED:
            width = 1 + max(max(row) for row in ranks)
            return Level(flat(self.top(logits, width, contexts), ranks))
        own = self.needs_context or self.vocab.is_full  # whether probabilities are worked out for every token
        mass = self.sampling.probs_rows(self._full(logits) if own else logits, contexts)
        numbers = [[uniform() for _ in row] for row, uniform in zip(ranks, uniforms, strict=True)]
        drawn, real = draw_rows(mass, numbers, distinct=self.kind is Drawn.DISTINCT)
        columns = [range(len(row)) for row in numbers]
        tokens = flat(drawn, columns)
        return Level(
            tokens if own else self.ids(logits.device)[tokens],
            mass if own else self._spread(mass, 0.0),  # temperature and cuts see no difference: the rest is impossible
            None if real is None else flat(real, columns),
        )

    def top(self, logits: Tensor, count: int, contexts: Contexts = ()) -> Tensor:
        """The likeliest tokens after draft logits [n, Vd]: [n, count] target ids, best first."""
        scores = self._scores(logits, contexts)
        # For one token argmax: of equals it takes the first, as greedy decoding does. topk promises nothing.
        best = scores.argmax(-1, keepdim=True) if count == 1 else scores.topk(count).indices
        return best if self.needs_context else self.ids(logits.device)[best]

    def ranked(self, logits: Tensor, count: int, contexts: Contexts = ()) -> tuple[Tensor, Tensor]:
        """The same and their log-probabilities [n, count] float32, as the drafter has them: before temperature and
        cuts, which change no order."""
        scores = self._scores(logits, contexts)
        best = scores.topk(count)
        total = scores.float().logsumexp(-1, keepdim=True)
        tokens = best.indices if self.needs_context else self.ids(logits.device)[best.indices]
        return tokens, (best.values.float() - total).clamp_(max=0.0)  # rounding must not lift a child over its parent

    def ids(self, device: torch.device) -> Tensor:
        """Target ids [Vd] of the draft vocabulary."""
        if self._ids.device != device:
            self._ids = self._ids.to(device)
        return self._ids

    def _scores(self, logits: Tensor, contexts: Contexts) -> Tensor:
        """What decides the order: the logits, or those of the full vocabulary after the penalties."""
        if not self.needs_context:
            return logits
        rows = zip(self._full(logits), contexts, strict=True)
        return torch.stack([self.sampling.penalised(row, context) for row, context in rows])

    def _full(self, logits: Tensor) -> Tensor:
        """Logits [n, V] float32: what the drafter can't say has -inf."""
        return logits.float() if self.vocab.is_full else self._spread(logits.float(), -math.inf)

    def _spread(self, rows: Tensor, fill: float) -> Tensor:
        """[n, Vd] -> [n, V]."""
        full = rows.new_full((rows.shape[0], self.vocab.size), fill)
        return full.index_copy_(1, self.ids(rows.device), rows)


def draw_rows(q: Tensor, numbers: Sequence[Sequence[float]], *, distinct: bool = False) -> tuple[Tensor, Tensor | None]:
    """Draw len(numbers[i]) tokens from each distribution q[i] of [n, V] by inversion (see sampling.draw), one
    after the other; ``distinct``: without those drawn before.

    Returns tokens [n, most], to be read as far as a row's numbers go, and which of them had any probability left
    (None: all).
    """
    counts = [len(row) for row in numbers]
    most, left = max(counts), q
    tokens = torch.zeros(len(counts), most, dtype=torch.int64, device=q.device)
    real = torch.ones_like(tokens, dtype=torch.bool) if distinct and most > 1 else None
    for turn in range(most):
        rows = torch.tensor([i for i, count in enumerate(counts) if count > turn], device=q.device)
        mass = left if len(rows) == len(counts) else left[rows]
        token = invert(mass, [row[turn] for row in numbers if len(row) > turn])
        tokens[rows, turn] = token
        if real is not None:
            real[rows, turn] = mass.gather(1, token[:, None])[:, 0] > 0
            left = left.clone() if left is q else left
            left[rows, token] = 0
    return tokens, real


def invert(mass: Tensor, uniforms: Sequence[float]) -> Tensor:
    """One token [n] from each row of mass [n, V], which need not sum to 1."""
    total = mass.cumsum(-1, dtype=torch.float64)
    wanted = total[:, -1:] * torch.tensor(uniforms, dtype=torch.float64, device=mass.device)[:, None]
    return torch.searchsorted(total, wanted, right=True).clamp_(max=mass.shape[-1] - 1)[:, 0]


def flat(table: Tensor, columns: Sequence[Sequence[int]]) -> Tensor:
    """Some columns of each row of table [n, m], back to back."""
    width = table.shape[1]
    places = [row * width + column for row, own in enumerate(columns) for column in own]
    whole = places == list(range(table.numel()))  # every chain: nothing to pick
    return table.flatten() if whole else table.flatten()[places]
