"""The measurement: every prompt decoded plainly and by every candidate, at every temperature and batch size.

:func:`measure` works on loaded models and returns what report.json holds (eval/look/report.schema.json describes it).
"""

from __future__ import annotations

import logging
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import torch

from conf.schema import VerifyConfig
from conf.values import NGRAM
from eval.candidates import Candidate, context_length
from eval.costs.cost import theory
from eval.decode import PLAIN, Answer, Decoded, decode_all
from eval.drafts.proposers import PlainProposer, Proposer
from eval.look.table import VERSION
from eval.numbers.intervals import Sums, quotient, tau_sums
from eval.numbers.metrics import DEFINITION, Round, acceptance, by_category, by_position, counted, ratio, uncut
from eval.numbers.pairs import PerPrompt, compare
from eval.numbers.simulated import Text, can_simulate, measured_alike, simulate
from eval.numbers.timing import compare_costs, speed
from eval.processes import Processes
from eval.prompts import Prompt
from eval.verify.accept import Rule
from eval.verify.sampling import Sampling
from eval.verify.speculate import Decoder, Limits, output_text
from models.blocks import Block
from models.errors import EyasError
from models.target import Target

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Bench:
    """What is measured: the models, the settings and the seed of every random number.

    The target must have been loaded with the taps of every trained drafter among its own.
    """

    target: Target
    candidates: Sequence[Candidate]
    verify: VerifyConfig
    seed: int = 0
    processes: Processes = field(default_factory=Processes)

    def decoder(self, temperature: float) -> Decoder:
        verify = self.verify
        sampling = Sampling(temperature, verify.top_k, verify.top_p, verify.min_p, verify.repetition_penalty)
        context = context_length(self.target.config)
        limits = Limits(
            verify.max_new_tokens, self.target.eos_ids, context, tuple(unescaped(stop) for stop in verify.stop)
        )
        rule = Rule(verify.rule, verify.typical_eps, verify.typical_delta)
        return Decoder(self.target, sampling, limits, rule)

    def ways(self, decoder: Decoder, slots: int) -> dict[str, Proposer]:
        """The proposers that take turns, fresh ones for so many sequences at a time."""
        plain: dict[str, Proposer] = {PLAIN: PlainProposer()} if self.verify.baseline else {}
        make = {c.name: c.proposer(self.target, decoder.sampling, self.verify, slots) for c in self.candidates}
        return make | plain


class Measurement(NamedTuple):
    """report: what report.json holds; rows: of generations.jsonl. By candidate and temperature: the texts that were
    written, and the sums by which it is compared with others on the same prompts."""

    report: dict[str, Any]
    rows: list[dict[str, Any]]
    texts: dict[tuple[str, float], list[Text]]
    sums: dict[tuple[str, float], PerPrompt]


def measure(
    bench: Bench,
    prompts: Sequence[Prompt],
    *,
    about: Mapping[str, Any] | None = None,
    quiet: bool = False,
) -> Measurement:
    """Decode and count. ``about`` (names of target, prompts, template) joins the settings. Every process must call
    it; all return the same texts and counts."""
    if not prompts:
        raise EyasError("verify: there are no prompts to measure on")
    warn_of_positions(bench, prompts)
    most = max(bench.verify.batch_sizes)
    if most > len(prompts):
        log.warning("verify.batch_sizes: %d at a time need as many prompts, there are %d", most, len(prompts))
    runs, rows = list[dict[str, Any]](), list[dict[str, Any]]()
    texts: dict[tuple[str, float], list[Text]] = {}
    sums: dict[tuple[str, float], PerPrompt] = {}
    first = bench.verify.batch_sizes[0]
    how: dict[str, Any] = {"seed": bench.seed, "processes": bench.processes}
    how["quiet"] = quiet or bench.processes.rank > 0
    for temperature in bench.verify.temperatures:
        decoder = bench.decoder(temperature)
        found = {}
        for size in bench.verify.batch_sizes:
            slots = min(size, len(prompts))
            found[size] = decode_all(decoder, bench.ways(decoder, slots), prompts, slots, **how)
        for candidate in bench.candidates:
            of_candidate = {size: (ways[candidate.name], ways.get(PLAIN)) for size, ways in found.items()}
            runs.append(Measured(bench, candidate, decoder, prompts, of_candidate).run())
            drafted, key = of_candidate[first][0], (candidate.name, temperature)
            rows += [row(decoder, candidate.name, prompts, answer) for answer in drafted.answers]
            texts[key] = [Text(a.prompt, a.out.tokens) for a in drafted.answers]
            sums[key] = per_prompt(drafted, len(prompts), alone=first == 1)
    report = {
        "version": VERSION,
        "definition": DEFINITION,
        "settings": settings(bench, prompts, about or {}),
        "drafters": [candidate.about() for candidate in bench.candidates],
        "runs": runs,
        "comparisons": compare(sums, seed=bench.seed),
        "cost_model": None,
    }
    return Measurement(report, rows, texts, sums)


@dataclass
class Measured:
    """One candidate at one temperature: what it decoded, and plain decoding beside it, by batch size."""

    bench: Bench
    candidate: Candidate
    decoder: Decoder
    prompts: Sequence[Prompt]
    found: Mapping[int, tuple[Decoded, Decoded | None]]

    def run(self) -> dict[str, Any]:
        """Its entry of ``runs``."""
        drafted, plain = self.found[self.bench.verify.batch_sizes[0]]
        rounds = [answer.out.rounds for answer in drafted.answers]
        levels, seed, prompts = self.candidate.shape.levels, self.bench.seed, len(self.prompts)
        accepted = drafted.of_prompts(counted(rounds), prompts)
        starts = [len(answer.prompt) + 1 for answer in drafted.answers]
        categories = [prompt.category for prompt in self.prompts]
        return {
            "drafter": self.candidate.name,
            "temperature": self.decoder.sampling.temperature,
            "drafts": self.drafts,
            "lossless": self.decoder.rule.lossless,
            "questions": len(drafted.answers),
            "acceptance": acceptance(accepted, levels, seed=seed).to_dict(),
            "uncut": acceptance(drafted.of_prompts(uncut(rounds), prompts), levels, seed=seed).to_dict(),
            "categories": {k: v.to_dict() for k, v in by_category(accepted, categories, levels, seed=seed).items()},
            "positions": by_position(rounds, starts, prompts=[a.number for a in drafted.answers], seed=seed),
            "simulated": self.simulation(drafted.answers, rounds),
            "finish": {end: sum(a.out.finish == end for a in drafted.answers) for end in FINISHES},
            "same_as_plain": self.same_as_plain(drafted, plain),
            "cost": self.cost(drafted, plain) if plain else None,
            "speed": [self.speed(size, *found) for size, found in self.found.items()],
        }

    def cost(self, drafted: Decoded, plain: Decoded) -> dict[str, Any]:
        """Costs in plain forwards; of a chain also what the formula makes of its acceptance and c (not of n-grams,
        which leave passes without drafts)."""
        found = compare_costs(speed(drafted), speed(plain))
        passes = [one for answer in drafted.answers for one in answer.out.rounds]
        chain = [one.accepted for one in passes], [one.drafted for one in passes]
        told = self.candidate.is_chain and self.candidate.kind != NGRAM
        return found | {"theory": theory(*chain, found["draft"]) if told else None}

    @property
    def drafts(self) -> str:
        """How drafts were drawn, in words."""
        if self.candidate.kind == NGRAM:
            return "n-grams of the text"
        if self.decoder.sampling.greedy:
            return "argmax" if self.candidate.is_chain else "top-k"
        if self.candidate.shape.fixed or self.bench.verify.draws == "top":
            return "top-k"
        return f"sampled from q, {self.bench.verify.draws.replace('_', ' ')}"

    def simulation(self, answers: Sequence[Answer], rounds: Sequence[Sequence[Round]]) -> dict[str, Any] | None:
        """Simulated tau on the texts just written, beside the measured one; None where the objective can't tell."""
        candidate, sampling, verify = self.candidate, self.decoder.sampling, self.bench.verify
        drawn = sampling.greedy or verify.draws != "top"
        whole = not verify.adaptive and verify.off_above is None and self.decoder.rule.lossless
        if candidate.drafter is None or not (candidate.is_chain and drawn and whole and can_simulate(sampling)):
            return None
        assert candidate.frozen is not None
        texts = [Text(answer.prompt, answer.out.tokens) for answer in answers]
        target, levels = candidate.tapped(self.bench.target), candidate.shape.levels
        found: dict[str, Any] = simulate(
            target, candidate.drafter, candidate.frozen, texts, levels, greedy=sampling.greedy
        )
        measured = measured_alike(rounds)
        off = found["tau"] / measured - 1 if measured and found["tau"] else None
        return found | {"measured": measured, "difference": off}

    def same_as_plain(self, drafted: Decoded, plain: Decoded | None) -> dict[str, Any] | None:
        if plain is None or not self.decoder.sampling.greedy or not self.decoder.rule.lossless:
            return None
        return compare_outputs(self.bench.target, drafted.answers, plain.answers)

    def speed(self, size: int, drafted: Decoded, plain: Decoded | None) -> dict[str, Any]:
        """An entry of ``speed``. Several sequences share the time of a pass: there is no interval over prompts then."""
        own, base = speed(drafted), speed(plain) if plain else None
        entry: dict[str, Any] = {"batch_size": size, "speculative": own, "plain": base}
        gain = ratio(own["tokens_per_second"] or 0.0, (base or own)["tokens_per_second"] or 0.0) if base else None
        interval = None
        if size == 1 and plain:
            sums = [speed_sums(part, len(self.prompts)) for part in (drafted, plain)]
            interval = quotient(*sums, seed=self.bench.seed).interval
        return entry | {"speed_up": gain or None, "speed_up_interval": interval}


FINISHES = ("eos", "length", "context", "stop")


def speed_sums(decoded: Decoded, prompts: int) -> Sums:
    """Tokens and seconds of each prompt's passes."""
    tokens, seconds = [0.0] * prompts, [0.0] * prompts
    for answer in decoded.answers:
        tokens[answer.number] += len(answer.out.tokens) - 1
        seconds[answer.number] += answer.out.latency
    return Sums.of(tokens, seconds)


def per_prompt(decoded: Decoded, prompts: int, *, alone: bool) -> PerPrompt:
    """alone: one sequence was decoded at a time, so that seconds belong to a prompt."""
    accepted = decoded.of_prompts(counted([answer.out.rounds for answer in decoded.answers]), prompts)
    return PerPrompt(tau_sums(accepted), speed_sums(decoded, prompts) if alone else None)


def compare_outputs(target: Target, drafted: Sequence[Answer], plain: Sequence[Answer]) -> dict[str, Any]:
    """How many greedy outputs are plain decoding's, and for each other how far apart the two tokens' logits are.

    A difference is a near-tie in reduced precision (a block's matmul rounds differently from a single row's) or a
    defect: ``logit_gap`` tells which. Later questions of a conversation that already differed are left out.
    """
    theirs_of = {(answer.number, answer.turn): answer for answer in plain}
    differences, compared = [], 0
    for ours in drafted:
        theirs = theirs_of.get((ours.number, ours.turn))
        if theirs is None or theirs.prompt != ours.prompt:
            continue
        compared += 1
        a, b = ours.out.tokens, theirs.out.tokens
        if a == b:
            continue
        at = next(i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y)
        ids = torch.tensor([*ours.prompt, *b[:at]])
        logits = target.step([Block(ids)], target.new_cache(), last_only=True)[0][0]
        gap = abs(float(logits[a[at]] - logits[b[at]]))
        differences.append({"prompt": ours.number, "turn": ours.turn, "token": at, "logit_gap": gap})
        log.warning(
            "prompt %d: output differs from plain decoding at token %d, logits %.2g apart", ours.number, at, gap
        )
    return {"identical": compared - len(differences), "prompts": compared, "differences": differences}


def row(decoder: Decoder, name: str, prompts: Sequence[Prompt], answer: Answer) -> dict[str, Any]:
    """A line of generations.jsonl."""
    prompt, out = prompts[answer.number], answer.out
    return {
        "prompt": answer.number,
        "turn": answer.turn,
        "id": prompt.id,
        "category": prompt.category,
        "drafter": name,
        "temperature": decoder.sampling.temperature,
        "prompt_ids": answer.prompt,
        "output_ids": out.tokens,
        "text": output_text(decoder, out),
        "finish": out.finish,
        "rounds": [asdict(r) for r in out.rounds],
    }


def settings(bench: Bench, prompts: Sequence[Prompt], about: Mapping[str, Any]) -> dict[str, Any]:
    verify, target = bench.verify, bench.target
    lossless = Rule(verify.rule).lossless
    has_ngrams = any(candidate.kind == NGRAM for candidate in bench.candidates)
    words = "lossless: argmax match at T = 0, rejection sampling otherwise"
    typical = f"typical acceptance, eps {verify.typical_eps:g}, delta {verify.typical_delta:g}: changes the output"
    sampling = bench.decoder(verify.temperatures[0]).sampling.describe()
    return {
        "target": str(target.folder),
        "prompt_source": "given",
        "template": None,
        **about,
        "tree": "tuned" if verify.tune else verify.tree,
        "gamma": verify.gamma,
        **({"branch": verify.branch, "nodes": verify.nodes} if verify.tree == "dynamic" else {}),
        "draws": verify.draws,
        **({"ngram_min": verify.ngram_min, "ngram_max": verify.ngram_max} if has_ngrams else {}),
        "adaptive": verify.adaptive,
        "off_above": verify.off_above,
        "tuned": verify.tune,
        "rule": words if lossless else typical,
        "lossless": lossless,
        **({} if lossless else {"typical_eps": verify.typical_eps, "typical_delta": verify.typical_delta}),
        "prompts": len(prompts),
        "prompt_tokens": sum(len(prompt.ids) for prompt in prompts),  # of the first questions
        "max_new_tokens": verify.max_new_tokens,
        "stop": list(verify.stop),
        **{key: value for key, value in sampling.items() if key not in ("temperature", "extra")},
        "temperatures": list(verify.temperatures),
        "batch_sizes": list(verify.batch_sizes),
        "eos_ids": sorted(target.eos_ids),
        "dtype": str(target.dtype).removeprefix("torch."),
        "device": str(target.device),
        "threads": torch.get_num_threads(),
        "processor": processor(),
        "versions": {name: version(name) for name in ("eyas", "torch", "transformers")},
        "processes": bench.processes.size,
        "seed": bench.seed,
    }


def unescaped(stop: str) -> str:
    """A stop string from the command line, where a line end can only be written \\n."""
    return stop.replace("\\n", "\n").replace("\\t", "\t")


def processor() -> str:
    """The device's name, or the processor's."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor() or platform.machine())


def warn_of_positions(bench: Bench, prompts: Sequence[Prompt]) -> None:
    """Beyond the positions that a drafter was made for it may guess badly; the output stays the target's own."""
    longest = max(len(prompt.ids) for prompt in prompts) + bench.verify.max_new_tokens
    for candidate in bench.candidates:
        limit = candidate.max_positions
        if limit is not None and longest > limit:
            log.warning(
                "%s was made for %d positions, texts reach %d: acceptance may fall beyond (tau by position tells)",
                candidate.name, limit, longest,
            )  # fmt: skip
