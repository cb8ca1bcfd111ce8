"""What other trees would gain here: costs measured on this hardware, acceptance on the texts at hand (eval/tune.py)."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from conf.schema import VerifyConfig
from eval.candidates import NGRAM, Candidate
from eval.cost import BUDGET, SIZES, CostModel, DraftCost, measure_draft, measure_target
from eval.decode import PLAIN, decode_all
from eval.measure import Bench, context_length
from eval.prompts import Prompt
from eval.proposers import PlainProposer
from eval.ranks import Ranks
from eval.sampling import Sampling
from eval.shapes import StaticTree, chain
from eval.simulated import Text, can_simulate, simulate
from eval.tune import MAX_GAMMA, MAX_LEVELS, Tuned, calibration_ranks, save_tuned, tune
from models.target import Target

PAST = 256  # cached tokens behind which passes are timed

log = logging.getLogger(__name__)


def measure_costs(target: Target, candidates: Sequence[Candidate], *, budget: float = BUDGET) -> CostModel:
    """Time the target's forwards and every candidate's drafting, about ``budget`` seconds each."""
    context = context_length(target.config) or PAST + 2 * max(SIZES)
    past = max(1, min(PAST, context - 2 * max(SIZES)))
    sizes = [size for size in SIZES if past + size <= context]
    draft = {}
    for candidate in candidates:
        if candidate.kind == NGRAM:
            draft[candidate.name] = DraftCost()
            continue
        own = target if candidate.drafter is None else target.tapped(candidate.drafter.tap_ids)
        levels = min(4, (candidate.drafter.max_depth if candidate.drafter else None) or 4)
        draft[candidate.name] = measure_draft(candidate.session(1), own, past, levels=levels, budget=budget)
    return CostModel(past, measure_target(target, past, sizes, budget=budget), draft)


def predictions(
    bench: Bench, costs: CostModel, texts: Mapping[tuple[str, float], Sequence[Text]]
) -> list[dict[str, Any]]:
    """For every candidate with a model, at every temperature: what chains and grown trees would gain on ``texts``."""
    found = []
    for candidate in bench.candidates:
        for temperature in bench.verify.temperatures if candidate.kind != NGRAM else ():
            sampling = bench.decoder(temperature).sampling
            own = texts[candidate.name, temperature]
            found.append(predict(bench.target, candidate, costs, own, sampling, bench.verify).prediction)
    return found


def predict(
    target: Target,
    candidate: Candidate,
    costs: CostModel,
    texts: Sequence[Text],
    sampling: Sampling,
    verify: VerifyConfig,
) -> Tuned:
    """Trees are grown on every other text and judged on the rest; with fewer than four texts on the same ones."""
    own = target if candidate.drafter is None else target.tapped(candidate.drafter.tap_ids)
    parts = (texts[::2], texts[1::2]) if len(texts) >= 4 else (texts,)
    grown, *judged = (ranks_of(own, candidate, part) for part in parts)
    return tune(
        candidate.name,
        sampling.temperature,
        grown,
        costs,
        max_rank=len(candidate.drafts) - 1,
        acceptance=sampled_acceptance(own, candidate, texts, sampling, verify),
        held_out=judged[0] if judged else None,
    )


def ranks_of(target: Target, candidate: Candidate, texts: Sequence[Text]) -> Ranks:
    depths = max(MAX_GAMMA, MAX_LEVELS)
    if candidate.model is not None:
        return calibration_ranks(target, candidate.model, texts, depths)
    assert candidate.drafter is not None and candidate.frozen is not None, "n-grams have no ranks"
    return calibration_ranks(target, (candidate.drafter, candidate.frozen), texts, depths)


def sampled_acceptance(
    target: Target, candidate: Candidate, texts: Sequence[Text], sampling: Sampling, verify: VerifyConfig
) -> list[float] | None:
    """alpha of every depth, where a chain's drafts are sampled from q and the objective knows p; otherwise None."""
    if sampling.greedy or verify.draws == "top" or not can_simulate(sampling) or candidate.drafter is None:
        return None
    assert candidate.frozen is not None
    depths = min(MAX_GAMMA, candidate.drafter.max_depth or MAX_GAMMA)
    found: Any = simulate(target, candidate.drafter, candidate.frozen, texts, depths, greedy=False)
    known = [alpha for alpha in found["per_depth"] if alpha is not None]
    return known or None


def tuned(bench: Bench, prompts: Sequence[Prompt], costs: CostModel, folder: Path) -> Bench:
    """The bench with the tree predicted to be fastest for each candidate at the first temperature, on what the target
    says to ``prompts``; the trees are saved in ``folder`` for ``verify.tree``. n-grams keep their chain."""
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
    if found.best is None or not found.paths:
        why = "there is no text to tell" if found.best is None else "no tree is predicted to beat plain decoding here"
        log.warning("verify.tune: %s: %s; measured with a chain of 1", candidate.name, why)
        return candidate.with_shape(chain(1))
    if bench.processes.rank == 0:
        folder.mkdir(parents=True, exist_ok=True)
        save_tuned(folder / f"{candidate.name.replace(' ', '_')}.json", found)
    best = found.best
    log.info(
        "verify.tune: %s: %s of %d nodes in %d levels, %.2f tokens a pass and a speed-up of %.2f expected",
        candidate.name, best.tree, best.nodes, best.levels, best.tokens_per_pass, best.speed_up,
    )  # fmt: skip
    return candidate.with_shape(StaticTree.of_paths(found.paths))
