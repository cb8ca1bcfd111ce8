"""Parallel heads: each is a decoder layer over the target's last states, in training and in drafting."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from conf.options import check_drafter
from models.batch import Batch, slots_of
from models.errors import EyasError
from models.frozen import FrozenTarget
from models.parallel_heads import ParallelHeadsDrafter
from tests.drafters import random_batch, random_frozen, random_vocab, randomise
from tests.families import FAMILIES


def made(family: str = "llama", heads: int = 3, **options: Any) -> tuple[ParallelHeadsDrafter, FrozenTarget]:
    frozen = random_frozen(**FAMILIES[family])
    drafter = ParallelHeadsDrafter.create(frozen, random_vocab(40, 17), (), num_heads=heads, init="random", **options)
    return randomise(drafter), frozen


def text(frozen: FrozenTarget, lengths: list[int]) -> Batch:
    return random_batch(frozen, lengths, supervised=torch.ones(sum(lengths), dtype=torch.bool))


def unrolled(drafter: ParallelHeadsDrafter, frozen: FrozenTarget, batch: Batch) -> dict[tuple[int, int], Tensor]:
    slots = slots_of(batch, drafter.config.num_heads)
    logits = drafter.head(frozen).logits(drafter.unroll(batch, slots, frozen), slots.counts)
    depth, slot = slots.rows()
    return dict(zip(zip(depth.tolist(), slots.index[slot].tolist(), strict=True), logits, strict=True))


@torch.no_grad()
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_head_k_is_a_layer_of_the_family_over_the_states_of_its_document(family: str) -> None:
    drafter, frozen = made(family)
    batch = text(frozen, [5, 9])
    got = unrolled(drafter, frozen, batch)
    fields = {k: v for k, v in FAMILIES[family].items() if k != "model_type"}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **fields), attn_implementation="eager").model
    for k, head in enumerate(drafter.steps):
        model.layers[3].load_state_dict(head.block.state_dict())
        for a, b in ((0, 5), (5, 14)):
            places = torch.arange(b - a)[None]
            mask = torch.full((b - a, b - a), float("-inf")).triu(1)[None, None]
            final = batch.final[None, a:b]
            turned = model.rotary_emb(final, places)
            out = model.layers[3](final, attention_mask=mask, position_ids=places, position_embeddings=turned)[0]
            want = F.rms_norm(out, (64,), head.norm.weight, 1e-6) @ frozen.head[drafter.vocab.ids].T
            for p in range(a, b - 2 - k):
                torch.testing.assert_close(got.pop((k, p)), want[p - a], rtol=1e-4, atol=1e-4)
    assert not got


@torch.no_grad()
@pytest.mark.parametrize("family", ["llama", "deepseek_v3", "qwen3_next"])
def test_drafting_several_sequences_equals_the_unroll(family: str) -> None:
    drafter, frozen = made(family)
    batch = text(frozen, [9, 14])
    want = unrolled(drafter, frozen, batch)
    session, at, compared = drafter.session(frozen, 2), [0, 9], 0
    session.reset(0, int(batch.input_ids[0]))
    for portions in ({0: 1, 1: 5}, {1: 2}, {0: 3, 1: 1}, {0: 2}):
        index = torch.cat([torch.arange(at[slot], at[slot] + n) for slot, n in portions.items()])
        used, counts = list(portions), list(portions.values())
        logits = session.extend(used, counts, batch.taps[index], batch.final[index], batch.input_ids[index + 1])
        for slot, n in portions.items():
            at[slot] += n
        for slot, row in zip(used, logits, strict=True):
            torch.testing.assert_close(row, want[0, at[slot] - 1], rtol=1e-4, atol=1e-4)
        for k in (1, 2):  # a tree with two nodes of each depth, whose tokens don't matter
            nodes = [slot for slot in used for _ in range(2)]
            logits = session.expand(nodes, torch.tensor([k - 2] * len(nodes)), torch.arange(len(nodes)), k)
            for slot, row in zip(nodes, logits, strict=True):
                if (k, at[slot] - 1) in want:
                    torch.testing.assert_close(row, want[k, at[slot] - 1], rtol=1e-4, atol=1e-4)
                    compared += 1
    assert compared > 20


def test_heads_have_weights_of_their_own_and_all_learn() -> None:
    drafter, frozen = made()
    batch = text(frozen, [12])
    slots = slots_of(batch, 3)
    states = drafter.unroll(batch, slots, frozen)
    states[: slots.counts[0]].sum().backward()
    grads = [[p.grad is not None and bool(p.grad.any()) for p in head.parameters()] for head in drafter.steps]
    assert all(grads[0]) and not any(grads[1]) and not any(grads[2])
    drafter.unroll(batch, slots, frozen).sum().backward()
    assert all(p.grad is not None and bool(p.grad.any()) for p in drafter.parameters())


def test_the_start() -> None:
    frozen = random_frozen(**FAMILIES["llama"])
    block = made()[0].steps[0].block
    frozen.last_layer = {name: torch.rand(t.shape) for name, t in block.state_dict().items()}
    drafter = ParallelHeadsDrafter.create(frozen, random_vocab(40, 17), (), num_heads=2, init_temper=0.5)
    for head in drafter.steps:
        assert frozen.final_norm is not None and torch.equal(head.norm.weight, frozen.final_norm * 0.5)
        for name, tensor in head.block.state_dict().items():
            silent = name in ("self_attn.o_proj.weight", "mlp.down_proj.weight")  # it writes nothing yet
            assert torch.equal(tensor, torch.zeros_like(tensor) if silent else frozen.last_layer[name])
    again = ParallelHeadsDrafter.from_architecture(drafter.architecture(), drafter.vocab)
    again.load_state_dict(drafter.state_dict())
    batch = text(frozen, [9])
    assert torch.equal(
        again.unroll(batch, slots_of(batch, 2), frozen), drafter.unroll(batch, slots_of(batch, 2), frozen)
    )


def test_what_it_cannot_do() -> None:
    drafter, frozen = made(heads=2)
    batch = text(frozen, [9])
    with pytest.raises(EyasError, match="no serving layout"):
        drafter.serving(frozen)
    with pytest.raises(EyasError, match="this ParallelHeads drafter has 2 heads"):
        drafter.unroll(batch, slots_of(batch, 3), frozen)
    with pytest.raises(EyasError, match="num_heads=0"):
        ParallelHeadsDrafter.check_options({"num_heads": 0})
    with pytest.raises(EyasError, match="init=carried"):
        check_drafter({"_target_": "models.parallel_heads.ParallelHeadsDrafter", "init": "carried"})
