"""Which chain or tree decodes fastest here: acceptance on calibration texts against costs measured on this hardware.

Two ways of drafting, never mixed in one prediction:

* Drafts of fixed rank (T = 0, and ``verify.draws=top``): no drafts at all, chains of 1 .. G tokens, and the trees of
  1 .. N nodes that tree_search.py grows. How many tokens a pass yields is read off the ranks of the true tokens by
  walking the texts pass by pass: exact for greedy decoding, and on sampled texts the expectation. :func:`tune`
* Drafts sampled from q: no drafts at all, or chains, whose tokens per pass follow from alpha = sum min(p, q)
  (eval/numbers/simulated.py). Ranks say nothing of a tree of draws, so none is predicted. :func:`tune_sampled`

Costs: cost.py. What the two models' forwards don't hold (choosing tokens, bookkeeping) is not in the prediction.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from eval.costs.cost import CostModel
from eval.costs.ranks import RankPath, Ranks, drafter_ranks, growth_order, model_ranks, path_counts, walk
from eval.costs.tree_search import chain_paths, drafted_widths, grow, levels
from eval.drafts.shapes import StaticTree, save_tree
from eval.numbers.simulated import Text
from models.drafter import Drafter
from models.frozen import FrozenTarget
from models.target import Target

MAX_GAMMA, MAX_NODES, MAX_LEVELS = 8, 64, 8
NEAR = 0.99  # of the highest speed-up: there the smaller tree is preferred

NONE, CHAIN, GROWN = "none", "chain", "grown"


@dataclass(frozen=True)
class Choice:
    """A shape and what is expected of it: an entry of report.json's predictions, ``best`` as it stands."""

    tree: str  # none | chain | grown
    levels: int
    nodes: int
    tokens_per_pass: float
    ms: float
    speed_up: float

    def without(self, *keys: str) -> dict[str, Any]:
        return {key: value for key, value in asdict(self).items() if key not in keys}


@dataclass(frozen=True)
class Tuned:
    """prediction: the entry of report.json; best: the chosen shape, None where nothing could tell; paths: its nodes,
    parents first, none for ``best.tree`` = none."""

    prediction: dict[str, Any]
    best: Choice | None
    paths: list[RankPath]


Found = tuple[Choice, list[RankPath]]


@dataclass(frozen=True)
class Predictor:
    """Expectations for one drafter at a temperature, milliseconds from ``cost``."""

    name: str
    temperature: float
    cost: CostModel

    def choice(self, tree: str, paths: Sequence[RankPath], tokens_per_pass: float) -> Choice:
        shape = len(paths), drafted_widths(paths), tokens_per_pass
        ms, speed_up = self.cost.pass_ms(self.name, *shape), self.cost.speed_up(self.name, *shape)
        return Choice(tree, levels(paths), len(paths), tokens_per_pass, ms, speed_up)

    def nested(self, tree: str, paths: Sequence[RankPath], ranks: Ranks) -> Iterator[Choice]:
        """The trees of the first 1, 2, ... of the paths, on the texts behind ``ranks``."""
        order = growth_order(ranks, paths)
        for size in range(1, len(paths) + 1):
            yield self.choice(tree, paths[:size], tokens_per_pass((order < size).sum(0), ranks))

    def choose(self, chains: Sequence[Choice], trees: Sequence[Found]) -> Tuned:
        """The best of these and of no drafts at all."""
        plain = self.choice(NONE, [], 1.0)
        found: list[Found] = [(plain, []), *((chain, chain_paths(chain.levels)) for chain in chains), *trees]
        best, paths = prefer(found)
        prediction = {
            "drafter": self.name,
            "temperature": self.temperature,
            "chain": [{"gamma": chain.levels} | chain.without("tree", "levels", "nodes") for chain in chains],
            "trees": [tree.without("tree") for tree, _ in trees],
            "best": asdict(best),
        }
        return Tuned(prediction, best, paths)


def untold(name: str, temperature: float) -> Tuned:
    """No prediction."""
    return Tuned({"drafter": name, "temperature": temperature, "chain": [], "trees": [], "best": None}, None, [])


def tune(
    name: str,
    temperature: float,
    ranks: Ranks,
    cost: CostModel,
    *,
    max_gamma: int = MAX_GAMMA,
    max_nodes: int = MAX_NODES,
    max_levels: int = MAX_LEVELS,
    max_rank: int | None = None,
    held_out: Ranks | None = None,
) -> Tuned:
    """Predict all candidates with drafts of fixed rank and choose.

    ranks: of the calibration texts, as deep as the deepest candidate may be. held_out: ranks on other texts, to
    predict from; without them the trees are judged on the texts they were grown on, a little too well. Within 1% of
    the best the fewest nodes are chosen, so no drafts at all (tree ``none``) where drafting gains no more than that.
    """
    judged = ranks if held_out is None else held_out
    if not len(ranks) or not len(judged):
        return untold(name, temperature)
    predictor = Predictor(name, temperature, cost)
    chains = [*predictor.nested(CHAIN, chain_paths(min(max_gamma, ranks.depths)), judged)]
    limits = max_nodes, min(max_levels, ranks.depths), max_rank
    return predictor.choose(chains, best_trees(predictor, ranks, judged, *limits))


def tune_sampled(name: str, temperature: float, taus: Sequence[float], cost: CostModel) -> Tuned:
    """The same for drafts sampled from q. taus: tokens per pass of chains of 1, 2, ... of them; no trees."""
    if not taus:
        return untold(name, temperature)
    predictor = Predictor(name, temperature, cost)
    return predictor.choose([predictor.choice(CHAIN, chain_paths(g), tau) for g, tau in enumerate(taus, 1)], [])


def best_trees(
    predictor: Predictor, ranks: Ranks, judged: Ranks, max_nodes: int, max_levels: int, max_rank: int | None
) -> list[Found]:
    """For each number of nodes the fastest of the trees of at most 1, 2, ... levels grown on ``ranks``, and its paths.

    A level costs a call of the drafter, so the tree that accepts most is not always the fastest.
    """
    whole = ranks.complete()
    slots = whole if len(whole) else ranks  # short texts only: what lies beyond their end counts as not accepted
    counts = path_counts(slots)
    best: dict[int, Found] = {}
    for deepest in range(1, max_levels + 1):
        paths = [node.path for node in grow(counts, len(slots), max_nodes, deepest, max_rank)]
        for choice in predictor.nested(GROWN, paths, judged):
            size = choice.nodes
            if size not in best or choice.speed_up > best[size][0].speed_up:
                best[size] = choice, paths[:size]
    return [best[size] for size in sorted(best)]


def prefer(found: Sequence[Found]) -> Found:
    """Of those within 1% of the highest speed-up the one with the fewest nodes, of equal ones the fastest."""
    top = max(choice.speed_up for choice, _ in found)
    near = [one for one in found if one[0].speed_up >= NEAR * top]
    return min(near, key=lambda one: (one[0].nodes, -one[0].speed_up))


def tokens_per_pass(accepted: np.ndarray, ranks: Ranks) -> float:
    """tau of decoding the texts when a pass accepts ``accepted[s]`` at slot s."""
    total, passes = walk(accepted, ranks.index)
    return 1 + total / passes


def calibration_ranks(
    target: Target, source: tuple[Drafter, FrozenTarget] | Target, texts: Iterable[Text], depths: int
) -> Ranks:
    """Ranks of a trained drafter (no deeper than it drafts), or of an independent draft model, on these texts.

    A drafter needs the target with its own taps.
    """
    if isinstance(source, Target):
        return model_ranks(source, texts, depths, target.vocab_size)
    drafter, frozen = source
    return drafter_ranks(target, drafter, frozen, texts, min(depths, drafter.max_depth or depths))


def save_shape(file: str | Path, tuned: Tuned) -> None:
    """The chosen shape as a tree file for ``verify.tree``. Raises ValueError where it is no drafts at all."""
    best = tuned.best
    if best is None or not tuned.paths:
        raise ValueError("there is no tree to save: plain decoding was chosen")
    of, temperature = tuned.prediction["drafter"], tuned.prediction["temperature"]
    about = (
        f"{best.tree} for {of} at T = {temperature:g}, {best.nodes} nodes in {best.levels} levels: "
        f"{best.tokens_per_pass:.3f} tokens a pass and a speed-up of {best.speed_up:.2f} expected"
    )
    save_tree(file, StaticTree.of_paths(tuned.paths), about)
