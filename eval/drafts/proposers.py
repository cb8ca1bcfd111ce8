"""Who drafts: the contract between the verification loop and any drafter, and the drafters that need no model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from eval.drafts.shapes import AdaptiveDepth
from eval.drafts.tree import DraftTree
from models.blocks import States


class Proposer(Protocol):
    """Drafts for several sequences at a time, each in a slot of its own; those in use are always 0 .. n-1.

    begin(slot, prompt, uniform) forgets what the slot held; ``uniform`` in [0, 1) is the sequence's only source of
    randomness. commit(slot, states, next_ids) then confirms n positions: the target's *true* states of them and the
    tokens that follow them; the first commit covers the whole prompt and the token that prefill gave, each later one
    an accepted path and the token that the pass added. Whatever was drafted and not confirmed is gone.
    propose(limits) drafts for the slots 0 .. len(limits)-1 a tree each, of at most ``limits[slot]`` levels (0: none).
    move(source, to) puts a sequence into another slot.
    """

    def begin(self, slot: int, prompt: Sequence[int], uniform: Callable[[], float]) -> None: ...

    def commit(self, slot: int, states: States, next_ids: Sequence[int]) -> None: ...

    def propose(self, limits: Sequence[int]) -> list[DraftTree]: ...

    def move(self, source: int, to: int) -> None: ...


class PlainProposer:
    """No drafts: the loop then is plain cached decoding."""

    def begin(self, slot: int, prompt: Sequence[int], uniform: Callable[[], float]) -> None:
        pass

    def commit(self, slot: int, states: States, next_ids: Sequence[int]) -> None:
        pass

    def propose(self, limits: Sequence[int]) -> list[DraftTree]:
        return [DraftTree.empty()] * len(limits)

    def move(self, source: int, to: int) -> None:
        pass


class LimitedProposer:
    """Another proposer that drafts less where drafts gain little.

    adaptive: the levels of each sequence's trees follow its acceptance. off_above: with more sequences than this
    nothing is drafted; drafting goes on when there are fewer.
    """

    def __init__(self, inner: Proposer, adaptive: AdaptiveDepth | None = None, off_above: int | None = None) -> None:
        self.inner, self.adaptive, self.off_above = inner, adaptive, off_above
        self.drafted: dict[int, bool] = {}  # whether the slot's newest tree had any nodes

    def begin(self, slot: int, prompt: Sequence[int], uniform: Callable[[], float]) -> None:
        self.inner.begin(slot, prompt, uniform)
        self.drafted[slot] = False
        if self.adaptive:
            self.adaptive.begin(slot)

    def commit(self, slot: int, states: States, next_ids: Sequence[int]) -> None:
        if self.adaptive and self.drafted[slot]:
            self.adaptive.learn(slot, len(next_ids) - 1)
        self.drafted[slot] = False
        self.inner.commit(slot, states, next_ids)

    def propose(self, limits: Sequence[int]) -> list[DraftTree]:
        trees = self.inner.propose([self._limit(slot, limit, len(limits)) for slot, limit in enumerate(limits)])
        self.drafted |= {slot: bool(len(tree)) for slot, tree in enumerate(trees)}
        return trees

    def move(self, source: int, to: int) -> None:
        self.inner.move(source, to)
        self.drafted[to] = self.drafted.pop(source)
        if self.adaptive:
            self.adaptive.move(source, to)

    def _limit(self, slot: int, limit: int, active: int) -> int:
        if self.off_above is not None and active > self.off_above:
            return 0
        return min(limit, self.adaptive.levels(slot)) if self.adaptive else limit


class ScriptedProposer:
    """Drafts what ``script(tokens so far, limit)`` says: oracles and adversaries for tests, trees of any shape."""

    def __init__(self, script: Callable[[list[int], int], DraftTree | Sequence[int]]) -> None:
        self.script = script
        self.ids: dict[int, list[int]] = {}

    def begin(self, slot: int, prompt: Sequence[int], uniform: Callable[[], float]) -> None:
        self.ids[slot] = list(prompt[:1])

    def commit(self, slot: int, states: States, next_ids: Sequence[int]) -> None:
        self.ids[slot] += next_ids

    def propose(self, limits: Sequence[int]) -> list[DraftTree]:
        return [self._draft(slot, limit) for slot, limit in enumerate(limits)]

    def move(self, source: int, to: int) -> None:
        self.ids[to] = self.ids.pop(source)

    def _draft(self, slot: int, limit: int) -> DraftTree:
        drafted = self.script(list(self.ids[slot]), limit)
        return drafted if isinstance(drafted, DraftTree) else DraftTree.chain(drafted[:limit])
