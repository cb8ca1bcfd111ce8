"""What other trees would gain here: costs measured on this hardware, acceptance on the texts at hand.

A prediction is for the way of drafting that ``verify`` asks for. At T = 0 and with ``verify.draws=top`` drafts have
fixed ranks: chains and grown trees. At T > 0 with sampled drafts: chains, where T = 1 and no processor changes p and q;
otherwise nothing is known, and nothing is predicted.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

from conf.schema import VerifyConfig
from conf.values import NGRAM
from eval.candidates import Candidate, context_length
from eval.costs.cost import BUDGET, POSITIONS, SIZES, WIDTHS, CostModel, DraftCost, measure_draft, measure_target
from eval.costs.ranks import Ranks
from eval.costs.tune import (
    MAX_GAMMA,
    MAX_LEVELS,
    NONE,
    Tuned,
    calibration_ranks,
    save_shape,
    tune,
    tune_sampled,
    untold,
)
from eval.decode import PLAIN, decode_all
from eval.drafts.proposers import PlainProposer
from eval.drafts.shapes import StaticTree, chain
from eval.measure import Bench
from eval.numbers.simulated import Text, accepts, can_simulate, chain_taus, model_accepts, scored
from eval.prompts import Prompt
from eval.verify.sampling import Sampling
from models.target import Target

PAST = 256  # cached tokens behind which passes are timed
TIMED_LEVELS = 4  # of drafts; deeper ones cost as much as the last

log = logging.getLogger(__name__)


class Sizes(NamedTuple):
    """What is timed of a drafter: positions confirmed at a time, nodes of a level, levels."""

    positions: tuple[int, ...]
    widths: tuple[int, ...]
    levels: int

    @classmethod
    def fitting(cls, room: int, levels: int = TIMED_LEVELS) -> Sizes:
        """Those whose text, one after the other as ``measure_draft`` confirms them, stays within ``room`` tokens."""
        levels = max(0, min(levels, room // 4))
        widths = WIDTHS[: max(0, room - levels) // 2] if levels else ()
        left = room - levels - len(widths)
        sums = accumulate(POSITIONS)
        return cls(tuple(n for n, total in zip(POSITIONS, sums, strict=True) if total <= left), widths, levels)


def measure_costs(target: Target, candidates: Sequence[Candidate], *, budget: float = BUDGET) -> CostModel:
    """Time the target's forwards and every candidate's drafting, about ``budget`` seconds each.

    All behind the same number of tokens, unless a draft model has a smaller context. Sizes that don't fit are left out.
    """
    context = context_length(target.config) or PAST + 2 * max(SIZES)
    past = max(1, min(PAST, context - 2 * max(SIZES)))
    sizes = [size for size in SIZES if past + size <= context] or [1]
    draft = {}
    for candidate in candidates:
        if candidate.kind == NGRAM:
            draft[candidate.name] = DraftCost()
            continue
        own = candidate.tapped(target)
        behind = max(1, min(past, positions_of(candidate, context) - 2 * max(SIZES)))
        most = candidate.drafter.max_depth if candidate.drafter else None
        levels = TIMED_LEVELS if most is None else min(TIMED_LEVELS, most - 1)  # the last level is not drafted on from
        chosen = Sizes.fitting(positions_of(candidate, context) - behind - 1, levels)
        how: dict[str, Any] = chosen._asdict()
        draft[candidate.name] = measure_draft(candidate.session(1), own, behind, **how, budget=budget)
    return CostModel(past, measure_target(target, past, sizes, budget=budget), draft)


def positions_of(candidate: Candidate, context: int) -> int:
    """Longest text that both the target, of this context, and the candidate can read."""
    return min(context, candidate.max_positions or context)


def predictions(
    bench: Bench, costs: CostModel, texts: Mapping[tuple[str, float], Sequence[Text]]
) -> list[dict[str, Any]]:
    """For every candidate with a model, at every temperature: what other shapes would gain on ``texts``."""
    found = []
    for candidate in bench.candidates:
        for temperature in bench.verify.temperatures if candidate.kind != NGRAM else ():
            sampling = bench.decoder(temperature).sampling
            own = texts[candidate.name, temperature]
            told = predict(bench.target, candidate, costs, own, sampling, bench.verify)
            if told.best is None:
                log.info("%s, T = %g: no prediction: %s", candidate.name, temperature, why_not(sampling, bench.verify))
            found.append(told.prediction)
    return found


def predict(
    target: Target,
    candidate: Candidate,
    costs: CostModel,
    texts: Sequence[Text],
    sampling: Sampling,
    verify: VerifyConfig,
) -> Tuned:
    """What is known of other shapes by the rule above; ``best`` is None where that is nothing (see why_not).

    Trees are grown on every other text and judged on the rest; with fewer than four texts on the same ones.
    """
    own = candidate.tapped(target)
    temperature = sampling.temperature
    if unknown(sampling, verify):
        return untold(candidate.name, temperature)
    if not (sampling.greedy or verify.draws == "top"):
        return tune_sampled(candidate.name, temperature, sampled_taus(own, candidate, texts), costs)
    parts = (texts[::2], texts[1::2]) if len(texts) >= 4 else (texts,)
    grown, *judged = (ranks_of(own, candidate, part) for part in parts)
    held_out = judged[0] if judged else None
    most = len(candidate.drafts) - 1
    return tune(candidate.name, temperature, grown, costs, max_rank=most, held_out=held_out)


def unknown(sampling: Sampling, verify: VerifyConfig) -> str | None:
    """Why nothing can be predicted, if that is so."""
    if sampling.greedy:
        return None
    if verify.rule != "lossless":
        return "typical acceptance does not follow the target's probabilities"
    if verify.draws != "top" and not can_simulate(sampling):
        return "the acceptance of sampled drafts is known at T = 1 without other processors only"
    return None


def why_not(sampling: Sampling, verify: VerifyConfig) -> str:
    return unknown(sampling, verify) or "there is no text to tell"


def ranks_of(target: Target, candidate: Candidate, texts: Sequence[Text]) -> Ranks:
    depths = max(MAX_GAMMA, MAX_LEVELS)
    if candidate.model is not None:
        return calibration_ranks(target, candidate.model, texts, depths)
    assert candidate.drafter is not None and candidate.frozen is not None, "n-grams have no ranks"
    return calibration_ranks(target, (candidate.drafter, candidate.frozen), texts, depths)


def sampled_taus(target: Target, candidate: Candidate, texts: Sequence[Text]) -> list[float]:
    """Tokens per pass at T = 1 of chains of 1, 2, ... sampled drafts, no longer than the candidate can draft."""
    if candidate.model is not None:
        model = candidate.model
        return chain_taus((model_accepts(target, model, text, MAX_GAMMA) for text in texts), MAX_GAMMA)
    drafter, frozen = candidate.drafter, candidate.frozen
    assert drafter is not None and frozen is not None, "n-grams are not sampled"
    depths = min(MAX_GAMMA, drafter.max_depth or MAX_GAMMA)
    scores = (scored(target, drafter, frozen, text, depths) for text in texts)
    return chain_taus((accepts(score, greedy=False) for score in scores if score is not None), depths)


def tune_shapes(bench: Bench, prompts: Sequence[Prompt], costs: CostModel, folder: Path) -> Bench:
    """The bench with the shape predicted to be fastest for each candidate at the first temperature, on what the target
    says to ``prompts``; saved in ``folder`` for ``verify.tree``. It is a chain where drafts are sampled there. n-grams
    keep their chain, and so does every candidate of which nothing is known."""
    decoder = bench.decoder(bench.verify.temperatures[0])
    decoded = decode_all(decoder, {PLAIN: PlainProposer()}, prompts, 1, seed=bench.seed, processes=bench.processes)
    texts = [Text(answer.prompt, answer.out.tokens) for answer in decoded[PLAIN].answers]
    return replace(
        bench, candidates=[choose(bench, one, costs, texts, decoder.sampling, folder) for one in bench.candidates]
    )


def choose(
    bench: Bench, candidate: Candidate, costs: CostModel, texts: Sequence[Text], sampling: Sampling, folder: Path
) -> Candidate:
    if candidate.kind == NGRAM:
        return candidate
    found = predict(bench.target, candidate, costs, texts, sampling, bench.verify)
    if found.best is None:
        why = why_not(sampling, bench.verify)
        log.warning("verify.tune: %s: %s; measured with verify.gamma=%d", candidate.name, why, bench.verify.gamma)
        return candidate
    if found.best.tree == NONE:
        log.warning(
            "verify.tune: %s: nothing is predicted to beat plain decoding; measured with a chain of 1", candidate.name
        )
        return candidate.with_shape(chain(1))
    if bench.processes.rank == 0:
        folder.mkdir(parents=True, exist_ok=True)
        save_shape(folder / f"{candidate.name.replace(' ', '_')}.json", found)
    best = found.best
    log.info(
        "verify.tune: %s: %s of %d nodes in %d levels, %.2f tokens a pass and a speed-up of %.2f expected",
        candidate.name, best.tree, best.nodes, best.levels, best.tokens_per_pass, best.speed_up,
    )  # fmt: skip
    return candidate.with_shape(StaticTree.of_paths(found.paths))
