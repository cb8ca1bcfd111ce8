"""Where the true next token stood in the drafter's distribution, on texts that the target itself wrote.

Rank 0 is the drafter's first choice. A node of a static tree is named by the ranks along its path (Medusa, arXiv
2401.10774, section 3.3), and a pass that begins at a slot accepts it exactly if the ranks of the true tokens there
begin with that path: drafted nodes on the path of the true tokens read what ``unroll`` reads (the index rule of
models/batch.py). So the ranks tell what any static tree would have accepted, without decoding. For greedy texts that
is what a greedy pass accepts; for sampled texts, what a lossless pass with drafts of fixed rank accepts on average.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from eval.numbers.simulated import Text, text_batch
from models.batch import slots_of, valid_slots
from models.drafter import Drafter
from models.frozen import FrozenTarget
from models.target import LOGITS_AT_ONCE, Target

RankPath = tuple[int, ...]
OUTSIDE = -1  # the rank of a token that the drafter has no logit for


@dataclass(frozen=True, eq=False)
class Ranks:
    """S slots of all texts, K depths, numpy.

    index [S]: ascending; neighbours of one text are consecutive, those of different texts are not. valid [K, S]: as
    in ``models.batch.Slots``. rank [K, S] int64: rank of x[p+2+k] at depth k of slot p; -1 where it is not valid, or
    the token is outside the draft vocabulary.
    """

    index: np.ndarray
    valid: np.ndarray
    rank: np.ndarray

    @property
    def depths(self) -> int:
        return int(self.rank.shape[0])

    def __len__(self) -> int:
        return int(self.rank.shape[1])

    def complete(self) -> Ranks:
        """The slots that are valid at every depth: one common number of slots for all paths."""
        whole = self.valid.all(0)
        return Ranks(self.index[whole], self.valid[:, whole], self.rank[:, whole])


@torch.no_grad()
def drafter_ranks(
    target: Target,
    drafter: Drafter,
    frozen: FrozenTarget,
    texts: Iterable[Text],
    depths: int,
    *,
    at_once: int = LOGITS_AT_ONCE,
) -> Ranks:
    """Ranks of a trained drafter. at_once: draft logits in memory at a time."""
    found, start = list[Ranks](), 0
    to_draft = draft_ids(drafter, frozen)
    head = drafter.head(frozen)  # its scale and soft cap don't change an order
    for text in texts:
        batch = text_batch(target, text)
        slots = slots_of(batch, depths)
        if len(slots):
            states = drafter.unroll(batch, slots, frozen)
            k, s = slots.rows()
            true = to_draft[batch.input_ids[slots.index[s] + 2 + k]]
            rank = torch.full(slots.valid.shape, OUTSIDE, dtype=torch.int64, device=true.device)
            parts = zip(states.split(slots.counts), true.split(slots.counts), strict=True)
            rank[k, s] = torch.cat(
                [
                    ranks_of(part, head.of(depth).to(drafter.dtype), own, at_once, head.bias)
                    for depth, (part, own) in enumerate(parts)
                ]
            )
            found.append(Ranks(*(part.cpu().numpy() for part in (slots.index + start, slots.valid, rank))))
        start += batch.num_tokens + 1
    return joined(found, depths)


@torch.no_grad()
def model_ranks(
    model: Target, texts: Iterable[Text], depths: int, vocab_size: int, *, at_once: int = LOGITS_AT_ONCE
) -> Ranks:
    """Ranks of an independent draft model, among the first ``vocab_size`` ids (the target's).

    It reads whole texts, so depth k of slot p sees x[0 .. p+1+k]: one forward gives all depths. Of an id that only
    the target has it reads the same other one as in drafting (eval/drafts/draft_model.py).
    """
    found, start = list[Ranks](), 0
    weight, bias = model.head.weight[:vocab_size], model.head.bias
    for text in texts:
        ids = torch.tensor([*text.prompt, *text.output], dtype=torch.int64, device=model.device)
        supervised = torch.arange(len(ids), device=ids.device) >= len(text.prompt)
        valid = valid_slots(supervised, torch.tensor([0, len(ids)], device=ids.device), depths)
        index = valid[0].nonzero().squeeze(1)
        if len(index):
            first = int(index[0]) + 1  # rank of x[t+1] after x[..t], from t = first on
            true = torch.where(ids < len(weight), ids, OUTSIDE)[first + 1 :]
            states = model.features([ids.clamp_max(model.vocab_size - 1)])[0].final[first:-1]
            after = ranks_of(states, weight, true, at_once, None if bias is None else bias[:vocab_size])
            k, s = valid[:, index].nonzero(as_tuple=True)
            rank = torch.full((depths, len(index)), OUTSIDE, dtype=torch.int64, device=ids.device)
            rank[k, s] = after[index[s] + 1 + k - first]
            found.append(Ranks(*(part.cpu().numpy() for part in (index + start, valid[:, index], rank))))
        start += len(ids) + 1
    return joined(found, depths)


def ranks_of(states: Tensor, weight: Tensor, true: Tensor, at_once: int, bias: Tensor | None = None) -> Tensor:
    """Rank [R] of the tokens ``true`` [R] under the head weight [V, H]; of equal logits the lower id comes first."""
    ids = torch.arange(weight.shape[0], device=weight.device)
    ranks = []
    rows = max(1, at_once // weight.shape[0])
    for state, token in zip(states.split(rows), true.split(rows), strict=True):
        logits = state @ weight.T
        logits = (logits if bias is None else logits + bias).float()
        own = logits.gather(1, token.clamp_min(0)[:, None])
        before = (logits > own) | ((logits == own) & (ids < token[:, None]))
        ranks.append(torch.where(token < 0, OUTSIDE, before.sum(1)))
    return torch.cat(ranks)


def draft_ids(drafter: Drafter, frozen: FrozenTarget) -> Tensor:
    """[V] the draft id of each target id, -1 outside the draft vocabulary."""
    ids = drafter.vocab.ids.to(frozen.head.device)
    to_draft = torch.full((drafter.vocab.size,), OUTSIDE, dtype=torch.int64, device=ids.device)
    to_draft[ids] = torch.arange(len(drafter.vocab), device=ids.device)
    return to_draft


def joined(parts: Sequence[Ranks], depths: int) -> Ranks:
    if not parts:
        return Ranks(np.zeros(0, np.int64), np.zeros((depths, 0), np.bool_), np.zeros((depths, 0), np.int64))
    pieces = ([p.index for p in parts], [p.valid for p in parts], [p.rank for p in parts])
    return Ranks(*(np.concatenate(piece, -1) for piece in pieces))


def path_counts(ranks: Ranks) -> dict[RankPath, int]:
    """How many slots begin with exactly that path of ranks, for every path that occurs: a trie by its paths.

    A path is counted over the slots that are valid to its depth; () is the number of slots. Nothing is capped.
    """
    counts: Counter[RankPath] = Counter({(): len(ranks)})
    for column in ranks.rank.T.tolist():
        path: RankPath = ()
        for rank in column:
            if rank == OUTSIDE:
                break
            path = (*path, rank)
            counts[path] += 1
    return dict(counts)


def growth_order(ranks: Ranks, paths: Sequence[RankPath]) -> np.ndarray:
    """[K, S] for each depth of each slot, the number in ``paths`` of the path of true tokens that ends there.

    len(paths) where it is not among them. With parents before children the tree of the first n paths accepts
    ``(order < n).sum(0)`` tokens at each slot.
    """
    number: Mapping[RankPath, int] = {path: i for i, path in enumerate(paths)}
    order = np.full(ranks.rank.shape, len(paths), dtype=np.int64)
    for s, column in enumerate(ranks.rank.T.tolist()):
        path: RankPath = ()
        for k, rank in enumerate(column):
            path = (*path, rank)
            if path not in number:
                break
            order[k, s] = number[path]
    return order


def walk(accepted: np.ndarray, index: np.ndarray) -> tuple[int, int]:
    """(accepted tokens, passes) of decoding the texts when a pass that begins at slot s accepts ``accepted[s]``.

    Passes start at the first slot of every text; one that accepts j at slot p is followed by one at p + 1 + j.
    """
    following = np.flatnonzero(np.diff(index) != 1) + 1
    ends = iter([*following.tolist(), len(index)])
    tokens, steps = accepted.tolist(), 0
    total, slot, end = 0, 0, next(ends)
    while slot < len(index):
        total, steps = total + tokens[slot], steps + 1
        slot += 1 + tokens[slot]
        if slot >= end:
            slot, end = end, next(ends, len(index))
    return total, steps
