"""The whole flow of ``python -m train``, stage by stage. A stage whose output is there and still valid is skipped.

target folder -> documents -> features -> draft vocabulary -> drafter -> fit -> evaluation -> export
"""

from __future__ import annotations

import copy
import inspect
import logging
import secrets
import shutil
import signal
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import asdict, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list

from conf.schema import Config
from data.documents.document_set import DocumentSet
from data.features.source import FeatureSource, OnlineFeatures, StoredFeatures, TokensOnly
from data.look.report import show
from data.prepare import Inputs, open_target
from data.processes import Job, Stage, Tick, nothing
from models.checkpoint import drafter_class
from models.device import free_memory, pick_device
from models.drafter import Drafter, NotServed
from models.errors import EyasError
from models.files import lock
from models.frozen import FrozenTarget
from models.launch import follow_parent, launched
from models.load_frozen import load_frozen
from models.portable import CARD, TARGET, open_drafter, refuse_foreign
from models.run_folder import REPORT, STAGES, STATE, best_checkpoint, file_digest, has_begun, note_down, read_notes
from models.signals import raise_again
from models.target import Target
from models.tuned import is_tuned_by, tuned
from models.vocab import DraftVocab
from train.checkpoint import digest
from train.drift import settle_config
from train.joint import JointTraining
from train.optimizer_state import is_optimizer_file
from train.strategy import build_accelerator, pick_precision
from train.trainer import Fitted, Trainer
from train.watchdog import Watchdog

JOB = ".job"  # of the run folder, while its processes talk there
PRECISION = {"fp32": torch.float32, "bf16": torch.bfloat16}

log = logging.getLogger(__name__)


def walk(cfg: Config) -> float | None:
    """Run or continue every stage; the greedy tau that the best checkpoint is best by, which a sweeper of Hydra's may
    optimise, or None if nothing is held out."""
    if cfg.threads:
        torch.set_num_threads(cfg.threads)
    if launched():
        follow_parent(signal.SIGTERM)  # to save, and leave the run to the next launcher
    run_dir = Path(cfg.output_dir or Path("outputs") / cfg.name)
    cfg = replace(cfg, output_dir=str(run_dir), drafter_path=None)  # what is measured and exported is this run's
    cfg.train.precision = pick_precision(cfg.train.precision, cfg.device)  # what config.yaml keeps
    accelerator = build_accelerator(cfg.device)
    main = accelerator.is_main_process
    with (
        Watchdog(accelerator, 60 * cfg.strategy.timeout_minutes) as watchdog,
        lock(run_dir, "training this run") if main else nullcontext(),
    ):
        inputs, fitted = together(cfg, accelerator, run_dir, watchdog)
        accelerator.end_training()
        free_memory()  # which the verifier wants
        # The others wait: a launcher takes a machine whose processes have ended out of the job, minutes later.
        with watchdog.paused("evaluating and exporting"), inputs.job.stage("end"):
            if main:
                evaluate(cfg, run_dir, inputs, fitted)
                export(cfg, run_dir, fitted)
                log.info("done: %s", run_dir)
    return None if fitted.best is None else float(fitted.best.get("tau_measured", fitted.best["tau_t0"]))


def together(cfg: Config, accelerator: Accelerator, run_dir: Path, watchdog: Watchdog) -> tuple[Inputs, Fitted]:
    """The stages that all processes take part in: up to the trained drafter."""
    from eval.load import check_settings

    check_settings(cfg.verify)  # not after hours of training
    settle_config(cfg, run_dir, begun=has_begun(run_dir), write=accelerator.is_main_process)
    check_start(cfg)
    if cfg.strategy.deepspeed is not None:
        from train.zero import check_engine

        check_engine(cfg.strategy, cfg.optim, accelerator)
    with watchdog.paused("reading the conversations"):
        inputs = gather(cfg, accelerator, run_dir)
    return inputs, fit(cfg, accelerator, run_dir, inputs, watchdog)


def gather(cfg: Config, accelerator: Accelerator, run_dir: Path, tick: Tick = nothing) -> Inputs:
    """Find the target, then read, render and mask the conversations: process 0, then the others find it done.

    They wait outside any collective, for as long as it takes. ``tick`` is called whenever this process moves on or,
    while it waits, another one does.
    """
    main = accelerator.is_main_process
    target, data, store = asdict(cfg.target), asdict(cfg.data), asdict(cfg.store)
    (token,) = broadcast_object_list([secrets.token_hex(8)])  # all have just started: nobody waits
    job = Job(accelerator.process_index, accelerator.num_processes, run_dir / JOB, token)
    if job.size == 1:
        shutil.rmtree(job.folder, ignore_errors=True)  # of several that were killed
    with job.stage("inputs", tick) as stage, stage.main_first():
        files = open_target(target)
        stage.moved()
        rejects_dir = run_dir if main and not has_begun(run_dir) else None
        inputs = Inputs.gather(
            files, target=target, data=data, store=store, prompts=cfg.verify.prompts, rejects_dir=rejects_dir, job=job
        )
        stage.moved()
        if main:
            show(inputs, run_dir, cfg.preview)
    return inputs


def frozen_dtype(cfg: Config, accelerator: Accelerator) -> torch.dtype:
    """The exact teacher wants float32 products, which only CUDA makes from half-precision weights."""
    return PRECISION[cfg.train.precision] if accelerator.device.type == "cuda" else torch.float32


def fit(cfg: Config, accelerator: Accelerator, run_dir: Path, inputs: Inputs, watchdog: Watchdog) -> Fitted:
    """Features, draft vocabulary and drafter, then the training loop."""
    joint = cfg.joint.backbone != "none"
    if accelerator.is_main_process and not joint and cfg.features == "store":
        parts = (inputs.corpus.train, inputs.corpus.valid)
        note_down(run_dir / STAGES, {"features": [str(inputs.folder(part).absolute()) for part in parts if part]})
    train, valid = token_sources(inputs) if joint else feature_sources(cfg, accelerator, inputs, watchdog.tick)
    if valid is None:
        log.warning("nothing is held out (data.valid_fraction=0): the last checkpoint counts as the best")
    frozen = load_frozen(inputs.files.folder).to(accelerator.device, frozen_dtype(cfg, accelerator))
    drafter = build_drafter(cfg, frozen, inputs)
    check_export(cfg, run_dir, drafter, frozen, tell=accelerator.is_main_process)
    settings: dict[str, Any] = {"train": train, "valid": valid}
    if joint:
        target = inputs.load_target(str(accelerator.device))
        if cfg.strategy.name == "zero3" and target.runs_row_by_row:
            raise EyasError(
                f"strategy=zero3: the RoPE of {cfg.target.path} hangs on the length of a text, so it reads documents "
                "one by one, and processes with different numbers of them would wait for each other; use zero2"
            )
        settings["joint"] = JointTraining.of(target, drafter, cfg.joint)
    if cfg.train.tau == "measured":  # every process must know that one measures: they wait for its number
        by_verifier = partial(tau_by_verifier, cfg, inputs, frozen, settings.get("joint"))
        settings["measure"] = by_verifier() if accelerator.is_main_process else lambda drafter: 0.0
    content = {
        "training features": inputs.key(inputs.corpus.train),
        "held-out features": inputs.key(inputs.corpus.valid),
        "draft vocabulary": digest([drafter.vocab.size, drafter.vocab.ids.tolist()]),
    }
    weights = inputs.corpus.weights
    if set(weights) != {1.0}:
        content["weights"] = digest(weights)
    settings |= {"content": content, "weights": weights, "watchdog": watchdog}
    return Trainer(cfg, run_dir, accelerator, drafter, frozen, **settings).fit()


def token_sources(inputs: Inputs) -> tuple[TokensOnly, TokensOnly | None]:
    """Documents for a target that is trained along: its states change with every step, so none are stored."""
    corpus = inputs.corpus
    return TokensOnly(corpus.train), TokensOnly(corpus.valid) if corpus.valid else None


def tau_by_verifier(
    cfg: Config, inputs: Inputs, frozen: FrozenTarget, joint: JointTraining | None
) -> Callable[[Drafter], float]:
    """What measures greedy tau of a drafter in training, on ``train.tau_prompts`` prompts. It uses up what it is given:
    a whole copy, which the trainer makes."""
    from eval.load import GreedyTau

    target = joint.model.target if joint else inputs.load_target(str(frozen.head.device))
    measured = GreedyTau(cfg, target)
    return lambda drafter: measured(drafter, target.frozen() if joint else frozen)


def feature_sources(
    cfg: Config, accelerator: Accelerator, inputs: Inputs, tick: Tick = nothing
) -> tuple[FeatureSource, FeatureSource | None]:
    """Features of the training and the held-out documents: from stores, dumped first if need be, or made in the loop.

    The target is loaded at most once, and let go of when the stores are whole. All processes dump, each on its device;
    they wait for each other outside any collective. ``tick``: see :func:`gather`.
    """
    dtype = PRECISION[cfg.train.precision]

    @cache
    def load_target() -> Target:
        return inputs.load_target(str(accelerator.device))

    def source(examples: DocumentSet, stage: Stage) -> FeatureSource:
        if cfg.features != "online":
            return StoredFeatures(inputs.stored(examples, load_target, stage), dtype)
        store = cfg.store
        return OnlineFeatures(
            load_target(), examples, store_dtype=store.dtype, batch_tokens=store.batch_tokens, dtype=dtype
        )

    with inputs.job.stage("features", tick) as stage:
        train, valid = inputs.corpus.train, inputs.corpus.valid
        return source(train, stage), source(valid, stage) if valid else None


def build_drafter(cfg: Config, frozen: FrozenTarget, inputs: Inputs) -> Drafter:
    """A fresh drafter of the configured class, or the one that ``train.init_from`` names."""
    options = {k: v for k, v in cfg.drafter.items() if k != "_target_"}
    cls = drafter_class(str(cfg.drafter.get("_target_")))
    size = options.pop("draft_vocab_size", None)
    if cfg.train.init_from:
        drafter = initial_drafter(cfg.train.init_from, cls, frozen, inputs.files.tap_ids)
        drafter.take_over(options)
        check_options_of(drafter, options | {"draft_vocab_size": size}, cfg.train.init_from)
        drafter.check_depths(cfg.train.depths)
        return drafter
    if size is None:
        vocab = DraftVocab.full(frozen.vocab_size)
    else:
        counts = torch.from_numpy(inputs.corpus.train.token_counts(frozen.vocab_size, inputs.corpus.weights))
        vocab = DraftVocab.from_counts(counts, size, inputs.files.special_ids)
    if "seed" in inspect.signature(cls.create).parameters:
        options["seed"] = cfg.seed
    torch.manual_seed(cfg.seed)
    drafter = cls.create(frozen, vocab, inputs.files.tap_ids, **options)
    drafter.check_depths(cfg.train.depths)
    return drafter


def check_options_of(drafter: Drafter, options: Mapping[str, Any], source: str) -> None:
    """Raise EyasError if a drafter that training starts from is not what the configuration asks for."""
    has = drafter.architecture() | {"draft_vocab_size": len(drafter.vocab)}
    wrong = [key for key, value in options.items() if value is not None and key in has and has[key] != value]
    if wrong:
        told = "; ".join(f"drafter.{key}={options[key]}, there it is {has[key]}" for key in wrong)
        raise EyasError(f"train.init_from={source}: is another drafter than the configuration asks for: {told}")


def check_start(cfg: Config) -> None:
    """Raise EyasError if ``train.init_from`` was trained together with a target that is not this run's."""
    if cfg.train.init_from is None:
        return
    folder = start_folder(cfg.train.init_from)
    if tuned(folder) is None or is_tuned_by(Path(cfg.target.path).expanduser(), folder):
        return
    export = folder.parents[1] / "export" if (folder / STATE).exists() else folder
    raise EyasError(
        f"train.init_from={cfg.train.init_from}: this drafter was trained together with its target, which is no longer "
        f"target.path={cfg.target.path}; give target.path={export / TARGET}, where its export has the tuned one"
    )


def start_folder(path: str) -> Path:
    """The folder of a run, a checkpoint or an export that holds the drafter."""
    return best_checkpoint(Path(path)) or Path(path)


def initial_drafter(path: str, cls: type[Drafter], frozen: FrozenTarget, tap_ids: tuple[int, ...]) -> Drafter:
    """The drafter of a run, a checkpoint or an export, checked against this run's target, taps and class."""
    folder = start_folder(path)
    drafter = open_drafter(folder, target=frozen.config)
    found = {"class": type(drafter).__name__, "taps": tuple(drafter.tap_ids), "vocabulary": drafter.vocab.size}
    wanted = {"class": cls.__name__, "taps": tuple(tap_ids), "vocabulary": frozen.vocab_size}
    if not drafter.tap_ids:
        wanted["taps"] = ()  # the method reads none
    wrong = [f"{name} {found[name]} instead of {wanted[name]}" for name in found if found[name] != wanted[name]]
    if wrong:
        raise EyasError(f"train.init_from={path}: does not fit this run: {'; '.join(wrong)}")
    log.info("starting from the weights in %s", folder)
    return drafter


def check_export(cfg: Config, run_dir: Path, drafter: Drafter, frozen: FrozenTarget, *, tell: bool) -> None:
    """Raise EyasError, before the training, for what could not be exported as configured after it. Of a method that no
    engine drafts with this is only told (by the process that may ``tell``)."""
    from scripts.beside import TargetBeside

    refuse_foreign(export_folder(cfg, run_dir))
    exact = copy.deepcopy(drafter).to("cpu").float().eval()
    try:
        exact.check_layout(cfg.export.layout)
        TargetBeside(stitched=cfg.export.stitch).check(exact)
        with torch.no_grad():
            for parameter in exact.parameters():
                parameter[parameter == 0] = 1e-3  # as training leaves them: a layout may have a place for zeros only
            exact.serving(frozen.to("cpu"), cfg.export.layout)
    except NotServed as error:
        if tell:
            log.warning("there will be no export: %s", error)


# --- after training: each made once for a checkpoint and its settings ---


def evaluate(cfg: Config, run_dir: Path, inputs: Inputs, fitted: Fitted) -> None:
    """Measure tau of the best checkpoint with the verifier, into report.json; without prompts, say so and go on."""
    from eval.look.table import VERSION
    from eval.run import evaluate_run

    if cfg.verify.prompts is None and not inputs.corpus.prompts():
        log.warning("evaluation: skipped, no conversation is held out to measure on; see python -m eval verify.prompts")
        return
    if cfg.verify.prompts is None:
        asked: list[Any] = [example.input_ids for example in inputs.corpus.valid]
    else:
        asked = file_digests(Path(cfg.verify.prompts).expanduser())
    if Path(cfg.verify.tree).exists():
        asked += file_digests(Path(cfg.verify.tree))
    made_from = [checkpoint_digest(fitted.checkpoint), asdict(cfg.verify), cfg.seed, digest(asked), VERSION]
    made_from += [asdict(cfg.target), pick_device(cfg.device), cfg.threads]  # what it is measured on
    once(run_dir, "evaluation", digest(made_from), run_dir / REPORT, lambda: evaluate_run(cfg))


def export(cfg: Config, run_dir: Path, fitted: Fitted) -> None:
    """Write the serving folder of the best checkpoint; of a method that no engine drafts with, say so and go on."""
    from scripts.export import run_export

    report = run_dir / REPORT
    measured = report.read_text(encoding="utf-8") if report.exists() else ""
    made_from = [checkpoint_digest(fitted.checkpoint), measured, asdict(cfg.export), asdict(cfg.target), cfg.data.path]
    try:
        once(run_dir, "export", digest(made_from), export_folder(cfg, run_dir), lambda: run_export(cfg))
    except NotServed as error:
        log.warning("export: skipped, %s", error)


def once(run_dir: Path, stage: str, key: str, product: Path, work: Callable[[], Any]) -> None:
    """Do the work unless its product is there, was made under the same key, and is what was made then."""
    path = run_dir / STAGES
    done = read_notes(path)  # nothing if that is damaged, and the stages are then done again
    own = f"{stage} product"  # another run or command may have written there, and files may be gone; more may lie there
    made = done.get(own)
    if done.get(stage) == key and isinstance(made, dict) and made and made.items() <= product_digests(product).items():
        log.info("%s: up to date, %s", stage, product)
        return
    work()
    raise_again()
    note_down(path, {stage: key, own: product_digests(product)})


def product_digests(product: Path) -> dict[str, str]:
    """Of a file, or of every file below a folder by its name; the model card is the reader's to edit."""
    if not product.is_dir():
        return {product.name: file_digest(product)} if product.exists() else {}
    files = sorted(path for path in product.rglob("*") if path.is_file() and path != product / CARD)
    return {str(path.relative_to(product)): file_digest(path) for path in files}


def file_digests(path: Path) -> list[str]:
    """Of a file, or of every file below a folder."""
    files = sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]
    return [file_digest(file) for file in files]


def export_folder(cfg: Config, run_dir: Path) -> Path:
    return Path(cfg.export.dir or run_dir / "export")


def checkpoint_digest(folder: Path) -> str:
    """Of all that evaluation and export take from a checkpoint: the drafter, and the target if it was trained along."""
    files = read_notes(folder / STATE)["files"]
    return digest([{name: files[name] for name in sorted(files) if not is_optimizer_file(name)}])
