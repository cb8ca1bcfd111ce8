"""The speculative loop: it writes what the target alone would write, whatever is drafted."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from scipy.stats import chi2
from torch import Tensor
from transformers import RepetitionPenaltyLogitsProcessor

from eval.metrics import Round
from eval.proposers import DrafterProposer, PlainProposer, Proposer, ScriptedProposer, random_proposer
from eval.sampling import Sampling
from eval.speculate import Decoder, Generation, Limits, generate, output_text
from eval.tree import ROOT, DraftTree, Drawn
from models.drafter import Drafter
from models.eagle3 import Eagle3Drafter
from models.errors import EyasError
from models.target import Features, Target
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
    return generate(Decoder(target, sampling, Limits(new, **limits), random.Random(0).random), proposer, prompt)


def oracle(prompt: Sequence[int], text: Sequence[int], gamma: int) -> ScriptedProposer:
    """Drafts exactly what the target will say."""

    def script(ids: list[int], limit: int) -> list[int]:
        assert ids == [*prompt, *text][: len(ids)], "the proposer was told another text"
        done = len(ids) - len(prompt)
        return list(text[done : done + min(gamma, limit)])

    return ScriptedProposer(script)


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


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_output_is_the_targets_own(load: Callable[[str], Target], family: str) -> None:
    target = load(family)
    for prompt in PROMPTS:
        text = plain_greedy(target, prompt, 30)
        proposers: dict[str, Proposer] = {
            "plain": PlainProposer(),
            "random": random_proposer(target.vocab_size, 4),
            "oracle": oracle(prompt, text, 5),
            "adversary": adversary(prompt, text, target.vocab_size),
            "trees": bushy(prompt, text, target.vocab_size),
            "drafter": DrafterProposer(drafter_for(target), target.frozen(), 4, GREEDY),
        }
        out = {name: decode(target, proposer, prompt) for name, proposer in proposers.items()}
        assert {name: o.tokens for name, o in out.items()} == dict.fromkeys(out, text[:24])
        assert out["plain"].rounds == [Round(0, 0, 1)] * 23
        # The prefill gives one token, full blocks 6 each: 1 + 6 + 6 + 6 + 5 of the last 6.
        assert out["oracle"].rounds == [Round(5, 5, 6)] * 3 + [Round(5, 5, 5)]
        assert [r.accepted for r in out["trees"].rounds] == [3] * 6
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
    sampling = Sampling(0.0, extra=(RepetitionPenaltyLogitsProcessor(5.0),))
    plain = decode(target, PlainProposer(), prompt, sampling=sampling)
    assert plain.tokens != plain_greedy(target, prompt, 24), "the penalty has no effect here"
    text = decode(target, PlainProposer(), prompt, 40, sampling).tokens
    drafter = DrafterProposer(drafter_for(target), target.frozen(), 4, sampling)
    for proposer in (oracle(prompt, text, 5), bushy(prompt, text, target.vocab_size), drafter):
        assert decode(target, proposer, prompt, sampling=sampling).tokens == plain.tokens


def test_top_k_1_equals_greedy(load: Callable[[str], Target]) -> None:
    target, prompt = load("llama"), PROMPTS[0]
    text = plain_greedy(target, prompt, 24)
    for sampling in (Sampling(1.0, top_k=1), Sampling(0.1, top_k=1, top_p=0.9), Sampling(1e-4), Sampling(1e-6)):
        proposer = DrafterProposer(drafter_for(target), target.frozen(), 4, sampling, uniform=random.Random(1).random)
        assert decode(target, proposer, prompt, sampling=sampling).tokens == text


class Recording:
    """A proposer that notes the true features it is given."""

    def __init__(self, inner: Proposer) -> None:
        self.inner = inner
        self.seen: list[tuple[Features, list[int]]] = []

    def begin(self, prompt: Sequence[int]) -> None:
        self.inner.begin(prompt)

    def commit(self, features: Any, next_ids: Sequence[int]) -> None:
        self.seen.append((features, list(next_ids)))
        self.inner.commit(features, next_ids)

    def propose(self, limit: int) -> DraftTree:
        return self.inner.propose(limit)


@pytest.mark.parametrize("make", [oracle, adversary, bushy])
def test_committed_features_are_the_targets_true_ones(load: Callable[[str], Target], make: Any) -> None:
    """After every pass: what the drafter was given = one plain forward over the confirmed text."""
    target, prompt = load("gemma3"), PROMPTS[0]
    text = plain_greedy(target, prompt, 30)
    recording = Recording(make(prompt, text, 5 if make is oracle else target.vocab_size))
    out = decode(target, recording, prompt)
    given = [torch.cat(column) for column in zip(*(features for features, _ in recording.seen), strict=True)]
    ids = torch.tensor([*prompt, *out.tokens])[: len(given[0])]
    for mine, true in zip(given, target.features([ids])[0], strict=True):
        torch.testing.assert_close(mine, true, atol=1e-4, rtol=1e-4)
    followers = [token for _, next_ids in recording.seen for token in next_ids]
    assert followers == [*prompt, *out.tokens][1 : len(followers) + 1]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_every_proposal_equals_that_of_a_drafter_built_anew(load: Callable[[str], Target], temperature: float) -> None:
    """No trace of rejected drafts: chains drafted along the way = chains after one commit of the whole text."""
    target, prompt = load("qwen3"), PROMPTS[0]
    sampling = Sampling(temperature)

    def fresh(uniform: Callable[[], float]) -> DrafterProposer:
        return DrafterProposer(drafter_for(target), target.frozen(), 3, sampling, uniform=uniform)

    drafted: list[tuple[int, DraftTree]] = []

    class Watched(DrafterProposer):
        def propose(self, limit: int) -> DraftTree:
            drafted.append((len(self.ids), super().propose(limit)))
            return drafted[-1][1]

    def half() -> float:
        return 0.5  # the same for every draw makes sampling repeatable

    watched = Watched(drafter_for(target), target.frozen(), 3, sampling, uniform=half)
    out = decode(target, watched, prompt, sampling=sampling)
    ids = [*prompt, *out.tokens]
    assert len(drafted) > 5
    for length, tree in drafted:
        proposer = fresh(half)
        proposer.begin(prompt)
        proposer.commit(target.features([torch.tensor(ids[: length - 1])])[0], ids[1:length])
        again = proposer.propose(3)
        assert again.tokens.tolist() == tree.tokens.tolist()
        assert len(again.q) == len(tree.q) == (3 if temperature else 0)
        for mine, true in zip(tree.q, again.q, strict=True):
            torch.testing.assert_close(mine, true, atol=1e-5, rtol=1e-4)


# --- the distribution of sampled text -----------------------------------------------------------------------

VOCAB, LENGTH, TRIALS, FALSE_ALARM = 4, 3, 1200, 1e-3


class MarkovTarget:
    """A target whose next-token logits depend on the last two tokens: the loop's interface over a table."""

    vocab_size = VOCAB
    device = torch.device("cpu")

    def __init__(self, seed: int) -> None:
        self.table = 1.5 * torch.randn(VOCAB, VOCAB, VOCAB, generator=torch.Generator().manual_seed(seed))

    def new_cache(self) -> list[int]:
        return []

    def step(
        self, ids: Tensor, positions: Tensor, cache: list[int], attention_mask: Tensor | None = None, keep: int = 0
    ) -> tuple[Tensor, Features]:
        assert attention_mask is None, "chains only"
        assert positions.tolist() == list(range(len(cache), len(cache) + len(ids)))
        cache += ids.tolist()
        before = torch.tensor([cache[0], *cache])[-len(ids) - 1 : -1]
        return self.table[before, ids][-keep:], Features(*(ids[:, None].float(),) * 4)

    def rollback(self, cache: list[int], length: int, then: Sequence[int] = ()) -> None:
        cache[:] = [*cache[:length], *(cache[i] for i in then)]


class MarkovDrafter:
    """A drafter over half the vocabulary whose logits depend on the last token."""

    def __init__(self, seed: int) -> None:
        self.vocab = DraftVocab(torch.tensor([0, 1, 3]), VOCAB)
        self.table = 1.5 * torch.randn(VOCAB, 3, generator=torch.Generator().manual_seed(seed))

    def session(self, frozen: Any) -> Any:
        return SimpleNamespace(
            extend=lambda taps, final, next_ids: self.table[next_ids[-1]],
            expand=lambda parents, tokens: self.table[tokens],
        )


SAMPLINGS = (Sampling(1.0), Sampling(0.6, top_k=3, top_p=0.9))


@pytest.mark.parametrize("greedy_drafts", [False, True])
@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_sampled_text_has_the_targets_distribution(sampling: Sampling, greedy_drafts: bool) -> None:
    """Joint of the first three tokens over TRIALS texts; four cases at a false-alarm rate of FALSE_ALARM together."""
    target: Any = MarkovTarget(3)
    rng, prompt = random.Random(11), [0, 2]
    frozen: Any = SimpleNamespace(head=target.table)
    drafter: Any = MarkovDrafter(4)
    proposer = DrafterProposer(drafter, frozen, 2, sampling, uniform=rng.random, greedy_drafts=greedy_drafts)
    decoder = Decoder(target, sampling, Limits(LENGTH), rng.random)
    outs = [generate(decoder, proposer, prompt) for _ in range(TRIALS)]
    seen = Counter(tuple(out.tokens) for out in outs)
    assert sum(r.accepted for out in outs for r in out.rounds) > TRIALS / 4, "nearly nothing was accepted"

    def joint(text: tuple[int, ...]) -> float:
        ids, chance = [*prompt, *text], 1.0
        for i in range(2, 2 + LENGTH):
            chance *= float(sampling.probs(target.table[ids[i - 2], ids[i - 1]], ids[:i])[ids[i]])
        return chance

    expected = {text: TRIALS * joint(text) for text in itertools.product(range(VOCAB), repeat=LENGTH)}
    assert all(expected[text] > 0 for text in seen), "an impossible text"
    small = [text for text, e in expected.items() if e < 5]
    cells = [(seen[text], e) for text, e in expected.items() if e >= 5]
    cells.append((sum(seen[t] for t in small), sum(expected[t] for t in small) or 1e-9))
    statistic = sum((o - e) ** 2 / e for o, e in cells)
    assert chi2.sf(statistic, len(cells) - 1) > FALSE_ALARM / 4
