"""Proposers: who drafts. The verification loop calls begin, commit and propose, and knows nothing else of them."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from eval.sampling import Sampling, draw
from eval.tree import DraftTree
from models.drafter import Drafter, DraftSession
from models.frozen import FrozenTarget


class TargetFeatures(Protocol):
    """What a proposer may read of the target: models.target.Features."""

    @property
    def taps(self) -> Tensor: ...  # [n, A*H]

    @property
    def final(self) -> Tensor: ...  # [n, H]


class Proposer(Protocol):
    """Drafts for one sequence at a time.

    begin(prompt) forgets everything. commit(features, next_ids) then confirms n positions: the target's *true*
    features of them and the tokens that follow them; the first commit covers the whole prompt and the token that
    prefill gave, each later one an accepted path and its bonus token. Whatever was drafted and not confirmed is
    gone. propose(limit) drafts a tree of at most ``limit`` levels (0 = none) after the last confirmed token.
    """

    def begin(self, prompt: Sequence[int]) -> None: ...

    def commit(self, features: TargetFeatures, next_ids: Sequence[int]) -> None: ...

    def propose(self, limit: int) -> DraftTree: ...


class PlainProposer:
    """No drafts: the loop then is plain cached decoding."""

    def begin(self, prompt: Sequence[int]) -> None:
        pass

    def commit(self, features: TargetFeatures, next_ids: Sequence[int]) -> None:
        pass

    def propose(self, limit: int) -> DraftTree:
        return DraftTree.empty()


class DrafterProposer:
    """Chains of ``gamma`` tokens from a trained drafter: its argmax at T = 0, drawn from its q otherwise.

    ``greedy_drafts`` takes the argmax at T > 0 too (fixed drafts, as vLLM does by default). Drafting never waits
    for the device: the tokens of a chain are fed back without being read.
    """

    def __init__(
        self,
        drafter: Drafter,
        frozen: FrozenTarget,
        gamma: int,
        sampling: Sampling,
        *,
        uniform: Callable[[], float] = random.random,
        greedy_drafts: bool = False,
    ) -> None:
        self.drafter, self.frozen, self.gamma = drafter, frozen, gamma
        self.sampling, self.uniform = sampling, uniform
        self.sampled = not (sampling.greedy or greedy_drafts)
        self.vocab_ids = drafter.vocab.ids.to(frozen.head.device)
        self.session: DraftSession | None = None
        self.logits: Tensor | None = None  # [Vd] for the token after the last confirmed one
        self.ids: list[int] = []

    def begin(self, prompt: Sequence[int]) -> None:
        self.session, self.logits = self.drafter.session(self.frozen), None
        self.ids = list(prompt[:1])

    def commit(self, features: TargetFeatures, next_ids: Sequence[int]) -> None:
        assert self.session is not None, "begin comes first"
        tokens = torch.tensor(next_ids, dtype=torch.int64, device=self.vocab_ids.device)
        self.logits = self.session.extend(features.taps, features.final, tokens)
        self.ids += next_ids

    def propose(self, limit: int) -> DraftTree:
        assert self.session is not None and self.logits is not None, "commit comes first"
        tokens, q, logits = list[Tensor](), list[Tensor](), self.logits
        for depth in range(min(self.gamma, limit)):
            if depth:
                parent = torch.tensor([depth - 2])  # on the host: the session asks for its value
                logits = self.session.expand(parent, tokens[-1])[0]
            tokens.append(self.choose(logits, tokens, q))
        return DraftTree.chain(torch.cat(tokens), q) if tokens else DraftTree.empty(self.vocab_ids.device)

    def choose(self, logits: Tensor, before: Sequence[Tensor], q: list[Tensor]) -> Tensor:
        """The next token of the chain as a target id, [1]; where it is sampled, its distribution joins ``q``."""
        if not self.sampled and not self.sampling.extra:
            return self.vocab_ids[logits.argmax(-1, keepdim=True)]
        full = logits.new_full((self.drafter.vocab.size,), float("-inf"), dtype=torch.float32)
        full[self.vocab_ids] = logits.float()
        context = [*self.ids, *(int(t) for t in before)] if self.sampling.extra else []
        if not self.sampled:
            return self.sampling.argmax(full, context)[None]
        q.append(self.sampling.probs(full, context))
        return draw(q[-1], self.uniform())[None]


class ScriptedProposer:
    """Drafts what ``script(tokens so far, limit)`` says: oracles and adversaries for tests, trees of any shape."""

    def __init__(self, script: Callable[[list[int], int], DraftTree | Sequence[int]]) -> None:
        self.script = script
        self.ids: list[int] = []

    def begin(self, prompt: Sequence[int]) -> None:
        self.ids = list(prompt[:1])

    def commit(self, features: TargetFeatures, next_ids: Sequence[int]) -> None:
        self.ids += next_ids

    def propose(self, limit: int) -> DraftTree:
        drafted = self.script(list(self.ids), limit)
        return drafted if isinstance(drafted, DraftTree) else DraftTree.chain(drafted[:limit])


def random_proposer(vocab_size: int, gamma: int, seed: int = 0) -> ScriptedProposer:
    """Chains of uniformly random tokens, whatever the text: a drafter that knows nothing."""
    rng = random.Random(seed)
    return ScriptedProposer(lambda ids, limit: [rng.randrange(vocab_size) for _ in range(min(gamma, limit))])
