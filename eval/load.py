"""What a configuration asks to measure: its drafters, the targets they draft for, and the prompts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import PretrainedConfig

from conf.schema import Config, VerifyConfig
from conf.values import NGRAM, drafters, is_folder
from data.chats.dialects import Dialect
from data.documents.corpus import Corpus, read_corpus, read_documents
from data.documents.held_out import check_training_data
from data.look.report import compare_prompts
from data.masks.template import ChatTemplate
from data.prepare import TargetFiles
from eval.candidates import (
    Candidate,
    context_length,
    drafter_folder,
    independent,
    load_drafter,
    load_model,
    ngrams,
    shape_of,
    told_apart,
    trained,
)
from eval.measure import Bench, measure
from eval.processes import Processes
from eval.prompts import PlainText, Prompt, describe, prompt_template, read_prompts, usable
from eval.verify.accept import Rule
from models.device import pick_device
from models.drafter import Drafter
from models.errors import EyasError
from models.frozen import FrozenTarget
from models.load_frozen import read_config
from models.target import Target
from models.tuned import apply_tuned, tuned


def check_settings(verify: VerifyConfig) -> None:
    """Raise EyasError for what only its own class can tell is impossible, tree files included: before any work."""
    shape_of(verify)
    Rule(verify.rule, verify.typical_eps, verify.typical_delta)


class Loaded(NamedTuple):
    """benches: one for each target, the original one first; a drafter trained together with its target brings the tuned
    target along. prompts and about are common to all (``about`` joins the settings of a report)."""

    benches: list[Bench]
    prompts: list[Prompt]
    about: dict[str, Any]


def load(cfg: Config, processes: Processes | None = None) -> Loaded:
    """The models and prompts that a configuration asks for, and what the report says about them."""
    if cfg.threads:
        torch.set_num_threads(cfg.threads)
    t = cfg.target
    check_settings(cfg.verify)
    device = pick_device(cfg.device)
    how: dict[str, Any] = {"trust_remote_code": t.trust_remote_code, "chat_template": t.chat_template}
    files = TargetFiles.open(t.path, revision=t.revision, **how)
    config = read_config(files.folder, t.trust_remote_code).get_text_config(decoder=True)
    loaded = load_drafters(cfg, config, device)
    template = prompt_template(files, asdict(t), asdict(cfg.data))
    for source, drafter in loaded.items():
        if drafter is not None and isinstance(template, ChatTemplate):
            compare_prompts(template, Path(source))
    prompts, origin = find_prompts(cfg, template, context_length(config))  # before the weights: a mistake shows at once
    taps = sorted({tap for drafter in loaded.values() if drafter is not None for tap in drafter.tap_ids})
    how |= {"dtype": t.dtype, "taps": taps or None, "device": device, "quantize": t.quantize}
    targets: dict[str | None, Target] = {}

    def target_of(source: str | None) -> Target:
        """The target, or the one that was tuned along with the drafter of ``source``."""
        if source not in targets:
            targets[source] = Target.load(str(files.folder), **how)
            if source is not None:
                apply_tuned(targets[source], Path(source))
        return targets[source]

    def candidate(source: str, drafter: Drafter | None) -> tuple[str | None, Candidate]:
        if drafter is not None:
            changed = tuned(Path(source))
            own = source if changed else None
            return own, replace(trained(drafter, target_of(own).frozen(), cfg.verify, source), tuned=changed)
        if source == NGRAM:
            return None, ngrams(cfg.verify)
        model = load_model(source, dtype=t.dtype, device=device, trust_remote_code=t.trust_remote_code)
        return None, independent(model, target_of(None), cfg.verify, source)

    found = [candidate(source, drafter) for source, drafter in loaded.items()]
    named = list(zip([own for own, _ in found], told_apart([one for _, one in found]), strict=True))
    order = sorted({own for own, _ in named}, key=lambda own: (own is not None, own))
    about = {"target": t.path, "prompt_source": origin, "template": describe(template)}
    benches = [
        Bench(
            target_of(source),
            [one for own, one in named if own == source],
            cfg.verify,
            cfg.seed,
            processes or Processes(),
        )
        for source in order
    ]
    return Loaded(benches, prompts, about)


def load_bench(cfg: Config) -> tuple[Bench, list[Prompt]]:
    """For what works on one target at a time."""
    benches, prompts, _ = load(cfg)
    if len(benches) > 1:
        raise EyasError(f"drafter_path={cfg.drafter_path}: these draft for several targets; name those of one")
    return benches[0], prompts


def load_drafters(cfg: Config, config: PretrainedConfig, device: str) -> dict[str, Drafter | None]:
    """The trained drafters among the entries of ``drafter_path`` (by default this run's own), None for the others."""
    run = Path(cfg.output_dir or ".")
    found: dict[str, Drafter | None] = {}
    entries: list[str | None] = [*drafters(cfg)]
    for entry in entries or [None]:
        if entry is not None and not is_folder(entry):
            found[entry] = None
            continue
        source = drafter_folder(entry, run)
        if any(Path(other).resolve() == source.resolve() for other, drafter in found.items() if drafter):
            raise EyasError(f"drafter_path={cfg.drafter_path}: names {source} twice")
        found[str(source)] = load_drafter(source, config, cfg.target.path, device)
    return found


def find_prompts(cfg: Config, template: ChatTemplate | PlainText, context: int | None) -> tuple[list[Prompt], str]:
    """Prompts as ``verify`` asks for and a word on where they come from."""
    verify, data = cfg.verify, asdict(cfg.data)
    wanted = verify.max_prompts + (verify.tune_prompts if verify.tune else 0)
    if verify.prompts is not None:
        dialect = Dialect.of_section(data)
        found = read_prompts(
            verify.prompts, template, limit=wanted, context=context, dialect=dialect, tuning=wanted - verify.max_prompts
        )
        check_training_data(data, verify.prompts)
        return found, Path(verify.prompts).name
    if isinstance(template, PlainText):
        raise EyasError(
            f"verify.prompts: target.path={cfg.target.path} has no chat template, which held-out conversations need; "
            "give a file of prompts, or target.chat_template=FILE"
        )
    if data["valid_path"] is not None:  # the training data need not be read
        valid = read_documents(template, data, "data.valid_path").documents
        corpus = Corpus(valid[:0], valid, [], {})
    else:
        corpus = read_corpus(template, data)
    found = usable(map(Prompt, corpus.prompts()), limit=wanted, context=context)
    if not found:
        raise EyasError("verify.prompts: no held-out conversation gives a prompt; name a file of prompts")
    return found, "held-out conversations"


class GreedyTau:
    """Greedy tau of a chain of ``verify.gamma``, by the verifier, of a drafter that is still in training."""

    def __init__(self, cfg: Config, target: Target) -> None:
        once: Mapping[str, Any] = {"temperatures": [0.0], "tree": "chain", "tune": False, "batch_sizes": [1]}
        prompts = cfg.train.tau_prompts
        verify = replace(cfg.verify, **once, baseline=False, costs=False, adaptive=False, max_prompts=prompts)
        files = TargetFiles.open(
            str(target.folder), trust_remote_code=cfg.target.trust_remote_code, chat_template=cfg.target.chat_template
        )
        template = prompt_template(files, asdict(cfg.target), asdict(cfg.data))
        self.prompts, _ = find_prompts(replace(cfg, verify=verify), template, context_length(target.config))
        self.target, self.verify, self.seed = target, verify, cfg.seed

    def __call__(self, drafter: Drafter, frozen: FrozenTarget) -> float:
        """``drafter`` is used up: give a copy."""
        bench = Bench(self.target, [trained(drafter, frozen, self.verify)], self.verify, self.seed)
        report, _, _ = measure(bench, self.prompts, quiet=True)
        return float(report["runs"][0]["acceptance"]["tau"])
