"""Speculative decoding of one sequence: draft, verify in one pass, keep what the target would have written.

Invariant between passes: the target's cache holds every confirmed token but the last (the root), and the proposer
holds the true features of the same positions. A pass feeds the root and the draft tree; afterwards the cache keeps
the root and the accepted path only.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from eval.accept import Accepted, accept_greedy, accept_sampled
from eval.metrics import Round
from eval.proposers import Proposer
from eval.sampling import Sampling, draw
from eval.tree import DraftTree
from models.errors import EyasError
from models.target import Features, Target

UNLIMITED = 1 << 30


@dataclass(frozen=True)
class Limits:
    """Where a sequence ends: after any of eos_ids (kept), after max_new_tokens, at the target's context length, or
    after the token that completes a stop string. Decided token by token, so blocks end where plain decoding does."""

    max_new_tokens: int
    eos_ids: frozenset[int] = frozenset()
    context: int | None = None  # prompt and output together; None: no limit
    stop: tuple[str, ...] = ()


@dataclass
class Seconds:
    """Wall time of one sequence: prefill, and of the passes: drafting (commits included), the target, the rest."""

    prefill: float = 0.0
    draft: float = 0.0
    verify: float = 0.0
    other: float = 0.0

    @property
    def decode(self) -> float:
        return self.draft + self.verify + self.other


@dataclass
class Generation:
    """tokens: the output, first the one that prefill gave; finish: eos | length | context | stop."""

    tokens: list[int] = field(default_factory=list)
    finish: str = ""
    rounds: list[Round] = field(default_factory=list)
    seconds: Seconds = field(default_factory=Seconds)


class Decoder(NamedTuple):
    """What stays the same from prompt to prompt. ``uniform`` in [0, 1) is the only source of randomness."""

    target: Target
    sampling: Sampling
    limits: Limits
    uniform: Callable[[], float] = random.random


@torch.inference_mode()
def generate(decoder: Decoder, proposer: Proposer, prompt: Sequence[int]) -> Generation:
    """Decode one prompt. The output (T = 0) or its distribution (T > 0) is the target's own, whatever the proposer.

    Raises EyasError for an empty prompt and for one that fills the target's context.
    """
    target, limits = decoder.target, decoder.limits
    room = room_for(prompt, limits)
    out, clock = Generation(), Clock(target)
    cache = target.new_cache()
    logits, features = prefill(target, prompt, cache)
    tokens = [choose(decoder, logits, prompt)]
    keep(out, tokens, decoder, room)
    clock.lap(out.seconds, "prefill")
    if not out.finish:
        proposer.begin(prompt)
        proposer.commit(features, [*prompt[1:], *tokens])
        clock.lap(out.seconds, "prefill")
    while not out.finish:
        ids = [*prompt, *out.tokens]
        # The deepest node stays inside the context: one place is left for the token that the pass itself adds.
        tree = proposer.propose(depth_limit(room, out))
        clock.lap(out.seconds, "draft")
        logits, features = verify(target, ids[-1], tree, cache, past=len(ids) - 1)
        clock.lap(out.seconds, "verify")
        path, tokens = judge(decoder, tree, logits, ids)
        kept = keep(out, tokens, decoder, room)
        out.rounds.append(Round(tree.depth, len(path), kept))
        if not out.finish:
            target.rollback(cache, len(ids), [len(ids) + node for node in path])  # the root, then the accepted path
            clock.lap(out.seconds, "other")
            proposer.commit(rows(features, [0, *(node + 1 for node in path)]), tokens)
            clock.lap(out.seconds, "draft")
        clock.lap(out.seconds, "other")
    return out


def room_for(prompt: Sequence[int], limits: Limits) -> int | None:
    """New tokens that the context leaves, None without a limit."""
    if not prompt:
        raise EyasError("a prompt has no tokens")
    if limits.max_new_tokens < 1:
        raise EyasError(f"verify.max_new_tokens={limits.max_new_tokens}: must be at least 1")
    if limits.context is not None and len(prompt) >= limits.context:
        raise EyasError(f"a prompt of {len(prompt)} tokens fills the target's context of {limits.context}")
    return None if limits.context is None else limits.context - len(prompt)


def depth_limit(room: int | None, out: Generation) -> int:
    """Levels the next tree may have. max_new_tokens doesn't narrow it: a pass that overshoots is cut, so that the
    passes before the end are like all others, as they are in serving engines."""
    return UNLIMITED if room is None else room - len(out.tokens) - 1


def prefill(target: Target, prompt: Sequence[int], cache: Cache) -> tuple[Tensor, Features]:
    """Fill the cache with the prompt: logits [V] after it and the features of its tokens."""
    ids = torch.tensor(list(prompt), dtype=torch.int64, device=target.device)
    logits, features = target.step(ids, torch.arange(len(prompt), device=target.device), cache, keep=1)
    return logits[-1], features


def verify(target: Target, root: int, tree: DraftTree, cache: Cache, *, past: int) -> tuple[Tensor, Features]:
    """One verification pass: logits [1 + N, V] after the root and each node, and their features."""
    first = torch.tensor([root], dtype=torch.int64, device=target.device)
    ids = torch.cat([first, tree.tokens.to(target.device)])
    mask = None if tree.is_chain else tree.attention_mask(past).to(target.device)  # a chain is plainly causal
    return target.step(ids, tree.positions(past).to(target.device), cache, mask)


def choose(decoder: Decoder, logits: Tensor, context: Sequence[int]) -> int:
    """One token of plain decoding after ``context``."""
    if decoder.sampling.greedy:
        return int(decoder.sampling.argmax(logits, context))
    return int(draw(decoder.sampling.probs(logits, context), decoder.uniform()))


def judge(decoder: Decoder, tree: DraftTree, logits: Tensor, ids: list[int]) -> Accepted:
    """Apply the acceptance rule to a verified tree; ``ids`` are the confirmed tokens."""
    sampling = decoder.sampling
    drafted: list[int] = tree.tokens.tolist() if sampling.extra else []

    def context(node: int) -> list[int]:
        return [*ids, *(drafted[n] for n in tree.path(node))] if sampling.extra else ids

    if not sampling.greedy:
        return accept_sampled(tree, lambda node: sampling.probs(logits[node + 1], context(node)), decoder.uniform)
    if sampling.extra:
        return accept_greedy(tree, lambda node: int(sampling.argmax(logits[node + 1], context(node))))
    best: list[int] = logits.argmax(-1).tolist()
    return accept_greedy(tree, lambda node: best[node + 1])


def keep(out: Generation, tokens: Sequence[int], decoder: Decoder, room: int | None) -> int:
    """Append a block's tokens up to the one that ends the sequence; how many were kept."""
    limits = decoder.limits
    for count, token in enumerate(tokens, 1):
        out.tokens.append(token)
        if token in limits.eos_ids:
            out.finish = "eos"
        elif limits.stop and stop_at(decoder, out.tokens) is not None:
            out.finish = "stop"
        elif len(out.tokens) >= limits.max_new_tokens:
            out.finish = "length"
        elif room is not None and len(out.tokens) >= room:
            out.finish = "context"
        if out.finish:
            return count
    return len(tokens)


def stop_at(decoder: Decoder, tokens: Sequence[int]) -> int | None:
    """Where the first stop string begins in the text of ``tokens``, None if none is complete. Only output counts."""
    text = text_of(decoder.target, tokens)
    found = [at for stop in decoder.limits.stop if (at := text.find(stop)) >= 0]
    return min(found, default=None)


def output_text(decoder: Decoder, out: Generation) -> str:
    """The text of a generation without special tokens and, where a stop string ended it, cut before that."""
    text = text_of(decoder.target, out.tokens)
    return text[: stop_at(decoder, out.tokens)] if out.finish == "stop" else text


def text_of(target: Target, tokens: Sequence[int]) -> str:
    return str(target.tokenizer.decode(list(tokens), skip_special_tokens=True))


def rows(features: Features, wanted: list[int]) -> Features:
    """Features of some tokens of a pass; a view where they lead it, as on every chain."""
    if wanted == list(range(len(wanted))):
        return Features(*(column[: len(wanted)] for column in features))
    return Features(*(column[wanted] for column in features))


class Clock:
    """Adds the time since the last lap to one of the Seconds."""

    def __init__(self, target: Target) -> None:
        self.device = torch.device(target.device)
        self.last = self.now()

    def now(self) -> float:
        if self.device.type == "cuda":  # otherwise a phase would be charged for the one before it
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def lap(self, seconds: Seconds, phase: str) -> None:
        now = self.now()
        setattr(seconds, phase, getattr(seconds, phase) + now - self.last)
        self.last = now
