"""What a forward with a KV cache reads: one block of tokens for each sequence, a chain or a draft tree."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from models.kv_cache import KVCache


@dataclass(frozen=True)
class Block:
    """n tokens that one slot reads behind what its cache holds.

    tokens [n] int64. depths: token i stands at position ``cache.lengths[slot] + depths[i]``; None for a chain.
    seen [n, pending + n] bool: which tokens that are not confirmed yet, the earlier pending ones and then the block's
    own, each may look at; every token sees all confirmed ones. None for a chain: itself and all before it.
    """

    tokens: Tensor
    depths: Sequence[int] | None = None
    seen: Tensor | None = None


class States(NamedTuple):
    """What drafting reads of the target. taps [n, A*H] tapped states, ascending ids side by side; final [n, H]."""

    taps: Tensor
    final: Tensor


class Laid(NamedTuple):
    """Blocks side by side. ids, positions [B, n], padded; sizes: tokens of each block; allowed [B, n, width] bool:
    the cached tokens that each may look at, None where plain causal attention says the same; keys [B, width]:
    the positions of the cached tokens."""

    ids: Tensor
    positions: Tensor
    sizes: list[int]
    allowed: Tensor | None
    keys: Tensor


def lay_out(blocks: Sequence[Block], cache: KVCache, first: int, device: torch.device) -> Laid:
    """Make the tokens of the blocks pending in the slots first, first + 1, ... and say how to read them."""
    sizes = [block.tokens.numel() for block in blocks]
    before = [cache.lengths[s] for s in range(first, first + len(blocks))]
    pending = [cache.pending[s] for s in range(first, first + len(blocks))]
    depths = [b.depths or range(p, p + n) for b, p, n in zip(blocks, pending, sizes, strict=True)]
    longest = max(sizes)
    # The first tokens of a single sequence, or one more token, need no mask: the kernels are faster without.
    simple = len(blocks) == 1 and blocks[0].seen is None and (longest == 1 or not before[0] + pending[0])
    width = cache.start(first, depths, device)
    if len(blocks) == 1:
        ids = blocks[0].tokens.to(device, torch.int64)[None]
    else:
        ids = pad_sequence([block.tokens.to(device, torch.int64) for block in blocks], batch_first=True)
    rows = [[length + d for d in depth] for length, depth in zip(before, depths, strict=True)]
    positions = torch.tensor([row + row[-1:] * (longest - len(row)) for row in rows], device=device)
    place = torch.arange(width, device=device)
    keys = place.expand(len(blocks), width)
    if simple:
        return Laid(ids, positions, sizes, None, keys)
    lengths = torch.tensor(before, device=device)[:, None]
    allowed = (place < lengths)[:, None].repeat(1, longest, 1)
    keys = keys.clone()
    for i, (block, length, n) in enumerate(zip(blocks, before, sizes, strict=True)):
        stop = length + pending[i] + n
        seen = torch.ones(n, pending[i] + n, dtype=torch.bool).tril(pending[i]) if block.seen is None else block.seen
        if seen.shape != (n, pending[i] + n):
            raise ValueError(f"seen {tuple(seen.shape)} for {n} tokens after {pending[i]} pending ones")
        allowed[i, :n, length:stop] = seen.to(device)
        keys[i, length:stop] = torch.tensor(cache.depths[first + i], device=device) + length
    return Laid(ids, positions, sizes, allowed, keys)


def side_by_side(padded: Tensor, sizes: Sequence[int]) -> Tensor:
    """[B, n, ...] without its padding, the rows back to back: [sum of sizes, ...]."""
    if len(sizes) == 1:
        return padded[0]
    if all(size == padded.shape[1] for size in sizes):
        return padded.flatten(0, 1)
    return torch.cat([row[:size] for row, size in zip(padded, sizes, strict=True)])
