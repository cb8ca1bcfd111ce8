"""Proof that an exported folder is the drafter that was trained, and drafts as engines will compute it.

The folder is read back and run on a small seeded batch three ways: the training unroll, the incremental session and
the stand-alone engine of scripts/engines/. All three must give the same logits; against the drafter before the
cast only rounding may differ.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from models.batch import Batch, Slots, slots_of
from models.drafter import Drafter, Serving
from models.errors import EyasError
from models.frozen import FrozenTarget
from models.portable import DTYPES, check_export
from scripts.engines import engine_for

LENGTHS = (23, 10)  # tokens of the two documents
DEPTHS = 7
SAME = 1e-4  # between float32 computations of the same weights, relative to the largest logit
ROUNDED = {"float32": 1e-5, "float16": 0.02, "bfloat16": 0.1}  # rms deviation, relative to the logits' spread


@dataclass(frozen=True)
class Rescored:
    """engine: largest difference between the three ways; rounding: rms change of the logits by the cast, both
    relative; top1: share of drafts whose argmax survived the cast; draft_tokens: those that the folder drafts."""

    engine: float
    rounding: float
    top1: float
    draft_tokens: int


@torch.no_grad()
def rescore(
    folder: Path, exact: Drafter, served: Serving, frozen: FrozenTarget, dtype: str, *, seed: int = 0
) -> Rescored:
    """Check and measure an export. ``exact``: the drafter before the cast, on CPU in float32; ``served``: what was to
    be written of it; ``frozen`` on CPU.

    A drafter with the target's own head, trained on some of its rows, is served with all of them: its own are compared.
    Raises EyasError if the folder is not what was meant to be written or computes something else.
    """
    drafter = check_export(folder, served, frozen.config)
    rows = drafted_rows(folder, drafter, exact)
    batch = seeded_batch(frozen, len(exact.tap_ids), seed)
    slots = slots_of(batch, min(DEPTHS, exact.max_depth or DEPTHS))
    shared = frozen.to("cpu", DTYPES[dtype]).to("cpu", torch.float32)  # what a target of this dtype shares
    before, after = unrolled(exact, batch, slots, frozen), unrolled(drafter, batch, slots, shared)
    scale = float(after.abs().max())
    worst = 0.0
    for column, others in served_logits(folder, drafter, batch, slots, shared):
        for other in others:
            worst = max(worst, float((other - after[:, column])[slots.valid[:, column]].abs().max()) / scale)
    if not worst <= SAME:
        raise EyasError(f"{folder}: an engine's logits would differ by {worst:.2g} from training's (allowed {SAME})")
    before, after = before[slots.valid], after[..., rows][slots.valid]
    rounding = float((after - before).square().mean().sqrt() / before.std())
    if not rounding <= ROUNDED[dtype]:
        raise EyasError(f"{folder}: casting to {dtype} changed the logits by {rounding:.2g}; export.dtype=float32")
    same = after.argmax(-1) == before.argmax(-1)
    return Rescored(worst, rounding, float(same.float().mean()), len(drafter.vocab))


def drafted_rows(folder: Path, drafter: Drafter, exact: Drafter) -> Tensor:
    """Which rows of the read-back drafter's logits are those of ``exact``, [Vd] int64."""
    if drafter.vocab.size != exact.vocab.size or drafter.tap_ids != exact.tap_ids:
        raise EyasError(f"{folder}: vocabulary or taps differ from the drafter's after reading back")
    if drafter.vocab.is_full:
        return exact.vocab.ids
    if not torch.equal(drafter.vocab.ids, exact.vocab.ids):
        raise EyasError(f"{folder}: the draft vocabulary differs from the drafter's after reading back")
    return torch.arange(len(exact.vocab))


def seeded_batch(frozen: FrozenTarget, taps: int, seed: int) -> Batch:
    """Random tokens and features; what only the objective needs is left empty."""
    generator = torch.Generator().manual_seed(seed)
    total, hidden = sum(LENGTHS), frozen.hidden_size
    return Batch(
        input_ids=torch.randint(frozen.vocab_size, (total,), generator=generator),
        supervised=torch.ones(total, dtype=torch.bool),
        cu_seqlens=torch.tensor([0, *LENGTHS]).cumsum(0).int(),
        taps=torch.randn(total, taps * hidden, generator=generator),
        final=torch.randn(total, hidden, generator=generator),
        lse=torch.zeros(total),
        top1=torch.zeros(total, dtype=torch.int64),
    )


def unrolled(drafter: Drafter, batch: Batch, slots: Slots, frozen: FrozenTarget) -> Tensor:
    """Training's logits of every depth and slot, [K, S, Vd], zero where a slot doesn't count."""
    logits = drafter.head(frozen).logits(drafter.unroll(batch, slots, frozen), slots.counts)
    dense = logits.new_zeros(*slots.valid.shape, logits.shape[-1])
    dense[slots.rows()] = logits
    return dense


def served_logits(
    folder: Path, drafter: Drafter, batch: Batch, slots: Slots, frozen: FrozenTarget
) -> Iterator[tuple[int, tuple[Tensor, Tensor]]]:
    """Of every third slot: its number, and its logits [K, Vd] by the engine and by the drafter's own session.

    Depths that reach past the document draft from token 0; they carry no loss and are not compared.
    """
    engine = engine_for(folder, frozen)
    if not torch.equal(engine.draft_ids, drafter.vocab.ids):
        raise EyasError(f"{folder}: the engine drafts other target ids than the drafter")
    starts = batch.doc_starts
    for column in range(0, len(slots), 3):
        slot = int(slots.index[column])
        begin = int(starts[slot])
        own = slice(begin, slot + 1)
        next_ids = batch.input_ids[begin + 1 : slot + 2]
        drafted = batch.input_ids.new_zeros(slots.depths - 1)
        known = batch.input_ids[slot + 2 : slot + 1 + slots.depths]
        drafted[: len(known)] = known
        served = engine.draft_logits(next_ids, batch.taps[own], batch.final[own], drafted)
        yield column, (served, session_logits(drafter, frozen, batch, own, next_ids, drafted))


def session_logits(
    drafter: Drafter, frozen: FrozenTarget, batch: Batch, own: slice, next_ids: Tensor, drafted: Tensor
) -> Tensor:
    """The incremental session's logits: slots confirmed in two goes, then the drafted chain."""
    session = drafter.session(frozen)
    taps, final, half = batch.taps[own], batch.final[own], len(next_ids) // 2
    parts = [slice(0, half), slice(half, None)] if half else [slice(None)]
    for part in parts:
        root = session.extend([0], [len(next_ids[part])], taps[part], final[part], next_ids[part])[0]
    rows = [root]
    for depth, token in enumerate(drafted, 1):
        rows.append(session.expand([0], torch.tensor([depth - 2]), token[None], depth)[0])
    return torch.stack(rows)
