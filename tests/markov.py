"""A target and a drafter that are tables, and a second opinion about the logits processors.

Logits depend on the last two tokens, the drafter knows a part of the vocabulary only, and everything that the
verification loop asks of a target, a cache or a drafting session is here in its plainest form: lists of tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from eval.verify.sampling import Sampling
from models.blocks import Block, States
from models.vocab import DraftVocab

VOCAB = 5
DRAFT_IDS = (0, 1, 3, 4)  # token 2 is never drafted


def table(seed: int, columns: int, spread: float = 1.0) -> Tensor:
    """Logits [VOCAB, VOCAB, columns] after each pair of tokens."""
    return spread * torch.randn(VOCAB, VOCAB, columns, generator=torch.Generator().manual_seed(seed))


def full_rows(draft: Tensor) -> Tensor:
    """Draft logits [..., Vd] over the full vocabulary: minus infinity where nothing is drafted."""
    full = torch.full((*draft.shape[:-1], VOCAB), -math.inf)
    full[..., list(DRAFT_IDS)] = draft
    return full


def reference_probs(logits: Sequence[float], context: Sequence[int], sampling: Sampling) -> list[float]:
    """The processed distribution by the definitions of the processors, in float64 and without any library."""
    scores = list(logits)
    for token in set(context):
        scores[token] *= sampling.repetition_penalty if scores[token] < 0 else 1 / sampling.repetition_penalty
    scores = [score / sampling.temperature for score in scores]
    ranked = sorted(range(len(scores)), key=lambda token: -scores[token])
    if sampling.top_k and sampling.top_k < len(ranked):
        worst = scores[ranked[sampling.top_k - 1]]
        ranked = [token for token in ranked if scores[token] >= worst]
    weight = {token: math.exp(scores[token] - scores[ranked[0]]) for token in ranked}
    total, mass = sum(weight.values()), 0.0
    stay = list[int]()
    for token in ranked:  # top-p: the likeliest ones, until they have that much mass
        if stay and mass >= sampling.top_p:
            break
        mass += weight[token] / total
        if weight[token] >= sampling.min_p * weight[ranked[0]]:
            stay.append(token)
    kept = sum(weight[token] for token in stay)
    return [weight[token] / kept if token in stay else 0.0 for token in range(len(scores))]


class TableCache:
    """The tokens that a KV cache would hold: confirmed ones and pending ones with their depths, for each slot."""

    def __init__(self, slots: int) -> None:
        self.confirmed: list[list[int]] = [[] for _ in range(slots)]
        self.waiting: list[list[tuple[int, int]]] = [[] for _ in range(slots)]

    def keep(self, slot: int, nodes: Sequence[int]) -> None:
        assert list(nodes) == sorted(set(nodes))
        self.confirmed[slot] += [self.waiting[slot][node][0] for node in nodes]
        self.waiting[slot] = []

    def reset(self, slot: int) -> None:
        self.confirmed[slot], self.waiting[slot] = [], []

    def move(self, source: int, to: int) -> None:
        self.confirmed[to], self.waiting[to] = self.confirmed[source], []
        self.reset(source)


class MarkovTarget:
    """The interface of models.target.Target. States: the token itself, as a float."""

    vocab_size = VOCAB
    device = torch.device("cpu")

    def __init__(self, logits: Tensor) -> None:
        self.table = logits

    def new_cache(self, slots: int = 1) -> TableCache:
        return TableCache(slots)

    def step(
        self, blocks: Sequence[Block], cache: TableCache, first: int = 0, *, last_only: bool = False
    ) -> tuple[Tensor, States]:
        rows, pairs, every = list[int](), list[tuple[int, int]](), list[int]()
        for slot, block in enumerate(blocks, first):
            tokens: list[int] = block.tokens.tolist()
            waiting, before = cache.waiting[slot], len(cache.waiting[slot])
            depths = block.depths or range(before, before + len(tokens))
            waiting += zip(tokens, depths, strict=True)
            for i in range(len(tokens)):
                seen = range(before + i + 1) if block.seen is None else block.seen[i].nonzero()[:, 0].tolist()
                assert [waiting[j][1] for j in seen] == list(range(len(seen))), "position = depth"
                text = [*cache.confirmed[slot][-1:], *(waiting[j][0] for j in seen)]
                pairs.append((text[-2], text[-1]) if len(text) > 1 else (text[0], text[0]))
            every += tokens
            rows.append(len(every) - 1)
        asked = torch.tensor([pairs[row] for row in rows] if last_only else pairs)
        own = torch.tensor(every)[:, None].float()
        return self.table[asked[:, 0], asked[:, 1]], States(own, own)


class MarkovDrafter:
    """The interface of models.drafter.Drafter as far as drafting goes."""

    max_depth = None
    max_positions = None

    def __init__(self, draft: Tensor) -> None:
        self.vocab = DraftVocab(torch.tensor(DRAFT_IDS), VOCAB)
        self.table = draft  # [VOCAB, VOCAB, Vd]

    def session(self, frozen: Any, slots: int = 1) -> MarkovSession:
        return MarkovSession(self.table, slots)


@dataclass
class Drafted:
    """A slot of a session: the last two confirmed tokens, then the last two tokens at each drafted node."""

    last: tuple[int, int] = (-1, -1)
    nodes: list[tuple[int, int]] = field(default_factory=list)


class MarkovSession:
    """Drafts from the pair of the last two tokens; the first of them it learns from the target's states alone."""

    def __init__(self, draft: Tensor, slots: int) -> None:
        self.table = draft
        self.slots = [Drafted() for _ in range(slots)]

    def reset(self, slot: int, first_token: int) -> None:
        self.slots[slot] = Drafted()

    def move(self, source: int, to: int) -> None:
        self.slots[to], self.slots[source] = self.slots[source], Drafted()

    def extend(
        self, slots: Sequence[int], counts: Sequence[int], taps: Tensor, final: Tensor, next_ids: Tensor
    ) -> Tensor:
        end = 0
        for slot, count in zip(slots, counts, strict=True):
            end += count
            self.slots[slot] = Drafted((int(final[end - 1, 0]), int(next_ids[end - 1])))
        return self._rows([self.slots[slot].last for slot in slots])

    def expand(self, slots: Sequence[int], parents: Tensor, tokens: Tensor, depth: int) -> Tensor:
        pairs = []
        for slot, parent, token in zip(slots, parents.tolist(), tokens.tolist(), strict=True):
            one = self.slots[slot]
            assert (parent == -1) == (depth == 1)
            pairs.append(((one.last if parent == -1 else one.nodes[parent])[1], token))
        for slot, pair in zip(slots, pairs, strict=True):
            self.slots[slot].nodes.append(pair)
        return self._rows(pairs)

    def _rows(self, pairs: Sequence[tuple[int, int]]) -> Tensor:
        a, b = torch.tensor(pairs).T
        return self.table[a, b]
