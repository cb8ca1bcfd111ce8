"""MTP modules: drafting = unroll for chains and trees, DeepSeek-V3's equations, the index rule, and the start."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3DecoderLayer, DeepseekV3RotaryEmbedding

from conf.options import check_drafter
from models.batch import Batch, Slots, slots_of
from models.errors import EyasError
from models.frozen import FrozenTarget
from models.load_frozen import load_frozen
from models.mtp import MtpDrafter
from models.vocab import DraftVocab
from tests.drafters import drafted_logits, random_batch, random_frozen, random_vocab, randomise
from tests.families import DEEPSEEK, FAMILIES

DRAFTERS = [(family, modules) for family in ("llama", "deepseek_v3", "qwen3_next") for modules in (1, 3)]


def made(family: str, modules: int, **options: Any) -> tuple[MtpDrafter, FrozenTarget]:
    frozen = random_frozen(**FAMILIES[family])
    drafter = MtpDrafter.create(frozen, random_vocab(40, 17), (), num_modules=modules, init="random", **options)
    return randomise(drafter), frozen


def text(frozen: FrozenTarget, lengths: list[int], seed: int = 0) -> Batch:
    return random_batch(frozen, lengths, seed, supervised=torch.ones(sum(lengths), dtype=torch.bool))


@torch.no_grad()
def scored(drafter: MtpDrafter, frozen: FrozenTarget, batch: Batch, depths: int) -> dict[tuple[int, int], Tensor]:
    """(depth, token of the slot) -> logits, as training has them."""
    slots = slots_of(batch, depths)
    logits = drafter.head(frozen).logits(drafter.unroll(batch, slots, frozen), slots.counts)
    depth, slot = slots.rows()
    return dict(zip(zip(depth.tolist(), slots.index[slot].tolist(), strict=True), logits, strict=True))


@pytest.mark.parametrize("zero_first", [False, True])
@pytest.mark.parametrize(("family", "modules"), DRAFTERS)
def test_chains_of_several_sequences_equal_the_unroll(family: str, modules: int, zero_first: bool) -> None:
    drafter, frozen = made(family, modules, zero_first=zero_first)
    depths = drafter.max_depth or 4
    lengths = [9, 20, 14]
    batch = text(frozen, lengths)
    want = scored(drafter, frozen, batch, depths)
    starts, session = [0, 9, 29], drafter.session(frozen, 3)
    for slot in range(3):
        session.reset(slot, int(batch.input_ids[starts[slot]]))
    at = list(starts)
    compared: set[tuple[int, int]] = set()
    for portions in ({0: 1, 1: 6, 2: 2}, {1: 3}, {0: 2, 2: 1}, {0: 1, 1: 1, 2: 1}, {0: 1, 1: 3}, {1: 2, 2: 4}):
        used, counts = list(portions), list(portions.values())
        index = torch.cat([torch.arange(at[slot], at[slot] + n) for slot, n in portions.items()])
        logits = session.extend(used, counts, batch.taps[index], batch.final[index], batch.input_ids[index + 1])
        for slot, n in portions.items():
            at[slot] += n
        for k in range(depths):
            for slot, row in zip(used, logits, strict=True):
                if (k, at[slot] - 1) in want:
                    torch.testing.assert_close(row, want[k, at[slot] - 1], rtol=1e-4, atol=2e-4)
                    compared.add((k, at[slot] - 1))
            if k + 1 < depths:
                tokens = batch.input_ids[(torch.tensor([at[slot] for slot in used]) + 1 + k).clamp_max(42)]
                logits = session.expand(used, torch.full((len(used),), k - 1), tokens, k + 1)
    assert len(compared) > 35 and {k for k, _ in compared} == set(range(depths))


@pytest.mark.parametrize("confirmed", [(1, 2), (2, 1), (3, 7)])
@pytest.mark.parametrize(("family", "modules"), DRAFTERS)
def test_trees_equal_their_paths_unrolled(family: str, modules: int, confirmed: tuple[int, int]) -> None:
    """Two sequences, as short as can be: module d has no slot at the first d places."""
    drafter, frozen = made(family, modules)
    texts = [text(frozen, [n + 1], seed=n) for n in confirmed]
    session = drafter.session(frozen, 2)
    whole = [torch.cat([getattr(t, name)[:-1] for t in texts]) for name in ("taps", "final")]
    session.extend([0, 1], confirmed, whole[0], whole[1], torch.cat([t.input_ids[1:] for t in texts]))
    paths = [[(3, 5, 7), (3, 5, 9), (3, 6, 1), (4, 2, 8)], [(9, 1, 2), (8, 1, 2), (8, 30, 4)]]
    nodes: list[dict[tuple[int, ...], int]] = [{}, {}]
    for depth in range(1, drafter.max_depth or 4):
        level = [(s, node) for s in (0, 1) for node in sorted({path[:depth] for path in paths[s]})]
        parents = torch.tensor([nodes[s].get(node[:-1], -1) for s, node in level])
        out = session.expand([s for s, _ in level], parents, torch.tensor([node[-1] for _, node in level]), depth)
        for (s, node), logits in zip(level, out, strict=True):
            nodes[s][node] = len(nodes[s])
            want = drafted_logits(drafter, frozen, texts[s], confirmed[s] - 1, node)[-1]
            torch.testing.assert_close(logits, want, rtol=1e-4, atol=1e-4)


def test_a_moved_and_a_reset_sequence() -> None:
    drafter, frozen = made("llama", 3)
    first, second = text(frozen, [9], seed=1), text(frozen, [7], seed=2)

    def drafts(session: Any, slot: int, batch: Batch, rows: Sequence[int]) -> Tensor:
        index = torch.tensor(rows)
        return session.extend([slot], [len(rows)], batch.taps[index], batch.final[index], batch.input_ids[index + 1])

    session = drafter.session(frozen, 3)
    drafts(session, 2, first, range(5))
    session.move(2, 0)
    got = drafts(session, 0, first, [5, 6])
    torch.testing.assert_close(got, drafts(drafter.session(frozen), 0, first, range(7)), rtol=1e-4, atol=1e-4)
    session.reset(0, int(second.input_ids[0]))
    found = []
    for one in (session, drafter.session(frozen, 3)):
        drafts(one, 0, second, range(4))
        found.append(one.expand([0], torch.tensor([-1]), torch.tensor([5]), 1))
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)


def literal_modules(drafter: MtpDrafter, batch: Batch, frozen: FrozenTarget) -> list[Tensor]:
    """DeepSeek-V3 (21)-(24), document by document with the original decoder layer: logits of each module [n, Vd].

    Module k (1-based) at position i of a document of T tokens joins h^{k-1}_i and the embedding of t_{i+k}, for
    i = 1 .. T - k, and predicts t_{i+k+1}. As engines have it, the state that is handed on is the normed one.
    """
    config = DeepseekV3Config(**{k: v for k, v in DEEPSEEK.items() if k != "model_type"})
    config._attn_implementation = "eager"
    rotary, weights = DeepseekV3RotaryEmbedding(config), drafter.state_dict()
    head = frozen.head[drafter.vocab.ids]
    logits = [torch.full((batch.num_tokens, len(drafter.vocab)), float("nan")) for _ in drafter.mtp]
    for a, b in zip(batch.cu_seqlens[:-1].tolist(), batch.cu_seqlens[1:].tolist(), strict=True):
        h, embedded = batch.final[a:b], frozen.embedding[batch.input_ids[a:b]]
        for k in range(1, len(logits) + 1):
            own = {n.split(".", 2)[2]: w for n, w in weights.items() if n.startswith(f"mtp.{k - 1}.")}
            layer = DeepseekV3DecoderLayer(config, 3)
            layer.load_state_dict({n.removeprefix("block."): w for n, w in own.items() if n.startswith("block.")})
            n = (b - a) - k
            if n < 1:
                break
            normed_h = F.rms_norm(h[:n], (64,), own["hnorm.weight"], 1e-5)
            normed_e = F.rms_norm(embedded[k:], (64,), own["enorm.weight"], 1e-5)
            joined = torch.cat([normed_e, normed_h], -1) @ own["proj.weight"].T  # (21)
            mask = torch.full((n, n), float("-inf")).triu(1)[None, None]
            place = torch.arange(k - 1, k - 1 + n)[None]
            turned = rotary(joined[None], place)
            out = layer(joined[None], attention_mask=mask, position_ids=place, position_embeddings=turned)[0]  # (22)
            h = F.rms_norm(out, (64,), own["norm.weight"], 1e-5)
            logits[k - 1][a : a + n] = h @ head.T  # (23); (24) is the loss, shared by all methods
    return logits


@torch.no_grad()
def test_sequential_modules_are_those_of_deepseek_v3() -> None:
    drafter, frozen = made("deepseek_v3", 3, zero_first=False)
    batch = text(frozen, [2, 3, 12, 7])
    want = literal_modules(drafter, batch, frozen)
    got = scored(drafter, frozen, batch, 3)
    assert len(got) == sum(max(n - 2 - k, 0) for n in (2, 3, 12, 7) for k in range(3))
    for (k, p), logits in got.items():
        torch.testing.assert_close(logits, want[k][p], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("modules", [1, 3])
def test_a_row_hangs_on_its_slots_features_and_tokens_alone(modules: int) -> None:
    """Depth k of slot p: h[..p] and x[..p+1+k] of its document; behind them, and across documents, no gradient."""
    drafter, frozen = made("llama", modules, zero_first=False)
    batch = text(frozen, [6, 11])
    every = frozen.embedding[batch.input_ids].requires_grad_()
    batch.final.requires_grad_()
    frozen.embedding, ids = every, torch.arange(17)  # a row for each token of the batch
    numbered = Batch(ids, *(getattr(batch, n) for n in ("supervised", "cu_seqlens", "taps", "final", "lse", "top1")))
    for p in (2, 9):
        first = 0 if p < 6 else 6
        for k in range(3):
            slots = Slots(torch.tensor([p]), torch.ones(k + 1, 1, dtype=torch.bool))
            row = drafter.unroll(numbered, slots, frozen)[k]
            of_state, of_token = torch.autograd.grad(row.square().sum(), [batch.final, every])
            felt = [set(g.abs().sum(1).nonzero().flatten().tolist()) for g in (of_state, of_token)]
            assert felt[0] == set(range(first, p + 1))
            # Depth 0 of the first slot reads x[1]: no module reads x[0].
            assert felt[1] == set(range(first + 1, p + 2 + k))


def test_the_start_is_the_feature_and_half_the_embedding() -> None:
    frozen = random_frozen(**FAMILIES["llama"])
    donor = MtpDrafter.create(frozen, DraftVocab.full(40), (), init="random", seed=5)
    frozen.last_layer = {
        n.removeprefix("mtp.0.block."): w for n, w in donor.state_dict().items() if n.startswith("mtp.0.block.")
    }
    drafter = MtpDrafter.create(frozen, DraftVocab.full(40), (), num_modules=2, init_temper=0.5, zero_first=False)
    batch = text(frozen, [9])
    every = Slots(torch.arange(8), torch.ones(1, 8, dtype=torch.bool))
    joined = F.rms_norm(batch.final[:8], (64,), None, 1e-5)
    joined = joined + 0.5 * F.rms_norm(frozen.embedding[batch.input_ids[1:]], (64,), None, 1e-5)
    assert frozen.final_norm is not None
    want = F.rms_norm(joined, (64,), frozen.final_norm * 0.5, 1e-5)  # the block writes nothing yet
    torch.testing.assert_close(drafter.unroll(batch, every, frozen), want, rtol=1e-4, atol=1e-4)
    silent = ("self_attn.o_proj.weight", "mlp.down_proj.weight")
    for module in drafter.steps:
        for name, tensor in module.block.state_dict().items():
            assert torch.equal(tensor, torch.zeros_like(tensor) if name in silent else frozen.last_layer[name])
    again = MtpDrafter.from_architecture(drafter.architecture(), drafter.vocab)
    again.load_state_dict(drafter.state_dict())
    slots = slots_of(batch, 2)
    with torch.no_grad():
        assert torch.equal(again.unroll(batch, slots, frozen), drafter.unroll(batch, slots, frozen))


def test_a_target_that_carries_modules_gives_them(tmp_path: Path) -> None:
    """A DeepSeek-V3 checkpoint with 4 layers of its own and a fifth that holds an MTP module."""
    config = DeepseekV3Config(**{k: v for k, v in DEEPSEEK.items() if k != "model_type"}, num_nextn_predict_layers=1)
    model = DeepseekV3ForCausalLM(config)
    model.save_pretrained(tmp_path)
    donor, frozen = made("deepseek_v3", 1)
    state = donor.state_dict()
    names = {"enorm": "enorm", "hnorm": "hnorm", "proj": "eh_proj", "norm": "shared_head.norm"}
    tensors = load_file(tmp_path / "model.safetensors")
    for name, tensor in state.items():
        part = name.removeprefix("mtp.0.")
        head = part.split(".")[0]
        if part == "block.mlp.experts.gate_up_proj":
            for i, (gate, up) in enumerate(expert.chunk(2) for expert in tensor):
                tensors[f"model.layers.4.mlp.experts.{i}.gate_proj.weight"] = gate.clone()
                tensors[f"model.layers.4.mlp.experts.{i}.up_proj.weight"] = up.clone()
        elif part == "block.mlp.experts.down_proj":
            tensors |= {f"model.layers.4.mlp.experts.{i}.down_proj.weight": t.clone() for i, t in enumerate(tensor)}
        else:
            tensors["model.layers.4." + (part[6:] if head == "block" else f"{names[head]}.weight")] = tensor
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    frozen = load_frozen(tmp_path)
    drafter = MtpDrafter.create(frozen, donor.vocab, (), init="carried")
    assert all(torch.equal(tensor, state[name]) for name, tensor in drafter.state_dict().items())
    assert len(drafter.state_dict()) == len(state)
    with pytest.raises(EyasError, match="num_modules=2: the target carries 1"):
        MtpDrafter.create(frozen, donor.vocab, (), init="carried", num_modules=2)


@pytest.mark.parametrize("layout", ["deepseek", None])
def test_what_is_served_is_read_back(layout: str | None) -> None:
    drafter, frozen = made("deepseek_v3", 3)
    served = drafter.serving(frozen, layout)
    again = MtpDrafter.from_serving(served.tensors, served.config, frozen.config)
    assert all(torch.equal(tensor, drafter.state_dict()[name]) for name, tensor in again.state_dict().items())
    assert again.vocab.is_full and again.max_depth == 3  # engines score the whole vocabulary


def test_options_that_cannot_be() -> None:
    for options, message in (
        ({"num_modules": 0}, "num_modules=0: must be at least 1"),
        ({"init": "zero"}, "init=zero: must be last_layer or random or carried"),
        ({"init_temper": 0.0}, "init_temper=0.0: must be above 0"),
    ):
        with pytest.raises(EyasError, match=message):
            check_drafter({"_target_": "models.mtp.MtpDrafter", **options})
    drafter, frozen = made("llama", 3)
    with pytest.raises(EyasError, match="3 modules"):
        drafter.unroll(text(frozen, [12]), slots_of(text(frozen, [12]), 4), frozen)
    with pytest.raises(EyasError, match="carries no MTP weights"):
        MtpDrafter.create(frozen, drafter.vocab, (), init="carried")
    with pytest.raises(EyasError, match=r"init=last_layer: self_attn\.q_proj\.weight"):
        MtpDrafter.create(frozen, drafter.vocab, (), init="last_layer")  # a target without a last layer


def test_where_the_embedding_at_position_0_is_zero() -> None:
    frozen = random_frozen(**FAMILIES["llama"])
    flags = {
        name: MtpDrafter.create(
            random_frozen(**FAMILIES["llama"] | {"model_type": name}), random_vocab(40, 17), (), init="random"
        ).config.zero_first
        for name in ("llama", "mimo")
    }
    assert flags == {"llama": True, "mimo": True}
    drafter, _ = made("llama", 1, zero_first=True)
    batch = text(frozen, [5, 5])
    slots = Slots(torch.tensor([0, 1, 5, 6]), torch.ones(1, 4, dtype=torch.bool))
    other = Batch(**(vars(batch) | {"input_ids": (batch.input_ids + torch.tensor([0, 1] + [0] * 8)) % 40}))
    with torch.no_grad():
        one, two = (drafter.unroll(b, slots, frozen) for b in (batch, other))
    assert torch.equal(one[0], two[0])  # slot 0 reads h[0] and x[1] at position 0
    assert torch.equal(one[2:], two[2:]) and torch.equal(one[1], two[1])
