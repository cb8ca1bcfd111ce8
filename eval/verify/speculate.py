"""Speculative decoding: draft, verify in one pass, keep what the target would have written.

Several sequences at a time, each in a slot and at a length of its own; a new one takes the slot of one that ended.
Invariant between passes: the target's cache holds every confirmed token of a sequence but the last (the root), and the
proposer was given the true states of the same positions. A pass feeds every sequence's root and draft tree in one
forward; afterwards the cache keeps the root and the accepted path only.
"""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from eval.drafts.proposers import Proposer
from eval.drafts.tree import DraftTree
from eval.numbers.metrics import Round
from eval.verify.accept import Accepted, Rule, accept
from eval.verify.sampling import Sampling, draw
from models.blocks import Block, States
from models.errors import EyasError
from models.target import Target

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
    """Wall time of a run: prefills, and of the passes: drafting, the target's forwards, the rest."""

    prefill: float = 0.0
    draft: float = 0.0
    verify: float = 0.0
    other: float = 0.0
    passes: int = 0  # forwards of the target, whatever the number of sequences in them
    levels: int = 0  # drafted in those passes: of the deepest tree of each

    @property
    def decode(self) -> float:
        return self.draft + self.verify + self.other


@dataclass
class Generation:
    """tokens: the output, first the one that prefill gave; finish: eos | length | context | stop. first_token: seconds
    of the prefill, the drafter's own included; latency: seconds from then to the last token."""

    tokens: list[int] = field(default_factory=list)
    finish: str = ""
    rounds: list[Round] = field(default_factory=list)
    first_token: float = 0.0
    latency: float = 0.0


@dataclass
class Request:
    """A prompt to continue. ``uniform`` in [0, 1) is the only source of randomness of its sequence, so that what
    becomes of it does not depend on its company. about: whatever the caller wants to know it by."""

    prompt: Sequence[int]
    uniform: Callable[[], float] = random.random
    about: Any = None


class Decoder(NamedTuple):
    """What stays the same from prompt to prompt."""

    target: Target
    sampling: Sampling
    limits: Limits
    rule: Rule = Rule()


def generate(
    decoder: Decoder, proposer: Proposer, prompt: Sequence[int], uniform: Callable[[], float] = random.random
) -> Generation:
    """Decode one prompt; see :func:`generate_all`."""
    found: list[Generation] = []
    generate_all(decoder, proposer, deque([Request(prompt, uniform)]), done=lambda _, out: found.append(out))
    return found[0]


def generate_all(
    decoder: Decoder,
    proposer: Proposer,
    requests: deque[Request],
    slots: int = 1,
    *,
    done: Callable[[Request, Generation], None],
) -> Seconds:
    """Decode the requests, up to ``slots`` at a time; ``done`` is told of each that ends, and may add new ones.

    Every output (T = 0) or its distribution (T > 0) is the target's own, whatever the proposer and the other
    sequences. Raises EyasError for an empty prompt and for one that fills the target's context.
    """
    return Loop(decoder, proposer, slots, done).run(requests)


@dataclass
class Active:
    """A sequence being decoded. room: new tokens that the context leaves, None without a limit."""

    request: Request
    room: int | None
    out: Generation = field(default_factory=Generation)
    started: float = 0.0

    @property
    def ids(self) -> list[int]:
        return [*self.request.prompt, *self.out.tokens]

    @property
    def limit(self) -> int:
        """Levels the next tree may have: its deepest node stays inside the context, and one place is left for the
        token that the pass adds. max_new_tokens doesn't narrow it: a pass that overshoots is cut, so that the passes
        before the end are like all others, as they are in serving engines."""
        return UNLIMITED if self.room is None else self.room - len(self.out.tokens) - 1


class Loop:
    """The state of :func:`generate_all`: ``active[slot]`` is the sequence in that slot of cache and proposer."""

    def __init__(
        self, decoder: Decoder, proposer: Proposer, slots: int, done: Callable[[Request, Generation], None]
    ) -> None:
        self.decoder, self.proposer, self.slots, self.done = decoder, proposer, slots, done
        self.cache = decoder.target.new_cache(slots)
        self.active: list[Active] = []
        self.seconds = Seconds()
        self.clock = Clock(decoder.target, self.seconds)

    @torch.inference_mode()
    def run(self, requests: deque[Request]) -> Seconds:
        while requests or self.active:
            while requests and len(self.active) < self.slots:
                self.admit(requests.popleft())
            if self.active:
                self.one_pass()
        return self.seconds

    def admit(self, request: Request) -> None:
        """Read a prompt into the next free slot, and take its first token."""
        decoder, slot, prompt = self.decoder, len(self.active), request.prompt
        one = Active(request, room_for(prompt, decoder.limits))
        started = self.clock.worked
        self.cache.reset(slot)
        ids = torch.tensor(list(prompt), dtype=torch.int64)  # on the host, where they are checked
        logits, states = decoder.target.step([Block(ids)], self.cache, first=slot, last_only=True)
        self.cache.keep(slot, range(len(prompt)))
        tokens = [choose(decoder, logits[0], prompt, request.uniform)]
        keep(one.out, tokens, decoder, one.room)
        if not one.out.finish:
            self.active.append(one)
            self.proposer.begin(slot, prompt, request.uniform)
            self.proposer.commit(slot, states, [*prompt[1:], *tokens])
        self.clock.lap("prefill")
        one.started, one.out.first_token = self.clock.worked, self.clock.worked - started
        if one.out.finish:
            self.done(request, one.out)
            self.clock.skip()

    def one_pass(self) -> None:
        """Draft for every sequence, verify all drafts in one forward, keep what is accepted."""
        trees = self.proposer.propose([one.limit for one in self.active])
        self.clock.lap("draft")
        blocks = [tree.block(one.out.tokens[-1]) for tree, one in zip(trees, self.active, strict=True)]
        logits, states = self.decoder.target.step(blocks, self.cache)
        self.seconds.passes += 1
        self.seconds.levels += max(tree.depth for tree in trees)
        self.clock.lap("verify")
        verdicts = judge_all(self.decoder, trees, logits, self.active)
        start = 0
        for slot, (one, tree, accepted) in enumerate(zip(self.active, trees, verdicts, strict=True)):
            nodes = [0, *(node + 1 for node in accepted.path)]  # the root, then the accepted path
            kept = keep(one.out, accepted.tokens, self.decoder, one.room)
            one.out.rounds.append(round_of(tree, accepted, kept))
            if not one.out.finish:
                self.cache.keep(slot, nodes)
                self.proposer.commit(slot, some_states(states, start, nodes), accepted.tokens)
            start += 1 + len(tree)
        self.clock.lap("other")
        for slot in reversed(range(len(self.active))):
            if self.active[slot].out.finish:
                self.leave(slot)

    def leave(self, slot: int) -> None:
        """Take a finished sequence out; the last one moves into its slot."""
        one, last = self.active[slot], len(self.active) - 1
        one.out.latency = self.clock.worked - one.started
        if slot < last:
            self.cache.move(last, slot)
            self.proposer.move(last, slot)
            self.active[slot] = self.active[last]
        self.active.pop()
        self.clock.lap("other")
        self.done(one.request, one.out)
        self.clock.skip()


def room_for(prompt: Sequence[int], limits: Limits) -> int | None:
    """New tokens that the context leaves, None without a limit."""
    if not prompt:
        raise EyasError("a prompt has no tokens")
    if limits.max_new_tokens < 1:
        raise EyasError(f"verify.max_new_tokens={limits.max_new_tokens}: must be at least 1")
    if limits.context is not None and len(prompt) >= limits.context:
        raise EyasError(f"a prompt of {len(prompt)} tokens fills the target's context of {limits.context}")
    return None if limits.context is None else limits.context - len(prompt)


def round_of(tree: DraftTree, accepted: Accepted, kept: int) -> Round:
    return Round(tree.depth, len(accepted.path), kept, tuple(tree.tokens.tolist()), tree.parents, tuple(accepted.path))


def some_states(states: States, start: int, nodes: Sequence[int]) -> States:
    """States of some tokens of a sequence whose rows begin at ``start``; a view where they lead it, as on chains."""
    if nodes[-1] == len(nodes) - 1:
        return States(*(column[start : start + len(nodes)] for column in states))
    return States(*(column[[start + node for node in nodes]] for column in states))


def choose(decoder: Decoder, logits: Tensor, context: Sequence[int], uniform: Callable[[], float]) -> int:
    """One token of plain decoding after ``context``."""
    if decoder.sampling.greedy:
        return int(decoder.sampling.argmax(logits, context))
    return int(draw(decoder.sampling.probs(logits, context), uniform()))


def judge_all(decoder: Decoder, trees: Sequence[DraftTree], logits: Tensor, active: Sequence[Active]) -> list[Accepted]:
    """Apply the acceptance rule to verified trees; ``logits`` of all roots and nodes, the sequences back to back."""
    sampling, verdicts, start = decoder.sampling, list[Accepted](), 0
    best = logits.argmax(-1).tolist() if sampling.greedy and not sampling.needs_context else None
    for tree, one in zip(trees, active, strict=True):
        own = slice(start, start + 1 + len(tree))
        argmax = None if best is None else best[own]
        ids = one.ids if sampling.needs_context else ()  # long texts are not copied for nothing
        verdicts.append(accept(decoder.rule, sampling, tree, logits[own], ids, one.request.uniform, argmax))
        start = own.stop
    return verdicts


def keep(out: Generation, tokens: Sequence[int], decoder: Decoder, room: int | None) -> int:
    """Append a block's tokens up to the one that ends the sequence; how many were kept."""
    limits = decoder.limits
    for count, token in enumerate(tokens, 1):
        out.tokens.append(token)
        if token in limits.eos_ids:
            out.finish = "eos"
        elif limits.stop and stops_here(decoder, out.tokens):
            out.finish = "stop"
        elif len(out.tokens) >= limits.max_new_tokens:
            out.finish = "length"
        elif room is not None and len(out.tokens) >= room:
            out.finish = "context"
        if out.finish:
            return count
    return len(tokens)


def stops_here(decoder: Decoder, tokens: Sequence[int]) -> bool:
    """Whether a stop string is complete, which none was before the last token: the end of the text tells."""
    longest = max(len(stop) for stop in decoder.limits.stop)
    end = text_of(decoder.target, tokens[-4 * longest - 16 :])  # a character may take four tokens
    return any(stop in end for stop in decoder.limits.stop) and stop_at(decoder, tokens) is not None


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


class Clock:
    """Adds the time since the last lap to one of the Seconds."""

    def __init__(self, target: Target, seconds: Seconds) -> None:
        self.device, self.seconds = torch.device(target.device), seconds
        self.last, self.skipped = self.now(), 0.0

    def now(self) -> float:
        if self.device.type == "cuda":  # otherwise a phase would be charged for the one before it
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def skip(self) -> None:
        """What happened since the last lap counts nowhere."""
        now = self.now()
        self.skipped += now - self.last
        self.last = now

    @property
    def worked(self) -> float:
        """The time of the last lap, without what was skipped."""
        return self.last - self.skipped

    def lap(self, phase: str) -> None:
        now = self.now()
        setattr(self.seconds, phase, getattr(self.seconds, phase) + now - self.last)
        self.last = now
