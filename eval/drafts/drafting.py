"""Drafting with a model: a session (of a trained drafter or an independent model) under a tree shape."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from eval.drafts.draws import Draws, Start
from eval.drafts.shapes import Shape
from eval.drafts.tree import DraftTree, Drawn
from eval.verify.sampling import Sampling
from models.blocks import States
from models.drafter import DraftSession
from models.vocab import DraftVocab

WAITING = 64  # positions of a sequence that are remembered at most, each with the target's states


@dataclass
class Text:
    """What is known of one slot's sequence. ids: its confirmed tokens; states, next_ids: what was committed and not yet
    given to the session; logits: of the token after the last confirmed one, where nothing is pending."""

    uniform: Callable[[], float]
    ids: list[int]
    states: list[States] = field(default_factory=list)
    next_ids: list[int] = field(default_factory=list)
    logits: Tensor | None = None


class DraftingProposer:
    """The proposer (see eval/drafts/proposers.py) of a draft model.

    shape: already fitted to the drafter (``shapes.fit``). draws: one of ``draws.WAYS``, how drafts are drawn
    at T > 0. A prompt is read when it is committed, as engines do in their prefill; later commits are only remembered,
    and read when drafts are wanted next, of all slots in one forward, or when WAITING positions have come together.
    A trained drafter's chains are drafted without waiting for the device, unless a logits processor reads the text.
    """

    def __init__(
        self,
        session: DraftSession,
        vocab: DraftVocab,
        shape: Shape,
        sampling: Sampling,
        *,
        draws: str = "without_replacement",
    ) -> None:
        assert not shape.trimmed(None, len(vocab))[1], "the shape has to be fitted to the draft vocabulary first"
        self.session, self.shape = session, shape
        self.draws = Draws(vocab, sampling, draws)
        self.texts: dict[int, Text] = {}

    @property
    def drawn(self) -> Drawn:
        """How the drafts come about."""
        return Drawn.FIXED if self.shape.fixed else self.draws.kind

    def begin(self, slot: int, prompt: Sequence[int], uniform: Callable[[], float]) -> None:
        self.texts[slot] = Text(uniform, list(prompt[:1]))
        self.session.reset(slot, prompt[0])

    def move(self, source: int, to: int) -> None:
        self.texts[to] = self.texts.pop(source)
        self.session.move(source, to)

    def commit(self, slot: int, states: States, next_ids: Sequence[int]) -> None:
        text = self.texts[slot]
        text.ids += next_ids
        text.states.append(states)
        text.next_ids += next_ids
        if len(text.ids) == len(next_ids) + 1 or len(text.next_ids) >= WAITING:  # the prompt, or nothing is drafted
            self._extend([slot])

    def propose(self, limits: Sequence[int]) -> list[DraftTree]:
        trees = [DraftTree.empty()] * len(limits)
        levels = [min(limit, self.shape.levels) for limit in limits]
        slots = [slot for slot, allowed in enumerate(levels) if allowed > 0]
        if slots:
            start = self._start(slots, [levels[slot] for slot in slots])
            for slot, tree in zip(slots, self.shape.draft(start, self.draws), strict=True):
                trees[slot] = tree
        return trees

    def _start(self, slots: Sequence[int], limits: Sequence[int]) -> Start:
        def expand(rows: Sequence[int], parents: Tensor, tokens: Tensor, depth: int) -> Tensor:
            return self.session.expand([slots[row] for row in rows], parents, tokens, depth)

        texts = [self.texts[slot] for slot in slots]
        if pending := [slot for slot in slots if self.texts[slot].next_ids]:
            self._extend(pending)
        roots = [text.logits for text in texts if text.logits is not None]
        assert len(roots) == len(texts), "commit comes first"
        logits = roots[0][None] if len(roots) == 1 else torch.stack(roots)
        return Start(logits, limits, [t.ids for t in texts], [t.uniform for t in texts], expand)

    def _extend(self, slots: Sequence[int]) -> None:
        """Give the session all that these slots have pending, and keep the draft logits behind it."""
        texts = [self.texts[slot] for slot in slots]
        states = [part for text in texts for part in text.states]
        taps, final = (torch.cat(parts) if len(parts) > 1 else parts[0] for parts in zip(*states, strict=True))
        ids = [token for text in texts for token in text.next_ids]
        counts = [len(text.next_ids) for text in texts]
        next_ids = torch.tensor(ids, dtype=torch.int64)  # on the host: an independent model reads them there
        logits = self.session.extend(slots, counts, taps, final, next_ids)
        for text, root in zip(texts, logits, strict=True):
            text.states, text.next_ids, text.logits = [], [], root
