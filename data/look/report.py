"""What a run is fed, for people: documents and counts in the terminal, pictures and a page, data.json for programs."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from data.look.coverage import Coverage
from data.look.page import write_page
from data.look.preview import print_preview, token_repr
from data.masks.template import ChatTemplate
from data.prepare import Inputs
from models.errors import EyasError
from models.files import write_atomic
from models.load_frozen import read_config
from models.run_folder import beside_run, has_begun

DATA, PAGE, PLOT = "data.json", "preview.html", "draft_vocab.png"

log = logging.getLogger(__name__)


def show(inputs: Inputs, run_dir: Path, preview: int, coverage: Coverage | None = None) -> None:
    """Print ``preview`` documents and the length histogram; write data.json: what the documents are made from."""
    about = inputs.corpus.about
    print_preview(inputs.corpus.train, inputs.files.tokenizer, count=preview, statistics=about["statistics"])
    run_dir.mkdir(parents=True, exist_ok=True)
    if has_begun(run_dir):  # data.json tells what its drafter was trained on
        log.info("%s: training has begun, so %s and rejects.jsonl stay as they are", run_dir, DATA)
        return
    facts = {**about, "prompt": prompt_identity(inputs.template)}
    if coverage is not None:
        facts["draft_vocabulary"] = coverage.to_json()
    write_atomic(run_dir / DATA, json.dumps(facts, indent=1, default=str) + "\n")


def report(inputs: Inputs, run_dir: Path, preview: int, draft_vocab_size: int | None, gamma: int) -> None:
    """:func:`show`, the draft-vocabulary report as a table and a picture, and a page with everything."""
    coverage = coverage_of(inputs, draft_vocab_size, gamma)
    show(inputs, run_dir, preview, coverage)
    console = Console()
    console.print(coverage.table(console.encoding))
    log.info("%s", coverage.justify())
    coverage.plot(run_dir / PLOT)
    write_page(
        run_dir / PAGE,
        [inputs.corpus.train[i] for i in range(min(preview, len(inputs.corpus.train)))],
        inputs.files.tokenizer,
        title=run_dir.name,
        statistics=inputs.corpus.about["statistics"],
        coverage=coverage,
        plot_png=(run_dir / PLOT).read_bytes(),
    )
    log.info("%s and %s", run_dir / PAGE, run_dir / PLOT)


def coverage_of(inputs: Inputs, draft_vocab_size: int | None, gamma: int) -> Coverage:
    """Coverage of the supervised tokens; ``draft_vocab_size`` None: the full vocabulary."""
    config = read_config(inputs.files.folder, bool(inputs.target["trust_remote_code"])).get_text_config(decoder=True)
    vocab, tokenizer = int(config.vocab_size), inputs.files.tokenizer
    try:
        return Coverage.of(
            torch.from_numpy(inputs.corpus.train.token_counts(vocab, inputs.corpus.weights)),
            inputs.files.special_ids,
            chosen=draft_vocab_size,
            hidden=int(config.hidden_size),
            held_out=torch.from_numpy(inputs.corpus.valid.token_counts(vocab)),
            gamma=gamma,
            token_text=partial(token_repr, tokenizer),
        )
    except ValueError as error:  # a tokenizer with more tokens than the target
        raise EyasError(
            f"target: the tokenizer gives ids beyond the target's vocabulary of {vocab} ({error})"
        ) from None


def prompt_identity(template: ChatTemplate) -> dict[str, Any]:
    """What decides the text that a prompt becomes: a drafter serves well only under the one it was trained with."""
    return {"chat_template": template.source, "template_kwargs": dict(template.kwargs)}


def compare_prompts(template: ChatTemplate, drafter: Path) -> None:
    """Warn if the run that ``drafter`` (a checkpoint or an export) lies in read text that was rendered otherwise."""
    told = beside_run(drafter, DATA)
    if told is None:
        return
    try:
        trained: Mapping[str, Any] = json.loads(told.read_text(encoding="utf-8"))["prompt"]
    except (OSError, ValueError, KeyError):
        return
    now = json.loads(json.dumps(prompt_identity(template), default=str))
    for key, value in now.items():
        if trained.get(key) != value:
            shown = f": {trained.get(key)} then, {value} now" if key == "template_kwargs" else ""
            log.warning("target.%s: the drafter was trained under another one%s; its acceptance may suffer", key, shown)
