"""What a run tells in its log: the plan before its first step, and how it goes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from conf.schema import Config
from train.metrics import rates

if TYPE_CHECKING:
    from train.trainer import Trainer


def plan_of(trainer: Trainer) -> str:
    """A table of it, a row a line."""
    source, kept, cfg = trainer.train_source, trainer.documents, trainer.cfg
    t, valid, accelerator = cfg.train, trainer.valid_source, trainer.accelerator
    tokens = sum(source.lengths[d] for d in kept)
    supervised = sum(source.supervised[d] for d in kept)
    left_out = len(source.lengths) - len(kept)
    held_out = 0 if valid is None else len(valid.lengths)
    drafter, target = trainer.drafter, trainer.joint or trainer.frozen
    rows = {
        "documents": f"{len(kept):,} ({left_out:,} without a slot to learn from left out); {held_out:,} held out",
        "tokens": f"{tokens:,}, of which {supervised:,} supervised ({supervised / tokens:.0%})",
        "optimizer steps": f"{trainer.total:,} ({trainer.plan.epoch(trainer.total):.2f} epochs)",
        "tokens per step": f"up to {t.bin_tokens * t.bins_per_step:,} in {t.bins_per_step} bins",
        "processes": f"{accelerator.num_processes} on {accelerator.device.type}, {t.precision}, {strategy_of(cfg)}",
        "trainable, drafter": f"{drafter.trainable_parameters():,} parameters",
        "trainable, target": f"{target.trainable_parameters():,} parameters",
        "draft vocabulary": f"{len(drafter.vocab):,} of {drafter.vocab.size:,} tokens",
        "validation, saving": f"every {trainer.eval_every:,} and {trainer.save_every:,} steps",
        "starts at step": f"{trainer.state.step:,}" + (" (resumed)" if trainer.state.step else ""),
    }
    width = max(map(len, rows))
    return "\n".join(f"  {name:<{width}}  {value}" for name, value in rows.items())


def strategy_of(cfg: Config) -> str:
    """Strategy, and what was said about it."""
    strategy = cfg.strategy
    more = (" with offload" * strategy.offload, f" by {strategy.deepspeed}" if strategy.deepspeed else "")
    return f"strategy {strategy.name}{''.join(more)}"


def step_line(row: Mapping[str, Any], step: int, total: int, left: float) -> str:
    """The line about a row of training. left: seconds to the last step."""
    return (
        f"step {step}/{total}: loss {row['loss']:.4f}, tau~{row['tau_mean_field']:.3f}, "
        f"accuracy {rates(row['accuracy'])}, grad norm {row['grad_norm']:.3f}, lr {row['lr']:.2e}, "
        f"{row['tokens_per_s']:.0f} tokens/s, {tqdm.format_interval(left)} left"
    )
