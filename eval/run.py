"""The measurement: every prompt decoded plainly and speculatively, at every temperature, and what came of it.

:func:`measure` works on loaded models; :func:`evaluate_run` is the stage behind ``python -m eval`` and the end of
``python -m train``.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm
from transformers import PretrainedConfig

from conf.schema import Config, VerifyConfig
from data.chats.dialects import Dialect
from data.documents.corpus import Corpus, read_corpus, read_documents
from data.documents.held_out import check_training_data
from data.look.report import compare_prompts
from data.masks.template import ChatTemplate
from data.prepare import TargetFiles, chat_template
from eval.metrics import DEFINITION, acceptance, counted, ratio, uncut
from eval.prompts import Prompt, read_prompts, usable
from eval.proposers import DrafterProposer, PlainProposer, Proposer
from eval.report import print_report, write_report
from eval.sampling import Sampling
from eval.simulated import Text, can_simulate, measured_alike, simulate
from eval.speculate import Decoder, Generation, Limits, generate, output_text
from models.device import pick_device
from models.drafter import Drafter
from models.errors import EyasError
from models.frozen import FrozenTarget
from models.load_frozen import read_config
from models.portable import open_drafter
from models.run_folder import best_checkpoint
from models.target import Target

WARM_UP = 8  # tokens decoded before the clock counts

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Bench:
    """What is measured: the models, the settings and the seed of every random number."""

    target: Target
    drafter: Drafter
    frozen: FrozenTarget
    verify: VerifyConfig
    seed: int = 0

    def limits(self, new: int | None = None) -> Limits:
        return Limits(new or self.verify.max_new_tokens, self.target.eos_ids, context_length(self.target.config))

    def sampling(self, temperature: float) -> Sampling:
        return Sampling(temperature, self.verify.top_k, self.verify.top_p)

    def decode(
        self, prompt: Sequence[int], number: int | str, sampling: Sampling, *, plain: bool, new: int | None = None
    ) -> Generation:
        """Decode a prompt; the random numbers depend on the seed, the prompt's number and the way of decoding only."""
        uniform = random.Random(f"{self.seed} {number} {plain}").random
        proposer: Proposer = PlainProposer()
        if not plain:
            proposer = DrafterProposer(self.drafter, self.frozen, self.verify.gamma, sampling, uniform=uniform)
        return generate(Decoder(self.target, sampling, self.limits(new), uniform), proposer, prompt)


def measure(
    target: Target,
    drafter: Drafter,
    frozen: FrozenTarget,
    prompts: Sequence[list[int] | Prompt],
    verify: VerifyConfig,
    out_dir: Path | str,
    *,
    seed: int = 0,
    about: Mapping[str, Any] | None = None,
    quiet: bool = False,
) -> dict[str, Any]:
    """Measure ``drafter`` on ``prompts`` (bare ids: with the generation prompt); returns what report.json holds.

    Writes report.json and generations.jsonl to ``out_dir`` and prints a table. ``about`` (names of target, drafter,
    prompts, template) joins the settings. The target must have been loaded with the drafter's taps.
    """
    if tuple(target.tap_ids) != tuple(drafter.tap_ids):
        raise EyasError(f"target.taps={list(target.tap_ids)}: the drafter reads {list(drafter.tap_ids)}")
    if not prompts:
        raise EyasError("verify: there are no prompts to measure on")
    bench = Bench(target, drafter.eval(), frozen, verify, seed)
    asked = [prompt if isinstance(prompt, Prompt) else Prompt(prompt) for prompt in prompts]
    runs, generations = [], list[dict[str, Any]]()
    for temperature in verify.temperatures:
        run, rows = measure_at(bench, asked, temperature, quiet=quiet)
        runs.append(run)
        generations += rows
    report = {"definition": DEFINITION, "settings": settings(bench, asked, about or {}), "runs": runs}
    write_report(report, generations, Path(out_dir))
    if not quiet:
        print_report(report)
    return report


@dataclass
class Decoded:
    """What was asked, and every question's two generations. owners: the number of the prompt it belongs to."""

    asked: list[list[int]] = field(default_factory=list)
    owners: list[int] = field(default_factory=list)
    drafted: list[Generation] = field(default_factory=list)
    plain: list[Generation] = field(default_factory=list)

    def of_prompts(self, values: Sequence[Sequence[int]]) -> list[list[int]]:
        """Values of all questions, put together for each prompt: an interval is taken over prompts."""
        joined: dict[int, list[int]] = {}
        for owner, part in zip(self.owners, values, strict=True):
            joined.setdefault(owner, []).extend(part)
        return list(joined.values())


def decode_all(bench: Bench, prompts: Sequence[Prompt], sampling: Sampling, *, quiet: bool) -> Decoded:
    """Ask every question of every prompt; the next one comes behind the answer that was drafted and verified."""
    found = Decoded()
    decoder = Decoder(bench.target, sampling, bench.limits())
    for mode in (True, False):
        bench.decode(prompts[0].ids, 0, sampling, plain=mode, new=WARM_UP)
    title = f"T = {sampling.temperature:g}"
    for number, first in enumerate(tqdm(prompts, desc=title, disable=quiet, leave=False)):
        prompt: Prompt | None = first
        turn = 0
        while prompt is not None:
            name = f"{number}.{turn}" if turn else number
            found.asked.append(prompt.ids)
            found.owners.append(number)
            found.drafted.append(bench.decode(prompt.ids, name, sampling, plain=False))
            if bench.verify.baseline:  # in turn with the other, so that both see the same state of the machine
                found.plain.append(bench.decode(prompt.ids, name, sampling, plain=True))
            prompt = prompt.next(output_text(decoder, found.drafted[-1]), bench.limits().context)
            turn += 1
    return found


def measure_at(
    bench: Bench, prompts: Sequence[Prompt], temperature: float, *, quiet: bool = False
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """One entry of ``runs`` and the rows of generations.jsonl."""
    sampling, gamma = bench.sampling(temperature), bench.verify.gamma
    found = decode_all(bench, prompts, sampling, quiet=quiet)
    asked, drafted, plain = found.asked, found.drafted, found.plain
    rounds = [out.rounds for out in drafted]
    texts = [Text(prompt, out.tokens) for prompt, out in zip(asked, drafted, strict=True)]
    run: dict[str, Any] = {
        "temperature": temperature,
        "questions": len(asked),
        "drafts": "argmax" if sampling.greedy else "sampled from q",
        "acceptance": acceptance(found.of_prompts(counted(rounds)), gamma, seed=bench.seed).to_dict(),
        "uncut": acceptance(found.of_prompts(uncut(rounds)), gamma, seed=bench.seed).to_dict(),
        "simulated": compare_simulation(bench, texts, rounds, sampling),
        "speculative": speed(drafted),
        "plain": speed(plain) if plain else None,
        "finish": {reason: sum(out.finish == reason for out in drafted) for reason in ("eos", "length", "context")},
    }
    if plain:
        run |= compare_speed(run["speculative"], run["plain"])
        run["same_as_plain"] = compare_outputs(bench.target, asked, drafted, plain) if sampling.greedy else None
    decoder = Decoder(bench.target, sampling, bench.limits())
    rows = zip(found.owners, asked, drafted, strict=True)
    return run, [row(decoder, number, prompt, out) for number, prompt, out in rows]


def compare_simulation(
    bench: Bench, texts: list[Text], rounds: Sequence[Sequence[Any]], sampling: Sampling
) -> dict[str, Any] | None:
    """Simulated tau on the texts just written, beside the measured one; None where the objective can't tell."""
    if not can_simulate(sampling):
        return None
    predicted: dict[str, Any] = simulate(
        bench.target, bench.drafter, bench.frozen, texts, bench.verify.gamma, greedy=sampling.greedy
    )
    measured = measured_alike(rounds)
    difference = predicted["tau"] / measured - 1 if measured and predicted["tau"] else None
    return predicted | {"measured": measured, "difference": difference}


def speed(outs: Sequence[Generation]) -> dict[str, Any]:
    """Pooled decoding speed. Tokens are those of the passes: prefill and the token it gives are apart.

    ms_per_*: of one draft (a token of the chain, commits included), of one target forward, of the rest of a pass.
    """
    tokens = sum(len(out.tokens) - 1 for out in outs)
    passes, drafts = sum(len(out.rounds) for out in outs), sum(r.drafted for out in outs for r in out.rounds)
    phases = ("prefill", "draft", "verify", "other", "decode")
    total = {phase: sum(getattr(out.seconds, phase) for out in outs) for phase in phases}
    return {
        "tokens": tokens,
        "seconds": total,
        "tokens_per_second": ratio(tokens, total["decode"]),
        "ms_per_draft": ratio(1e3 * total["draft"], drafts),
        "ms_per_forward": ratio(1e3 * total["verify"], passes),
        "ms_per_rest": ratio(1e3 * total["other"], passes),
    }


def compare_speed(drafted: Mapping[str, Any], plain: Mapping[str, Any]) -> dict[str, Any]:
    """Speed-up, and the costs of a draft and of a verification in plain forwards."""

    def over(key: str, base: str) -> float | None:
        return ratio(drafted[key], plain[base]) if drafted[key] is not None and plain[base] else None

    cost = {"draft": over("ms_per_draft", "ms_per_forward"), "verify": over("ms_per_forward", "ms_per_forward")}
    return {"speed_up": over("tokens_per_second", "tokens_per_second"), "cost": cost}


def compare_outputs(
    target: Target, prompts: list[list[int]], drafted: Sequence[Generation], plain: Sequence[Generation]
) -> dict[str, Any]:
    """How many greedy outputs are plain decoding's, and for each other how far apart the two tokens' logits are.

    A difference is a near-tie in reduced precision (a block's matmul rounds differently from a single row's) or a
    defect: ``logit_gap`` tells which.
    """
    differences = []
    for number, (prompt, ours, theirs) in enumerate(zip(prompts, drafted, plain, strict=True)):
        if ours.tokens == theirs.tokens:
            continue
        at = next(i for i, (a, b) in enumerate(zip(ours.tokens, theirs.tokens, strict=False)) if a != b)
        ids = torch.tensor([*prompt, *theirs.tokens[:at]], device=target.device)
        logits = target.step(ids, torch.arange(len(ids), device=ids.device), target.new_cache(), keep=1)[0][0]
        gap = abs(float(logits[ours.tokens[at]] - logits[theirs.tokens[at]]))
        differences.append({"prompt": number, "token": at, "logit_gap": gap})
        log.warning("prompt %d: output differs from plain decoding at token %d, logits %.2g apart", number, at, gap)
    return {"identical": len(prompts) - len(differences), "prompts": len(prompts), "differences": differences}


def row(decoder: Decoder, number: int, prompt: Sequence[int], out: Generation) -> dict[str, Any]:
    return {
        "prompt": number,
        "temperature": decoder.sampling.temperature,
        "prompt_ids": list(prompt),
        "output_ids": out.tokens,
        "text": output_text(decoder, out),
        "finish": out.finish,
        "rounds": [asdict(r) for r in out.rounds],
    }


def settings(bench: Bench, prompts: Sequence[Prompt], about: Mapping[str, Any]) -> dict[str, Any]:
    verify = bench.verify
    return {
        **about,
        "tree": "chain",
        "gamma": verify.gamma,
        "rule": "lossless: argmax match at T = 0, rejection sampling otherwise",
        "prompts": len(prompts),
        "prompt_tokens": sum(len(prompt.ids) for prompt in prompts),  # of the first questions
        "max_new_tokens": verify.max_new_tokens,
        "top_k": verify.top_k,
        "top_p": verify.top_p,
        "eos_ids": sorted(bench.target.eos_ids),
        "draft_vocab": len(bench.drafter.vocab),
        "dtype": str(bench.target.dtype).removeprefix("torch."),
        "device": str(bench.target.device),
        "threads": torch.get_num_threads(),
        "seed": bench.seed,
    }


def context_length(config: PretrainedConfig) -> int | None:
    """Longest text the positions of a target with this text config allow."""
    found = getattr(config, "max_position_embeddings", None)
    return None if found is None else int(found)


# --- from a configuration ------------------------------------------------------------------------------------


def evaluate_run(cfg: Config) -> dict[str, Any]:
    """Measure ``drafter_path``, or this run's best checkpoint, into report.json of the run's folder."""
    assert cfg.output_dir is not None
    bench, prompts, about = load_bench(cfg)
    models = bench.target, bench.drafter, bench.frozen
    return measure(*models, prompts, cfg.verify, cfg.output_dir, seed=cfg.seed, about=about)


def load_bench(cfg: Config) -> tuple[Bench, list[Prompt], dict[str, Any]]:
    """The models and prompts that a configuration asks for, and what the report says about them."""
    if cfg.threads:
        torch.set_num_threads(cfg.threads)
    t = cfg.target
    device = pick_device(cfg.device)
    source = drafter_folder(cfg.drafter_path, Path(cfg.output_dir or "."))
    how: dict[str, Any] = {"trust_remote_code": t.trust_remote_code, "chat_template": t.chat_template}
    files = TargetFiles.open(t.path, revision=t.revision, **how)
    config = read_config(files.folder, t.trust_remote_code).get_text_config(decoder=True)
    drafter = open_drafter(source, target_layers=int(config.num_hidden_layers)).to(device)
    if drafter.vocab.size != config.vocab_size:
        raise EyasError(
            f"{source}: drafts for a vocabulary of {drafter.vocab.size}, target.path={t.path} has {config.vocab_size}; "
            "it was trained for another target"
        )
    template = chat_template(files, asdict(t), asdict(cfg.data))
    compare_prompts(template, source)
    prompts, origin = find_prompts(cfg, template, context_length(config))  # before the weights: a mistake shows at once
    target = Target.load(str(files.folder), dtype=t.dtype, taps=drafter.tap_ids, device=device, **how)
    about = {"target": t.path, "drafter": str(source), "prompt_source": origin, "template": template.fingerprint()[:16]}
    return Bench(target, drafter.eval(), target.frozen(), cfg.verify, cfg.seed), prompts, about


def drafter_folder(path: str | None, run: Path) -> Path:
    """The checkpoint or export to measure; of a run directory its best checkpoint, or its newest."""
    source = Path(path) if path else run
    found = best_checkpoint(source)
    if found is not None:
        return found
    if path is None:
        raise EyasError(f"{run}: no checkpoint to measure; train first, or give drafter_path=FOLDER")
    return source


def find_prompts(cfg: Config, template: ChatTemplate, context: int | None) -> tuple[list[Prompt], str]:
    """Prompts as ``verify`` asks for and a word on where they come from."""
    verify, data = cfg.verify, asdict(cfg.data)
    if verify.prompts is not None:
        dialect = Dialect.of_section(data)
        found = read_prompts(verify.prompts, template, limit=verify.max_prompts, context=context, dialect=dialect)
        check_training_data(data, verify.prompts)
        return found, Path(verify.prompts).name
    if data["valid_path"] is not None:  # the training data need not be read
        valid = read_documents(template, data, "data.valid_path").documents
        corpus = Corpus(valid[:0], valid, [], {})
    else:
        corpus = read_corpus(template, data)
    found = usable(map(Prompt, corpus.prompts()), limit=verify.max_prompts, context=context)
    if not found:
        raise EyasError("verify.prompts: no held-out conversation gives a prompt; name a file of prompts")
    return found, "held-out conversations"
