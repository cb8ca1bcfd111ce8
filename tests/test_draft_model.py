"""An independent draft model: its session against plain forwards of the model, and the check of its tokenizer."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tokenizers import AddedToken
from torch import Tensor

from eval.drafts.draft_model import ModelSession, check_same_tokenizer, draft_vocab
from models.blocks import Block, States
from models.errors import EyasError
from models.target import Target
from tests.tiny import tiny_target, tiny_tokenizer

FAMILIES = ("llama", "qwen3", "gemma3")  # every other layer of gemma3 sees 8 tokens only
NOTHING = torch.empty(0, 0)  # the target's states, which a draft model never looks at
VOCAB = 288


@pytest.fixture(scope="module", params=FAMILIES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    yield Target.load(str(tiny_target(tmp_path_factory.mktemp("draft"), request.param, layers=2, hidden=32)))


class Texts:
    """Sequences in the slots of a session, fed as a verifier would: the tokens that were accepted, then one more."""

    def __init__(self, model: Target, slots: int, seed: int) -> None:
        self.model, self.session, self.rng = model, ModelSession(model, slots), random.Random(seed)
        self.ids: dict[int, list[int]] = {}
        self.paths: dict[int, list[tuple[int, ...]]] = {}  # of the drafted nodes
        self.ready: list[int] = []  # the slots that were extended last

    def begin(self, slot: int) -> None:
        self.ids[slot] = [self.rng.randrange(VOCAB)]
        self.session.reset(slot, self.ids[slot][0])

    def move(self, source: int, to: int) -> None:
        self.session.move(source, to)
        self.ids[to] = self.ids.pop(source)
        self.paths.pop(source, None), self.paths.pop(to, None)

    def extend(self, new: dict[int, Sequence[int]]) -> None:
        """Confirm tokens and compare the logits after them with a plain forward of the whole text."""
        self.ready = slots = sorted(new)
        for slot in slots:
            self.ids[slot] += new[slot]
            self.paths[slot] = []
        flat = torch.tensor([token for slot in slots for token in new[slot]])
        out = self.session.extend(slots, [len(new[s]) for s in slots], NOTHING, NOTHING, flat)
        for slot, logits in zip(slots, out, strict=True):
            self.check(slot, (), logits)

    def expand(self, nodes: list[tuple[int, int, int]], depth: int) -> None:
        """Nodes of (slot, parent, token), compared in the same way."""
        slots, parents, tokens = (list(column) for column in zip(*nodes, strict=True))
        out = self.session.expand(slots, torch.tensor(parents), torch.tensor(tokens), depth)
        for (slot, parent, token), logits in zip(nodes, out, strict=True):
            before = self.paths[slot][parent] if parent >= 0 else ()
            self.paths[slot].append((*before, token))
            self.check(slot, self.paths[slot][-1], logits)

    def draft(self, widest: int, depths: int = 3) -> None:
        last = {slot: [-1] for slot in self.ready}
        for depth in range(1, depths + 1):
            nodes = []
            for slot in self.ready:
                parents = sorted(self.rng.choices(last[slot], k=self.rng.randint(1, widest)))
                start = len(self.paths[slot])
                last[slot] = list(range(start, start + len(parents)))
                nodes += [(slot, parent, self.rng.randrange(VOCAB)) for parent in parents]
            self.expand(nodes, depth)

    def accepted(self, slot: int) -> list[int]:
        """A random part of what was drafted, down to nothing, and a token that may be anything."""
        paths = [(), *self.paths.get(slot, [])]
        return [*self.rng.choice(paths), self.rng.randrange(VOCAB)]

    @torch.no_grad()
    def check(self, slot: int, path: Sequence[int], logits: Tensor) -> None:
        whole = self.model.model(torch.tensor([self.ids[slot] + list(path)]), use_cache=False).logits[0, -1]
        torch.testing.assert_close(logits, whole, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("widest", [1, 3])
def test_logits_are_those_of_plain_forwards(model: Target, widest: int) -> None:
    texts = Texts(model, 3, seed=widest)
    for slot, length in enumerate((40, 3, 11)):
        texts.begin(slot)
        texts.extend({slot: [texts.rng.randrange(VOCAB) for _ in range(length)]})
        if slot != 1:
            texts.draft(widest, 1)
    for round_ in range(9):
        slots = [[0, 1, 2], [0, 2], [1]][round_ % 3] if round_ < 7 else [0, 1]
        if round_ == 7:  # slot 0 ends, the last takes its place; a later text begins in slot 1
            texts.move(2, 0)
            texts.begin(1)
        texts.extend({slot: texts.accepted(slot) for slot in slots if slot in texts.ids})
        texts.draft(widest)


def test_accepted_drafts_are_not_read_again(model: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    texts, read, step = Texts(model, 1, seed=0), list[int](), model.step

    def counted(blocks: Sequence[Block], *args: Any, **options: Any) -> tuple[Tensor, States]:
        read.extend(block.tokens.numel() for block in blocks)
        return step(blocks, *args, **options)

    monkeypatch.setattr(model, "step", counted)
    texts.begin(0)
    texts.extend({0: [5, 6, 7]})
    texts.expand([(0, -1, 10), (0, -1, 11)], 1)
    texts.expand([(0, 0, 11), (0, 1, 10), (0, 1, 12)], 2)
    texts.extend({0: [11, 12, 20]})  # a path that is no prefix of the nodes in their order
    texts.expand([(0, -1, 30)], 1)
    texts.extend({0: [31, 30]})  # rejected
    texts.expand([(0, -1, 40)], 1)
    texts.extend({0: [40]})  # drafted as well, but its logits are wanted
    assert read == [4, 2, 3, 1, 1, 2, 1, 1]
    assert texts.session.cache.lengths == [len(texts.ids[0])] == [10]


def test_moves_at_odd_moments(model: Target) -> None:
    texts = Texts(model, 2, seed=2)
    texts.begin(0)
    texts.begin(1)
    texts.move(1, 0)  # before anything was read
    texts.begin(1)
    texts.extend({0: [5, 6], 1: [7]})
    texts.expand([(0, -1, 9), (1, -1, 9)], 1)
    texts.move(1, 0)
    texts.extend({0: [9, 4]})  # drafted in both slots; only one of the drafts was of this text
    texts.expand([(0, -1, 8), (0, -1, 9)], 1)


def test_long_texts(model: Target) -> None:
    """Past the places that a cache has at first, while drafting."""
    texts = Texts(model, 2, seed=1)
    for slot, length in enumerate((5, 252)):
        texts.begin(slot)
        texts.extend({slot: [texts.rng.randrange(VOCAB) for _ in range(length)]})
    for _ in range(2):
        texts.draft(2)
        texts.extend({slot: texts.accepted(slot) for slot in (0, 1)})


def test_drafts_only_what_both_models_have_rows_for(tmp_path: Path) -> None:
    small, large = (
        Target.load(str(tiny_target(tmp_path / str(n), layers=2, hidden=32, vocab=n))) for n in (264, VOCAB)
    )
    check_same_tokenizer(large, small)
    check_same_tokenizer(small, large)
    for target, draft in ((large, small), (small, large)):
        vocab = draft_vocab(target, draft)
        assert (len(vocab), vocab.size, vocab.ids.tolist()) == (264, target.vocab_size, list(range(264)))
        session = ModelSession(draft, 1, len(vocab))
        session.reset(0, 3)
        out = session.extend([0], [2], NOTHING, NOTHING, torch.tensor([4, 5]))
        whole = draft.model(torch.tensor([[3, 4, 5]])).logits[0, -1, :264]
        torch.testing.assert_close(out[0], whole, rtol=1e-4, atol=1e-4)
    session = ModelSession(small)  # an id of the target's padding, which the draft model has no row for
    session.reset(0, 280)
    assert bool(session.extend([0], [1], NOTHING, NOTHING, torch.tensor([287])).isfinite().all())


def named(tokenizer: Any, folder: str) -> Any:
    return SimpleNamespace(tokenizer=tokenizer, folder=Path(folder))


def renamed(names: dict[str, str]) -> Any:
    """The tiny tokenizer's vocabulary with other names for some tokens."""
    vocab = {names.get(token, token): number for token, number in tiny_tokenizer().get_vocab().items()}
    return SimpleNamespace(get_vocab=lambda: vocab)


def with_token(token: str, special: bool) -> Any:
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens([AddedToken(token, special=special)], special_tokens=special)
    return tokenizer


def test_another_tokenizer_is_refused() -> None:
    target = named(tiny_tokenizer(), "big")
    check_same_tokenizer(target, named(tiny_tokenizer(None), "small"))  # the chat template does not matter
    head = "drafter_path=model:small: not the tokenizer of target.path=big: "
    letters = target.tokenizer.get_vocab()
    cases = {
        "260 tokens, the target's has 259 (only the draft model knows '<call>')": with_token("<call>", False),
        f"token 'B' is {letters['B']} to the target and {letters['C']} to the draft model": renamed(
            {"B": "C", "C": "B"}
        ),
        f"token 'A' is {letters['A']} to the target and unknown to the draft model": renamed({"A": "<new>"}),
    }
    for message, tokenizer in cases.items():
        with pytest.raises(EyasError) as refused:
            check_same_tokenizer(target, named(tokenizer, "small"))
        assert str(refused.value).startswith(head + message)
    plain, special = (named(with_token("<call>", flag), "small") for flag in (False, True))
    with pytest.raises(EyasError, match="only the target knows '<call>'"):
        check_same_tokenizer(plain, target)
    with pytest.raises(EyasError, match="token '<call>' is special only to the draft model"):
        check_same_tokenizer(plain, special)
