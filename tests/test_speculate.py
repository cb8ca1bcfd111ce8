"""The speculative loop: it writes what the target alone would write, whatever is drafted."""

from __future__ import annotations

import itertools
import random
from collections import deque
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from eval.drafts.draft_model import ModelSession
from eval.drafts.drafting import DraftingProposer
from eval.drafts.dynamic_tree import DynamicTree
from eval.drafts.ngram import NgramProposer
from eval.drafts.proposers import LimitedProposer, PlainProposer, Proposer, ScriptedProposer
from eval.drafts.shapes import AdaptiveDepth, Shape, StaticTree, chain
from eval.drafts.tree import ROOT, DraftTree, Drawn
from eval.numbers.metrics import Round
from eval.verify.sampling import Sampling
from eval.verify.speculate import Decoder, Generation, Limits, Request, generate, generate_all, output_text
from models.blocks import States
from models.drafter import Drafter
from models.eagle3 import Eagle3Drafter
from models.errors import EyasError
from models.target import Target
from models.vocab import DraftVocab
from tests.tiny import tiny_target

GREEDY = Sampling(0.0)
PROMPTS = [[1, 40, 50, 60], [1], list(range(3, 40)), [1, 7, 7, 7, 9]]
FAMILIES = ("llama", "qwen3", "gemma3")


@cache
def folder(root: Path, family: str) -> Path:
    return tiny_target(root / family, family, layers=3, hidden=32, vocab=270)


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Target]:
    root = tmp_path_factory.mktemp("targets")
    return cache(lambda family: Target.load(str(folder(root, family))))


def plain_greedy(target: Target, prompt: Sequence[int], new: int) -> list[int]:
    """Argmax decoding without any cache, straight from the Hugging Face model."""
    ids = torch.tensor([list(prompt)])
    with torch.no_grad():
        for _ in range(new):
            ids = torch.cat([ids, target.model(input_ids=ids, use_cache=False).logits[:, -1:].argmax(-1)], 1)
    return [int(i) for i in ids[0, len(prompt) :]]


def decode(
    target: Target,
    proposer: Proposer,
    prompt: Sequence[int],
    new: int = 24,
    sampling: Sampling = GREEDY,
    **limits: Any,
) -> Generation:
    return generate(Decoder(target, sampling, Limits(new, **limits)), proposer, prompt, random.Random(0).random)


def oracle(prompt: Sequence[int], text: Sequence[int], gamma: int) -> ScriptedProposer:
    """Drafts exactly what the target will say."""

    def script(ids: list[int], limit: int) -> list[int]:
        assert ids == [*prompt, *text][: len(ids)], "the proposer was told another text"
        done = len(ids) - len(prompt)
        return list(text[done : done + min(gamma, limit)])

    return ScriptedProposer(script)


def random_drafts(vocab_size: int, gamma: int) -> ScriptedProposer:
    """Chains of random tokens, whatever the text."""
    rng = random.Random(0)
    return ScriptedProposer(lambda ids, limit: [rng.randrange(vocab_size) for _ in range(min(gamma, limit))])


def adversary(prompt: Sequence[int], text: Sequence[int], vocab: int) -> ScriptedProposer:
    """Drafts that are right up to a depth that changes from pass to pass, and wrong from there on."""
    passes = itertools.count()

    def script(ids: list[int], limit: int) -> list[int]:
        done = len(ids) - len(prompt)
        drafts = list(text[done : done + 5])
        right = next(passes) % 6
        return [token if i < right else (token + 1) % vocab for i, token in enumerate(drafts)]

    return ScriptedProposer(script)


def bushy(prompt: Sequence[int], text: Sequence[int], vocab: int) -> ScriptedProposer:
    """Trees whose right branch comes last among its siblings, so that the cache has to be reordered."""

    def script(ids: list[int], limit: int) -> DraftTree:
        a, b, c = text[len(ids) - len(prompt) :][:3]
        tokens = [(a + 1) % vocab, a, (b + 2) % vocab, (b + 1) % vocab, b, (c + 1) % vocab, c]
        return DraftTree(torch.tensor(tokens), (ROOT, ROOT, 0, 1, 1, 4, 4), (Drawn.FIXED,) * 7)

    return ScriptedProposer(script)


@cache
def drafter_for(target: Target) -> Drafter:
    vocab = DraftVocab(torch.arange(0, target.vocab_size, 2), target.vocab_size)
    return Eagle3Drafter.create(target.frozen(), vocab, target.tap_ids, seed=1)


def drafting(
    target: Target, shape: Shape | None = None, sampling: Sampling = GREEDY, **options: Any
) -> DraftingProposer:
    drafter, slots = drafter_for(target), options.pop("slots", 1)
    session = drafter.session(target.frozen(), slots)
    return DraftingProposer(session, drafter.vocab, shape or chain(4), sampling, **options)


BUSHY = StaticTree.of_paths([[0], [1], [2], [0, 0], [0, 1], [1, 0], [1, 0, 0], [0, 1, 0], [0, 1, 0, 0]])
SHAPES: dict[str, Shape] = {"chain": chain(4), "static": BUSHY, "dynamic": DynamicTree(4, 3, 9)}


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_output_is_the_targets_own(load: Callable[[str], Target], family: str) -> None:
    target = load(family)
    for prompt in PROMPTS:
        text = plain_greedy(target, prompt, 30)
        proposers: dict[str, Proposer] = {
            "plain": PlainProposer(),
            "random": random_drafts(target.vocab_size, 4),
            "oracle": oracle(prompt, text, 5),
            "adversary": adversary(prompt, text, target.vocab_size),
            "trees": bushy(prompt, text, target.vocab_size),
            "ngram": NgramProposer(1, 3, 4),
            "model": DraftingProposer(ModelSession(target, 1), DraftVocab.full(target.vocab_size), chain(3), GREEDY),
            **{f"drafter, {name}": drafting(target, shape) for name, shape in SHAPES.items()},
            "drafter, adaptive": LimitedProposer(drafting(target, BUSHY), AdaptiveDepth(BUSHY.levels)),
        }
        out = {name: decode(target, proposer, prompt) for name, proposer in proposers.items()}
        assert {name: o.tokens for name, o in out.items()} == dict.fromkeys(out, text[:24])
        assert out["plain"].rounds == [Round(0, 0, 1)] * 23
        # The prefill gives one token, full blocks 6 each: 1 + 6 + 6 + 6 + 5 of the last 6.
        assert out["oracle"].rounds == [Round(5, 5, 6)] * 3 + [Round(5, 5, 5)]
        assert [r.accepted for r in out["trees"].rounds] == [3] * 6
        assert [r.accepted for r in out["model"].rounds] == [3] * 6  # the target drafts for itself
        assert [r.accepted for r in out["adversary"].rounds][:6] == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("new", [1, 2, 7])
def test_max_new_tokens_inside_a_block(load: Callable[[str], Target], new: int) -> None:
    target, prompt = load("llama"), PROMPTS[0]
    text = plain_greedy(target, prompt, 12)
    out = decode(target, oracle(prompt, text, 5), prompt, new)
    assert (out.tokens, out.finish) == (text[:new], "length")
    assert [r.kept for r in out.rounds] == {1: [], 2: [1], 7: [6]}[new]


def test_ends_at_the_first_of_several_eos_inside_a_block(load: Callable[[str], Target]) -> None:
    target, prompt = load("llama"), PROMPTS[0]
    text = plain_greedy(target, prompt, 12)
    ends = frozenset({text[4], text[6]})
    first = next(i for i, token in enumerate(text) if token in ends)
    plain = decode(target, PlainProposer(), prompt, eos_ids=ends)
    blocks = decode(target, oracle(prompt, text, 5), prompt, eos_ids=ends)
    assert plain.tokens == blocks.tokens == text[: first + 1]
    assert plain.finish == blocks.finish == "eos"
    assert blocks.rounds[-1].kept < blocks.rounds[-1].accepted
    immediately = decode(target, oracle(prompt, text, 5), prompt, eos_ids=frozenset({text[0]}))
    assert (immediately.tokens, immediately.rounds, immediately.finish) == (text[:1], [], "eos")


def test_stop_string_inside_a_block(load: Callable[[str], Target]) -> None:
    target, prompt = load("llama"), PROMPTS[2]
    text = plain_greedy(target, prompt, 30)
    decoded = [target.tokenizer.decode(text[:n], skip_special_tokens=True) for n in range(31)]
    stop = decoded[10][len(decoded[8]) :]  # what tokens 8 and 9 say together
    assert stop, "the tiny model said nothing there"
    expected = next(n for n in range(31) if stop in decoded[n])
    for proposer in (PlainProposer(), oracle(prompt, text, 5)):
        decoder = Decoder(target, GREEDY, Limits(30, stop=(stop, "never said")))
        out = generate(decoder, proposer, prompt)
        assert (out.tokens, out.finish) == (text[:expected], "stop")
        assert output_text(decoder, out) == decoded[expected][: decoded[expected].index(stop)]


def test_the_context_narrows_drafts_and_ends_the_text(load: Callable[[str], Target]) -> None:
    target, context = load("llama"), 20
    prompt = list(range(10, 10 + context - 3))
    text = plain_greedy(target, prompt, 5)
    asked: list[int] = []

    def script(ids: list[int], limit: int) -> list[int]:
        asked.append(limit)
        return text[len(ids) - len(prompt) :]

    out = decode(target, ScriptedProposer(script), prompt, context=context)
    assert (out.tokens, out.finish) == (text[:3], "context")
    assert asked == [1]  # one confirmed of three, one place for the pass's own token
    assert out.rounds == [Round(1, 1, 2)]
    with pytest.raises(EyasError, match="context of 20"):
        decode(target, PlainProposer(), list(range(20)), context=context)
    with pytest.raises(EyasError, match="no tokens"):
        decode(target, PlainProposer(), [], context=context)


def test_penalties_hold_inside_blocks(load: Callable[[str], Target]) -> None:
    """A repetition penalty sees the drafted tokens before each position; equal to plain decoding."""
    target, prompt = load("llama"), PROMPTS[3]
    sampling = Sampling(0.0, repetition_penalty=5.0)
    plain = decode(target, PlainProposer(), prompt, sampling=sampling)
    assert plain.tokens != plain_greedy(target, prompt, 24), "the penalty has no effect here"
    text = decode(target, PlainProposer(), prompt, 40, sampling).tokens
    own: list[Proposer] = [drafting(target, shape, sampling) for shape in SHAPES.values()]
    for proposer in (oracle(prompt, text, 5), bushy(prompt, text, target.vocab_size), *own):
        assert decode(target, proposer, prompt, sampling=sampling).tokens == plain.tokens


def test_top_k_1_equals_greedy(load: Callable[[str], Target]) -> None:
    target, prompt = load("llama"), PROMPTS[0]
    text = plain_greedy(target, prompt, 24)
    for sampling in (Sampling(1.0, top_k=1), Sampling(0.1, top_k=1, top_p=0.9), Sampling(1e-4), Sampling(1e-6)):
        for shape in SHAPES.values():
            assert decode(target, drafting(target, shape, sampling), prompt, sampling=sampling).tokens == text


class Recording:
    """A proposer that notes the true states it is given."""

    def __init__(self, inner: Proposer) -> None:
        self.inner = inner
        self.seen: list[tuple[States, list[int]]] = []

    def begin(self, slot: int, prompt: Sequence[int], uniform: Callable[[], float]) -> None:
        self.inner.begin(slot, prompt, uniform)

    def commit(self, slot: int, states: States, next_ids: Sequence[int]) -> None:
        self.seen.append((states, list(next_ids)))
        self.inner.commit(slot, states, next_ids)

    def propose(self, limits: Sequence[int]) -> list[DraftTree]:
        return self.inner.propose(limits)

    def move(self, source: int, to: int) -> None:
        self.inner.move(source, to)


@pytest.mark.parametrize("make", [oracle, adversary, bushy])
def test_committed_states_are_the_targets_true_ones(load: Callable[[str], Target], make: Any) -> None:
    """After every pass: what the drafter was given = one plain forward over the confirmed text."""
    target, prompt = load("gemma3"), PROMPTS[0]
    text = plain_greedy(target, prompt, 30)
    recording = Recording(make(prompt, text, 5 if make is oracle else target.vocab_size))
    out = decode(target, recording, prompt)
    given = [torch.cat(column) for column in zip(*(states for states, _ in recording.seen), strict=True)]
    ids = torch.tensor([*prompt, *out.tokens])[: len(given[0])]
    (true,) = target.features([ids])
    for mine, expected in zip(given, (true.taps, true.final), strict=True):
        torch.testing.assert_close(mine, expected, atol=1e-4, rtol=1e-4)
    followers = [token for _, next_ids in recording.seen for token in next_ids]
    assert followers == [*prompt, *out.tokens][1 : len(followers) + 1]


class Watched(DraftingProposer):
    """Notes every proposal and the text it was made for."""

    def propose(self, limits: Sequence[int]) -> list[DraftTree]:
        trees = super().propose(limits)
        self.drafted = [*getattr(self, "drafted", []), *((list(self.texts[0].ids), tree) for tree in trees)]
        return trees


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("kind", ["drafter", "model"])
def test_every_proposal_equals_that_of_a_drafter_built_anew(
    load: Callable[[str], Target], kind: str, temperature: float, shape: str
) -> None:
    """No trace of rejected drafts: trees drafted along the way = trees after one commit of the whole text."""
    target, prompt = load("qwen3"), PROMPTS[0]
    sampling, drafter, model = Sampling(temperature), drafter_for(target), load("gemma3")

    def half() -> float:
        return 0.5  # the same for every draw makes sampling repeatable

    def fresh() -> Watched:
        if kind == "model":
            return Watched(ModelSession(model, 1), DraftVocab.full(target.vocab_size), SHAPES[shape], sampling)
        return Watched(drafter.session(target.frozen()), drafter.vocab, SHAPES[shape], sampling)

    watched = fresh()
    generate(Decoder(target, sampling, Limits(24)), watched, prompt, half)
    assert len(watched.drafted) > 5
    for ids, tree in watched.drafted:
        proposer = fresh()
        proposer.begin(0, prompt, half)
        (true,) = target.features([torch.tensor(ids[:-1])])
        proposer.commit(0, States(true.taps, true.final), ids[1:])
        (again,) = proposer.propose([10])
        assert (again.tokens.tolist(), again.parents) == (tree.tokens.tolist(), tree.parents)
        assert len(again.q) == len(tree.q)
        for mine, expected in zip(tree.q, again.q, strict=True):
            torch.testing.assert_close(mine, expected, atol=1e-5, rtol=1e-4)


# --- several sequences at a time ----------------------------------------------------------------------------

MANY = [[1, 40, 50], [1], list(range(3, 40)), [1, 7, 7, 7, 9], [5] * 17, [200, 30], [9, 8, 7, 6]]


def decode_many(
    target: Target, proposer: Proposer, slots: int, sampling: Sampling, **limits: Any
) -> dict[int, Generation]:
    found: dict[int, Generation] = {}
    waiting = deque(Request(prompt, random.Random(i).random, i) for i, prompt in enumerate(MANY))
    decoder = Decoder(target, sampling, Limits(**({"max_new_tokens": 20} | limits)))
    seconds = generate_all(decoder, proposer, waiting, slots, done=lambda r, out: found.update({r.about: out}))
    assert seconds.passes > 0 and seconds.decode > 0
    return found


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(1.0), Sampling(0.8, top_p=0.9, repetition_penalty=1.2)])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_company_changes_nothing(load: Callable[[str], Target], family: str, shape: str, sampling: Sampling) -> None:
    """Prompts of 1 to 37 tokens, 1, 2 and 4 at a time, that end in different passes: every sequence's tokens and
    rounds are those of decoding it alone."""
    target = load(family)
    plain = decode_many(target, PlainProposer(), 1, sampling)
    ends = frozenset(plain[i].tokens[5 + 4 * i] for i in range(3))
    ends |= frozenset() if sampling.greedy else frozenset(range(0, target.vocab_size, 16))
    alone = decode_many(target, drafting(target, SHAPES[shape], sampling), 1, sampling, eos_ids=ends)
    assert len({len(out.tokens) for out in alone.values()}) > 2, "all end alike: nothing is moved"
    for slots in (2, 4):
        together = decode_many(
            target, drafting(target, SHAPES[shape], sampling, slots=slots), slots, sampling, eos_ids=ends
        )
        for i, out in alone.items():
            assert (together[i].tokens, together[i].finish) == (out.tokens, out.finish)
            assert together[i].rounds == out.rounds
            assert [(r.tokens, r.path) for r in together[i].rounds] == [(r.tokens, r.path) for r in out.rounds]


def test_greedy_batches_equal_uncached_decoding(load: Callable[[str], Target]) -> None:
    target = load("gemma3")
    for proposer in (PlainProposer(), NgramProposer(1, 3, 4), drafting(target, BUSHY, slots=3)):
        found = decode_many(target, proposer, 3, GREEDY)
        assert {i: out.tokens for i, out in found.items()} == {
            i: plain_greedy(target, prompt, 20) for i, prompt in enumerate(MANY)
        }


def test_no_drafts_above_a_batch_size(load: Callable[[str], Target]) -> None:
    """With off_above=1 nothing is drafted while two decode; the last one alone drafts again, from true states."""
    target = load("llama")
    itself = DraftingProposer(ModelSession(target, 2), DraftVocab.full(target.vocab_size), chain(4), GREEDY)
    for inner in (drafting(target, slots=2), itself, NgramProposer(1, 3, 4)):
        found = decode_many(target, LimitedProposer(inner, off_above=1), 2, GREEDY)
        drafted = [r.drafted for out in found.values() for r in out.rounds]
        assert 0 in drafted and max(drafted) == 4
        assert [out.tokens for _, out in sorted(found.items())] == [plain_greedy(target, p, 20) for p in MANY]
        if inner is itself:
            assert all(r.accepted == r.drafted for out in found.values() for r in out.rounds)


def test_a_new_request_may_follow_an_answer(load: Callable[[str], Target]) -> None:
    target = load("llama")
    waiting, found = deque([Request([1, 40], about=0)]), list[tuple[int, list[int]]]()

    def done(request: Request, out: Generation) -> None:
        found.append((request.about, out.tokens))
        if request.about < 2:
            waiting.append(Request([*request.prompt, *out.tokens], about=request.about + 1))

    generate_all(Decoder(target, GREEDY, Limits(5)), PlainProposer(), waiting, 2, done=done)
    whole = plain_greedy(target, [1, 40], 15)
    assert found == [(0, whole[:5]), (1, whole[5:10]), (2, whole[10:])]
