"""EAGLE-3: unroll = incremental drafting, initialisation, rope of the target."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from models.batch import slots_of
from models.eagle3 import Eagle3Config, Eagle3Drafter
from models.errors import EyasError
from models.rope import rope_parameters
from tests.drafters import TAPS, TINY, random_batch, random_drafter, random_frozen, random_vocab

ROPES: list[dict[str, Any]] = [
    {"rope_type": "default", "rope_theta": 10000.0},
    {"rope_type": "linear", "rope_theta": 500.0, "factor": 4.0},
    {
        "rope_type": "llama3",
        "rope_theta": 5000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    {"rope_type": "yarn", "rope_theta": 1000.0, "factor": 4.0, "original_max_position_embeddings": 128},
]
FLAGS: list[dict[str, Any]] = [{}, {"norm_before_fc": True}, {"fc_norm": True, "norm_output": True}]


@pytest.mark.parametrize("flags", FLAGS)
@pytest.mark.parametrize("rope", ROPES, ids=lambda r: r["rope_type"])
def test_unroll_equals_incremental_drafting(rope: dict[str, Any], flags: dict[str, Any]) -> None:
    """Depth-k logits of a slot = logits of the session after k true tokens were drafted from that slot."""
    frozen, vocab = random_frozen(rope_parameters=rope), random_vocab(40, 17)
    drafter = random_drafter(frozen, vocab, **flags)
    lengths = [11, 26]
    batch = random_batch(frozen, lengths, supervised=torch.ones(37, dtype=torch.bool))
    slots = slots_of(batch, 7)
    with torch.no_grad():
        unrolled = drafter.unroll(batch, slots, frozen) @ drafter.lm_head.weight.T
    number = {pair: i for i, pair in enumerate(zip(*(t.tolist() for t in slots.rows()), strict=True))}
    start = 11  # the second document, in uneven portions as a verifier would confirm them
    session, at = drafter.session(frozen), start
    compared = 0
    for portion in (4, 1, 3, 1, 1, 6, 2):
        part = slice(at, at + portion)
        next_ids = batch.input_ids[at + 1 : at + portion + 1]
        logits = session.extend([0], [portion], batch.taps[part], batch.final[part], next_ids)[0]
        at += portion
        column = slots.index.tolist().index(at - 1)
        for k in range(7):
            if (k, column) not in number:
                break
            torch.testing.assert_close(logits, unrolled[number[k, column]], rtol=1e-4, atol=1e-4)
            compared += 1
            parent = torch.tensor([k - 1])
            logits = session.expand([0], parent, batch.input_ids[at + 1 + k : at + 2 + k], k + 1)[0]
    assert compared > 30


def test_a_tree_drafts_what_its_paths_would_as_chains() -> None:
    frozen, vocab = random_frozen(), random_vocab(40, 17)
    drafter = random_drafter(frozen, vocab)
    batch = random_batch(frozen, [8])
    paths = [(3, 5, 7), (3, 5, 9), (3, 6, 1), (4, 2, 8)]

    def fresh() -> Any:
        session = drafter.session(frozen)
        session.extend([0], [7], batch.taps[:7], batch.final[:7], batch.input_ids[1:8])
        return session

    nodes: dict[tuple[int, ...], int] = {}
    session, tree = fresh(), {}
    for depth in (1, 2, 3):
        level = sorted({path[:depth] for path in paths})
        parents = torch.tensor([nodes.get(node[:-1], -1) for node in level])
        out = session.expand([0] * len(level), parents, torch.tensor([node[-1] for node in level]), depth)
        for node, logits in zip(level, out, strict=True):
            nodes[node] = len(nodes)
            tree[node] = logits
    for path in paths:
        chain = fresh()
        for depth in range(3):
            logits = chain.expand([0], torch.tensor([depth - 1]), torch.tensor([path[depth]]), depth + 1)[0]
            torch.testing.assert_close(logits, tree[path[: depth + 1]], rtol=1e-4, atol=1e-4)


def test_rope_is_the_targets_own() -> None:
    for rope in ROPES:
        config = LlamaConfig(
            hidden_size=32, num_attention_heads=4, head_dim=12, max_position_embeddings=512, rope_parameters=dict(rope)
        )
        positions = torch.tensor([[0, 1, 7, 100, 400]])
        want = LlamaRotaryEmbedding(config)(torch.zeros(1), positions)
        drafter = random_drafter(random_frozen(rope_parameters=rope), random_vocab(40, 17))
        for mine, theirs in zip(drafter.rotary(torch.zeros(1), positions), want, strict=True):
            torch.testing.assert_close(mine, theirs)


def test_rope_spellings() -> None:
    assert rope_parameters({"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}}) == {
        "rope_type": "linear",
        "factor": 2.0,
        "rope_theta": 5e5,
    }
    full, sliding = {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0}, {"rope_type": "default"}
    assert rope_parameters({"rope_parameters": {"full_attention": full, "sliding_attention": sliding}}) == full
    partial = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5, "mrope_section": [1, 2]}
    assert rope_parameters({"rope_parameters": partial}) == {"rope_type": "default", "rope_theta": 1e4}
    assert rope_parameters({}) == {"rope_type": "default", "rope_theta": 10000.0}


def test_initialisation_from_the_target() -> None:
    frozen, vocab = random_frozen(), random_vocab(40, 17)
    generator = torch.Generator().manual_seed(0)
    shapes = {
        "self_attn.q_proj": (48, 32),
        "self_attn.k_proj": (24, 32),
        "self_attn.v_proj": (24, 32),
        "self_attn.o_proj": (32, 48),
        "mlp.gate_proj": (48, 32),
        "mlp.up_proj": (48, 32),
        "mlp.down_proj": (32, 48),
        "input_layernorm": (32,),
        "post_attention_layernorm": (32,),
    }
    frozen.last_layer = {f"{n}.weight": torch.randn(s, generator=generator) for n, s in shapes.items()}
    drafter = Eagle3Drafter.create(frozen, vocab, TAPS, init_layer=True, init_fc=True, init_head=True, init_temper=0.5)
    taps = torch.randn(5, 96)
    assert torch.equal(drafter.fuse(taps), taps[:, 64:])  # fc passes the last tap through
    assert torch.equal(drafter.lm_head.weight, frozen.head[vocab.ids])
    assert frozen.final_norm is not None and torch.equal(drafter.norm.weight, frozen.final_norm * 0.5)
    # the layer ignores the embedding and equals the target's on the feature
    x = taps[:, 64:]
    inputs = drafter.midlayer.inputs(torch.randn(5, 32), x)
    normed = F.rms_norm(x, (32,), frozen.last_layer["input_layernorm.weight"], 1e-5)
    torch.testing.assert_close(
        drafter.midlayer.self_attn.q_proj(inputs), normed @ frozen.last_layer["self_attn.q_proj.weight"].T
    )
    frozen.last_layer.pop("mlp.up_proj.weight")
    with pytest.raises(EyasError, match=r"init_layer=true: mlp\.up_proj"):
        Eagle3Drafter.create(frozen, vocab, TAPS, init_layer=True)


def test_dimensions_follow_the_target() -> None:
    config = Eagle3Config.for_target({**TINY, "hidden_size": 96, "head_dim": 32}, TAPS)
    assert (config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim) == (128, 64)
    no_kv = {k: v for k, v in TINY.items() if k not in ("num_key_value_heads", "head_dim")}
    assert Eagle3Config.for_target(no_kv, TAPS).num_key_value_heads == 4
    assert Eagle3Config.for_target(no_kv, TAPS).head_dim == 8
    assert Eagle3Config.for_target({**TINY, "intermediate_size": 16}, TAPS).intermediate_size == 96  # an expert's width
    with pytest.raises(EyasError, match="num_key_value_heads=3"):
        Eagle3Config.for_target(TINY, TAPS, num_key_value_heads=3)
    with pytest.raises(EyasError, match="exclude each other"):
        Eagle3Config.for_target(TINY, TAPS, fc_norm=True, norm_before_fc=True)
    with pytest.raises(EyasError, match=r"target\.taps=\[\]: EAGLE-3 reads tapped states"):
        Eagle3Config.for_target(TINY, ())


def test_same_seed_same_drafter() -> None:
    frozen, vocab = random_frozen(), random_vocab(40, 17)
    one, two, other = (Eagle3Drafter.create(frozen, vocab, TAPS, seed=s) for s in (1, 1, 2))
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))
    assert not torch.equal(one.midlayer.mlp.up_proj.weight, other.midlayer.mlp.up_proj.weight)


def test_without_taps_there_is_nothing_to_read() -> None:
    with pytest.raises(EyasError, match=r"target\.taps=\[\]"):
        Eagle3Drafter.create(random_frozen(), random_vocab(40, 17), ())
