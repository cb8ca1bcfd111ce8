"""An independent draft model: a smaller language model with the target's tokenizer that drafts from the text alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from models.blocks import Block
from models.draft_session import Tails
from models.errors import EyasError
from models.target import Target
from models.vocab import DraftVocab

READ_ALONE = 32  # a longer block is no cheaper beside others, which would be padded to its length


class ModelSession:
    """The :class:`~models.drafter.DraftSession` of a model that never sees the target's states.

    Drafted nodes are pending tokens of its own KV cache. Those that turn out to be the confirmed text stay there,
    the others are dropped, so that no token is read twice.
    """

    def __init__(self, model: Target, slots: int = 1, vocab_size: int | None = None) -> None:
        """vocab_size: draft only ids below it (see :func:`draft_vocab`); None: all of the model's."""
        self.model, self.cache = model, model.new_cache(slots)
        self.size = min(vocab_size or model.vocab_size, model.vocab_size)
        self.tails = Tails(slots, model.device)
        self.unread: list[list[int]] = [[] for _ in range(slots)]  # x[0] of a text that begins
        self.drafted: list[list[tuple[Tensor, Tensor]]] = [[] for _ in range(slots)]  # parents and tokens, by level

    def reset(self, slot: int, first_token: int) -> None:
        self.cache.reset(slot)
        self._drop(slot)
        self.unread[slot] = [first_token]

    def move(self, source: int, to: int) -> None:
        self.cache.move(source, to)  # without what is drafted
        self._drop(source)
        self._drop(to)
        self.unread[to], self.unread[source] = self.unread[source], []

    @torch.no_grad()
    def extend(
        self, slots: Sequence[int], counts: Sequence[int], taps: Tensor, final: Tensor, next_ids: Tensor
    ) -> Tensor:
        known, blocks, at = next_ids.tolist(), list[Block](), 0
        for slot, count in zip(slots, counts, strict=True):
            new, at = self.unread[slot] + known[at : at + count], at + count
            kept = self._came_true(slot, new[:-1])  # the last one is read in any case, for its logits
            self.cache.keep(slot, kept)
            self._drop(slot)
            self.unread[slot] = []
            blocks.append(Block(torch.tensor(new[len(kept) :])))
        logits = self._step(slots, blocks, last_only=True)
        for slot, block in zip(slots, blocks, strict=True):
            self.cache.keep(slot, range(block.tokens.numel()))
        return logits

    @torch.no_grad()
    def expand(self, slots: Sequence[int], parents: Tensor, tokens: Tensor, depth: int) -> Tensor:
        counted, device = Counter(slots), self.model.device
        used, counts = list(counted), list(counted.values())
        where, own = torch.tensor([list(slots), self.tails.add(slots)], device=device)
        parents, tokens = parents.to(device), tokens.to(device)
        seen = self.tails.link(where, own, parents + 1)
        blocks = []
        for slot, *rows in zip(used, *(t.split(counts) for t in (parents, tokens, seen)), strict=True):
            nodes = self.tails.nodes[slot]
            self.drafted[slot].append((rows[0], rows[1]))
            chain = nodes == depth
            blocks.append(Block(rows[1], [depth - 1] * len(rows[1]), None if chain else rows[2][:, :nodes]))
        return self._step(used, blocks)

    def _came_true(self, slot: int, text: Sequence[int]) -> list[int]:
        """Numbers of the drafted nodes that begin the confirmed ``text``, a path from the root."""
        nodes = [pair for level in self.drafted[slot] for pair in zip(*(t.tolist() for t in level), strict=True)]
        numbers = {pair: number for number, pair in reversed(list(enumerate(nodes)))}  # the first of equal ones
        path = [-1]
        for token in text:
            node = numbers.get((path[-1], token))
            if node is None:
                break
            path.append(node)
        return path[1:]

    def _drop(self, slot: int) -> None:
        self.tails.drop(slot)
        self.drafted[slot] = []

    def _step(self, slots: Sequence[int], blocks: Sequence[Block], last_only: bool = False) -> Tensor:
        """Logits of one block for each of the ascending ``slots``: one forward per run of neighbours."""
        last = self.model.vocab_size - 1  # an id that only the target has rows for: any other will do in a draft
        blocks = [Block(b.tokens.clamp_max(last), b.depths, b.seen) for b in blocks]
        runs: list[list[int]] = []
        for i, slot in enumerate(slots):
            near = i > 0 and slots[i - 1] == slot - 1
            if near and max(blocks[j].tokens.numel() for j in (i - 1, i)) <= READ_ALONE:
                runs[-1].append(i)
            else:
                runs.append([i])
        out = [
            self.model.step([blocks[i] for i in run], self.cache, slots[run[0]], last_only=last_only) for run in runs
        ]
        return torch.cat([logits for logits, _ in out])[:, : self.size]


def draft_vocab(target: Target, draft: Target) -> DraftVocab:
    """What ``draft`` can draft for ``target``: the ids that both have rows for (some models pad their tables)."""
    return DraftVocab(torch.arange(min(target.vocab_size, draft.vocab_size)), target.vocab_size)


def check_same_tokenizer(target: Target, draft: Target) -> None:
    """Raise EyasError, naming the first difference, unless a token means the same to both models."""
    ours, theirs = target.tokenizer.get_vocab(), draft.tokenizer.get_vocab()
    where = f"drafter_path=model:{draft.folder}: not the tokenizer of target.path={target.folder}"
    if len(ours) != len(theirs):
        bigger, smaller, name = (ours, theirs, "target") if len(ours) > len(theirs) else (theirs, ours, "draft model")
        extra = min((token for token in bigger if token not in smaller), key=lambda token: bigger[token])
        raise EyasError(
            f"{where}: {len(theirs)} tokens, the target's has {len(ours)} (only the {name} knows {extra!r}). "
            "A draft model must share the target's tokenizer"
        )
    for token, number in sorted(ours.items(), key=lambda item: item[1]):
        if theirs.get(token) != number:
            other = f"{theirs[token]} to" if token in theirs else "unknown to"
            raise EyasError(f"{where}: token {token!r} is {number} to the target and {other} the draft model")
    special = [
        {i for i, token in model.tokenizer.added_tokens_decoder.items() if token.special} for model in (target, draft)
    ]
    for number in sorted(special[0] ^ special[1]):
        name = "the target" if number in special[0] else "the draft model"
        raise EyasError(f"{where}: token {target.tokenizer.convert_ids_to_tokens(number)!r} is special only to {name}")
