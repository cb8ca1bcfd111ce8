"""N-gram drafting (prompt lookup): what followed the text's last tokens where they stood before.

The rule, as vLLM's n-gram proposer has it: take the longest n, min_n <= n <= max_n, whose last n tokens occur earlier
in the text (prompt and output alike; the two may overlap); of its occurrences the first one; draft the tokens that
follow it there, at most gamma of them and none beyond the end of the text. Nothing occurs twice: nothing is drafted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from eval.drafts.tree import DraftTree
from models.blocks import States
from models.errors import EyasError

TOKEN_BITS = 32  # of an n-gram's number; ids are smaller


class NgramIndex:
    """A growing text and where each of its n-grams first stood.

    Appending and looking up take time in proportion to ``max_n - min_n + 1``, however long the text; memory grows by
    as many entries a token. An n-gram's key is one integer of its token ids, and the next key is a shift away.
    """

    def __init__(self, min_n: int, max_n: int) -> None:
        self.min_n, self.max_n = min_n, max_n
        self.ids: list[int] = []
        self._last = 0  # key of the last max_n tokens
        self._masks = {n: (1 << TOKEN_BITS * n) - 1 for n in range(min_n, max_n + 1)}
        self._after: dict[int, dict[int, int]] = {n: {} for n in self._masks}  # key -> where its first follower stands

    def append(self, ids: Sequence[int]) -> None:
        for token in ids:
            self.ids.append(token)
            self._last = (self._last << TOKEN_BITS | token) & self._masks[self.max_n]
            for n, mask in self._masks.items():
                if n <= len(self.ids):
                    self._after[n].setdefault(self._last & mask, len(self.ids))

    def follow(self, count: int) -> list[int]:
        """At most ``count`` tokens that the rule drafts after the text."""
        for n in range(min(self.max_n, len(self.ids)), self.min_n - 1, -1):
            start = self._after[n][self._last & self._masks[n]]
            if start < len(self.ids):  # otherwise the end of the text is where it first stands
                return self.ids[start : start + max(count, 0)]
        return []


class NgramProposer:
    """Chains of at most ``gamma`` fixed drafts out of each sequence's own text; no model. See the rule above.

    Drafts are a point mass at every temperature, so sampling stays lossless.
    """

    def __init__(self, min_n: int, max_n: int, gamma: int) -> None:
        if not 1 <= min_n <= max_n:
            raise EyasError(f"verify.ngram_min={min_n}, verify.ngram_max={max_n}: must be 1 <= ngram_min <= ngram_max")
        if gamma < 1:
            raise EyasError(f"verify.gamma={gamma}: must be at least 1")
        self.min_n, self.max_n, self.gamma = min_n, max_n, gamma
        self._texts: dict[int, NgramIndex] = {}
        self._new: dict[int, list[int]] = {}  # confirmed, but not yet in the index

    def begin(self, slot: int, prompt: Sequence[int], uniform: Callable[[], float]) -> None:
        self._texts[slot] = NgramIndex(self.min_n, self.max_n)
        self._new[slot] = list(prompt[:1])  # commit brings the rest

    def commit(self, slot: int, states: States, next_ids: Sequence[int]) -> None:
        self._new[slot] += next_ids

    def propose(self, limits: Sequence[int]) -> list[DraftTree]:
        return [self._propose(slot, min(self.gamma, limit)) for slot, limit in enumerate(limits)]

    def _propose(self, slot: int, count: int) -> DraftTree:
        text = self._texts[slot]
        text.append(self._new[slot])
        self._new[slot] = []
        return DraftTree.chain(text.follow(count))

    def move(self, source: int, to: int) -> None:
        self._texts[to], self._new[to] = self._texts.pop(source), self._new.pop(source)
