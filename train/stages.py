"""The whole flow of ``python -m train``, stage by stage. A stage whose output is there and still valid is skipped.

    target folder -> documents -> features -> draft vocabulary -> drafter -> fit -> evaluation -> export
"""

from __future__ import annotations

import inspect
import json
import logging
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from tqdm import tqdm

from conf.schema import Config
from data.dump import FeatureTarget
from data.prepare import Corpus, TargetFiles, read_corpus, stored_features, token_counts
from data.preview import print_preview
from data.source import FeatureSource, OnlineFeatures, StoredFeatures
from data.store import FeatureStore
from data.template import ChatTemplate, Example
from models.checkpoint import drafter_class
from models.drafter import Drafter
from models.errors import EyasError
from models.frozen import FrozenTarget
from models.load_frozen import load_frozen
from models.portable import open_drafter
from models.target import Target
from models.vocab import DraftVocab
from train.checkpoint import STATE, best_checkpoint, digest, write_text
from train.drift import settle_config
from train.strategy import build_accelerator
from train.trainer import Fitted, Trainer

STAGES = "stages.json"  # what evaluation and export were made from
PRECISION = {"fp32": torch.float32, "bf16": torch.bfloat16}

log = logging.getLogger(__name__)


def walk(cfg: Config) -> float | None:
    """Run or continue every stage; the simulated greedy tau of the best checkpoint (what a sweep may optimise)."""
    if cfg.threads:
        torch.set_num_threads(cfg.threads)
    run_dir = Path(cfg.output_dir or Path("outputs") / cfg.name)
    cfg = replace(cfg, output_dir=str(run_dir))
    accelerator = build_accelerator(cfg.strategy, device=cfg.device, precision=cfg.train.precision)
    begun = any((run_dir / "checkpoints").glob("step_*"))
    settle_config(cfg, run_dir, begun=begun, write=accelerator.is_main_process)
    inputs = Inputs.gather(cfg, accelerator, run_dir)
    fitted = fit(cfg, accelerator, run_dir, inputs)
    main = accelerator.is_main_process
    accelerator.end_training()  # the other processes are done
    if main:
        evaluate(cfg, run_dir, inputs, fitted)
        export(cfg, run_dir, fitted)
        log.info("done: %s", run_dir)
    return float(fitted.best["tau_t0"]) if fitted.best else None


@dataclass
class Inputs:
    """What a run is fed. ``keys`` name the features of the training and the held-out documents."""

    files: TargetFiles
    template: ChatTemplate
    corpus: Corpus
    keys: dict[str, str]
    load_target: Callable[[], Target]

    @classmethod
    def gather(cls, cfg: Config, accelerator: Accelerator, run_dir: Path) -> Inputs:
        """Find the target, then read, render and mask the conversations (every process for itself)."""
        t, d = cfg.target, cfg.data
        with accelerator.main_process_first():  # a conversion or download is done once
            files = TargetFiles.open(
                t.path,
                taps=t.taps,
                revision=t.revision,
                trust_remote_code=t.trust_remote_code,
                chat_template=t.chat_template,
            )
        main = accelerator.is_main_process
        template = ChatTemplate(files.tokenizer, None, t.template_kwargs, d.supervise, eos_ids=files.eos_ids)
        corpus = read_corpus(
            template,
            path=d.path,
            valid_path=d.valid_path,
            valid_fraction=d.valid_fraction,
            max_length=d.max_length,
            max_documents=d.max_documents,
            roles=d.roles,
            split=d.split,
            rejects_dir=run_dir if main else None,
        )
        if main:
            print_preview(corpus.train, files.tokenizer)
        named = {"training features": corpus.train, "held-out features": corpus.valid}
        keys = {n: files.key(e, dtype=cfg.store.dtype, compute_dtype=t.dtype) for n, e in named.items()}
        return cls(files, template, corpus, keys, target_loader(cfg, files, accelerator.device))


def target_loader(cfg: Config, files: TargetFiles, device: torch.device) -> Callable[[], Target]:
    """Loads the target on the first call and keeps it."""
    loaded: list[Target] = []

    def load() -> Target:
        if not loaded:
            target = Target.load(
                str(files.folder),
                dtype=cfg.target.dtype,
                taps=files.tap_ids,
                device=str(device),
                trust_remote_code=cfg.target.trust_remote_code,
                chat_template=cfg.target.chat_template,
            )
            log.info("target %s: %d trainable parameters", files.folder, target.trainable_parameters())
            loaded.append(target)
        return loaded[0]

    return load


def fit(cfg: Config, accelerator: Accelerator, run_dir: Path, inputs: Inputs) -> Fitted:
    """Features, draft vocabulary and drafter, then the training loop."""
    sources = {
        name: feature_source(cfg, accelerator, inputs, examples, inputs.keys[name])
        for name, examples in zip(inputs.keys, (inputs.corpus.train, inputs.corpus.valid), strict=True)
        if examples
    }
    if cfg.features == "store":
        inputs.load_target = target_loader(cfg, inputs.files, accelerator.device)  # lets go of the dump's target
    dtype = PRECISION[cfg.train.precision]
    frozen = load_frozen(inputs.files.folder).to(accelerator.device, dtype)
    drafter = build_drafter(cfg, frozen, inputs)
    content = inputs.keys | {"draft vocabulary": digest([drafter.vocab.size, drafter.vocab.ids.tolist()])}
    train, valid = sources["training features"], sources.get("held-out features")
    if valid is None:
        log.warning("nothing is held out (data.valid_fraction=0): no validation, and the last checkpoint counts as best")
    return Trainer(cfg, run_dir, accelerator, drafter, frozen, train=train, valid=valid, content=content).fit()


def feature_source(
    cfg: Config, accelerator: Accelerator, inputs: Inputs, examples: list[Example], key: str
) -> FeatureSource:
    """Features of these documents, from the store (dumped first, if need be) or from the target as they are needed."""
    dtype = PRECISION[cfg.train.precision]
    store = cfg.store
    if cfg.features == "online":
        return OnlineFeatures(
            inputs.load_target(), examples, store_dtype=store.dtype, batch_tokens=store.batch_tokens, dtype=dtype
        )
    folder = Path(store.dir)
    if not accelerator.is_main_process:  # a dump may take longer than a collective is allowed to
        while not FeatureStore.is_complete(folder / key, key):
            time.sleep(1)
        return StoredFeatures(FeatureStore.open(folder / key, key=key), dtype)
    with tqdm(total=0, unit="tok", unit_scale=True, desc="features", disable=None) as bar:

        def progress(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        features = stored_features(
            examples,
            folder,
            key,
            inputs.load_target,
            dtype=store.dtype,
            shard_mib=store.shard_mib,
            batch_tokens=store.batch_tokens,
            provenance={"target": cfg.target.path, "data": cfg.data.path, "template": inputs.template.fingerprint()},
            progress=progress,
        )
    return StoredFeatures(features, dtype)


def build_drafter(cfg: Config, frozen: FrozenTarget, inputs: Inputs) -> Drafter:
    """A fresh drafter of the configured class, or the one that ``train.init_from`` names."""
    options = {k: v for k, v in cfg.drafter.items() if k != "_target_"}
    cls = drafter_class(str(cfg.drafter.get("_target_")))
    size = options.pop("draft_vocab_size", None)
    if cfg.train.init_from:
        return initial_drafter(cfg.train.init_from, cls, frozen, inputs.files.tap_ids)
    if size is None:
        vocab = DraftVocab.full(frozen.vocab_size)
    else:
        vocab = DraftVocab.from_counts(
            token_counts(inputs.corpus.train, frozen.vocab_size), size, inputs.files.special_ids
        )
    if "seed" in inspect.signature(cls.create).parameters:
        options["seed"] = cfg.seed
    torch.manual_seed(cfg.seed)
    return cls.create(frozen, vocab, inputs.files.tap_ids, **options)


def initial_drafter(path: str, cls: type[Drafter], frozen: FrozenTarget, tap_ids: tuple[int, ...]) -> Drafter:
    """The drafter of a run, a checkpoint or an export, checked against this run's target, taps and class."""
    folder = best_checkpoint(Path(path)) or Path(path)
    drafter = open_drafter(folder, target_layers=int(frozen.config["num_hidden_layers"]))
    found = {"class": type(drafter).__name__, "taps": tuple(drafter.tap_ids), "vocabulary": drafter.vocab.size}
    wanted = {"class": cls.__name__, "taps": tuple(tap_ids), "vocabulary": frozen.vocab_size}
    wrong = [f"{name} {found[name]} instead of {wanted[name]}" for name in found if found[name] != wanted[name]]
    if wrong:
        raise EyasError(f"train.init_from={path}: does not fit this run: {'; '.join(wrong)}")
    log.info("starting from the weights in %s", folder)
    return drafter


# --- after training: each made once for a checkpoint and its settings ---


def evaluate(cfg: Config, run_dir: Path, inputs: Inputs, fitted: Fitted) -> None:
    """Measure tau of the best checkpoint with the verifier, into report.json."""
    from eval.run import evaluate_run

    made_from = [checkpoint_digest(fitted.checkpoint), inputs.keys, asdict(cfg.verify)]
    once(run_dir, "evaluation", digest(made_from), run_dir / "report.json", lambda: evaluate_run(cfg))


def export(cfg: Config, run_dir: Path, fitted: Fitted) -> None:
    """Write the serving folder of the best checkpoint."""
    from scripts.export import run_export

    report = run_dir / "report.json"
    made_from = [checkpoint_digest(fitted.checkpoint), report.read_text(encoding="utf-8") if report.exists() else ""]
    once(run_dir, "export", digest(made_from), run_dir / "export" / "config.json", lambda: run_export(cfg))


def once(run_dir: Path, stage: str, key: str, product: Path, work: Callable[[], Any]) -> None:
    """Do the work unless its product is there and was made under the same key."""
    path = run_dir / STAGES
    done = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    if done.get(stage) == key and product.exists():
        log.info("%s: up to date, %s", stage, product)
        return
    work()
    write_text(path, json.dumps(done | {stage: key}, indent=1) + "\n")


def checkpoint_digest(folder: Path) -> str:
    files = json.loads((folder / STATE).read_text(encoding="utf-8"))["files"]
    return digest([files["model.safetensors"]])
