"""The measurement of a configuration: what it loads, measures and leaves behind.

:func:`evaluate_run` is the stage behind ``python -m eval`` and the end of ``python -m train``.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

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
from eval.costs.cost import CostModel
from eval.costs.predict import measure_costs, predictions, tuned
from eval.look.page import token_texts
from eval.look.report import print_report, write_report
from eval.measure import Bench, measure
from eval.processes import Processes
from eval.prompts import PlainText, Prompt, describe, prompt_template, read_prompts, usable
from eval.verify.accept import Rule
from models.device import pick_device
from models.drafter import Drafter
from models.errors import EyasError
from models.load_frozen import read_config
from models.target import Target

log = logging.getLogger(__name__)


def evaluate_run(cfg: Config, processes: Processes | None = None) -> dict[str, Any]:
    """Measure ``drafter_path``, or this run's best checkpoint, into report.json of the run's folder: the report.

    ``processes``: those that share the prompts; every one must call, the first one writes and prints.
    """
    assert cfg.output_dir is not None
    bench, prompts, about = load_bench(cfg, processes)
    return run_bench(bench, prompts, about, Path(cfg.output_dir))


def run_bench(
    bench: Bench, prompts: Sequence[Prompt], about: dict[str, Any], folder: Path, *, quiet: bool = False
) -> dict[str, Any]:
    """Measure loaded models, on the first ``verify.max_prompts`` prompts; the others serve to choose a tree."""
    verify = bench.verify
    asked, others = prompts[: verify.max_prompts], prompts[verify.max_prompts :]
    costs: CostModel | None = None
    if asked and (verify.costs or verify.tune):  # each process by itself would choose trees of its own
        costs = bench.processes.first(measure_costs(bench.target, bench.candidates))
    if verify.tune and costs:
        bench = tuned(bench, others or asked, costs, folder / "trees")
        about |= {"tuned_on": f"{len(others)} other prompts" if others else "the prompts of the measurement"}
        if not others:
            log.warning("verify.tune: no prompts are left over; the tree is chosen on those that it is measured on")
    report, rows, texts = measure(bench, asked, about=about, quiet=quiet)
    if bench.processes.rank:
        return report
    if costs:
        report["cost_model"] = costs.to_dict() | {"predictions": predictions(bench, costs, texts)}
    if not quiet:  # first: the numbers are worth more than the files
        print_report(report)
    write_report(report, rows, folder, token_texts(bench.target.tokenizer))
    return report


def check_settings(verify: VerifyConfig) -> None:
    """Raise EyasError for what only its own class can tell is impossible, tree files included: before any work."""
    shape_of(verify)
    Rule(verify.rule, verify.typical_eps, verify.typical_delta)


def load_bench(cfg: Config, processes: Processes | None = None) -> tuple[Bench, list[Prompt], dict[str, Any]]:
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
    target = Target.load(str(files.folder), dtype=t.dtype, taps=taps or None, device=device, **how)
    frozen = target.frozen()

    def candidate(source: str, drafter: Drafter | None) -> Candidate:
        if drafter is not None:
            return trained(drafter, frozen, cfg.verify, source)
        if source == NGRAM:
            return ngrams(cfg.verify)
        model = load_model(source, dtype=t.dtype, device=device, trust_remote_code=t.trust_remote_code)
        return independent(model, target, cfg.verify, source)

    candidates = told_apart([candidate(source, drafter) for source, drafter in loaded.items()])
    about = {"target": t.path, "prompt_source": origin, "template": describe(template)}
    return Bench(target, candidates, cfg.verify, cfg.seed, processes or Processes()), prompts, about


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
