"""MTP modules by the names of three families: written, read back, found in targets, and computed as engines do."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from models.drafter import NotServed, Serving
from models.errors import EyasError
from models.load_frozen import WeightFiles, load_frozen
from models.mtp import MtpDrafter
from models.mtp_serving import carried_modules, carries_mtp, open_carried, read_mtp, write_mtp
from models.portable import fill_export, serve
from models.vocab import DraftVocab
from scripts.engines.mtp import MtpEngine
from tests.drafters import random_batch, randomise
from tests.mtp_targets import (
    EXPERTS,
    FAMILIES,
    HIDDEN,
    LAYERS,
    VOCAB,
    add_tensors,
    carrying_target,
    family_config,
    module_in_files,
    save_target,
)

LAYOUT = {"deepseek_v3": "deepseek", "qwen2": "mimo", "qwen3_next": "qwen3_next", "qwen3_5_text": "qwen3_next"}


def drafter_for(folder: Path, modules: int = 1, seed: int = 1) -> MtpDrafter:
    frozen = load_frozen(folder)
    return randomise(MtpDrafter.create(frozen, DraftVocab.full(VOCAB), (), num_modules=modules, init="random"), seed)


def written(drafter: MtpDrafter, layout: str | None = None) -> Serving:
    return write_mtp(drafter.state_dict(), drafter.architecture(), drafter.vocab, drafter.config.config, layout)


def through_json(config: dict[str, Any]) -> dict[str, Any]:
    out: dict[str, Any] = json.loads(json.dumps(config))
    return out


# --- names --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_a_familys_own_files_are_read_and_written_bit_for_bit(tmp_path: Path, family: str) -> None:
    """By hand: what every tensor of the module is called in files (tests/mtp_targets.py)."""
    save_target(tmp_path, family)
    config = load_frozen(tmp_path).config
    files = module_in_files(family)
    architecture, vocab, weights = read_mtp(files, config, config)
    assert architecture == {"num_modules": 1, "config": config, "zero_first": not family.startswith("qwen3_")}
    assert len(vocab) == VOCAB
    again = write_mtp(weights, architecture, vocab, config)
    assert again.tensors.keys() == files.keys()
    assert all(torch.equal(again.tensors[name], tensor) for name, tensor in files.items())
    assert again.config["eyas"]["layout"] == LAYOUT[family]


@pytest.mark.parametrize(
    ("family", "modules"),
    [*((family, 1) for family in (*FAMILIES, "llama", "qwen3")), *((f, 3) for f in ("deepseek_v3", "qwen2", "llama"))],
)
def test_what_is_written_reads_back(tmp_path: Path, family: str, modules: int) -> None:
    drafter = drafter_for(save_target(tmp_path, family), modules)
    served = written(drafter)
    architecture, vocab, weights = read_mtp(served.tensors, through_json(served.config))
    assert architecture == drafter.architecture()
    assert vocab.is_full
    own = drafter.state_dict()
    assert weights.keys() == own.keys()
    assert all(torch.equal(weights[name], tensor) for name, tensor in own.items())


def test_hidden_columns_come_first_in_mimos_projection(tmp_path: Path) -> None:
    drafter = drafter_for(save_target(tmp_path, "qwen2"))
    module, tensors = drafter.steps[0], written(drafter).tensors
    embedding, feature = torch.randn(HIDDEN, generator=torch.Generator().manual_seed(3)), torch.ones(HIDDEN) * 0.3
    ours = module.proj.weight @ torch.cat([embedding, feature])
    theirs = tensors["model.mtp_layers.0.input_proj.weight"] @ torch.cat([feature, embedding])
    assert torch.allclose(ours, theirs, atol=1e-6)
    assert torch.equal(tensors["model.mtp_layers.0.token_layernorm.weight"], module.enorm.weight)
    assert torch.equal(tensors["model.mtp_layers.0.hidden_layernorm.weight"], module.hnorm.weight)


def test_norms_of_qwen3_next_are_stored_less_one(tmp_path: Path) -> None:
    drafter = drafter_for(save_target(tmp_path, "qwen3_next"))
    with torch.no_grad():
        drafter.steps[0].enorm.weight.fill_(1.5)
        drafter.steps[0].hnorm.weight.fill_(0.75)
        drafter.steps[0].norm.weight.fill_(1.0)
    tensors = written(drafter).tensors
    for name, value in (("pre_fc_norm_embedding", 0.5), ("pre_fc_norm_hidden", -0.25), ("norm", 0.0)):
        assert torch.equal(tensors[f"mtp.{name}.weight"], torch.full((HIDDEN,), value))
    inner = drafter.state_dict()["mtp.0.block.input_layernorm.weight"]  # the family's own, less one already
    assert torch.equal(tensors["mtp.layers.0.input_layernorm.weight"], inner)


def test_modules_that_differ_in_what_is_held_once(tmp_path: Path) -> None:
    drafter = drafter_for(save_target(tmp_path, "qwen3_next"), 2)
    with pytest.raises(EyasError, match=r"holds one mtp\.\w+\.weight for all modules, and those of mtp\.1\."):
        written(drafter)


def test_several_qwen3_next_layers_share_one_projection(tmp_path: Path) -> None:
    config = load_frozen(save_target(tmp_path, "qwen3_next")).config
    files = module_in_files("qwen3_next")
    second = module_in_files("qwen3_next", seed=7, number=1)
    files |= {name: tensor for name, tensor in second.items() if name.startswith("mtp.layers.1.")}
    architecture, vocab, weights = read_mtp(files, config, config)
    assert architecture["num_modules"] == 2
    assert torch.equal(weights["mtp.1.proj.weight"], files["mtp.fc.weight"])
    again = write_mtp(weights, architecture, vocab, config).tensors
    assert all(torch.equal(again[name], tensor) for name, tensor in files.items())


def test_a_block_without_biases_gets_zeros_where_engines_have_some(tmp_path: Path) -> None:
    served = written(drafter_for(save_target(tmp_path, "llama")))
    stem = "model.mtp_layers.0.self_attn"
    assert torch.equal(served.tensors[f"{stem}.q_proj.bias"], torch.zeros(HIDDEN))
    assert torch.equal(served.tensors[f"{stem}.v_proj.bias"], torch.zeros(HIDDEN // 2))
    served.tensors[f"{stem}.v_proj.bias"][3] = 1e-3
    with pytest.raises(EyasError, match=rf"{stem}.v_proj.bias: unexpected"):
        read_mtp(served.tensors, served.config)


# --- config.json --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "key", "architecture"),
    [
        ("deepseek_v3", "num_nextn_predict_layers", "DeepSeekMTPModel"),
        ("qwen2", "num_nextn_predict_layers", "MiMoForCausalLM"),
        ("qwen3_next", "num_nextn_predict_layers", "Qwen3NextMTP"),
        ("qwen3_5_text", "mtp_num_hidden_layers", "Qwen3_5MTP"),
    ],
)
def test_config_is_the_targets_with_a_count(tmp_path: Path, family: str, key: str, architecture: str) -> None:
    drafter = drafter_for(save_target(tmp_path, family))
    config = written(drafter).config
    assert (config[key], config["architectures"], config["num_hidden_layers"]) == (1, [architecture], LAYERS)
    target = drafter.config.config
    changed = {key, "architectures", "eyas"}
    assert {k: v for k, v in config.items() if k not in changed} == {
        k: v for k, v in target.items() if k not in changed
    }


def test_layouts_that_would_be_computed_otherwise_are_refused(tmp_path: Path) -> None:
    drafter = drafter_for(save_target(tmp_path, "qwen2"))
    with pytest.raises(EyasError, match=r"export.layout=qwen3_next: .*position 0 as it is there.* as zeros"):
        written(drafter, "qwen3_next")
    with pytest.raises(
        EyasError, match="export.layout=vllm: MTP modules are written as deepseek or mimo or qwen3_next"
    ):
        written(drafter, "vllm")
    other = drafter.architecture()
    other["config"] = other["config"] | {"model_type": "granite"}
    with pytest.raises(EyasError, match=r"export.layout=mimo: .* not one of granite") as refused:
        write_mtp(drafter.state_dict(), other, drafter.vocab, other["config"], "mimo")
    assert not isinstance(refused.value, NotServed)
    with pytest.raises(NotServed, match=r"no serving layout for a granite target: "):
        write_mtp(drafter.state_dict(), other, drafter.vocab, other["config"])
    with pytest.raises(EyasError, match="made for 63 tokens, the target has 64"):
        write_mtp(drafter.state_dict(), drafter.architecture(), DraftVocab.full(63), drafter.config.config)


def test_configs_of_others(tmp_path: Path) -> None:
    """A config.json that says only what differs from the family's defaults, inside a multimodal one, and MiMo's own."""
    files = module_in_files("qwen3_5_text")
    plain = load_frozen(save_target(tmp_path / "a", "qwen3_5_text")).config
    raw = family_config("qwen3_5_text").to_diff_dict()
    outer = {"model_type": "qwen3_5", "text_config": raw | {"model_type": "qwen3_5_text"}}
    told = read_mtp(files, outer)[0]["config"]
    assert {k: told[k] for k in ("hidden_size", "rms_norm_eps", "layer_types", "head_dim")} == {
        k: plain[k] for k in ("hidden_size", "rms_norm_eps", "layer_types", "head_dim")
    }
    mimo = family_config("qwen2").to_diff_dict() | {"model_type": "mimo", "architectures": ["MiMoForCausalLM"]}
    assert read_mtp(module_in_files("qwen2"), mimo)[0]["config"]["hidden_size"] == HIDDEN
    with pytest.raises(EyasError, match="of speculators must be stitched"):
        read_mtp(files, outer | {"speculators_model_type": "mtp"})
    with pytest.raises(EyasError, match="model_type is missing"):
        read_mtp(files, {})


# --- files that are wrong -----------------------------------------------------------------------------------

Files = dict[str, Tensor]
BLOCK = f"model.layers.{LAYERS}"


def drop(name: str) -> Callable[[Files], object]:
    return lambda files: files.pop(name)


def put(name: str, *shape: int) -> Callable[[Files], object]:
    return lambda files: files.update({name: torch.ones(shape)})


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (drop(f"{BLOCK}.eh_proj.weight"), f"{BLOCK}.eh_proj.weight: missing"),
        (drop(f"{BLOCK}.shared_head.norm.weight"), f"{BLOCK}.shared_head.norm.weight: missing"),
        (drop(f"{BLOCK}.self_attn.o_proj.weight"), f"{BLOCK}.self_attn.o_proj.weight: missing"),
        (drop(f"{BLOCK}.mlp.experts.2.up_proj.weight"), f"{BLOCK}.mlp.experts.2.up_proj.weight: missing"),
        (put(f"{BLOCK}.mlp.experts.3.down_proj.weight", 3, 3), r"experts.3.down_proj.weight: has shape \[3, 3\]"),
        (put(f"{BLOCK}.mlp.experts.4.down_proj.weight", 3, 3), "experts.4.gate_proj.weight: missing"),
        (put(f"{BLOCK}.eh_proj.weight", 32, 32), r"eh_proj.weight: has shape \[32, 32\], .* \[32, 64\]"),
        (put(f"{BLOCK}.mlp.gate.weight", 5, 32), r"mlp.gate.weight: has shape \[5, 32\], .* \[4, 32\]"),
        (put(f"{BLOCK}.self_attn.q_norm.weight", 8), f"{BLOCK}.self_attn.q_norm.weight: unexpected"),
        (put(f"{BLOCK}.eh_proj.weight_scale_inv", 1, 1), "weight_scale_inv: unexpected; is quantised"),
        (put("model.layers.1.enorm.weight", 32), "model.layers.1.enorm.weight: unexpected"),
        (put(f"{BLOCK}.embed_tokens.weight", 64, 16), r"embed_tokens.weight: has shape \[64, 16\], .* \[64, 32\]"),
        (put("model.layers.4.enorm.weight", 32), r"model.layers.3.\*: missing, but model.layers.4.enorm"),
        (put("model.layers.3.enorm.weight", 32), "num_nextn_predict_layers=1, but the files hold 2"),
    ],
)
def test_a_wrong_tensor_is_named(tmp_path: Path, spoil: Callable[[Files], object], message: str) -> None:
    config = load_frozen(save_target(tmp_path, "deepseek_v3")).config
    files = module_in_files("deepseek_v3")
    spoil(files)
    with pytest.raises(EyasError, match=message):
        read_mtp(files, config, config)


def test_experts_of_another_width(tmp_path: Path) -> None:
    """All experts alike, and still not what the config asks for: named by what the file holds."""
    config = load_frozen(save_target(tmp_path, "deepseek_v3")).config
    files = module_in_files("deepseek_v3")
    for e in range(EXPERTS):
        for kind in ("gate", "up"):
            files[f"{BLOCK}.mlp.experts.{e}.{kind}_proj.weight"] = torch.ones(10, 32)
    with pytest.raises(EyasError, match=r"experts.0.gate_proj.weight: has shape \[10, 32\], .* \[12, 32\]"):
        read_mtp(files, config, config)


# --- targets that carry modules -----------------------------------------------------------------------------


@pytest.mark.parametrize("shards", ["5GB", "20KB"])
@pytest.mark.parametrize("family", FAMILIES)
def test_modules_in_a_targets_own_files(
    tmp_path: Path, family: str, shards: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, files = carrying_target(tmp_path, family, max_shard_size=shards)
    assert (folder / "model.safetensors.index.json").exists() == (shards == "20KB")
    frozen = load_frozen(folder)
    read: list[str] = []
    original = WeightFiles.read

    def noted(self: WeightFiles, name: str) -> Tensor:
        read.append(name)
        return original(self, name)

    monkeypatch.setattr(WeightFiles, "read", noted)
    carried = carried_modules(folder, frozen.config)
    assert carried is not None
    repeats = {"model.embed_tokens.weight", "lm_head.weight"} if family == "deepseek_v3" else set()
    assert set(read) == set(files) | repeats  # and nothing else of the target
    expected = read_mtp(files, frozen.config, frozen.config)
    assert all(torch.equal(carried[name], tensor) for name, tensor in expected[2].items())
    opened = open_carried(folder)
    assert opened[0] == expected[0]
    assert carries_mtp(folder)
    drafter = MtpDrafter.create(frozen, DraftVocab.full(VOCAB), (), init="carried")
    assert all(torch.equal(tensor, carried[name].float()) for name, tensor in drafter.state_dict().items())


def test_targets_without_modules(tmp_path: Path) -> None:
    folder = save_target(tmp_path / "target", "deepseek_v3")  # its config counts one, as after a save by transformers
    assert carried_modules(folder, load_frozen(folder).config) is None
    assert not carries_mtp(folder)
    assert not carries_mtp(tmp_path)
    with pytest.raises(EyasError, match="carries no MTP modules"):
        open_carried(folder)


def test_a_drafter_folder_is_no_target(tmp_path: Path) -> None:
    drafter = drafter_for(save_target(tmp_path / "target", "qwen2"))
    (tmp_path / "out").mkdir()
    fill_export(serve(drafter, load_frozen(tmp_path / "target")), tmp_path / "out", "float32")
    assert not carries_mtp(tmp_path / "out")


def test_broken_modules_of_a_target_are_named(tmp_path: Path) -> None:
    folder, files = carrying_target(tmp_path, "deepseek_v3")
    config = load_frozen(folder).config
    with pytest.raises(EyasError, match="num_nextn_predict_layers=2, but the files hold 1 MTP modules"):
        carried_modules(folder, config | {"num_nextn_predict_layers": 2})
    name = f"{BLOCK}.shared_head.head.weight"
    add_tensors(folder, {name: files[name] + 1})
    with pytest.raises(EyasError, match=re.escape(f"{tmp_path}: {name}: differs from lm_head.weight")):
        carried_modules(folder, config)
    add_tensors(folder, {name: files[name], f"{BLOCK}.enorm.weight": torch.ones(3)})
    with pytest.raises(EyasError, match=rf"{BLOCK}.enorm.weight: has shape \[3\]"):
        carried_modules(folder, config)


# --- what engines compute -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "modules"),
    [*((family, 1) for family in (*FAMILIES, "llama", "qwen3")), *((f, 2) for f in ("deepseek_v3", "qwen2", "llama"))],
)
@torch.no_grad()
def test_the_engine_drafts_as_training_unrolled(tmp_path: Path, family: str, modules: int) -> None:
    frozen = load_frozen(save_target(tmp_path / "target", family))
    drafter = drafter_for(tmp_path / "target", modules)
    (tmp_path / "out").mkdir()
    fill_export(serve(drafter, frozen), tmp_path / "out", "float32")
    engine = MtpEngine(tmp_path / "out", frozen)
    depths, slot = modules if modules > 1 else 4, 6
    text = random_batch(frozen, [slot + 2 + depths])
    session = drafter.session(frozen)
    next_ids = text.input_ids[1 : slot + 2]
    rows = [session.extend([0], [slot + 1], text.taps[: slot + 1, :0], text.final[: slot + 1], next_ids)[0]]
    drafted = text.input_ids[slot + 2 : slot + 1 + depths]
    for depth, token in enumerate(drafted, 1):
        rows.append(session.expand([0], torch.tensor([depth - 2]), token[None], depth)[0])
    theirs = engine.draft_logits(next_ids, text.taps[: slot + 1], text.final[: slot + 1], drafted)
    assert torch.equal(engine.draft_ids, torch.arange(VOCAB))
    assert torch.allclose(torch.stack(rows), theirs, atol=1e-4 * float(theirs.abs().max()))
