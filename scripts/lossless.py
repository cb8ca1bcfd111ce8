"""Greedy speculative output against plain decoding, token for token, for good, random and adversarial drafters.

    python -m scripts.lossless conf=eagle3_smollm2 verify.max_prompts=50 verify.max_new_tokens=64

Takes the run's drafter (or drafter_path=...) and the prompts that ``python -m eval`` would take. The random drafter
has the trained one's shape; the adversarial one knows the right text and leaves it after a varying number of tokens,
so that every length of acceptance and rollback occurs. Ends with an error if any output differs in float32.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Sequence
from typing import Any

import torch
from tqdm import tqdm

from conf.cli import entry
from conf.schema import Config
from eval.proposers import DrafterProposer, PlainProposer, Proposer, ScriptedProposer
from eval.run import load_bench
from eval.sampling import Sampling
from eval.speculate import Decoder, Generation, generate
from models.drafter import Drafter
from models.errors import EyasError

log = logging.getLogger(__name__)


def randomised(drafter: Drafter, seed: int = 0) -> Drafter:
    """The same architecture and vocabulary with random weights."""
    twin = type(drafter).from_architecture(drafter.architecture(), drafter.vocab)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * parameter.shape[-1] ** -0.5)
    return twin.to(next(drafter.parameters()).device).eval()


def adversary(prompt: Sequence[int], right: Sequence[int], vocab_size: int, gamma: int, seed: int) -> Proposer:
    """Right for 0..gamma tokens, then wrong."""
    rng, text = random.Random(seed), [*prompt, *right]

    def script(ids: list[int], limit: int) -> list[int]:
        good = rng.randint(0, gamma)
        ahead = text[len(ids) : len(ids) + good]
        wrong = [rng.randrange(vocab_size) for _ in range(gamma - len(ahead))]
        return [*ahead, *wrong][:limit]

    return ScriptedProposer(script)


def check(cfg: Config) -> dict[str, Any]:
    """Identical outputs and acceptance of each kind of drafter; raises EyasError if a float32 output differs."""
    bench, prompts, _ = load_bench(cfg)
    gamma, sampling = cfg.verify.gamma, Sampling(0.0)
    twin = randomised(bench.drafter)
    decoder = Decoder(bench.target, sampling, bench.limits())
    totals = {kind: {"identical": 0, "accepted": 0, "passes": 0} for kind in ("trained", "random", "adversarial")}
    for number, prompt in enumerate(tqdm([prompt.ids for prompt in prompts], desc="lossless")):
        plain = generate(decoder, PlainProposer(), prompt)
        proposers = {
            "trained": DrafterProposer(bench.drafter, bench.frozen, gamma, sampling),
            "random": DrafterProposer(twin, bench.frozen, gamma, sampling),
            "adversarial": adversary(prompt, plain.tokens, bench.target.vocab_size, gamma, number),
        }
        for kind, proposer in proposers.items():
            out: Generation = generate(decoder, proposer, prompt)
            totals[kind]["identical"] += out.tokens == plain.tokens
            totals[kind]["accepted"] += sum(r.accepted for r in out.rounds)
            totals[kind]["passes"] += len(out.rounds)
    for kind, sums in totals.items():
        log.info(
            "%s drafter: %d of %d outputs are plain decoding's; %.2f accepted drafts a pass",
            kind,
            sums["identical"],
            len(prompts),
            sums["accepted"] / max(sums["passes"], 1),
        )
    wrong = [kind for kind, sums in totals.items() if sums["identical"] < len(prompts)]
    if wrong and bench.target.dtype == torch.float32:
        raise EyasError(f"greedy output differs from plain decoding with the {', '.join(wrong)} drafter")
    return totals


@entry("lossless")
def main(cfg: Config) -> None:
    check(cfg)


if __name__ == "__main__":
    main()
