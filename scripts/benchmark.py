"""Speed and memory of one training step (forward and backward) against a plain reference of the same step.

    python -m scripts.benchmark --threads 1
    python -m scripts.benchmark --lengths 2048 --depths 7 --repeats 3

Eyas packs documents, attends without masks and scores in chunks; scripts/reference_step.py pads, builds dense masks
and keeps full logits. Both get the same random weights, features and documents (SmolLM2-135M's shape and the document
lengths of its chats by default), must agree in loss and gradients, and are timed in turns. Memory is the growth of
the peak resident set over the loaded weights and features, each step in a fresh process.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import multiprocessing
import resource
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from models.batch import Batch
from models.drafter import TrainSpec
from models.eagle3 import Eagle3Drafter
from models.frozen import FrozenTarget
from models.objective import Objective
from models.vocab import DraftVocab
from scripts.reference_step import Dims, PaddedBatch, Target, reference_step

SAME_LOSS = 1e-4
SAME_GRADIENT = 2e-3  # of a tensor's largest gradient; float32 sums in another order
EPS, ROPE_THETA = 1e-5, 100000.0


@dataclass(frozen=True)
class Shape:
    """What is measured. Defaults: SmolLM2-135M, and one bin of 2048 tokens of its chats, 73% supervised."""

    hidden: int = 576
    intermediate: int = 1536
    heads: int = 9
    kv_heads: int = 3
    head_dim: int = 64
    vocab: int = 49152
    draft_vocab: int = 8192
    depths: int = 7
    decay: float = 0.8
    chunk: int = 256
    supervised: float = 0.73
    lengths: tuple[int, ...] = (420, 350, 310, 280, 250, 220, 150, 68)
    seed: int = 0
    threads: int = 1


@dataclass
class Step:
    """A step ready to run: ``run()`` is forward and backward, and returns the loss; ``gradients()`` by tensor name."""

    run: Callable[[], float]
    gradients: Callable[[], dict[str, Tensor]]


@dataclass(frozen=True)
class Drafted:
    """A drafter and its target."""

    drafter: Eagle3Drafter
    frozen: FrozenTarget


def documents(shape: Shape) -> tuple[Drafted, Batch]:
    """Random frozen target, drafter and packed batch of one seed."""
    generator = torch.Generator().manual_seed(shape.seed)
    config = {
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "num_hidden_layers": 30,
        "rms_norm_eps": EPS,
        "max_position_embeddings": 8192,
        "rope_parameters": {"rope_type": "default", "rope_theta": ROPE_THETA},
    }
    table = torch.randn(shape.vocab, shape.hidden, generator=generator).mul_(0.1)
    frozen = FrozenTarget(table, table, config)
    chosen = torch.randperm(shape.vocab, generator=generator)[: shape.draft_vocab]
    drafter = Eagle3Drafter.create(
        frozen, DraftVocab(chosen.sort().values, shape.vocab), (2, 15, 27), init_head=True, seed=shape.seed
    )
    total = sum(shape.lengths)
    final = torch.randn(total, shape.hidden, generator=generator)
    scores = [(rows @ table.T).double() for rows in final.split(64)]
    return Drafted(drafter, frozen), Batch(
        input_ids=torch.randint(shape.vocab, (total,), generator=generator),
        supervised=torch.cat([answers(length, shape.supervised) for length in shape.lengths]),
        cu_seqlens=torch.tensor([0, *shape.lengths]).cumsum(0).int(),
        taps=torch.randn(total, 3 * shape.hidden, generator=generator),
        final=final,
        lse=torch.cat([s.logsumexp(-1) for s in scores]).float(),
        top1=torch.cat([s.argmax(-1) for s in scores]),
    )


def answers(length: int, share: float) -> Tensor:
    """Supervised mask [length] of a chat: a prompt and an answer, twice in documents of 300 tokens and more."""
    turns = 2 if length >= 300 else 1
    turn = torch.arange(length) * turns % length / length
    return turn >= 1 - share


def eyas_step(shape: Shape) -> Step:
    made, batch = documents(shape)
    spec = TrainSpec(Objective(decay=shape.decay, chunk=shape.chunk), shape.depths)
    made.frozen.teacher(batch, made.drafter.vocab)  # gathers the head's rows once, as in training

    def run() -> float:
        made.drafter.zero_grad(set_to_none=True)
        score = made.drafter(batch, made.frozen, spec)
        loss = score.loss_sum / score.count[0]
        loss.backward()
        return float(loss.detach())

    return Step(run, lambda: {n: p.grad for n, p in made.drafter.named_parameters() if p.grad is not None})


def plain_step(shape: Shape) -> Step:
    made, packed = documents(shape)
    weights = {name: p.detach().clone().requires_grad_() for name, p in made.drafter.named_parameters()}
    target = Target(made.frozen.embedding, made.frozen.head, made.drafter.vocab.ids)
    batch = padded(packed)
    del made, packed
    dims = Dims(shape.heads, shape.kv_heads, shape.head_dim, EPS, ROPE_THETA)

    def run() -> float:
        for weight in weights.values():
            weight.grad = None
        loss = reference_step(weights, batch, target, dims, shape.depths, shape.decay).loss
        loss.backward()
        return float(loss.detach())

    return Step(run, lambda: {name: w.grad for name, w in weights.items() if w.grad is not None})


def padded(batch: Batch) -> PaddedBatch:
    """The packed documents as rows of equal length."""
    sizes = batch.cu_seqlens.diff().tolist()

    def rows(column: Tensor) -> Tensor:
        return torch.nn.utils.rnn.pad_sequence(list(column.split(sizes)), batch_first=True)

    return PaddedBatch(rows(batch.input_ids), rows(batch.supervised), rows(batch.taps), rows(batch.final))


STEPS = {"eyas": eyas_step, "reference": plain_step}


# --- what is measured ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Agreement:
    """loss: relative difference; gradient: largest difference of any tensor, relative to its largest entry."""

    loss: float
    gradient: float

    @property
    def holds(self) -> bool:
        return self.loss <= SAME_LOSS and self.gradient <= SAME_GRADIENT


def compare(eyas: Step, reference: Step) -> Agreement:
    losses = eyas.run(), reference.run()
    ours, theirs = eyas.gradients(), reference.gradients()
    assert ours.keys() == theirs.keys(), ours.keys() ^ theirs.keys()
    gaps = [float((ours[n] - theirs[n]).abs().max() / theirs[n].abs().max()) for n in ours]
    return Agreement(abs(losses[0] - losses[1]) / abs(losses[1]), max(gaps))


def time_in_turns(steps: dict[str, Step], repeats: int) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Seconds of every run, alternating so that a busy machine slows both down: by the clock, and of processor time."""
    clock: dict[str, list[float]] = {name: [] for name in steps}
    cpu: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(repeats):
        for name, step in steps.items():
            start, used = time.perf_counter(), time.process_time()
            step.run()
            clock[name].append(time.perf_counter() - start)
            cpu[name].append(time.process_time() - used)
    return clock, cpu


def peak_memory(name: str, shape: Shape) -> int:
    """Bytes by which a step's peak resident set exceeds what is resident before it, in a fresh process."""
    context = multiprocessing.get_context("spawn")
    receive, send = context.Pipe(duplex=False)
    process = context.Process(target=_measure_memory, args=(name, shape, send))
    process.start()
    send.close()
    try:
        return int(receive.recv())
    except EOFError:
        raise SystemExit(f"the {name} step died while its memory was measured (out of memory?)") from None
    finally:
        process.join()


def _measure_memory(name: str, shape: Shape, send: multiprocessing.connection.Connection) -> None:
    torch.set_num_threads(shape.threads)
    step = STEPS[name](shape)
    gc.collect()
    before = reset_peak()
    step.run()
    send.send(read_peak() - before)


def reset_peak() -> int:
    """Give freed memory back, forget the peak so far, and return what is resident."""
    if not sys.platform.startswith("linux"):
        return read_peak()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    return _status("VmRSS")


def read_peak() -> int:
    if sys.platform.startswith("linux"):
        return _status("VmHWM")
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # macOS counts bytes


def _status(key: str) -> int:
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(key):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {key}")


# --- the command --------------------------------------------------------------------------------------------


def benchmark(shape: Shape, repeats: int, memory: bool = True) -> dict[str, Any]:
    """Run everything; a JSON-able report."""
    torch.set_num_threads(shape.threads)
    steps = {name: build(shape) for name, build in STEPS.items()}
    agreement = compare(steps["eyas"], steps["reference"])  # and the warm-up
    seconds, cpu = time_in_turns(steps, repeats)
    tokens = sum(shape.lengths)
    rate = {name: tokens / statistics.median(runs) for name, runs in seconds.items()}
    report: dict[str, Any] = {
        "shape": asdict(shape),
        "tokens": tokens,
        "padded_tokens": max(shape.lengths) * len(shape.lengths),
        "same": agreement.holds,
        "loss_difference": agreement.loss,
        "gradient_difference": agreement.gradient,
        "seconds": seconds,
        "cpu_seconds": cpu,
        "tokens_per_second": rate,
        "speed_ratio": rate["eyas"] / rate["reference"],
        "cpu_ratio": statistics.median(cpu["reference"]) / statistics.median(cpu["eyas"]),
    }
    del steps
    if memory:
        peaks = {name: peak_memory(name, shape) for name in STEPS}
        report |= {"peak_bytes": peaks, "memory_ratio": peaks["eyas"] / peaks["reference"]}
    return report


def parse(arguments: list[str] | None = None) -> tuple[argparse.Namespace, Shape]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    defaults = Shape()
    for field in fields(Shape):
        value = getattr(defaults, field.name)
        option = f"--{field.name.replace('_', '-')}"
        if isinstance(value, tuple):
            parser.add_argument(option, type=int, nargs="+", default=value, help="tokens of each document")
        else:
            parser.add_argument(option, type=type(value), default=value, help=f"default {value}")
    parser.add_argument("--repeats", type=int, default=5, help="timed steps of each, in turns; default 5")
    parser.add_argument("--no-memory", action="store_true", help="skip the memory measurement")
    parser.add_argument("--json", action="store_true", help="print the whole report as JSON")
    options = parser.parse_args(arguments)
    chosen = {field.name: getattr(options, field.name) for field in fields(Shape)}
    return options, Shape(**chosen | {"lengths": tuple(options.lengths)})


def summary(report: dict[str, Any]) -> str:
    rate, peaks = report["tokens_per_second"], report.get("peak_bytes")
    shape = report["shape"]
    lines = [
        f"{report['tokens']} tokens in {len(shape['lengths'])} documents ({report['padded_tokens']} padded), "
        f"{shape['depths']} depths, {shape['threads']} thread(s)",
        f"same step: loss within {report['loss_difference']:.1e}, gradients within {report['gradient_difference']:.1e}",
        f"tokens/s: eyas {rate['eyas']:.0f}, reference {rate['reference']:.0f}; ratio {report['speed_ratio']:.2f} "
        f"(by processor time {report['cpu_ratio']:.2f})",
    ]
    if peaks:
        eyas, reference = (peaks[name] / 2**20 for name in STEPS)
        lines.append(
            f"peak memory above weights: eyas {eyas:.0f} MiB, reference {reference:.0f} MiB; "
            f"ratio {report['memory_ratio']:.3f}"
        )
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> None:
    options, shape = parse(arguments)
    report = benchmark(shape, options.repeats, memory=not options.no_memory)
    print(json.dumps(report, indent=2) if options.json else summary(report))
    if not report["same"]:
        raise SystemExit("the two steps differ: the comparison above means nothing")


if __name__ == "__main__":
    main()
