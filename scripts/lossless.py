"""Greedy speculative output against ``transformers.generate``, token for token, for every kind of draft tree.

    python -m scripts.lossless conf=eagle3_smollm2 verify.max_prompts=40 verify.batch_sizes=[1,4]

Takes the drafters of the run (or drafter_path=...) and the prompts that ``python -m eval`` would take. Beside every
trained drafter drafts a twin with random weights, and one that knows the right text and leaves it after a varying
number of tokens, so that every length of acceptance and roll-back occurs. verify.branch and verify.nodes size the
dynamic tree. Ends with an error if any output differs in float32.
"""

from __future__ import annotations

import logging
import random
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from tqdm import tqdm

from conf.cli import entry
from conf.schema import Config
from conf.values import NGRAM
from eval.candidates import CLASSIC, Candidate, ngrams
from eval.drafts.dynamic_tree import DynamicTree
from eval.drafts.proposers import PlainProposer, Proposer, ScriptedProposer
from eval.drafts.shapes import Shape, chain, classic, fit
from eval.drafts.tree import ROOT, DraftTree, Drawn
from eval.load import load_bench
from eval.measure import Bench
from eval.verify.speculate import Decoder, Generation, Limits, Request, generate_all
from models.drafter import Drafter
from models.errors import EyasError
from models.target import Target

log = logging.getLogger(__name__)

Texts = Mapping[tuple[int, ...], Sequence[int]]  # the right output of each prompt


@dataclass
class Total:
    """Of one way of drafting: outputs that are the target's own, accepted drafts, passes."""

    identical: int = 0
    accepted: int = 0
    passes: int = 0


def randomised(drafter: Drafter, seed: int = 0) -> Drafter:
    """The same architecture and vocabulary with random weights."""
    twin = type(drafter).from_architecture(drafter.architecture(), drafter.vocab)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * parameter.shape[-1] ** -0.5)
    return twin.to(next(drafter.parameters()).device).eval()


def adversary(texts: Texts, vocab_size: int, gamma: int, *, bushy: bool, seed: int = 0) -> Proposer:
    """Right for 0..gamma tokens, then wrong; ``bushy``: with a wrong sibling before and after every token."""
    rng = random.Random(seed)

    def script(ids: list[int], limit: int) -> DraftTree:
        prompt = next(p for p in texts if tuple(ids[: len(p)]) == p)
        good = rng.randint(0, gamma)
        ahead = [*prompt, *texts[prompt]][len(ids) : len(ids) + good]
        line = [*ahead, *(rng.randrange(vocab_size) for _ in range(gamma - len(ahead)))][:limit]
        if not bushy:
            return DraftTree.chain(line)
        tokens, parents, parent = list[int](), list[int](), ROOT
        for token in line:
            tokens += [(token + 1) % vocab_size, token, (token + 2) % vocab_size]
            parents += [parent] * 3
            parent = len(tokens) - 2
        return DraftTree(torch.tensor(tokens), tuple(parents), (Drawn.FIXED,) * len(tokens))

    return ScriptedProposer(script)


def shapes(bench: Bench) -> dict[str, Shape]:
    """A chain, the dynamic tree of verify.branch and verify.nodes, and the classic static trees."""
    verify = bench.verify
    dynamic = DynamicTree(verify.gamma, verify.branch, verify.nodes)
    static: dict[str, Shape] = {name: classic(name) for name in CLASSIC}
    return {"chain": chain(verify.gamma), "dynamic": dynamic, **static}


def ways(bench: Bench, decoder: Decoder, texts: Texts, slots: int) -> dict[str, Callable[[], Proposer]]:
    """Everything that drafts, by name."""
    target, verify = bench.target, bench.verify
    found: dict[str, Callable[[], Proposer]] = {"plain": PlainProposer}
    for candidate in [*(c for c in bench.candidates if c.kind != NGRAM), ngrams(verify)]:

        def add(name: str, one: Candidate, **options: Any) -> None:
            how = replace(verify, **options)
            found[name] = lambda: one.proposer(target, decoder.sampling, how, slots)

        if candidate.kind == NGRAM:
            add(NGRAM, candidate)
            continue
        deepest = candidate.drafter.max_depth if candidate.drafter else None
        for name, shape in shapes(bench).items():
            fitted = fit(shape, name, deepest, len(candidate.drafts))
            add(f"{candidate.name}, {name}", candidate.with_shape(fitted))
        add(f"{candidate.name}, adaptive", candidate, adaptive=True)
        if candidate.drafter is not None:
            add(f"{candidate.name}, random weights", replace(candidate, drafter=randomised(candidate.drafter)))
    for bushy in (False, True):
        name = f"adversary, {'tree' if bushy else 'chain'}"
        found[name] = lambda bushy=bushy: adversary(texts, target.vocab_size, verify.gamma, bushy=bushy)  # type: ignore[misc]
    return found


def generated(target: Target, prompt: Sequence[int], limits: Limits) -> list[int]:
    """Greedy output of ``transformers.generate``, EOS included, within the context."""
    room = limits.max_new_tokens if limits.context is None else limits.context - len(prompt)
    ids = torch.tensor([list(prompt)], device=target.device)
    model: Any = target.model
    ends = sorted(target.eos_ids)
    out = model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=min(limits.max_new_tokens, room),
        do_sample=False,
        repetition_penalty=1.0,
        eos_token_id=ends or None,
        pad_token_id=ends[0] if ends else 0,
    )
    return [int(token) for token in out[0, ids.shape[1] :]]


def check(cfg: Config) -> dict[str, Total]:
    """Totals of every way and batch size; raises EyasError if a float32 output differs."""
    bench, prompts = load_bench(cfg)
    decoder = bench.decoder(0.0)
    if decoder.sampling.needs_context or decoder.limits.stop:
        raise EyasError("scripts.lossless: compares bare greedy decoding; leave penalties and verify.stop out")
    asked = [prompt.ids for prompt in prompts]
    limits = decoder.limits
    texts = {tuple(ids): generated(bench.target, ids, limits) for ids in tqdm(asked, desc="transformers")}
    totals: dict[str, Total] = {}
    for slots in cfg.verify.batch_sizes:
        for name, make in ways(bench, decoder, texts, slots).items():
            title = f"{name}, {slots} at a time"
            totals[title] = total = Total()

            def done(request: Request, out: Generation, total: Total = total) -> None:
                total.identical += out.tokens == texts[tuple(request.prompt)]
                total.accepted += sum(r.accepted for r in out.rounds)
                total.passes += len(out.rounds)

            generate_all(decoder, make(), deque(Request(ids) for ids in asked), slots, done=done)
            mean = total.accepted / max(total.passes, 1)
            log.info("%s: %d of %d outputs identical, %.2f accepted a pass", title, total.identical, len(asked), mean)
    wrong = [name for name, total in totals.items() if total.identical < len(asked)]
    if wrong and bench.target.dtype == torch.float32:
        raise EyasError(f"greedy output differs from transformers.generate: {'; '.join(wrong)}")
    log.info("%d of %d ways of drafting write what transformers.generate writes", len(totals) - len(wrong), len(totals))
    return totals


@entry("lossless")
def main(cfg: Config) -> None:
    check(cfg)


if __name__ == "__main__":
    main()
