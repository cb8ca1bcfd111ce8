"""Memory and speed of a training step, with and without activations that are made again (train.recompute).

    python -m scripts.memory conf=eagle3_smollm2 train.bin_tokens=8192 data.max_length=8192 train.depths=7 threads=2

Trains the recipe's drafter, and with ``joint`` its target too, on random tokens and features, all of them supervised:
the worst case. Documents of data.max_length tokens fill the bin. Each way runs in a process of its own. Its peak
(resident memory, or what is allocated on a GPU) is counted above the weights, the optimizer's state and the target's
tables, which are there before the step; the batch and the gradients count.
"""

from __future__ import annotations

import gc
import inspect
import multiprocessing
import time
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from multiprocessing.connection import Connection
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.optim import Optimizer

from conf.cli import entry
from conf.schema import Config
from data.prepare import open_target
from models.batch import Batch
from models.checkpoint import drafter_class
from models.device import pick_device
from models.drafter import Drafter, TrainSpec
from models.errors import EyasError
from models.frozen import FrozenTarget, linear_f32
from models.heads import cap_logits
from models.load_frozen import load_frozen
from models.objective import Objective
from models.target import Target
from models.vocab import DraftVocab
from scripts.benchmark import read_peak, reset_peak
from train.joint import JointTraining
from train.optim import build_optimizer
from train.strategy import PRECISIONS, pick_precision

WARM_UP = 64  # tokens of the step before the one that is measured: it makes the optimizer's state


@dataclass(frozen=True)
class Measured:
    """Of one step: bytes at the peak, bytes of all gradients (not all of them are there at the peak), seconds by the
    clock and of processor time, and the mean loss."""

    peak: int
    gradients: int
    seconds: float
    processor: float
    loss: float


def measure(cfg: Config) -> Measured:
    """A step in this process, of which nothing else may be running."""
    if cfg.threads:
        torch.set_num_threads(cfg.threads)
    torch.manual_seed(cfg.seed)
    device, dtype = pick_device(cfg.device), PRECISIONS[pick_precision(cfg.train.precision, cfg.device)]
    module, drafter, frozen, optimizer = build(cfg, device, dtype)
    spec = spec_of(cfg)

    def step(batch: Batch) -> float:
        with torch.autocast(device, dtype, enabled=dtype is not None):
            loss = module(batch, frozen, spec).loss_sum / batch.num_tokens
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    step(random_batch(frozen, [WARM_UP], len(drafter.tap_ids), dtype))
    batch = random_batch(frozen, lengths(cfg), len(drafter.tap_ids), dtype)
    held = sum(getattr(batch, field.name).nbytes for field in fields(batch))
    before, peak = watch_memory(device)
    clock, processor = time.perf_counter(), time.process_time()
    loss = step(batch)
    taken = time.perf_counter() - clock, time.process_time() - processor
    gradients = sum(p.nbytes for p in module.parameters() if p.requires_grad)
    return Measured(peak() - before + held, gradients, *taken, loss)


def spec_of(cfg: Config) -> TrainSpec:
    """What the trainer would ask for in a step."""
    t, joint = cfg.train, cfg.joint.backbone != "none"
    more = (t.depth_keep, t.top_k, t.top_k_weight, t.lk_eta)
    objective = Objective(t.loss, t.depth_weights, t.decay, t.chunk, *more)
    weights = (1.0, cfg.joint.weight) if joint else (0.0, 1.0)
    return TrainSpec(objective, t.depths, lm_weight=weights[0], draft_weight=weights[1], recompute=t.recompute)


def build(cfg: Config, device: str, dtype: torch.dtype | None) -> tuple[nn.Module, Drafter, FrozenTarget, Optimizer]:
    """The module that is trained, the drafter in it, the target's tables, and the optimizer."""
    files = open_target(vars(cfg.target))
    frozen = load_frozen(files.folder).to(device, dtype if device == "cuda" else None)
    options = {key: value for key, value in cfg.drafter.items() if key != "_target_"}
    cls, size = drafter_class(str(cfg.drafter["_target_"])), options.pop("draft_vocab_size", None)
    chosen = torch.randperm(frozen.vocab_size, generator=torch.Generator().manual_seed(cfg.seed))[:size]
    if "seed" in inspect.signature(cls.create).parameters:
        options["seed"] = cfg.seed
    vocab = DraftVocab(chosen.sort().values, frozen.vocab_size)
    drafter = cls.create(frozen, vocab, files.tap_ids, **options).to(device)
    drafter.check_depths(cfg.train.depths)
    if cfg.joint.backbone == "none":
        return drafter.train(), drafter, frozen, build_optimizer(drafter, cfg.optim)
    how = {key: getattr(cfg.target, key) for key in ("dtype", "trust_remote_code", "quantize")}
    target = Target.load(str(files.folder), taps=files.tap_ids, device=device, **how)
    model = JointTraining.of(target, drafter, cfg.joint).model
    both = build_optimizer(drafter, cfg.optim, backbone=model.trained_backbone(), backbone_lr=cfg.joint.lr)
    return model.train(), drafter, frozen, both


def lengths(cfg: Config) -> list[int]:
    """Tokens of the documents that fill a bin."""
    size = cfg.train.bin_tokens
    longest = min(cfg.data.max_length, size)
    rest = size % longest
    return [longest] * (size // longest) + [rest] * bool(rest)


def random_batch(frozen: FrozenTarget, lengths: list[int], taps: int, dtype: torch.dtype | None) -> Batch:
    """Documents of these lengths, with the target's exact numbers for random final states."""
    total, device = sum(lengths), frozen.head.device
    generator = torch.Generator(device).manual_seed(0)

    def states(width: int) -> torch.Tensor:
        return torch.randn(total, width, generator=generator, device=device).to(dtype or torch.float32)

    final, lse, top1 = states(frozen.hidden_size), [], []
    for rows in final.split(64):
        logits = cap_logits(linear_f32(rows, frozen.head), frozen.scale, frozen.softcap)
        lse.append(logits.logsumexp(-1))
        top1.append(logits.argmax(-1))
    return Batch(
        input_ids=torch.randint(frozen.vocab_size, (total,), generator=generator, device=device),
        supervised=torch.ones(total, dtype=torch.bool, device=device),
        cu_seqlens=torch.tensor([0, *lengths], device=device).cumsum(0).int(),
        taps=states(taps * frozen.hidden_size),
        final=final,
        lse=torch.cat(lse),
        top1=torch.cat(top1),
    )


def watch_memory(device: str) -> tuple[int, Callable[[], int]]:
    """Bytes held now, and what tells the most that were held since."""
    gc.collect()
    if device != "cuda":
        return reset_peak(), read_peak
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated


def apart(cfg: Config) -> Measured:
    """:func:`measure` in a fresh process. Raises its EyasError, or one of its own if the process dies."""
    context = multiprocessing.get_context("spawn")
    receive, send = context.Pipe(duplex=False)
    process = context.Process(target=_measure_and_send, args=(cfg, send))
    process.start()
    send.close()
    try:
        found: Any = receive.recv()
    except EOFError:
        raise EyasError(f"train.bin_tokens={cfg.train.bin_tokens}: the step died (out of memory?)") from None
    finally:
        process.join()
    if isinstance(found, Measured):
        return found
    raise EyasError(found)


def _measure_and_send(cfg: Config, send: Connection) -> None:
    try:
        send.send(measure(cfg))
    except EyasError as error:
        send.send(str(error))


@entry("memory")
def main(cfg: Config) -> None:
    table = Table("recompute", "GiB above weights", "of which gradients", "seconds", "processor", "tokens/s", "loss")
    for recompute in (False, True):
        found = apart(replace(cfg, train=replace(cfg.train, recompute=recompute)))
        table.add_row(
            "yes" if recompute else "no",
            f"{found.peak / 2**30:.2f}",
            f"{found.gradients / 2**30:.2f}",
            f"{found.seconds:.1f}",
            f"{found.processor:.1f}",
            f"{cfg.train.bin_tokens / found.seconds:,.0f}",
            f"{found.loss:.6f}",
        )
    documents = ", ".join(f"{size:,}" for size in lengths(cfg))
    precision = pick_precision(cfg.train.precision, cfg.device)
    Console().print(f"one step of {cfg.train.depths} depths in {precision}, documents of {documents} tokens", table)


if __name__ == "__main__":
    main()
