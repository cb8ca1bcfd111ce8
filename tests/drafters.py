"""Random batches, frozen targets and drafters for unit tests."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from models.batch import Batch, Slots
from models.drafter import Drafter, DraftSession
from models.eagle3 import Eagle3Drafter
from models.frozen import FrozenTarget
from models.vocab import DraftVocab

D = TypeVar("D", bound=Drafter)
TINY: dict[str, Any] = {  # a whole text config of Llama, for methods that build its layers
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
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


def randomise(drafter: D, seed: int = 1) -> D:
    """Every parameter random, so that no path is hidden by a neutral value: norms .5 to 1.5, biases and the like
    normal, matrices such that the size of what passes through stays."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in drafter.named_parameters():
            if parameter.ndim > 1:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * parameter.shape[-1] ** -0.5)
            elif name.endswith("bias"):
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
            else:
                parameter.copy_(torch.rand(parameter.shape, generator=generator) + 0.5)
    return drafter


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
    return drafter.head(frozen).logits(drafter.unroll(batch, one, frozen), [1] * depths)


class Reader:
    """Feeds texts to the slots of a session in uneven pieces and notes what was confirmed in each."""

    def __init__(self, session: DraftSession, frozen: FrozenTarget) -> None:
        self.session, self.frozen = session, frozen
        self.texts: dict[int, Batch] = {}
        self.read: dict[int, int] = {}

    def begin(self, slot: int, length: int, seed: int) -> None:
        self.texts[slot], self.read[slot] = random_batch(self.frozen, [length], seed), 0
        self.session.reset(slot, int(self.texts[slot].input_ids[0]))

    def move(self, source: int, to: int) -> None:
        self.session.move(source, to)
        self.texts[to], self.read[to] = self.texts.pop(source), self.read.pop(source)

    def extend(self, counts: dict[int, int]) -> Tensor:
        slots = sorted(counts)
        parts = [slice(self.read[s], self.read[s] + counts[s]) for s in slots]
        taps, final = (
            torch.cat([getattr(self.texts[s], name)[part] for s, part in zip(slots, parts, strict=True)])
            for name in ("taps", "final")
        )
        ids = [self.texts[s].input_ids[part.start + 1 : part.stop + 1] for s, part in zip(slots, parts, strict=True)]
        for slot in slots:
            self.read[slot] += counts[slot]
        return self.session.extend(slots, [counts[s] for s in slots], taps, final, torch.cat(ids))


def random_levels(
    rng: random.Random, slots: Sequence[int], widest: int, depths: int, vocab: int = 40
) -> list[list[tuple[int, int, int]]]:
    """Levels of (slot, parent, token): trees of different shapes, some of which end early. ``widest`` 1: chains."""
    levels, last, count = [], {s: [-1] for s in slots}, dict.fromkeys(slots, 0)
    for _ in range(depths):
        level = []
        for slot in slots:
            if not last[slot] or (widest > 1 and rng.random() < 0.15):
                last[slot] = []
                continue
            parents = sorted(rng.choices(last[slot], k=rng.randint(1, widest)))
            level += [(slot, parent, rng.randrange(vocab)) for parent in parents]
            last[slot] = list(range(count[slot], count[slot] + len(parents)))
            count[slot] += len(parents)
        if level:
            levels.append(level)
    return levels


def draft(session: DraftSession, levels: list[list[tuple[int, int, int]]]) -> dict[int, dict[tuple[int, ...], Tensor]]:
    """Expand the levels; for each slot the logits after every node, by its path of tokens."""
    paths: dict[int, list[tuple[int, ...]]] = {}
    found: dict[int, dict[tuple[int, ...], Tensor]] = {}
    for depth, level in enumerate(levels, 1):
        slots, parents, tokens = (list(column) for column in zip(*level, strict=True))
        out = session.expand(slots, torch.tensor(parents), torch.tensor(tokens), depth)
        for (slot, parent, token), logits in zip(level, out, strict=True):
            own = paths.setdefault(slot, [])
            own.append((*own[parent], token) if parent >= 0 else (token,))
            found.setdefault(slot, {})[own[-1]] = logits
    return found
