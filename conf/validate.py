"""The last check before any work: values that no schema type can refuse, and keys that contradict each other.

:func:`resolve` is what entry points use. Everything that fails here raises :class:`EyasError` naming the key.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from conf.deepspeed import STAGES, check_installed, deepspeed_config
from conf.explain import every_key, unknown
from conf.options import check_drafter, method_of
from conf.rules import (
    AT_LEAST,
    AT_MOST,
    CHOICES,
    CONFLICTS,
    LEVELLED,
    MEASURING,
    OVERLAP_ONLY,
    PATHS,
    RANGES,
    RESERVED_NAMES,
    TREES,
    UNUSED,
)
from conf.schema import Config
from conf.values import drafters, expand, is_folder, packaged, refuse, typed_keys, value
from data.chats.rows import inputs_of
from models.errors import EyasError
from models.launch import world


def resolve(composed: DictConfig, job: str, overrides: Sequence[str] = ()) -> tuple[Config, list[str]]:
    """The composed configuration as a checked :class:`Config`, and notes on what the user may not have meant.

    ``job`` is the verb (it decides which keys are required); ``overrides`` what was typed on the command line.
    Packaged data paths are resolved; everything else stays as written.
    """
    check_keys(composed)
    composed = composed.copy()
    missing = OmegaConf.missing_keys(composed)
    for key in sorted(missing & {"data.path"}):
        OmegaConf.update(composed, key, None)
        missing.remove(key)
    if missing:
        raise EyasError(f"{min(missing)}: required, and this recipe leaves it open; give {min(missing)}=VALUE")
    cfg = OmegaConf.to_object(composed)
    assert isinstance(cfg, Config)
    require_data(cfg, job)
    validate(cfg, overrides)
    for key in PATHS:
        expand(cfg, key)
    if cfg.verify.tree not in TREES:
        expand(cfg, "verify.tree")
    if isinstance(cfg.drafter_path, str | list):
        home = [str(Path(e).expanduser()) if str(e).startswith("~") else e for e in drafters(cfg)]
        cfg.drafter_path = home[0] if len(home) == 1 and isinstance(home[0], str) else home
    cfg.data.path = packaged("data.path", cfg.data.path)
    cfg.data.valid_path = packaged("data.valid_path", cfg.data.valid_path)
    cfg.verify.prompts = packaged("verify.prompts", cfg.verify.prompts)
    check_late_inputs(cfg, job)
    check_outputs(cfg, job)
    found = notes(cfg, overrides)
    if job == "train" and cfg.drafter_path is not None:
        found.append("drafter_path has no effect on train, which measures its own drafter; see train.init_from")
    if job == "train":
        found += idle_processes(cfg)
    return cfg, found


def check_keys(composed: DictConfig, prefix: str = "") -> None:
    """Refuse keys that ``+key=value`` or a recipe put beside those of the schema."""
    schema = OmegaConf.get_type(composed)
    assert is_dataclass(schema)
    known = [item.name for item in fields(schema)]
    for name, node in composed.items_ex(resolve=False):
        key = str(name)
        if key not in known:
            raise EyasError(unknown(f"{prefix}{key}", known))
        if isinstance(node, DictConfig) and is_dataclass(OmegaConf.get_type(node)):
            check_keys(node, f"{prefix}{key}.")


def require_data(cfg: Config, job: str) -> None:
    """train, data and regenerate read conversations; eval does unless it is given prompts; the others never do."""
    readers = ("train", "data", "regenerate")
    needed = job in readers or (job in MEASURING and cfg.verify.prompts is None and cfg.data.valid_path is None)
    if needed and cfg.data.path is None:
        other = ", or verify.prompts=FILE" if job in MEASURING else ""
        raise EyasError(
            "data.path: this recipe brings no data; give data.path=FILE (ShareGPT or messages, JSON or JSONL), "
            f"a folder of them, or a `datasets` name{other}"
        )


def check_late_inputs(cfg: Config, job: str) -> None:
    """What is only read after hours of work must be there from the start."""
    needed = {"train.init_from": cfg.train.init_from} if job == "train" else {}
    if job == "train" and cfg.strategy.name in STAGES:
        check_installed()
        deepspeed_config(cfg.strategy, cfg.optim, world())
    if job in (*MEASURING, "export"):
        check_drafters(cfg, job)
    if job in ("train", *MEASURING) and cfg.verify.tree not in TREES:
        needed["verify.tree"] = cfg.verify.tree
    if job in ("train", "data", *MEASURING):
        needed["verify.prompts"] = cfg.verify.prompts
    if job in ("train", *MEASURING) and cfg.data.supervise == "all" and cfg.verify.prompts is None:
        refuse(cfg, "data.supervise", "leaves no prompt to measure on; give verify.prompts=FILE")
    for key, path in needed.items():
        if path is not None and not Path(path).exists():
            refuse(cfg, key, f"no such file or folder (looked in {Path.cwd()})")


def check_drafters(cfg: Config, job: str) -> None:
    """Every entry of ``drafter_path`` must be something to draft with, and differ from the others."""
    found = drafters(cfg)
    if cfg.drafter_path is not None and not (found and all(isinstance(entry, str) for entry in found)):
        refuse(cfg, "drafter_path", "must be a folder, ngram, model:TARGET, or a list of these")
    if len(set(found)) < len(found):
        refuse(cfg, "drafter_path", "names the same drafter twice")
    if job == "export" and (len(found) > 1 or not all(map(is_folder, found))):
        refuse(cfg, "drafter_path", "one trained drafter is exported at a time")
    for entry in found:
        if is_folder(entry) and not Path(entry).exists():
            raise EyasError(f"drafter_path={entry}: no such file or folder (looked in {Path.cwd()})")


def check_outputs(cfg: Config, job: str) -> None:
    """What is written after hours of work must be writable from the start; finished features may be read-only."""
    written = ["output_dir"]
    stores = cfg.features == "store" and cfg.joint.backbone == "none"
    written += ["store.dir"] if job in ("train", "data") and stores else []
    written += ["data.cache_dir"] if job in ("train", "data", *MEASURING) and cfg.data.path is not None else []
    written += ["export.dir"] if job in ("train", "export") else []
    for key in written:
        if value(cfg, key) is None:
            continue
        folder = Path(value(cfg, key)).absolute()
        there = next(path for path in (folder, *folder.parents) if path.exists())
        if not there.is_dir():
            refuse(cfg, key, f"{there} is a file; give a folder")
        if key not in ("store.dir", "data.cache_dir") and not os.access(there, os.W_OK | os.X_OK):
            refuse(cfg, key, f"{there} cannot be written to")


def validate(cfg: Config, overrides: Sequence[str] = ()) -> None:
    """Raise EyasError for the first impossible value or combination."""
    for key, allowed in CHOICES.items():
        if value(cfg, key) not in allowed:
            refuse(cfg, key, f"must be one of {', '.join(name or 'null' for name in allowed)}")
    for key, least in AT_LEAST.items():
        if value(cfg, key) is not None and value(cfg, key) < least:
            refuse(cfg, key, f"must be at least {least}")
    for key, most in AT_MOST.items():
        if value(cfg, key) > most:
            refuse(cfg, key, f"must be at most {most}")
    for key, (words, holds) in RANGES.items():
        if not math.isfinite(value(cfg, key)) or not holds(value(cfg, key)):
            refuse(cfg, key, f"must be {words}")
    check_texts(cfg)
    check_name(cfg)
    check_lists(cfg)
    check_schedule(cfg)
    check_joint(cfg)
    if cfg.train.depth_keep < 1 and (cfg.train.loss == "expected_length" or cfg.train.depth_weights == "dpace"):
        refuse(cfg, "train.depth_keep", "must be 1 with train.loss=expected_length or train.depth_weights=dpace")
    check_strategy(cfg)
    check_drafter(cfg.drafter)
    check_method(cfg)
    typed = typed_keys(overrides)
    for key, in_force, reason in CONFLICTS:
        if key in typed and in_force(cfg):
            refuse(cfg, key, reason)


def check_texts(cfg: Config) -> None:
    """An empty text is no path and no name, and neither is Python's None."""
    for key in every_key():
        given = value(cfg, key)
        for text in given if isinstance(given, list) else [given]:
            if key == "verify.stop" and text:
                continue  # white space may end a text
            if isinstance(text, str) and (not text.strip() or text == "None"):
                refuse(cfg, key, "must not be empty; none is written null")


def check_name(cfg: Config) -> None:
    """The name is a folder below outputs/."""
    parts = Path(cfg.name).parts
    if not parts or ".." in parts or Path(cfg.name).is_absolute():
        refuse(cfg, "name", "must be a folder name below outputs/")
    if parts[0] in RESERVED_NAMES:
        refuse(cfg, "name", f"{parts[0]} is a folder that Eyas itself uses; choose another name")


def check_lists(cfg: Config) -> None:
    """Lists whose length or order matters, and paths, which may be one or several."""
    taps = cfg.target.taps
    if taps and (min(taps) < 0 or sorted(set(taps)) != list(taps)):
        refuse(cfg, "target.taps", "must be ascending, distinct boundary ids (0 = the embedding's output)")
    if len(cfg.optim.betas) != 2 or not all(0 <= beta < 1 for beta in cfg.optim.betas):
        refuse(cfg, "optim.betas", "must be two numbers, each 0 or more and below 1")
    if not cfg.verify.temperatures or not all(0 <= t < math.inf for t in cfg.verify.temperatures):
        refuse(cfg, "verify.temperatures", "must be a list of temperatures, each 0 (greedy) or more")
    if not cfg.verify.batch_sizes or min(cfg.verify.batch_sizes) < 1:
        refuse(cfg, "verify.batch_sizes", "must be a list of numbers, each 1 or more")
    for key in ("verify.temperatures", "verify.batch_sizes"):
        if len(set(value(cfg, key))) < len(value(cfg, key)):
            refuse(cfg, key, "holds a number twice")
    if cfg.verify.ngram_min > cfg.verify.ngram_max:
        refuse(cfg, "verify.ngram_min", f"must not be above verify.ngram_max={cfg.verify.ngram_max}")
    for key in ("data.path", "data.valid_path"):
        given = value(cfg, key)
        items = given if isinstance(given, list) else [given]
        if given is not None and not (items and all(isinstance(i, str | dict) and i for i in items)):
            refuse(cfg, key, "must be a path, a `datasets` name, {path: ..., weight: ...}, or a list of them")
        if given is not None:
            inputs_of(given, key)


def check_schedule(cfg: Config) -> None:
    """Warm-up (and WSD's decay) must fit into the run."""
    optim, steps = cfg.optim, cfg.train.steps
    if optim.warmup >= 1 and steps is None:
        return  # in steps, of a run whose length only the data tells
    warmup = optim.warmup / steps if optim.warmup >= 1 and steps else optim.warmup
    if warmup >= 1:
        refuse(cfg, "optim.warmup", f"as long as the whole run (train.steps={steps})")
    if optim.schedule == "wsd" and warmup + optim.decay > 1:
        refuse(cfg, "optim.decay", f"does not fit behind optim.warmup={optim.warmup}: together more than the run")


def check_joint(cfg: Config) -> None:
    """What training the target along asks of the target and of the length of the run."""
    joint, steps = cfg.joint, cfg.train.steps
    if joint.backbone == "full":
        if joint.distill:
            refuse(cfg, "joint.distill", "needs joint.backbone=lora, whose adapters can be switched off")
        if cfg.target.quantize is not None:
            refuse(cfg, "target.quantize", "quantized weights can't be trained; joint.backbone=lora trains adapters")
        if cfg.target.dtype != "float32":
            refuse(cfg, "target.dtype", "too coarse to train with joint.backbone=full; use float32, or lora")
    if joint.backbone != "none" and joint.warmup >= 1 and steps is not None and joint.warmup >= steps:
        refuse(cfg, "joint.warmup", f"as long as the whole run (train.steps={steps})")


def check_strategy(cfg: Config) -> None:
    """What belongs to ZeRO alone, and what ZeRO, which splits tensors over processes, can't do."""
    strategy = cfg.strategy
    if strategy.name not in STAGES:
        if strategy.offload:
            refuse(cfg, "strategy.offload", "only with strategy=zero1, zero2 or zero3")
        if strategy.deepspeed is not None:
            refuse(cfg, "strategy.deepspeed", "only with strategy=zero1, zero2 or zero3")
        return
    if cfg.optim.name == "muon":
        refuse(cfg, "optim.name", f"needs whole matrices, which strategy={strategy.name} cuts up; use strategy=ddp")
    if strategy.name == "zero3" and cfg.joint.backbone != "none":  # then the target is split too
        if cfg.train.tau == "measured":
            refuse(
                cfg, "train.tau", "strategy=zero3 leaves no process a whole target; use train.tau=simulated or zero2"
            )
        if cfg.target.quantize is not None:
            refuse(cfg, "target.quantize", "strategy=zero3 can't split quantized weights; use strategy=zero2")


def check_method(cfg: Config) -> None:
    """What the rest of the configuration asks of the drafter's method."""
    method = method_of(cfg.drafter)
    levels = method.levels(cfg.drafter)
    if levels is not None and cfg.train.depths > levels:
        refuse(cfg, "train.depths", f"deeper than the drafter can draft ({levels} levels by its options)")
    if cfg.export.layout is not None and cfg.drafter_path is None:
        method.check_layout(cfg.export.layout)


def notes(cfg: Config, overrides: Sequence[str]) -> list[str]:
    """What is allowed but probably not meant; entry points log these."""
    typed = typed_keys(overrides)
    found = [f"{key} has no effect: {why}" for key, unused, why in UNUSED if key in typed and unused(cfg)]
    if "data.path" in typed and "data.valid_path" not in typed and cfg.data.valid_path is not None:
        found.append(
            f"data.valid_path={cfg.data.valid_path} comes from the recipe, not from your data.path; "
            "data.valid_path=null holds out a part of your own data instead"
        )
    found += untrained(cfg)
    if cfg.train.loss in OVERLAP_ONLY and cfg.train.init_from is None:
        found.append(
            f"train.loss={cfg.train.loss} learns next to nothing from scratch: its gradient vanishes where draft and "
            "target hardly overlap (arXiv 2602.23881); train with ce or kl first and give train.init_from=RUN"
        )
    return found


def idle_processes(cfg: Config) -> list[str]:
    """A note if a step has fewer bins than there are processes."""
    bins, size = cfg.train.bins_per_step, world()
    if bins >= size:
        return []
    return [
        f"train.bins_per_step={bins} leaves {size - bins} of {size} processes nothing to do; with {size} bins of "
        f"train.bin_tokens={max(1, cfg.train.bin_tokens * bins // size)} a step takes as many tokens as now"
    ]


def untrained(cfg: Config) -> list[str]:
    """A note if drafts go deeper than training does, unless the method means to."""
    method = method_of(cfg.drafter)
    levels = method.levels(cfg.drafter)
    deepest = cfg.verify.gamma if levels is None else min(cfg.verify.gamma, levels)  # deeper trees are trimmed
    if method.recursive or cfg.verify.tree not in LEVELLED or deepest <= cfg.train.depths:
        return []
    return [
        f"verify.gamma={cfg.verify.gamma} drafts deeper than train.depths={cfg.train.depths}: "
        "the depths beyond are never trained"
    ]
