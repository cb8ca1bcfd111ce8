"""What a configuration asks to measure: its drafters, the targets they draft for, and the prompts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
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
from data.prepare import TargetFiles, chat_template
from eval.candidates import (
    Candidate,
    context_length,
    drafter_folder,
    drafter_name,
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
from models.device import free_memory, pick_device
from models.drafter import Drafter
from models.errors import EyasError
from models.frozen import FrozenTarget
from models.load_frozen import read_config
from models.target import Target
from models.tuned import check_tuned, is_tuned_by, load_tuned, tuned


def check_settings(verify: VerifyConfig) -> None:
    """Raise EyasError for what only its own class can tell is impossible, tree files included: before any work."""
    shape_of(verify)
    Rule(verify.rule, verify.typical_eps, verify.typical_delta)


class Asked(NamedTuple):
    """One of the drafters to measure. name: its own in the report; drafter: a trained one; tuned: what is known of the
    target that was trained along with it, None if it goes with the target as configured."""

    name: str
    source: str
    drafter: Drafter | None
    tuned: Mapping[str, Any] | None

    @property
    def target(self) -> str | None:
        """Where the target comes from: the drafter's own folder, None for the one that is configured."""
        return self.source if self.tuned else None


@dataclass(frozen=True)
class Loaded:
    """What a configuration asks for, targets and draft models yet unread.

    asked: in the order of ``drafter_path``; folder: of the target; prompts and about are common to all (``about`` joins
    the settings of a report).
    """

    cfg: Config
    folder: Path
    device: str
    asked: list[Asked]
    prompts: list[Prompt]
    about: dict[str, Any]
    processes: Processes

    @property
    def names(self) -> list[str]:
        return [one.name for one in self.asked]

    @property
    def targets(self) -> list[str | None]:
        """The configured target first, if any drafter goes with it."""
        return sorted(dict.fromkeys(one.target for one in self.asked), key=lambda target: target is not None)

    def benches(self) -> Iterator[Bench]:
        """One for each target, loaded when it is asked for; whoever asks for the next should have dropped the last."""
        for target in self.targets:
            yield self._bench(target)
            free_memory()

    def _bench(self, source: str | None) -> Bench:
        cfg, asked = self.cfg, [one for one in self.asked if one.target == source]
        taps = {tap for one in asked if one.drafter is not None for tap in one.drafter.tap_ids}
        how = self._how | {"quantize": cfg.target.quantize, "chat_template": cfg.target.chat_template}
        how |= {"taps": sorted(taps) or None}
        if source is None:
            target = Target.load(str(self.folder), **how)
        else:
            target = load_tuned(self.folder, Path(source), **how)
        candidates = [self._candidate(one, target) for one in asked]
        return Bench(target, candidates, cfg.verify, cfg.seed, self.processes)

    def _candidate(self, one: Asked, target: Target) -> Candidate:
        verify = self.cfg.verify
        if one.drafter is not None:
            found = trained(one.drafter, target.frozen(), verify, one.source)
        elif one.source == NGRAM:
            found = ngrams(verify)
        else:
            found = independent(load_model(one.source, **self._how), target, verify, one.source)
        return replace(found, name=one.name, tuned=one.tuned)

    @property
    def _how(self) -> dict[str, Any]:
        """Arguments of Target.load for any model."""
        target = self.cfg.target
        return {"dtype": target.dtype, "device": self.device, "trust_remote_code": target.trust_remote_code}


def load(cfg: Config, processes: Processes | None = None) -> Loaded:
    """The drafters and prompts that a configuration asks for, checked before any target's weights are read."""
    if cfg.threads:
        torch.set_num_threads(cfg.threads)
    t = cfg.target
    check_settings(cfg.verify)
    device = pick_device(cfg.device)
    files = TargetFiles.open(
        t.path, revision=t.revision, trust_remote_code=t.trust_remote_code, chat_template=t.chat_template
    )
    config = read_config(files.folder, t.trust_remote_code).get_text_config(decoder=True)
    drafters = load_drafters(cfg, config, device)
    asked = name_drafters(drafters, files.folder)
    template = prompt_template(files, asdict(t), asdict(cfg.data))
    for source, drafter in drafters.items():
        if drafter is not None and isinstance(template, ChatTemplate):
            compare_prompts(template, Path(source))
    prompts, origin = find_prompts(cfg, template, context_length(config))
    about = {"target": t.path, "prompt_source": origin, "template": describe(template)}
    return Loaded(cfg, files.folder, device, asked, prompts, about, processes or Processes())


def name_drafters(drafters: Mapping[str, Drafter | None], target: Path) -> list[Asked]:
    """Each with a name of its own and what is known of its target. Raises EyasError if a tuned one is missing."""
    names = told_apart([source if source == NGRAM else drafter_name(source) for source in drafters])
    found = []
    for name, (source, drafter) in zip(names, drafters.items(), strict=True):
        known = tuned(Path(source)) if drafter is not None else None
        if known is not None and is_tuned_by(target, Path(source)):
            known = None  # target.path is that very model
        if known is not None:
            check_tuned(Path(source))
        found.append(Asked(name, source, drafter, known))
    return found


def load_bench(cfg: Config) -> tuple[Bench, list[Prompt]]:
    """For what works on one target at a time."""
    loaded = load(cfg)
    if len(loaded.targets) > 1:
        raise EyasError(f"drafter_path={cfg.drafter_path}: these draft for several targets; name those of one")
    return next(loaded.benches()), loaded.prompts


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
    found = held_out(data, template, wanted, context)
    if not found:
        raise EyasError("verify.prompts: no held-out conversation gives a prompt; name a file of prompts")
    return found, "held-out conversations"


def held_out(data: dict[str, Any], template: ChatTemplate, wanted: int, context: int | None) -> list[Prompt]:
    """Prompts of the conversations that training holds out, as the ``data`` section has it."""
    if data["valid_path"] is not None:  # the training data need not be read
        valid = read_documents(template, data, "data.valid_path").documents
        corpus = Corpus(valid[:0], valid, [], {})
    else:
        corpus = read_corpus(template, data)
    return usable(map(Prompt, corpus.prompts()), limit=wanted, context=context)


class GreedyTau:
    """Greedy tau of a chain of ``verify.gamma``, by the verifier, of a drafter that is still in training.

    On held-out conversations, whatever ``verify.prompts`` says: on its prompts a checkpoint is measured that was chosen
    without them.
    """

    def __init__(self, cfg: Config, target: Target) -> None:
        once: dict[str, Any] = {"temperatures": [0.0], "tree": "chain", "tune": False, "batch_sizes": [1]}
        once |= {"baseline": False, "costs": False, "adaptive": False, "off_above": None}
        wanted = cfg.train.tau_prompts
        self.verify = replace(cfg.verify, **once, max_prompts=wanted)
        files = TargetFiles.open(
            str(target.folder), trust_remote_code=cfg.target.trust_remote_code, chat_template=cfg.target.chat_template
        )
        data = asdict(cfg.data)
        template = chat_template(files, asdict(cfg.target), data)
        self.prompts = held_out(data, template, wanted, context_length(target.config))
        if not self.prompts:
            raise EyasError("train.tau=measured: no held-out conversation gives a prompt to measure on")
        self.target, self.seed = target, cfg.seed

    def __call__(self, drafter: Drafter, frozen: FrozenTarget) -> float:
        """``drafter`` is used up: give a copy."""
        bench = Bench(self.target, [trained(drafter, frozen, self.verify)], self.verify, self.seed)
        report = measure(bench, self.prompts, quiet=True).report
        return float(report["runs"][0]["acceptance"]["tau"])
