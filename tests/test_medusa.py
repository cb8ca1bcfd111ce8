"""Medusa: what a head computes, which token it predicts, how it begins, and how others read and write it."""

from __future__ import annotations

import json
import logging
import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from models.batch import slots_of
from models.drafter import Serving, TrainSpec
from models.errors import EyasError
from models.frozen import FrozenTarget
from models.medusa import MedusaConfig, MedusaDrafter
from models.objective import Objective
from models.portable import load_export, serve, write_export
from models.vocab import DraftVocab
from scripts.engines.medusa import MedusaEngine
from tests.drafters import (
    Reader,
    draft,
    drafted_logits,
    random_batch,
    random_frozen,
    random_levels,
    random_vocab,
    randomise,
)

VOCAB = 40
HEADS = ("own", "shared")


def random_medusa(frozen: FrozenTarget, vocab: DraftVocab, seed: int = 1, **options: Any) -> MedusaDrafter:
    return randomise(MedusaDrafter.create(frozen, vocab, (), **{"num_layers": 2, **options}), seed)


def by_hand(drafter: MedusaDrafter, frozen: FrozenTarget, h: Tensor, head: int) -> Tensor:
    """Logits of one head for one state [H], number by number in float64."""
    x = h.double()
    for layer in drafter.blocks[head].layers:  # type: ignore[union-attr]
        z = layer.weight.double() @ x + layer.bias.double()
        x = torch.stack([xi + zi / (1 + math.exp(-zi)) for xi, zi in zip(x, z, strict=True)])
    own = drafter.lm_heads[head] if drafter.config.head == "own" else frozen.head[drafter.vocab.ids]
    return own.detach().double() @ x


# --- the heads ---


@pytest.mark.parametrize("head", HEADS)
@torch.no_grad()
def test_what_a_head_computes(head: str) -> None:
    frozen, vocab = random_frozen(), random_vocab(VOCAB, 17)
    drafter = random_medusa(frozen, vocab, head=head, num_heads=3)
    batch = random_batch(frozen, [6, 5], supervised=torch.ones(11, dtype=torch.bool))
    slots = slots_of(batch, 3)
    logits = drafter.head(frozen).logits(drafter.unroll(batch, slots, frozen), slots.counts)
    assert slots.counts == [7, 5, 3] and logits.shape == (15, 17)
    for row, k, s in zip(logits, *(t.tolist() for t in slots.rows()), strict=True):
        expected = by_hand(drafter, frozen, batch.final[slots.index[s]], k)
        torch.testing.assert_close(row.double(), expected, rtol=1e-4, atol=1e-5)


def test_head_k_at_slot_0_of_tokens_10_to_17_predicts_12_plus_k() -> None:
    """Trained on that text alone, from the first slot alone, with the document's tokens as labels."""
    frozen = random_frozen()
    drafter = MedusaDrafter.create(frozen, DraftVocab.full(VOCAB), (), num_heads=5)
    batch = random_batch(frozen, [8], supervised=torch.tensor([False, *[True] * 6, False]))
    batch.input_ids.copy_(torch.arange(10, 18))
    batch.final[1:] = 0.0  # what only slot 0 can have learned
    spec = TrainSpec(Objective("nll"), 5)
    optimizer = torch.optim.Adam(drafter.parameters(), lr=0.02)
    for _ in range(150):
        optimizer.zero_grad()
        drafter(batch, frozen, spec).loss_sum.backward()
        optimizer.step()
    logits = drafted_logits(drafter, frozen, batch, 0, [0] * 4)
    assert logits.argmax(-1).tolist() == [12, 13, 14, 15, 16]


def test_every_head_gets_a_gradient_of_its_own() -> None:
    frozen = random_frozen()
    batch = random_batch(frozen, [12], supervised=torch.ones(12, dtype=torch.bool))
    for head in HEADS:
        drafter = MedusaDrafter.create(frozen, random_vocab(VOCAB, 17), (), num_heads=4, num_layers=2, head=head)  # type: ignore[arg-type]
        drafter(batch, frozen, TrainSpec(Objective(), 4)).loss_sum.backward()
        for name, parameter in drafter.named_parameters():
            assert parameter.grad is not None, name
            for part in parameter.grad if name == "lm_heads" else [parameter.grad]:
                assert float(part.abs().max()) > 1e-6, name
        first, second = (drafter.blocks[k].layers[0].weight.grad for k in (0, 1))  # type: ignore[index, union-attr]
        assert not torch.allclose(first, second)
    assert frozen.head.grad is None


def test_a_depth_without_slots_still_takes_part() -> None:
    """Documents too short for the last heads: DDP waits for every parameter."""
    frozen = random_frozen()
    drafter = random_medusa(frozen, random_vocab(VOCAB, 17), num_heads=4)
    batch = random_batch(frozen, [4], supervised=torch.ones(4, dtype=torch.bool))
    drafter(batch, frozen, TrainSpec(Objective(), 4)).loss_sum.backward()
    assert all(p.grad is not None for p in drafter.parameters())
    assert not drafter.lm_heads.grad[2:].any() and drafter.lm_heads.grad[:2].any()  # type: ignore[index]


@pytest.mark.parametrize("head", HEADS)
@torch.no_grad()
def test_heads_begin_as_the_targets_own(head: str) -> None:
    frozen, vocab = random_frozen(), random_vocab(VOCAB, 17)
    frozen.scale = 0.25
    drafter = MedusaDrafter.create(frozen, vocab, (2, 3, 5), num_heads=3, num_layers=2, head=head)  # type: ignore[arg-type]
    batch = random_batch(frozen, [9], supervised=torch.ones(9, dtype=torch.bool))
    slots = slots_of(batch, 3)
    states = drafter.unroll(batch, slots, frozen)
    k, s = slots.rows()
    assert torch.equal(states, batch.final[slots.index[s]])
    logits = drafter.head(frozen).logits(states, slots.counts)
    # a power of two scales without rounding, so the order of the products is all that could differ
    torch.testing.assert_close(logits, batch.final[slots.index[s]] @ frozen.head[vocab.ids].T * 0.25)


def test_own_heads_may_begin_flatter() -> None:
    frozen, vocab = random_frozen(), random_vocab(VOCAB, 17)
    drafter = MedusaDrafter.create(frozen, vocab, (), num_heads=2, init_temper=0.5)
    assert torch.equal(drafter.lm_heads[1], frozen.head[vocab.ids] / 2)
    with pytest.raises(EyasError, match="drafter.init_temper=0"):
        MedusaDrafter.check_options({"init_temper": 0})


def test_layers_and_heads_share_nothing() -> None:
    """The original put one block into its list several times."""
    drafter = random_medusa(random_frozen(), random_vocab(VOCAB, 17), num_heads=3, num_layers=3)
    weights = [p for name, p in drafter.named_parameters() if name.endswith(".weight")]
    assert len(weights) == 9 and len({w.data_ptr() for w in weights}) == 9
    assert len(drafter.state_dict()) == 2 * 9 + 1
    assert drafter.trainable_parameters() == 9 * (32 * 32 + 32) + 3 * 17 * 32
    shared = random_medusa(random_frozen(), random_vocab(VOCAB, 17), head="shared", num_heads=3, num_layers=3)
    assert shared.trainable_parameters() == 9 * (32 * 32 + 32)


def test_architecture_and_options() -> None:
    drafter = random_medusa(random_frozen(), random_vocab(VOCAB, 17), num_heads=3)
    assert drafter.max_depth == 3 and drafter.target_hidden_size == 32 and drafter.tap_ids == ()
    again = MedusaDrafter.from_architecture(json.loads(json.dumps(drafter.architecture())), drafter.vocab)
    again.load_state_dict(drafter.state_dict())
    assert again.config == drafter.config == MedusaConfig(32, 3, 2, "own")
    with pytest.raises(EyasError, match="drafter.num_heads=0"):
        MedusaDrafter.check_options({"num_heads": 0})
    with pytest.raises(EyasError, match="drafter.head=both: must be own or shared"):
        MedusaConfig(32, 3, 2, "both")
    frozen = random_frozen()
    batch = random_batch(frozen, [9], supervised=torch.ones(9, dtype=torch.bool))
    with pytest.raises(EyasError, match="4 levels of drafts: this Medusa drafter has 3 heads"):
        drafter.unroll(batch, slots_of(batch, 4), frozen)
    session = drafter.session(frozen)
    session.extend([0], [1], batch.taps[:1], batch.final[:1], batch.input_ids[1:2])
    with pytest.raises(EyasError, match="train.depths, verify.gamma"):
        session.expand([0], torch.tensor([-1]), torch.tensor([1]), 3)


# --- drafting ---


@pytest.mark.parametrize("widest", [1, 4])
@pytest.mark.parametrize("head", HEADS)
def test_a_session_drafts_what_training_unrolls(head: str, widest: int) -> None:
    frozen, rng, compared = random_frozen(), random.Random(widest), 0
    drafter = random_medusa(frozen, random_vocab(VOCAB, 17), head=head, num_heads=4)
    reader = Reader(drafter.session(frozen, 3), frozen)
    for slot, length in enumerate((30, 40, 50)):
        reader.begin(slot, length, seed=slot)
    for step in range(10):
        if step == 6:  # a sequence ends and the last one takes its slot
            reader.move(2, 0)
        if step == 8:
            reader.begin(2, 20, seed=7)
        slots = rng.sample(sorted(reader.texts), rng.randint(1, len(reader.texts)))
        roots = reader.extend({slot: rng.randint(1, 3) for slot in slots})
        drafts = draft(reader.session, random_levels(rng, sorted(slots), widest, 3))
        for slot, root in zip(sorted(slots), roots, strict=True):
            nodes = {(): root} | drafts.get(slot, {})
            for path, logits in nodes.items():
                rows = drafted_logits(drafter, frozen, reader.texts[slot], reader.read[slot] - 1, path)
                torch.testing.assert_close(logits, rows[-1], rtol=1e-5, atol=1e-5)
                compared += 1
    assert compared > 40


def test_dtype_of_the_drafter() -> None:
    frozen = random_frozen()  # in float32
    drafter = random_medusa(frozen, random_vocab(VOCAB, 17), head="shared").to(torch.bfloat16)
    session, batch = drafter.session(frozen, 2), random_batch(frozen, [5])
    out = session.extend([0, 1], [2, 3], batch.taps, batch.final, batch.input_ids)
    assert out.dtype == torch.bfloat16 and out.shape == (2, 17)


# --- layouts ---


def vocabulary(pruned: bool) -> DraftVocab:
    return random_vocab(VOCAB, 17) if pruned else DraftVocab.full(VOCAB)


@pytest.mark.parametrize("pruned", [False, True])
@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("layout", MedusaDrafter.layouts)
@torch.no_grad()
def test_round_trip_and_engine(layout: str, head: str, pruned: bool, tmp_path: Path) -> None:
    frozen, vocab = random_frozen(), vocabulary(pruned)
    drafter = random_medusa(frozen, vocab, head=head, num_heads=3)
    folder = write_export(serve(drafter, frozen, layout), tmp_path / "export", "float32")
    again = load_export(folder, target=frozen.config)
    assert isinstance(again, MedusaDrafter) and again.config == drafter.config
    kept = vocab if head == "own" or layout == "vllm" else DraftVocab.full(VOCAB)  # version 2 has no map
    assert torch.equal(again.vocab.ids, kept.ids)
    for name, tensor in drafter.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor)
    engine, batch = MedusaEngine(folder, frozen), random_batch(frozen, [6])
    assert torch.equal(engine.draft_ids, kept.ids)
    served = engine.draft_logits(batch.input_ids[1:], batch.taps, batch.final[:4], torch.zeros(2))
    for k, row in enumerate(served):
        expected = by_hand(again, frozen, batch.final[3], k)
        torch.testing.assert_close(row.double(), expected, rtol=1e-4, atol=1e-5)


def test_what_vllm_is_given() -> None:
    frozen, vocab = random_frozen(), DraftVocab.full(VOCAB)
    served = random_medusa(frozen, vocab, num_heads=2).serving(frozen)
    assert served.weights == "model.safetensors"
    assert served.config == {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "hidden_size": 32,
        "vocab_size": 40,
        "truncated_vocab_size": 40,
        "num_heads": 2,
        "num_hidden_layers": 2,
        "medusa_fc_bias": True,
        "original_lm_head": False,
    }
    blocks = {f"blocks.{h}.layers.{n}.{kind}" for h in (0, 1) for n in (0, 1) for kind in ("weight", "bias")}
    assert set(served.tensors) == blocks | {"lm_heads.0.weight", "lm_heads.1.weight"}
    shared = random_medusa(frozen, random_vocab(VOCAB, 17), head="shared", num_heads=2).serving(frozen, "vllm")
    assert set(shared.tensors) == blocks | {"lm_head.weight", "token_map"}
    assert shared.config["original_lm_head"] and shared.config["truncated_vocab_size"] == 17
    assert torch.equal(shared.tensors["lm_head.weight"], frozen.head[shared.tensors["token_map"]])
    frozen.head_bias = torch.ones(VOCAB)
    with pytest.raises(EyasError, match=r"export\.layout=vllm: the target's head has a bias.*drafter\.head=own"):
        random_medusa(frozen, vocab, head="shared").serving(frozen)


def test_tokens_that_own_heads_cannot_draft_never_win() -> None:
    """vLLM takes the largest of all rows."""
    frozen, vocab = random_frozen(), random_vocab(VOCAB, 5)
    tensors = random_medusa(frozen, vocab, num_heads=1).serving(frozen).tensors
    rows = tensors["lm_heads.0.weight"]
    logits = torch.randn(2000, 32, generator=torch.Generator().manual_seed(3)) @ rows.T
    assert rows.shape == (40, 32) and torch.isin(logits.argmax(-1), vocab.ids).all()
    assert torch.equal(tensors["token_map"], vocab.ids)


def test_what_fasterdecoding_is_given(tmp_path: Path) -> None:
    frozen, vocab = random_frozen(), DraftVocab.full(VOCAB)
    frozen.folder = tmp_path
    served = random_medusa(frozen, vocab, num_heads=2).serving(frozen, "fasterdecoding")
    assert served.weights == "medusa_lm_head.safetensors"
    linear = {f"{h}.{n}.linear.{kind}" for h in (0, 1) for n in (0, 1) for kind in ("weight", "bias")}
    assert set(served.tensors) == linear | {"0.2.weight", "1.2.weight"}
    named = {"medusa_num_heads": 2, "medusa_num_layers": 2, "base_model_name_or_path": str(tmp_path)}
    assert named.items() <= served.config.items() and "version" not in served.config
    second = random_medusa(frozen, vocab, num_heads=2, head="shared").serving(frozen, "fasterdecoding")
    assert set(second.tensors) == linear and second.config["version"] == "2"


def official(drafter: MedusaDrafter, frozen: FrozenTarget) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """As published: no sizes in the config, and a wrong number of heads."""
    served = drafter.serving(frozen, "fasterdecoding")
    return served.tensors, {"medusa_num_heads": 2, "medusa_num_layers": 1, "base_model_name_or_path": "lmsys/vicuna-7b"}


def test_official_checkpoints(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    frozen = random_frozen()
    drafter = random_medusa(frozen, DraftVocab.full(VOCAB), num_heads=5, num_layers=1)
    tensors, config = official(drafter, frozen)
    (tmp_path / "config.json").write_text(json.dumps(config))
    torch.save({name: t.half() for name, t in tensors.items()}, tmp_path / "medusa_lm_head.pt")
    with caplog.at_level(logging.WARNING):
        again = load_export(tmp_path, target=frozen.config)
    assert "medusa_num_heads=2, but the tensors hold 5" in caplog.text
    assert isinstance(again, MedusaDrafter) and again.config == drafter.config
    for name, tensor in drafter.state_dict().items():
        assert again.state_dict()[name].dtype == torch.float32
        assert torch.equal(again.state_dict()[name], tensor.half().float())
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "config.json").write_text(json.dumps(config))
    save_file(tensors, tmp_path / "bare" / "medusa_lm_head.safetensors")
    assert load_export(tmp_path / "bare").vocab.size == VOCAB  # the heads' own rows tell it


def test_a_tuned_target_that_carries_its_heads(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    frozen = random_frozen()
    drafter = random_medusa(frozen, DraftVocab.full(VOCAB), num_heads=3, num_layers=1)
    tensors = {f"medusa_head.{name}": tensor for name, tensor in official(drafter, frozen)[0].items()}
    whole = tensors | {"model.layers.0.mlp.up_proj.weight": torch.ones(3, 3), "lm_head.weight": torch.ones(40, 32)}
    base = {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 6, "num_attention_heads": 4, "vocab_size": 40}
    (tmp_path / "config.json").write_text(json.dumps(base | {"medusa_num_heads": 3, "medusa_num_layers": 1}))
    save_file(whole, tmp_path / "model.safetensors")
    again = load_export(tmp_path)
    assert isinstance(again, MedusaDrafter) and again.config == MedusaConfig(32, 3, 1, "own") and not caplog.text
    assert torch.equal(again.lm_heads, drafter.lm_heads)


def exported(**options: Any) -> tuple[FrozenTarget, Serving]:
    frozen = random_frozen()
    vocab = options.pop("vocab", DraftVocab.full(VOCAB))
    return frozen, random_medusa(frozen, vocab, num_heads=2, **options).serving(frozen)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"blocks.1.layers.0.bias": None}, r"blocks\.1\.layers\.0\.bias: missing"),
        ({"blocks.1.layers.0.weight": torch.ones(3, 32)}, r"blocks\.1\.layers\.0\.weight: has shape \[3, 32\]"),
        ({"lm_heads.1.weight": None}, r"lm_heads\.1\.weight: missing"),
        ({"lm_heads.1.weight": torch.ones(39, 32)}, r"lm_heads\.1\.weight: has shape \[39, 32\].*\[40, 32\]"),
        ({"lm_heads.2.weight": torch.ones(40, 32)}, r"lm_heads\.2\.weight: unexpected"),
        ({"norm.weight": torch.ones(32)}, r"norm\.weight: unexpected"),
        ({"0.0.linear.bias": torch.ones(32)}, r"blocks\.0\.layers\.0\.bias: present twice"),
        ({"token_map": torch.tensor([3, 3])}, "token_map: must name distinct tokens within 0..39"),
        ({"token_map": torch.ones(2, 2)}, r"token_map: is torch\.float32 \[2, 2\]"),
    ],
)
def test_bad_tensors_are_named(change: dict[str, Tensor | None], said: str) -> None:
    frozen, served = exported()
    tensors = {name: t for name, t in (served.tensors | change).items() if t is not None}
    with pytest.raises(EyasError, match=said):
        MedusaDrafter.from_serving(tensors, served.config, frozen.config)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"num_heads": 5}, "num_heads=5, but the tensors hold 2"),
        ({"num_hidden_layers": 1}, "num_hidden_layers=1, but the tensors hold 2"),
        ({"medusa_fc_bias": False}, r"blocks\.0\.layers\.0\.bias: unexpected; without medusa_fc_bias=true"),
        ({"truncated_vocab_size": 30}, "token_map: missing; truncated_vocab_size=30"),
        ({"original_lm_head": True}, r"lm_heads\.1\.weight: unexpected"),
    ],
)
def test_configs_that_vllm_would_read_otherwise_are_refused(change: dict[str, Any], said: str) -> None:
    frozen, served = exported()
    with pytest.raises(EyasError, match=said):
        MedusaDrafter.from_serving(served.tensors, served.config | change, frozen.config)


def test_other_peoples_vllm_checkpoints() -> None:
    """Blocks without biases; a token map in its own order, with heads cut down to it."""
    frozen, served = exported(vocab=random_vocab(VOCAB, 17))
    ids = served.tensors["token_map"]
    tensors = {name: t for name, t in served.tensors.items() if not name.endswith("bias")}
    order = torch.randperm(17, generator=torch.Generator().manual_seed(0))
    tensors["token_map"] = ids[order]
    for h in range(2):
        tensors[f"lm_heads.{h}.weight"] = served.tensors[f"lm_heads.{h}.weight"][ids[order]]
    again = MedusaDrafter.from_serving(tensors, served.config | {"medusa_fc_bias": False}, frozen.config)
    assert torch.equal(again.vocab.ids, ids)
    assert torch.equal(again.lm_heads[1], served.tensors["lm_heads.1.weight"][ids])
    assert not again.state_dict()["blocks.1.layers.1.bias"].any()


def test_a_shared_head_without_a_vocabulary_size() -> None:
    frozen = random_frozen()
    tensors, config = official(random_medusa(frozen, DraftVocab.full(VOCAB), head="shared"), frozen)
    with pytest.raises(EyasError, match="names no vocab_size"):
        MedusaDrafter.from_serving(tensors, config)
    assert MedusaDrafter.from_serving(tensors, config, {"vocab_size": 41}).vocab.size == 41
    with pytest.raises(EyasError, match=r"blocks\.0\.layers\.0\.weight .*missing"):
        MedusaDrafter.from_serving({"0.1.weight": torch.ones(40, 32)}, config)
