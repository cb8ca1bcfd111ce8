"""Predictions for the way of drafting that is measured: by ranks, by alpha, or none; and costs on tiny contexts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from conf.schema import VerifyConfig
from eval.candidates import Candidate, independent, ngrams, trained
from eval.costs.cost import CostModel, Curve
from eval.costs.predict import Sizes, measure_costs, predict, predictions, sampled_taus, tune_shapes
from eval.measure import Bench
from eval.numbers.simulated import Accepts, Text, chain_taus, model_accepts, simulate
from eval.prompts import Prompt
from eval.verify.sampling import Sampling
from models.eagle3 import Eagle3Drafter
from models.target import Target
from models.vocab import DraftVocab
from tests.drafters import random_drafter, random_vocab
from tests.tiny import tiny_target

COSTS = CostModel(0, Curve((1, 64), (10.0, 11.0)))  # drafts for free


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    return Target.load(str(tiny_target(tmp_path_factory.mktemp("target"), layers=6, hidden=32)), taps=(2, 3, 5))


@pytest.fixture(scope="module")
def smaller(tmp_path_factory: pytest.TempPathFactory) -> Target:
    """A draft model with fewer ids than the target."""
    return Target.load(str(tiny_target(tmp_path_factory.mktemp("model"), layers=2, hidden=32, vocab=270, seed=5)))


@pytest.fixture(scope="module")
def larger(tmp_path_factory: pytest.TempPathFactory) -> Target:
    """A draft model with more ids than the target."""
    return Target.load(str(tiny_target(tmp_path_factory.mktemp("model"), "qwen3", layers=2, vocab=300, seed=6)))


def texts_for(target: Target, *lengths: tuple[int, int]) -> list[Text]:
    generator = torch.Generator().manual_seed(0)

    def ids(size: int) -> list[int]:
        return torch.randint(3, target.vocab_size, (size,), generator=generator).tolist()

    return [Text(ids(prompt), ids(output)) for prompt, output in lengths]


def eagle(target: Target, verify: VerifyConfig) -> Candidate:
    drafter = random_drafter(target.frozen(), random_vocab(target.vocab_size, 150)).eval()
    return trained(drafter, target.frozen(), verify)


# --- alpha of independent models ---


@pytest.mark.parametrize("name", ["smaller", "larger"])
def test_alpha_of_a_draft_model_one_prefix_at_a_time(target: Target, name: str, request: pytest.FixtureRequest) -> None:
    """sum min(p, q) in float64, each prefix read anew; q over the ids that both have, p over all of the target's."""
    model: Target = request.getfixturevalue(name)
    text = Text([5, 287, 9], [4, 280, 17, 269, 3, 8])  # some of them the smaller model lacks
    found = model_accepts(target, model, text, 3)
    x, shared = [*text.prompt, *text.output], min(target.vocab_size, model.vocab_size)
    columns = []
    for p in range(2, len(x) - 2):
        column = [0.0] * 3
        for k in range(min(3, len(x) - p - 2)):
            prefix = torch.tensor([x[: p + 2 + k]])
            own = target.model(prefix).logits[0, -1].double().softmax(-1)
            drafts = model.model(prefix.clamp_max(model.vocab_size - 1)).logits[0, -1, :shared].double().softmax(-1)
            column[k] = float(torch.minimum(own[:shared], drafts).sum())
        columns.append(column)
    assert found.slots.tolist() == list(range(2, len(x) - 2))
    assert found.valid.T.tolist() == [[value > 0 for value in column] for column in columns]
    assert found.accept.T.numpy() == pytest.approx(torch.tensor(columns).numpy(), abs=1e-5)
    assert model_accepts(target, model, Text([5, 6], [7]), 3).accept.shape == (3, 0)


def test_chain_taus_by_hand() -> None:
    """Three slots at 0.5 each. Chain of 1: visits 1, then 1/2, then 1 - 1/2 + 1/4... accepted = passes / 2 in any case.

    Passes of a chain of 1: slot 0: 1; slot 1: 1/2 (rejected at 0); slot 2: 1/2 + 1/4 = 3/4: 9/4. Of a second text with
    one slot: 1. A chain of 2 (the last slot has one draft only): slot 0 accepts exactly 0, 1, 2 with 1/2, 1/4, 1/4, so
    slot 1 is visited with 1/2 and slot 2 with 1/4 + 1/4 = 1/2. Accepted: 3/4 (1 + 1/2) + 1/2 (1/2) + 1/2 of text two.
    """
    valid = torch.tensor([[True, True, True], [True, True, False]])
    first = Accepts(torch.full((2, 3), 0.5), torch.arange(4, 7), valid)
    second = Accepts(torch.full((2, 1), 0.5), torch.tensor([9]), torch.tensor([[True], [False]]))
    assert chain_taus([first, second], 2) == pytest.approx([1.5, 1 + (9 / 8 + 1 / 4 + 1 / 2) / (2 + 1)])
    assert chain_taus([], 2) == []


# --- which way of drafting is predicted ---


def test_sampled_chains_of_a_trained_drafter_are_the_simulated_ones(target: Target) -> None:
    verify, texts = VerifyConfig(), texts_for(target, (4, 20), (1, 1), (7, 9))
    candidate = eagle(target, verify)
    found = predict(target, candidate, COSTS, texts, Sampling(1.0), verify)
    assert candidate.drafter is not None and candidate.frozen is not None
    for entry in found.prediction["chain"]:
        told = simulate(target, candidate.drafter, candidate.frozen, texts, entry["gamma"], greedy=False)
        assert entry["tokens_per_pass"] == pytest.approx(told["tau"])
    assert [entry["gamma"] for entry in found.prediction["chain"]] == list(range(1, 9))
    assert found.prediction["trees"] == [] and found.best is not None


@pytest.mark.parametrize(
    ("sampling", "options", "chains", "trees"),
    [
        (Sampling(0.0), {}, True, True),
        (Sampling(0.0), {"rule": "typical"}, True, True),
        (Sampling(1.0), {}, True, False),
        (Sampling(1.0), {"draws": "with_replacement"}, True, False),
        (Sampling(1.0), {"draws": "top"}, True, True),
        (Sampling(0.7, top_p=0.9), {"draws": "top"}, True, True),
        (Sampling(0.7), {}, False, False),
        (Sampling(1.0, top_k=5), {}, False, False),
        (Sampling(1.0), {"rule": "typical"}, False, False),
    ],
)
def test_what_is_predicted(
    target: Target, larger: Target, sampling: Sampling, options: dict[str, Any], chains: bool, trees: bool
) -> None:
    verify = VerifyConfig(**options)
    texts = texts_for(target, *[(4, 12)] * 4)
    for candidate in (eagle(target, verify), independent(larger, target, verify, "model:larger")):
        found = predict(target, candidate, COSTS, texts, sampling, verify)
        assert (bool(found.prediction["chain"]), bool(found.prediction["trees"])) == (chains, trees)
        assert (found.best is None) == (found.prediction["best"] is None) == (not chains)


def test_a_report_says_why_nothing_is_predicted(target: Target, caplog: pytest.LogCaptureFixture) -> None:
    verify = VerifyConfig(temperatures=[1.0, 0.5])
    bench = Bench(target, [eagle(target, verify), ngrams(verify)], verify)
    texts = {("drafter", 1.0): [Text([5], [6])], ("drafter", 0.5): texts_for(target, (4, 9))}
    with caplog.at_level("INFO"):
        found = predictions(bench, COSTS, texts)
    nothing: dict[str, Any] = {"drafter": "drafter", "chain": [], "trees": [], "best": None}
    assert found == [nothing | {"temperature": 1.0}, nothing | {"temperature": 0.5}]
    assert "drafter, T = 1: no prediction: there is no text to tell" in caplog.text
    assert "drafter, T = 0.5: no prediction: the acceptance of sampled drafts is known at T = 1" in caplog.text


@pytest.mark.parametrize(("temperature", "levels"), [(1.0, 8), (0.6, 3)])
def test_tuning_for_sampled_drafts_picks_a_chain(
    target: Target, tmp_path: Path, temperature: float, levels: int, caplog: pytest.LogCaptureFixture
) -> None:
    """The target drafting for itself: at T = 1 the longest chain. At other temperatures verify.gamma stays."""
    verify = VerifyConfig(tune=True, gamma=3, temperatures=[temperature], max_new_tokens=18)
    itself = independent(target, target, verify, "model:itself")
    bench = tune_shapes(Bench(target, [itself], verify), [Prompt([5, 6, 7]), Prompt([9])], COSTS, tmp_path)
    (chosen,) = bench.candidates
    assert chosen.is_chain and chosen.shape.levels == levels
    assert (tmp_path / "itself.json").exists() == (temperature == 1)
    assert ("is known at T = 1 without other processors only; measured with verify.gamma=3" in caplog.text) == (
        temperature != 1
    )


# --- tiny contexts ---


@pytest.mark.parametrize("context", [2, 3, 8, 20, 64, 150])
def test_costs_within_a_tiny_context(
    target: Target, tmp_path: Path, context: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The target's own, and that of a draft model: nobody is ever given a longer text."""
    verify = VerifyConfig()
    folder = tiny_target(tmp_path / "tiny", layers=3, hidden=32, max_position_embeddings=context)
    tiny = Target.load(str(folder))
    frozen = tiny.frozen()
    drafter = Eagle3Drafter.create(frozen, DraftVocab.full(tiny.vocab_size), tiny.tap_ids, seed=0)
    longest = watch(monkeypatch)
    costs = measure_costs(
        tiny, [trained(drafter, frozen, verify), independent(target, tiny, verify, "model:big")], budget=0.0
    )
    assert longest[context] <= context and costs.past + max(costs.target.sizes) <= context
    assert costs.draft["drafter"].levels.keys() == costs.draft["big"].levels.keys()
    assert (0 in costs.draft["drafter"].levels) == (context > 2)
    assert costs.speed_up("drafter", 60, [10, 10], 2.0) > 0
    longest.clear()
    other = measure_costs(target, [independent(tiny, target, verify, "model:tiny")], budget=0.0)
    assert longest[context] <= context and other.past == 256 and other.target.sizes[-1] == 64


def watch(monkeypatch: pytest.MonkeyPatch) -> dict[int, int]:
    """The longest text that each target has read since, by its context."""
    longest: dict[int, int] = {}
    step, features = Target.step, Target.features

    def saw(target: Target, size: int) -> None:
        context = int(target.config.max_position_embeddings)
        longest[context] = max(longest.get(context, 0), size)

    def watched_step(self: Target, blocks: Any, cache: Any, first: int = 0, **options: Any) -> Any:
        for slot, block in enumerate(blocks, first):
            below = cache.pending[slot] if block.depths is None else max(block.depths) + 1 - block.tokens.numel()
            saw(self, cache.lengths[slot] + below + block.tokens.numel())
        return step(self, blocks, cache, first, **options)

    def watched_features(self: Target, ids: Any) -> Any:
        saw(self, max(len(row) for row in ids))
        return features(self, ids)

    monkeypatch.setattr(Target, "step", watched_step)
    monkeypatch.setattr(Target, "features", watched_features)
    return longest


@pytest.mark.parametrize("room", range(-2, 60))
def test_sizes_fit(room: int) -> None:
    found = Sizes.fitting(room)
    assert sum(found.positions) + len(found.widths) + found.levels <= max(room, 0)
    assert bool(found.positions) == (room > 0) and (room < 24 or found == Sizes.fitting(1000))
    assert bool(found.widths) == bool(found.levels)


def test_sampled_taus_end_where_the_drafter_does(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    candidate = eagle(target, VerifyConfig())
    monkeypatch.setattr(Eagle3Drafter, "max_depth", 2)
    assert len(sampled_taus(target, candidate, texts_for(target, (3, 9)))) == 2
    assert torch.is_grad_enabled()
