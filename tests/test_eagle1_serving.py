"""EAGLE-1 as engines and the original have it: export, the engine's drafts, official checkpoints, broken ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from models.batch import slots_of
from models.eagle1 import Eagle1Drafter
from models.errors import EyasError
from models.portable import open_drafter, write_export
from scripts.engines.eagle1 import Eagle1Engine
from tests.drafters import TINY, random_batch, random_frozen, random_vocab
from tests.eagle1 import make

LINEARS = [f"self_attn.{name}_proj" for name in "qkvo"] + [f"mlp.{name}_proj" for name in ("gate", "up", "down")]


def test_export_and_back(tmp_path: Path) -> None:
    frozen = random_frozen()
    vocab = random_vocab(40, 17)
    drafter = make(vocab, frozen, detach=True)
    served = drafter.serving(frozen)
    own = {f"layers.0.{name}.weight" for name in LINEARS}
    assert set(served.tensors) == own | {"fc.weight", "fc.bias", "layers.0.post_attention_layernorm.weight"}
    assert served.tensors["fc.weight"].shape == (32, 64) and not served.tensors["fc.bias"].any()
    config = served.config
    assert config["architectures"] == ["LlamaForCausalLMEagle", "LlamaForCausalLM"] and config["bias"] is False
    assert (config["vocab_size"], config["num_hidden_layers"], config["model_type"]) == (40, 1, "llama")
    assert "logit_scale" not in config and "final_logit_softcapping" not in config
    write_export(served, tmp_path / "export", "float32")
    again = open_drafter(tmp_path / "export")
    assert isinstance(again, Eagle1Drafter) and again.vocab.is_full and not again.config.fc_bias
    assert {n: p.shape for n, p in again.state_dict().items()} == {n: p.shape for n, p in drafter.state_dict().items()}
    assert all(torch.equal(p, drafter.state_dict()[name]) for name, p in again.state_dict().items())


@pytest.mark.parametrize("transform", [{}, {"scale": 0.25}, {"scale": 2.0, "softcap": 5.0}])
def test_an_engine_drafts_the_same(transform: dict[str, float], tmp_path: Path) -> None:
    frozen = random_frozen(rope_parameters={"rope_type": "linear", "rope_theta": 500.0, "factor": 4.0})
    for key, value in transform.items():
        setattr(frozen, key, value)
    drafter, batch = make(frozen=frozen), random_batch(frozen, [12])
    write_export(drafter.serving(frozen), tmp_path / "export", "float32")
    engine = Eagle1Engine(tmp_path / "export", frozen)
    drafted = torch.tensor([3, 38, 3])
    found = engine.draft_logits(batch.input_ids[1:9], batch.taps[:8], batch.final[:8], drafted)
    session = drafter.session(frozen)
    want = [session.extend([0], [8], batch.taps[:8], batch.final[:8], batch.input_ids[1:9])[0]]
    for depth in (1, 2, 3):
        want.append(session.expand([0], torch.tensor([depth - 2]), drafted[depth - 1 : depth], depth)[0])
    torch.testing.assert_close(found, torch.stack(want), rtol=1e-4, atol=1e-4)
    assert torch.equal(engine.draft_ids, torch.arange(40))


def test_what_engines_would_drop_is_refused() -> None:
    frozen = random_frozen()
    with pytest.raises(EyasError, match=r"fc\.bias: is not zero, and vLLM drops it"):
        make(frozen=frozen, fc_bias=True).serving(frozen)
    drafter = make(frozen=frozen, fc_bias=True)
    with torch.no_grad():
        drafter.fc.bias.zero_()
    assert not drafter.serving(frozen).tensors["fc.bias"].any()
    frozen.head_bias = torch.ones(40)
    with pytest.raises(EyasError, match="output head has a bias"):
        drafter.serving(frozen)


def official(folder: Path, fc_bias: Tensor | None, **config: Any) -> Eagle1Drafter:
    """An official checkpoint in ``folder``: embed_tokens, fc.bias, an ordinary Llama config; the drafter it holds."""
    drafter = make(fc_bias=fc_bias is not None)
    tensors = {name: tensor.clone() for name, tensor in drafter.state_dict().items()}
    if fc_bias is not None:
        with torch.no_grad():
            drafter.fc.bias.copy_(fc_bias)
        tensors["fc.bias"] = fc_bias
    tensors["embed_tokens.weight"] = torch.randn(40, 32)
    whole = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        **{key: TINY[key] for key in ("hidden_size", "intermediate_size", "num_attention_heads", "head_dim")},
        **{key: TINY[key] for key in ("num_key_value_heads", "vocab_size", "rms_norm_eps")},
        "max_position_embeddings": 2048,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "hidden_act": "silu",
        **config,
    }
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(whole))
    return drafter


@pytest.mark.parametrize("config", [{}, {"bias": True}, {"bias": False}, {"num_hidden_layers": 40}])
def test_official_checkpoints(config: dict[str, Any], tmp_path: Path) -> None:
    """The embedding is dropped, a bias kept, whatever the config says of it; drafts are those of the original."""
    frozen = random_frozen()
    drafter = official(tmp_path / "eagle", torch.linspace(-1, 1, 32), **config)
    read = open_drafter(tmp_path / "eagle", target=frozen.config)
    assert isinstance(read, Eagle1Drafter) and read.config.fc_bias and read.vocab.is_full
    assert read.max_positions == 2048 and read.config.head_dim == 12
    batch = random_batch(frozen, [20])
    with torch.no_grad():
        slots = slots_of(batch, 4)
        assert torch.equal(read.unroll(batch, slots, frozen), drafter.unroll(batch, slots, frozen))


def test_official_checkpoints_without_a_bias(tmp_path: Path) -> None:
    official(tmp_path / "none", None, bias=False)
    official(tmp_path / "zeros", torch.zeros(32))
    official(tmp_path / "silent", None)
    for folder in ("none", "zeros", "silent"):
        read = open_drafter(tmp_path / folder)
        assert isinstance(read, Eagle1Drafter) and not read.config.fc_bias and read.fc.bias is None
    official(tmp_path / "missing", None, bias=True)
    with pytest.raises(EyasError, match=r"fc\.bias: missing, and config\.json says bias=true"):
        open_drafter(tmp_path / "missing")


def test_broken_checkpoints_name_the_tensor(tmp_path: Path) -> None:
    tensors = make().state_dict()
    config = make().serving(random_frozen()).config
    norm = "layers.0.input_layernorm.weight"
    more = {norm: torch.ones(32)}, {"layers.1.mlp.gate_proj.weight": torch.ones(48, 32)}, {"extra": torch.ones(1)}
    for extra, message in zip(more, (norm, "several layers", "extra: unexpected"), strict=True):
        with pytest.raises(EyasError, match=message):
            Eagle1Drafter.from_serving(tensors | extra, config)
    for name in tensors:
        with pytest.raises(EyasError, match=rf"{name}: missing"):
            Eagle1Drafter.from_serving({k: v for k, v in tensors.items() if k != name}, config)
    with pytest.raises(EyasError, match=r"fc\.weight: has shape"):
        Eagle1Drafter.from_serving(tensors | {"fc.weight": torch.ones(32, 96)}, config)
    with pytest.raises(EyasError, match="hidden_act=gelu"):
        Eagle1Drafter.from_serving(tensors, config | {"hidden_act": "gelu"})
