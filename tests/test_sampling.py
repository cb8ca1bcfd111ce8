"""The logits processors: against transformers' own, against the definitions in float64, and by hand."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

import eval.verify.sampling
from eval.verify.sampling import Sampling, draw
from models.errors import EyasError
from tests.markov import reference_probs


def logits_of(seed: int, size: int, spread: float = 2.0) -> Tensor:
    return spread * torch.randn(size, generator=torch.Generator().manual_seed(seed))


def transformers_probs(sampling: Sampling, logits: Tensor, context: Sequence[int]) -> Tensor:
    """transformers' processors in the order of ``generate``."""
    processors = LogitsProcessorList([RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty), *sampling.extra])
    processors.append(TemperatureLogitsWarper(sampling.temperature))
    if sampling.top_k:
        processors.append(TopKLogitsWarper(sampling.top_k))
    processors.append(TopPLogitsWarper(sampling.top_p))
    processors.append(MinPLogitsWarper(sampling.min_p))
    ids: Any = torch.tensor([list(context)])
    scores: Any = logits[None]
    probs: Tensor = processors(ids, scores).softmax(-1)[0]
    return probs


ALL: Any = st.builds(
    Sampling,
    temperature=st.sampled_from([0.1, 0.6, 1.0, 1.7]),
    top_k=st.sampled_from([0, 1, 2, 5, 30, 1000]),
    top_p=st.sampled_from([1.0, 0.97, 0.9, 0.5, 0.05]),
    min_p=st.sampled_from([0.0, 0.01, 0.2, 0.9, 1.0]),
    repetition_penalty=st.sampled_from([1.0, 1.3, 0.7]),
)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(ALL, st.integers(0, 10**6), st.sampled_from([1, 2, 7, 40, 900]))
def test_equal_to_transformers_and_to_the_definitions(sampling: Sampling, seed: int, size: int) -> None:
    logits = logits_of(seed, size)
    context = [random.Random(seed).randrange(size) for _ in range(6)]
    probs = sampling.probs(logits, context)
    assert probs.dtype == torch.float32
    torch.testing.assert_close(probs, transformers_probs(sampling, logits, context), atol=1e-6, rtol=1e-4)
    mine = sampling.probs(logits.double(), context)
    expected = torch.tensor(reference_probs(logits.double().tolist(), context, sampling), dtype=torch.float64)
    torch.testing.assert_close(mine, expected, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("cut", [{"top_p": 0.9}, {"top_k": 5}, {"top_k": 40, "top_p": 0.8, "min_p": 0.1}])
@pytest.mark.parametrize("short", [1, 2, 3, 64])
def test_the_short_list_is_made_longer_where_it_must(
    monkeypatch: pytest.MonkeyPatch, cut: dict[str, Any], short: int
) -> None:
    """From flat to sharp rows, one at a time and together."""
    monkeypatch.setattr(eval.verify.sampling, "SHORT_LIST", short)
    sampling = Sampling(0.7, **cut)
    rows = torch.stack([logits_of(seed, 500, spread) for seed, spread in enumerate((0.0, 0.01, 1.0, 3.0, 50.0))])
    rows[0, 0] = 1e-3  # nearly all are tied, which rounding must not tell apart
    together = sampling.probs_rows(rows)
    for row, mine in list(zip(rows, together, strict=True))[1:]:
        torch.testing.assert_close(mine, transformers_probs(sampling, row, [0]), atol=1e-6, rtol=1e-4)
        torch.testing.assert_close(sampling.probs(row, []), mine)
    assert float(together.sum(-1).sub(1).abs().max()) < 1e-5


def test_ties_with_the_last_of_top_k_stay() -> None:
    """As in transformers; half precision makes them often."""
    logits = torch.tensor([1.0, 2.0, 1.0, 0.0, 1.0, -1.0]).repeat(10)
    for k, kept in ((1, 10), (10, 10), (11, 40), (41, 50)):
        assert int((Sampling(1.0, top_k=k).probs(logits, []) > 0).sum()) == kept
        torch.testing.assert_close(
            Sampling(1.0, top_k=k).probs(logits, []), transformers_probs(Sampling(1.0, top_k=k), logits, [0])
        )


def test_tokens_that_cannot_be_drafted_stay_impossible() -> None:
    """Minus infinity outside the draft vocabulary, whatever the processors; also where top-k asks for more."""
    logits = torch.full((400,), -math.inf)
    logits[[3, 50, 399]] = torch.tensor([1.0, 2.0, 0.0])
    for sampling in (Sampling(1.0), Sampling(0.5, top_k=10), Sampling(1.0, top_p=0.999999), Sampling(1.0, min_p=0.01)):
        probs = sampling.probs(logits, [3])
        assert probs.nonzero()[:, 0].tolist() == [3, 50, 399]
    penal = Sampling(1.0, top_k=2, repetition_penalty=1.5).probs(logits, [3, 7, 50])
    torch.testing.assert_close(penal[[3, 50]], torch.tensor([1 / 1.5, 2 / 1.5]).softmax(0))


def test_by_hand() -> None:
    scores = torch.tensor([1.0, 3.0, 2.0, 0.0])
    torch.testing.assert_close(Sampling(1.0, top_k=1).probs(scores, []), torch.eye(4)[1])
    torch.testing.assert_close(Sampling(1.0, top_k=99).probs(scores, []), scores.softmax(0))
    top = Sampling(0.5, top_p=0.9).probs(scores, [])  # softmax of (6, 4) after the other two are cut
    torch.testing.assert_close(top, torch.tensor([0.0, 0.8808, 0.1192, 0.0]), atol=1e-4, rtol=0)
    # e^-1 = .37 times the likeliest stays above min_p = .2, e^-2 = .14 doesn't
    low = Sampling(1.0, min_p=0.2).probs(scores, [])
    torch.testing.assert_close(low, torch.tensor([0.0, 0.7311, 0.2689, 0.0]), atol=1e-4, rtol=0)
    # 3 / 1.5 = 2, -1 * 1.5 = -1.5; token 1 counts once however often it was said
    said = Sampling(1.0, repetition_penalty=1.5).probs(torch.tensor([0.5, 3.0, -1.0, -1.0]), [1, 2, 1, 1])
    torch.testing.assert_close(said, torch.tensor([0.5, 2.0, -1.5, -1.0]).softmax(0))


def test_temperatures_near_zero_are_greedy() -> None:
    scores = torch.tensor([1.0, 3.0, 2.0, 0.0])
    assert Sampling(0.0).greedy and Sampling(1e-6).greedy and not Sampling(1e-4).greedy
    assert int(Sampling(0.0).argmax(scores, [])) == 1
    torch.testing.assert_close(Sampling(1e-4).probs(scores, []), torch.eye(4)[1])
    # only what matters at T > 0, and so without effect; the penalty is in force at any temperature
    assert int(Sampling(0.0, top_k=2, top_p=0.1, min_p=0.9).argmax(scores, [1, 1])) == 1
    assert int(Sampling(0.0, repetition_penalty=2.0).argmax(scores, [1])) == 2
    assert int(Sampling(1e-6, repetition_penalty=2.0).argmax(scores, [1])) == 2


@pytest.mark.parametrize("top_k", [0, 1, 5000])
@pytest.mark.parametrize("top_p", [0.9, 1.0])
@pytest.mark.parametrize("temperature", [0.0, 1e-6, 0.1])
def test_reported_settings_give_a_token(temperature: float, top_p: float, top_k: int) -> None:
    sampling, logits = Sampling(temperature, top_k, top_p), logits_of(0, 300)
    best = int(logits.argmax())
    assert int(sampling.argmax(logits, [])) == best
    if not sampling.greedy:
        probs = sampling.probs(logits, [])
        assert float(probs.sum()) == pytest.approx(1.0, abs=1e-5)
        assert int(draw(probs, 0.0)) in probs.nonzero()[:, 0].tolist()
        assert top_k != 1 or int(draw(probs, 0.999999)) == best


def test_greedy_choice_with_a_penalty_equals_generate() -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=60, **sizes)).eval()
    prompt, sampling = [1, 7, 7, 9], Sampling(0.0, repetition_penalty=1.3)
    ids = list(prompt)
    with torch.no_grad():
        for _ in range(25):
            ids.append(int(sampling.argmax(model(torch.tensor([ids])).logits[0, -1], ids)))
        settings_: dict[str, Any] = {"do_sample": False, "repetition_penalty": 1.3, "eos_token_id": None}
        theirs = model.generate(torch.tensor([prompt]), max_new_tokens=25, pad_token_id=0, **settings_)
    assert ids == theirs[0].tolist()


def test_extra_processors_run_after_the_penalty_and_before_the_temperature() -> None:
    class Shift:
        def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
            assert ids.tolist() == [[0]]
            return scores + 1.0  # 2 / 2 + 1 = 2 and then 2 / 0.5 = 4; before the penalty 3, after the temperature 3

    sampling = Sampling(0.5, repetition_penalty=2.0, extra=(Shift(),))
    probs = sampling.probs(torch.tensor([2.0, 0.0]), [0])
    torch.testing.assert_close(probs, torch.tensor([4.0, 2.0]).softmax(0))


def test_what_needs_the_context() -> None:
    ban: Any = SuppressTokensLogitsProcessor([1])
    assert not Sampling(0.7, 5, 0.9, 0.1).needs_context
    assert Sampling(1.0, repetition_penalty=1.1).needs_context and Sampling(1.0, extra=(ban,)).needs_context
    assert Sampling(1.0).plain
    for other in ({"top_k": 3}, {"top_p": 0.9}, {"min_p": 0.1}, {"repetition_penalty": 1.1}, {"extra": (ban,)}):
        assert not Sampling(1.0, **other).plain
    assert Sampling(0.5, 4, extra=(ban,)).describe() == {
        "temperature": 0.5,
        "top_k": 4,
        "top_p": 1.0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "extra": ["SuppressTokensLogitsProcessor"],
    }


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"temperature": -0.1}, "verify.temperatures: -0.1"),
        ({"temperature": math.nan}, "verify.temperatures: nan"),
        ({"temperature": math.inf}, "verify.temperatures: inf"),
        ({"top_k": -1}, "verify.top_k=-1"),
        ({"top_k": 2.5}, "verify.top_k=2.5"),
        ({"top_p": 0.0}, "verify.top_p=0.0"),
        ({"top_p": 1.1}, "verify.top_p=1.1"),
        ({"min_p": -0.1}, "verify.min_p=-0.1"),
        ({"min_p": 1.5}, "verify.min_p=1.5"),
        ({"repetition_penalty": 0.0}, "verify.repetition_penalty=0.0"),
        ({"repetition_penalty": math.inf}, "verify.repetition_penalty=inf"),
    ],
)
def test_mistakes_name_the_key(setting: dict[str, Any], message: str) -> None:
    with pytest.raises(EyasError, match=message):
        Sampling(**setting)


def test_draw_inverts_the_cumulative_sum() -> None:
    p = torch.tensor([0.0, 0.25, 0.0, 0.75, 0.0])
    assert [int(draw(p, u)) for u in (0.0, 0.2499, 0.2501, 0.9999999, 1 - 2**-53)] == [1, 1, 3, 3, 3]
