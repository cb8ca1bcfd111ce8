"""The choice of chain or tree: by hand on scripted ranks and costs, and against real decoding with the chosen trees."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from eval.costs.cost import CostModel, Curve, draft_cost
from eval.costs.ranks import OUTSIDE, Ranks, growth_order, path_counts
from eval.costs.tree_search import chain_paths
from eval.costs.tune import (
    CHAIN,
    GROWN,
    NONE,
    Choice,
    calibration_ranks,
    prefer,
    save_shape,
    tokens_per_pass,
    tune,
    tune_sampled,
)
from eval.drafts.draft_model import ModelSession, draft_vocab
from eval.drafts.drafting import DraftingProposer
from eval.drafts.shapes import StaticTree, read_tree
from eval.numbers.metrics import Round
from eval.numbers.simulated import Text, measured_alike
from eval.verify.sampling import Sampling
from eval.verify.speculate import Decoder, Limits, generate
from models.target import Target
from tests.drafters import random_drafter, random_vocab
from tests.tiny import tiny_target

FREE = CostModel(0, Curve((1, 100), (10.0, 10.0)))
STEEP = CostModel(0, Curve((1, 2), (10.0, 20.0)))  # every token costs a whole step


def ranks_from(columns: list[list[int]], texts: int = 1) -> Ranks:
    """Slots of equally long texts; a text's last slots are valid to ever smaller depths."""
    rank = np.array(columns, dtype=np.int64).T
    depths, slots = rank.shape
    place = np.arange(slots) % (slots // texts)
    valid = np.arange(depths)[:, None] + place[None] < slots // texts
    index = np.arange(slots) + np.arange(slots) // (slots // texts) * 5
    return Ranks(index, valid, np.where(valid, rank, OUTSIDE))


def test_prediction_by_hand() -> None:
    """One text, ranks [0, 0], [1, 0], [0, 1], [0, 0], [0, -] (the last slot is valid at depth 0 only).

    Chain of 1: slot 0 accepts 1, slot 2 1, slot 4 1: 3 passes, 3 accepted: 2 tokens a pass. Chain of 2: slot 0 accepts
    2, slot 3 accepts 2 (to the end): 2 passes: 3 a pass. Costs: 1, 2, 3 tokens 10, 11, 15 ms; confirming 1, 2, 3
    positions costs 1, 2, 3; one node more 4.
    """
    ranks = ranks_from([[0, 0], [1, 0], [0, 1], [0, 0], [0, 0]])
    cost = CostModel(
        0,
        Curve((1, 2, 3), (10.0, 11.0, 15.0)),
        {"x": draft_cost({(0, 1): 1.0, (0, 3): 3.0, (1, 1): 4.0, (1, 2): 4.5})},
    )
    tuned = tune("x", 0.0, ranks, cost, max_nodes=2)
    found = tuned.prediction
    assert (found["drafter"], found["temperature"]) == ("x", 0.0)
    assert found["chain"] == [
        {"gamma": 1, "tokens_per_pass": 2.0, "ms": 13.0, "speed_up": pytest.approx(20 / 13)},
        {"gamma": 2, "tokens_per_pass": 3.0, "ms": 22.0, "speed_up": pytest.approx(30 / 22)},
    ]
    # Two nodes: on the four whole slots (0,) counts 3 and (0, 0) 2, (1,) 1. One level: (0,), (1,): all accept 1, so
    # slots 0, 2, 4: 2 a pass for 15 + 2 = 17 ms: 1.18. Two levels are the chain: 1.36.
    assert found["trees"] == [
        {"nodes": 1, "levels": 1, "tokens_per_pass": 2.0, "ms": 13.0, "speed_up": pytest.approx(20 / 13)},
        {"nodes": 2, "levels": 2, "tokens_per_pass": 3.0, "ms": 22.0, "speed_up": pytest.approx(30 / 22)},
    ]
    best = {"tree": CHAIN, "levels": 1, "nodes": 1, "tokens_per_pass": 2.0, "ms": 13.0}
    assert found["best"] == best | {"speed_up": pytest.approx(20 / 13)}
    assert tuned.paths == [(0,)]


def test_a_level_must_be_worth_its_call() -> None:
    """Where drafting on costs as much as a step, siblings beat a level more, though the level accepts as much."""
    ranks = ranks_from([[0, 0], [1, 0], [0, 0], [1, 1], [0, 0], [1, 0]] * 5)
    dear = CostModel(0, FREE.target, {"x": draft_cost({(1, 1): 10.0})})
    by_nodes = {tree["nodes"]: tree["levels"] for tree in tune("x", 0.0, ranks, dear).prediction["trees"]}
    assert by_nodes[2] == 1
    by_nodes = {tree["nodes"]: tree["levels"] for tree in tune("x", 0.0, ranks, FREE).prediction["trees"]}
    assert by_nodes[3] == 2


def test_nothing_beats_plain_decoding() -> None:
    """The right token is drafted half of the time, but every token read costs a step of its own."""
    ranks = ranks_from(np.random.default_rng(0).choice([0, 7], (400, 2)).tolist())
    tuned = tune("x", 0.0, ranks, STEEP)
    assert tuned.best == Choice(NONE, 0, 0, 1.0, 10.0, 1.0)
    assert tuned.prediction["best"]["tree"] == "none" and tuned.paths == []
    assert all(one["speed_up"] < 1 for one in tuned.prediction["chain"])
    with pytest.raises(ValueError, match="plain decoding"):
        save_shape("nowhere.json", tuned)


def test_hopeless_drafter() -> None:
    """A drafter whose vocabulary has none of the tokens: chains that accept nothing, no trees, even for free."""
    tuned = tune("x", 0.0, ranks_from([[-1, -1]] * 10), FREE)
    assert tuned.best is not None and tuned.best.tree == NONE
    assert tuned.prediction["trees"] == [] and tuned.prediction["chain"][1]["speed_up"] == 1.0


def test_no_texts_no_choice() -> None:
    empty = Ranks(np.zeros(0, np.int64), np.zeros((3, 0), np.bool_), np.zeros((3, 0), np.int64))
    tuned = tune("x", 1.0, empty, FREE)
    assert tuned.best is None and tuned.paths == []
    assert tuned.prediction == {"drafter": "x", "temperature": 1.0, "chain": [], "trees": [], "best": None}


def test_the_smaller_tree_within_one_percent() -> None:
    def choice(tree: str, nodes: int, speed_up: float) -> tuple[Choice, list[tuple[int, ...]]]:
        return Choice(tree, 1, nodes, 2.0, 1.0, speed_up), []

    found = [choice(NONE, 0, 1.0), choice(GROWN, 3, 1.979), choice(GROWN, 8, 1.981), choice(GROWN, 20, 2.0)]
    assert prefer(found)[0].nodes == 8
    assert prefer([*found, choice(CHAIN, 8, 1.985)])[0].tree == CHAIN
    assert prefer([choice(NONE, 0, 1.0), choice(CHAIN, 1, 1.0099)])[0].tree == NONE
    assert prefer([choice(NONE, 0, 1.0), choice(CHAIN, 1, 1.02)])[0].tree == CHAIN


def test_sampled_drafts_get_a_chain_by_hand() -> None:
    """1.5, 1.7, 1.72 tokens a pass; reading 1, 2, 3, 4 tokens costs 10, 11, 12, 13 ms: 1.36, 1.42, 1.32."""
    tuned = tune_sampled("x", 1.0, [1.5, 1.7, 1.72], CostModel(0, Curve((1, 4), (10.0, 13.0))))
    assert tuned.prediction["chain"] == [
        {"gamma": gamma, "tokens_per_pass": tau, "ms": pytest.approx(10 + gamma), "speed_up": pytest.approx(speed_up)}
        for gamma, tau, speed_up in ((1, 1.5, 15 / 11), (2, 1.7, 17 / 12), (3, 1.72, 17.2 / 13))
    ]
    assert tuned.prediction["trees"] == [] and tuned.prediction["best"]["tree"] == CHAIN
    assert tuned.paths == [(0,), (0, 0)] and (tuned.prediction["drafter"], tuned.prediction["temperature"]) == (
        "x",
        1.0,
    )
    assert tune_sampled("x", 1.0, [1.001], FREE).best == Choice(NONE, 0, 0, 1.0, 10.0, 1.0)
    nothing = {"drafter": "x", "temperature": 1.0, "chain": [], "trees": [], "best": None}
    assert tune_sampled("x", 1.0, [], FREE).prediction == nothing


def test_held_out_texts_judge() -> None:
    """Grown on texts where the second choice is right, judged on others where the first one is."""
    grown_on, others = ranks_from([[1]] * 10), ranks_from([[0]] * 10)
    assert tune("x", 0.0, grown_on, FREE).prediction["trees"][0]["tokens_per_pass"] == 2.0
    judged = tune("x", 0.0, grown_on, FREE, held_out=others).prediction
    assert judged["trees"][0]["tokens_per_pass"] == 1.0
    assert judged["chain"][0]["tokens_per_pass"] == 2.0


def test_free_drafts_take_all_nodes_and_limits_hold() -> None:
    rng = np.random.default_rng(0)
    ranks = ranks_from(rng.integers(0, 3, (400, 4)).tolist(), texts=4)
    trees = tune("x", 0.0, ranks, FREE, max_nodes=12, max_levels=3, max_rank=1, max_gamma=2)
    assert len(trees.prediction["chain"]) == 2 and len(trees.prediction["trees"]) == 12
    speeds = [tree["speed_up"] for tree in trees.prediction["trees"]]
    assert speeds[-1] == max(speeds) and all(tree["levels"] <= 3 for tree in trees.prediction["trees"])
    assert all(max(path) <= 1 for path in trees.paths)
    assert len(StaticTree.of_paths(trees.paths).paths) == len(trees.paths)  # no parent is missing


# --- against decoding ---


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    folder: Path = tiny_target(tmp_path_factory.mktemp("target"), "llama", layers=6)
    return Target.load(str(folder), taps=(2, 3, 5))


@pytest.fixture(scope="module")
def shaken(target: Target) -> Target:
    """The target with noise on its weights: a draft model that is often right, with other ranks when it isn't."""
    model = Target.load(str(target.folder))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in model.model.parameters():
            weight += 0.05 * weight.std() * torch.randn(weight.shape, generator=generator)
    return model


def prompts(count: int = 6) -> list[list[int]]:
    generator = torch.Generator().manual_seed(2)
    return [torch.randint(3, 280, (4 + i,), generator=generator).tolist() for i in range(count)]


def decode(target: Target, proposer: DraftingProposer, size: int = 40) -> tuple[list[Text], list[list[Round]]]:
    decoder = Decoder(target, Sampling(0.0), Limits(size, frozenset({2}), None))
    outs = [generate(decoder, proposer, prompt) for prompt in prompts()]
    return [Text(p, out.tokens) for p, out in zip(prompts(), outs, strict=True)], [out.rounds for out in outs]


def test_predicted_tokens_per_pass_are_those_of_decoding(target: Target, shaken: Target) -> None:
    """Greedy texts of the target: chains and grown trees accept, pass by pass, what the ranks said."""

    def measured(tree: StaticTree) -> tuple[list[Text], float]:
        session = ModelSession(shaken)
        texts, rounds = decode(target, DraftingProposer(session, draft_vocab(target, shaken), tree, Sampling(0.0)))
        found = measured_alike(rounds)
        assert found is not None
        return texts, found

    texts, one = measured(StaticTree.of_paths(chain_paths(1)))
    ranks = calibration_ranks(target, shaken, texts, 4)
    tuned = tune("shaken", 0.0, ranks, FREE, max_gamma=3, max_nodes=9)
    chain = [found["tokens_per_pass"] for found in tuned.prediction["chain"]]
    assert chain[0] == pytest.approx(one) and one > 1.1
    assert measured(StaticTree.of_paths(chain_paths(3)))[1] == pytest.approx(chain[2])
    again, found = measured(StaticTree.of_paths(tuned.paths))
    assert again == texts  # lossless
    assert tuned.best is not None and tuned.best.tree == GROWN and tuned.best.tokens_per_pass > chain[2]
    assert found == pytest.approx(tuned.best.tokens_per_pass)


def test_the_same_for_a_trained_drafter(target: Target) -> None:
    """EAGLE-3 with a draft vocabulary; its weights are random, so the tree is one of unlikely ranks."""
    frozen = target.frozen()
    drafter = random_drafter(frozen, random_vocab(target.vocab_size, 200)).eval()

    def proposer(tree: StaticTree) -> DraftingProposer:
        return DraftingProposer(drafter.session(frozen), drafter.vocab, tree, Sampling(0.0))

    texts, rounds = decode(target, proposer(StaticTree.of_paths(chain_paths(2))))
    ranks = calibration_ranks(target, (drafter, frozen), texts, 3)
    tuned = tune("eagle", 0.0, ranks, FREE, max_nodes=30)
    assert tuned.prediction["chain"][1]["tokens_per_pass"] == pytest.approx(measured_alike(rounds))
    counts = path_counts(ranks)
    deep = sorted((path for path in counts if len(path) == 3), key=lambda path: (-counts[path], path))[:25]
    joined = sorted({path[:level] for path in deep for level in (1, 2, 3)}, key=lambda path: (len(path), path))
    for paths in (tuned.paths, joined):
        again, rounds = decode(target, proposer(StaticTree.of_paths(paths)))
        expected = tokens_per_pass((growth_order(ranks, paths) < len(paths)).sum(0), ranks)
        assert again == texts and measured_alike(rounds) == pytest.approx(expected) and expected > 1.1
    assert tuned.best is not None
    assert max(r.accepted for prompt in rounds for r in prompt) == 3  # of the deep tree, where its three levels hold


def test_saved_tree_is_read_back(tmp_path: Path) -> None:
    tuned = tune("x", 0.0, ranks_from([[0, 1], [1, 0], [0, 0]] * 8), FREE, max_nodes=4)
    save_shape(tmp_path / "tree.json", tuned)
    tree = read_tree(tmp_path / "tree.json")
    assert sorted(tree.paths) == sorted(tuned.paths) and tree.levels == 2
    assert "grown for x at T = 0, 3 nodes in 2 levels" in (tmp_path / "tree.json").read_text()
