"""``python -m train ... status``: where a run stands, or each run of a sweep. It only looks: see train/standing.py."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from hydra import compose, initialize_config_dir
from hydra.core.hydra_config import HydraConfig
from omegaconf import open_dict, read_write

from conf import CONF_DIR, PRIMARY
from conf.cli import is_plain_sweep
from conf.schema import Config
from conf.validate import check_keys, check_name
from models.errors import EyasError
from models.launch import rank
from models.units import format_seconds
from models.visible import visible
from train.standing import Standing, ago, standing
from train.sweep import plan

OF_A_ROW = (
    ("epochs", "epoch", "{:.2f}"),
    ("loss", "loss", "{:.4f}"),
    ("speed", "tokens_per_s", "{:,.0f} tokens/s"),
)


def show_status(arguments: Sequence[str]) -> int:
    """Print where the run of this command line stands; with ``--multirun`` a line for each. The exit code.

    Raises EyasError, or what Hydra raises, if the arguments name no run.
    """
    if rank():
        return 0
    if is_plain_sweep(arguments):
        folder, jobs = plan(arguments[1:])
        heading, rows = str(folder), [(job.name, in_a_line(standing(job.folder))) for job in jobs]
    elif any(argument.startswith("-") for argument in arguments):
        raise EyasError("status: of the flags only --multirun goes with it, and that without hydra. keys")
    else:
        found = standing(run_folder(arguments))
        heading, rows = f"{found.folder}: {state_of(found)}", list(table(found))
    width = max((len(name) for name, _ in rows), default=0)
    lines = [f"  {name:<{width}}  {value}" for name, value in rows]
    print("\n".join(map(visible, [heading, *lines])))
    return 0


def run_folder(overrides: Sequence[str]) -> Path:
    """The folder of the run that ``python -m train`` with these overrides is about; nothing else of them is checked.

    Raises EyasError for a key that there is not, or a name that can't be a folder.
    """
    hydra = HydraConfig.instance()
    before = hydra.cfg
    with initialize_config_dir(version_base="1.3", config_dir=str(CONF_DIR), job_name="train"):
        whole = compose(PRIMARY, list(overrides), return_hydra_config=True)
    try:
        hydra.set_config(whole)  # what ${hydra:...} looks into
        with read_write(whole.hydra.runtime), open_dict(whole.hydra.runtime):
            whole.hydra.runtime.output_dir = os.path.abspath(whole.hydra.run.dir)  # noqa: PTH100 - as Hydra does
        hydra.set_config(whole)
        cfg = whole.copy()
        with open_dict(cfg):
            del cfg["hydra"]
        check_keys(cfg)
        check_name(Config(name=cfg.name))
        return Path(cfg.output_dir or Path("outputs") / cfg.name).expanduser()
    finally:
        hydra.cfg = before


# --- in words ---


def state_of(run: Standing) -> str:
    """``training, running now``"""
    now = {True: "running now", False: "stopped", None: "no telling whether it is running"}[run.running]
    if run.finished:
        done = ["stopped early by train.patience" if run.stopped_early else "trained"]
        done += ["evaluated"] * run.evaluated + ["exported"] * run.exported
        return ", ".join(done + ([now] if run.running is not False else []))
    if run.running is False and run.newest is None and (run.rows or run.checkpoints):
        return "stopped without a whole checkpoint: the same command begins anew"
    if run.newest is not None or run.rows:
        return f"training, {now}"
    if not run.begun and not run.running:
        return "not begun"
    dumping = run.features is not None and run.features[0] < run.features[1]
    return f"{'dumping features' if dumping else 'reading data and features, before the first step'}, {now}"


def table(run: Standing) -> Iterator[tuple[str, str]]:
    """The rows of a run: name and value; none of one that has not begun."""
    if not run.begun and not run.running:
        return
    at, newest = run.position, run.newest
    if run.total is not None:
        yield "step", f"{run.step:,} of {run.total:,} ({run.step / run.total:.1%})"
    else:
        yield "step", f"{run.step:,}; how many there are is known once the data is read"
    if "tokens" in at:
        yield "tokens", f"{at['tokens']:,}" + (f", {at['supervised']:,} supervised" if "supervised" in at else "")
    if run.rows:
        last = run.rows[-1]
        dropped = "; made again from the checkpoint on" if last["step"] > run.step else ""
        yield "last row", f"step {last['step']:,}{dropped}"
        yield from ((name, text.format(last[key])) for name, key, text in OF_A_ROW if key in last)
    if run.best is not None or run.measured is not None:
        yield "best tau", best_of(run)
    if newest is not None:
        yield (
            "last checkpoint",
            f"step {newest.step:,}, {format_seconds(ago(newest.saved))} ago, {newest.folder.relative_to(run.folder)}",
        )
    if run.checkpoints:
        yield "checkpoints", counted(run)
    if "seconds" in at:
        yield "trained for", format_seconds(at["seconds"])
    if run.left is not None:
        yield "time left", f"{format_seconds(run.left)}, validation and saving included"
    if run.features is not None:
        whole, planned = run.features
        yield "features", "whole" if whole >= planned else f"{whole:,} of {planned:,} shards ({whole / planned:.0%})"
    for what in run.damage:
        yield "damaged", what


def best_of(run: Standing) -> str:
    found = [] if run.best is None else [f"{tau_of(run)} ({run.best.get('by')}, chain of {run.best.get('chain')})"]
    return "; ".join(found + ([] if run.measured is None else [f"{run.measured:.3f} measured by the evaluation"]))


def tau_of(run: Standing) -> str:
    assert run.best is not None
    return f"{run.best.get('tau_measured', run.best['tau_t0']):.3f} at step {run.best['step']:,}"


def counted(run: Standing) -> str:
    sized = sum(checkpoint.whole and not checkpoint.digested for checkpoint in run.checkpoints)
    known = f" ({sized:,} by the sizes of the files)" if sized else ""
    named = f": {', '.join(folder.name for folder in run.broken)}" if run.broken else ""
    return f"{len(run.checkpoints) - len(run.broken):,} whole{known}, {len(run.broken):,} broken{named}"


def in_a_line(run: Standing) -> str:
    parts = [state_of(run)]
    if run.total is not None and not run.finished and (run.begun or run.running):
        parts.append(f"step {run.step:,} of {run.total:,} ({run.step / run.total:.1%})")
    if run.best is not None:
        parts.append(f"best tau {tau_of(run)}")
    if run.measured is not None:
        parts.append(f"measured {run.measured:.3f}")
    if run.left is not None:
        parts.append(f"{format_seconds(run.left)} left")
    return "; ".join(parts + [f"damaged: {what}" for what in run.damage])
