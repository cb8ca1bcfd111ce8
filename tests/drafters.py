"""Random batches, frozen targets and drafters for unit tests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from models.batch import Batch, Slots
from models.drafter import Drafter
from models.eagle3 import Eagle3Drafter
from models.frozen import FrozenTarget
from models.vocab import DraftVocab

TINY: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "num_hidden_layers": 6,
    "vocab_size": 40,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 512,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}
TAPS = (2, 3, 5)


def random_frozen(seed: int = 0, **overrides: Any) -> FrozenTarget:
    generator = torch.Generator().manual_seed(seed)
    config = TINY | overrides
    vocab, hidden = config["vocab_size"], config["hidden_size"]
    embedding = torch.randn(vocab, hidden, generator=generator) * 0.5
    head = torch.randn(vocab, hidden, generator=generator) * 0.5
    return FrozenTarget(embedding, head, config, final_norm=torch.rand(hidden, generator=generator) + 0.5)


def random_batch(frozen: FrozenTarget, lengths: list[int], seed: int = 0, supervised: Tensor | None = None) -> Batch:
    """Random tokens and features with the exact lse and top-1 of those features."""
    generator = torch.Generator().manual_seed(seed)
    total, hidden = sum(lengths), frozen.hidden_size
    final = torch.randn(total, hidden, generator=generator)
    logits = final.double() @ frozen.head.double().T
    if supervised is None:
        supervised = torch.rand(total, generator=generator) < 0.8
    return Batch(
        input_ids=torch.randint(frozen.vocab_size, (total,), generator=generator),
        supervised=supervised,
        cu_seqlens=torch.tensor([0, *lengths]).cumsum(0).int(),
        taps=torch.randn(total, len(TAPS) * hidden, generator=generator),
        final=final,
        lse=logits.logsumexp(-1).float(),
        top1=logits.argmax(-1),
    )


def random_vocab(size: int, draft: int, seed: int = 0) -> DraftVocab:
    order = torch.randperm(size, generator=torch.Generator().manual_seed(seed))
    return DraftVocab(order[:draft].sort().values, size)


def random_drafter(frozen: FrozenTarget, vocab: DraftVocab, seed: int = 0, **options: Any) -> Eagle3Drafter:
    """Every weight random, norms included, so that no path is hidden by a neutral value."""
    drafter = Eagle3Drafter.create(frozen, vocab, TAPS, init_fc=False, init_head=False, seed=seed, **options)
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for parameter in drafter.parameters():
            if parameter.ndim == 1:
                parameter.copy_(torch.rand(parameter.shape, generator=generator) + 0.5)
    return drafter


@torch.no_grad()
def drafted_logits(drafter: Drafter, frozen: FrozenTarget, text: Batch, slot: int, path: Sequence[int]) -> Tensor:
    """What training unrolls for one slot of a text whose confirmed part, x[0] .. x[slot+1], goes on with ``path``:
    logits [1 + len(path), Vd], row k those of depth k. The true features end at ``slot``; noise follows."""
    depths, confirmed = 1 + len(path), slot + 1
    noise = random_batch(frozen, [depths + 1], seed=99)
    ids = torch.cat([text.input_ids[: slot + 2], torch.tensor([*path, 0], dtype=torch.int64)])
    rows = {
        name: torch.cat([getattr(text, name)[:confirmed], getattr(noise, name)])
        for name in ("taps", "final", "lse", "top1")
    }
    total = ids.numel()
    batch = Batch(ids, torch.ones(total, dtype=torch.bool), torch.tensor([0, total], dtype=torch.int32), **rows)
    one = Slots(torch.tensor([slot]), torch.ones(depths, 1, dtype=torch.bool))
    return drafter.unroll(batch, one, frozen) @ drafter.head_weight(frozen).T
