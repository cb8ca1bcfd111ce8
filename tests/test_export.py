"""Exporting a drafter: the config engines read, the tensors they load, the proof, the command and its card."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig

import train.stages
from conf.schema import Config
from models.checkpoint import save_drafter
from models.drafter import NotServed
from models.eagle3 import Eagle3Drafter
from models.eagle3_serving import eagle3_config
from models.errors import EyasError
from models.load_frozen import load_frozen
from models.portable import check_export, load_export, serve
from models.vocab import DraftVocab
from scripts.card import About, of_drafter
from scripts.engines.eagle3 import Eagle3Engine
from scripts.export import export, run_export
from scripts.rescore import rescore
from scripts.vllm_check import read_prompts, summary
from tests.drafters import random_frozen
from tests.exports import Spoil, exported, make, rewrite
from tests.reports import Faker
from tests.tiny import tiny_target
from train.trainer import Fitted

LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 128}


# --- what is written ----------------------------------------------------------------------------------------


def test_config_of_the_portable_layout(tmp_path: Path) -> None:
    frozen = random_frozen(bos_token_id=1, eos_token_id=[2, 7])
    _, config = exported(tmp_path / "out", "bfloat16", frozen=frozen, norm_before_fc=True)
    own = config.pop("eyas")
    assert config == {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 12,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "vocab_size": 40,
        "draft_vocab_size": 12,
        "max_position_embeddings": 512,
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "bias": False,
        "bos_token_id": 1,
        "eos_token_id": [2, 7],
        "num_aux_hidden_states": 3,
        "norm_before_residual": False,
        "norm_before_fc": True,
        "fc_norm": False,
        "norm_output": False,
        "eagle_aux_hidden_state_layer_ids": [2, 3, 5],  # states entering these layers: vLLM
        "eagle_config": {
            "use_aux_hidden_state": True,
            "norm_before_fc": True,
            "eagle_aux_hidden_state_layer_ids": [1, 2, 4],  # layers whose output is read: SGLang
        },
        "dtype": "bfloat16",
        "torch_dtype": "bfloat16",
    }
    assert own == {"method": "eagle3", "layout": "vllm", "tap_ids": [2, 3, 5], "target_layers": 6}


@pytest.mark.parametrize(
    ("layers", "taps", "family", "boundary", "output"),
    [
        (30, (2, 15, 27), "llama", None, None),  # what every engine taps by itself
        (31, (2, 15, 28), "qwen3", None, None),
        (30, (2, 15, 28), "llama", [2, 15, 28], [1, 14, 27]),
        (30, (15, 30), "llama", [15, 30], [14, 29]),
        (61, (2, 30, 60), "deepseek_v3", [2, 30, 60], [1, 29, 59]),  # SGLang adds 1 only behind a leading 1
        (61, (3, 30, 60), "deepseek_v3", [3, 30, 60], [3, 30, 60]),
    ],
)
def test_layer_ids_in_both_conventions(
    layers: int, taps: tuple[int, ...], family: str, boundary: Any, output: Any
) -> None:
    drafter, frozen = make(frozen=random_frozen(num_hidden_layers=layers), taps=taps)
    config = eagle3_config(drafter.architecture(), drafter.vocab, frozen.config | {"model_type": family})
    assert config.get("eagle_aux_hidden_state_layer_ids") == boundary
    assert config["eagle_config"].get("eagle_aux_hidden_state_layer_ids") == output
    assert config["num_aux_hidden_states"] == len(taps)


def test_boundary_1_of_a_deepseek_target_is_refused() -> None:
    drafter, frozen = make(taps=(1, 3, 5))
    with pytest.raises(EyasError, match="target.taps"):
        eagle3_config(drafter.architecture(), drafter.vocab, frozen.config | {"model_type": "deepseek_v3"})


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_tensors_and_draft_vocabulary(tmp_path: Path, dtype: str) -> None:
    drafter, frozen = make()
    drafter.vocab = DraftVocab(torch.tensor([0, 3, 4, 9, *range(20, 27), 39]), 40)
    export(drafter, frozen, tmp_path / "out", About("t"), dtype=dtype)
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert {name: list(t.shape) for name, t in tensors.items()} == {
        "fc.weight": [32, 96],
        "midlayer.input_layernorm.weight": [32],
        "midlayer.hidden_norm.weight": [32],
        "midlayer.post_attention_layernorm.weight": [32],
        "midlayer.self_attn.q_proj.weight": [48, 64],
        "midlayer.self_attn.k_proj.weight": [24, 64],
        "midlayer.self_attn.v_proj.weight": [24, 64],
        "midlayer.self_attn.o_proj.weight": [32, 48],
        "midlayer.mlp.gate_proj.weight": [48, 32],
        "midlayer.mlp.up_proj.weight": [48, 32],
        "midlayer.mlp.down_proj.weight": [32, 48],
        "norm.weight": [32],
        "lm_head.weight": [12, 32],
        "d2t": [12],
        "t2d": [40],
    }
    assert tensors["d2t"].tolist() == [0, 2, 2, 6, 16, 16, 16, 16, 16, 16, 16, 28]
    assert tensors["t2d"].nonzero().flatten().tolist() == [0, 3, 4, 9, *range(20, 27), 39]
    assert tensors.pop("d2t").dtype == torch.int64
    assert tensors.pop("t2d").dtype == torch.bool
    assert {str(t.dtype) for t in tensors.values()} == {f"torch.{dtype}"}


def test_full_vocabulary_has_no_map(tmp_path: Path) -> None:
    tensors, config = exported(tmp_path / "out", draft=40)
    assert not {"d2t", "t2d"} & set(tensors)
    assert config["draft_vocab_size"] == config["vocab_size"] == 40
    assert tensors["lm_head.weight"].shape == (40, 32)
    assert load_export(tmp_path / "out").vocab.is_full


def test_flags_add_their_norms(tmp_path: Path) -> None:
    tensors, config = exported(tmp_path / "a", fc_norm=True, norm_output=True)
    assert [list(tensors[f"fc_norm.{i}.weight"].shape) for i in range(3)] == [[32]] * 3
    assert config["fc_norm"] and config["norm_output"]
    tensors, _ = exported(tmp_path / "b", norm_before_fc=True)
    assert list(tensors["input_norm.weight"].shape) == [96]


def llama3_frequencies(base: Tensor, rope: dict[str, Any]) -> Tensor:
    """Llama 3.1's rule, one frequency at a time: long waves slowed down, short ones kept, a ramp between."""
    out = []
    for frequency in base.tolist():
        turns = rope["original_max_position_embeddings"] * frequency / (2 * math.pi)
        ramp = (turns - rope["low_freq_factor"]) / (rope["high_freq_factor"] - rope["low_freq_factor"])
        ramp = min(max(ramp, 0.0), 1.0)
        out.append((1 - ramp) * frequency / rope["factor"] + ramp * frequency)
    return torch.tensor(out)


@pytest.mark.parametrize("rope", [LINEAR, LLAMA3, YARN], ids=lambda r: r["rope_type"])
def test_rope_reaches_readers_as_trained(tmp_path: Path, rope: dict[str, Any]) -> None:
    """Transformers 5 reads rope_parameters, Transformers 4 rope_theta and rope_scaling; both say the same."""
    frozen = random_frozen(rope_parameters=rope | {"partial_rotary_factor": 1.0})
    _, config = exported(tmp_path / "out", frozen=frozen)
    assert config["rope_parameters"] == rope
    assert config["rope_scaling"] | {"rope_theta": config["rope_theta"]} == rope
    read = AutoConfig.from_pretrained(tmp_path / "out")
    assert {key: read.rope_parameters[key] for key in rope} == rope
    engine = Eagle3Engine(tmp_path / "out", frozen)
    base = rope["rope_theta"] ** -(torch.arange(0, 12, 2) / 12)
    if rope is LINEAR:
        torch.testing.assert_close(engine.rotary.inv_freq, base / 4)
    elif rope is LLAMA3:
        torch.testing.assert_close(engine.rotary.inv_freq, llama3_frequencies(base, rope))
    drafter = load_export(tmp_path / "out")
    assert isinstance(drafter, Eagle3Drafter)
    torch.testing.assert_close(engine.rotary.inv_freq, drafter.rotary.inv_freq)


# --- re-scoring ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("flags", [{}, {"norm_before_fc": True}, {"fc_norm": True}, {"norm_output": True}], ids=str)
def test_engine_unroll_and_session_agree(tmp_path: Path, flags: dict[str, Any], dtype: str) -> None:
    drafter, frozen = make(**flags)
    export(drafter, frozen, tmp_path / "out", About("t"), dtype=dtype)
    proof = rescore(tmp_path / "out", drafter, serve(drafter, frozen), frozen, dtype)
    assert proof.engine < 2e-5
    assert proof.top1 == 1.0 if dtype == "float32" else proof.top1 > 0.9
    assert proof.rounding == 0.0 if dtype == "float32" else 1e-4 < proof.rounding < 0.05


def swap_halves(tensors: dict[str, Tensor], _: dict[str, Any]) -> None:
    weight = tensors["midlayer.self_attn.q_proj.weight"]
    tensors["midlayer.self_attn.q_proj.weight"] = torch.cat([weight[:, 32:], weight[:, :32]], 1)


def other_feedback(_: dict[str, Tensor], config: dict[str, Any]) -> None:
    config["norm_output"] = True


def other_rope(_: dict[str, Tensor], config: dict[str, Any]) -> None:
    config["rope_parameters"] = {"rope_type": "default", "rope_theta": 50.0}


@pytest.mark.parametrize("spoil", [swap_halves, other_feedback, other_rope], ids=lambda f: f.__name__)
def test_rescoring_notices_what_no_shape_shows(tmp_path: Path, spoil: Spoil) -> None:
    folder = tmp_path / "out"
    exported(folder)
    rewrite(folder, spoil)
    drafter, frozen = make()
    spoilt = serve(drafter, frozen)
    spoil(spoilt.tensors, spoilt.config)  # as if it were what the drafter serves
    with pytest.raises(EyasError, match="logits"):
        rescore(folder, drafter, spoilt, frozen, "float32")


def test_unlike_engines_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A drafter whose own arithmetic strays from the engines' is never exported."""
    drafter, frozen = make()
    monkeypatch.setattr(Eagle3Drafter, "rope", lambda self, heads, positions: heads)
    with pytest.raises(EyasError, match="an engine's logits would differ"):
        export(drafter, frozen, tmp_path / "out", About("t"), dtype="float32")
    assert list(tmp_path.iterdir()) == []


# --- the command and its card -------------------------------------------------------------------------------


def test_command_exports_the_given_checkpoint(tmp_path: Path) -> None:
    target = tiny_target(tmp_path / "target", hidden=32, vocab=272)
    frozen = random_frozen(hidden_size=32, vocab_size=272, head_dim=8, num_hidden_layers=4)
    drafter, _ = make(draft=64, taps=(1, 2, 3), frozen=frozen)
    (tmp_path / "checkpoint").mkdir()
    save_drafter(drafter, tmp_path / "checkpoint")
    cfg = Config(name="run", output_dir=str(tmp_path / "run"), drafter_path=str(tmp_path / "checkpoint"))
    cfg.target.path, cfg.export.dtype = str(target), "float32"
    folder = run_export(cfg)
    assert folder == tmp_path / "run" / "export"
    read = check_export(folder, serve(drafter, load_frozen(target)))
    assert all(torch.equal(t, drafter.state_dict()[n]) for n, t in read.state_dict().items())
    cfg.drafter_path, cfg.export.dir = str(folder), str(tmp_path / "again")
    assert run_export(cfg) == tmp_path / "again"
    card = tmp_path / "again" / "README.md"
    for measured, told in ((folder, True), (tmp_path / "checkpoint", False)):  # of another drafter: not on the card
        report = measured_report(str(measured))
        report["settings"]["target"] = str(target)
        (tmp_path / "run" / "report.json").write_text(json.dumps(report))
        run_export(cfg)
        assert (f"| tau | {report['runs'][0]['acceptance']['tau']:.3f} |" in card.read_text()) is told
    (tmp_path / "run" / "report.json").write_text("[]")
    with pytest.raises(EyasError, match="not a report"):
        run_export(cfg)
    cfg.drafter_path = None
    with pytest.raises(EyasError, match="no checkpoint to export"):
        run_export(cfg)


def measured_report(path: str) -> dict[str, Any]:
    """Of three drafters, the trained one loaded from ``path``, at two temperatures."""
    report, _ = Faker(questions=4).build()
    report["drafters"][0]["path"] = path
    return report


def test_card_states_switches_and_commands(tmp_path: Path) -> None:
    drafter, frozen = make()
    whole = measured_report(str(tmp_path))
    whole["definition"] = "a | b"
    whole["drafters"][0]["levels"] = 5
    report = of_drafter(whole, tmp_path)
    assert report is not None
    export(drafter, frozen, tmp_path / "out", About("acme/target", report=report, data="chats.json"))
    card = (tmp_path / "out" / "README.md").read_text()
    taus = " | ".join(f"{run['acceptance']['tau']:.3f}" for run in whole["runs"][:2])
    for line in (
        "| definition | a \\| b |",
        "| tree measured | dynamic tree of 30, 5 deep |",
        "| max_new_tokens | 64 |",
        "| temperatures | 0 1 |",
        "|  | T = 0 | T = 1 |",
        f"| tau | {taus} |",
        "| drafts | top | sampled, without replacement |",
        "| training data | chats.json |",
        "| draft vocabulary | 12 of 40 tokens |",
        f"--speculative-draft-model-path {tmp_path / 'out'} --speculative-num-steps 5 --speculative-eagle-topk 1 "
        "--speculative-num-draft-tokens 6",
        f"""vllm serve acme/target --speculative-config '{{"method": "eagle3", "model": "{tmp_path / "out"}", """
        """"num_speculative_tokens": 5}'""",
    ):
        assert line in card
    export(drafter, frozen, tmp_path / "out", About("acme/target"))
    assert "Not measured" in (tmp_path / "out" / "README.md").read_text()


def test_a_report_is_narrowed_to_the_exported_drafter(tmp_path: Path) -> None:
    whole = measured_report(str(tmp_path / "a"))
    found = of_drafter(whole, tmp_path / "b" / ".." / "a")
    assert found is not None and [d["name"] for d in found["drafters"]] == ["eagle3-smollm2"]
    assert [(run["drafter"], run["temperature"]) for run in found["runs"]] == [
        ("eagle3-smollm2", t) for t in (0.0, 1.0)
    ]
    assert of_drafter(whole, tmp_path) is None
    assert of_drafter(whole, Path(whole["drafters"][1]["path"])) is None  # a draft model, not a drafter of ours
    with pytest.raises(ValueError, match="version 1"):
        of_drafter(whole | {"version": 1}, tmp_path)
    with pytest.raises(KeyError):
        of_drafter({"settings": {"drafter": "x"}, "runs": []}, tmp_path)


def test_a_single_tap_is_not_for_sglang(tmp_path: Path) -> None:
    drafter, frozen = make(taps=(5,))
    export(drafter, frozen, tmp_path / "out", About("t"))
    card = (tmp_path / "out" / "README.md").read_text()
    assert "SGLang can't serve" in card and "sglang.launch_server" not in card


def test_acceptance_length_from_engine_counters(tmp_path: Path) -> None:
    counters = {"drafts": 8, "draft_tokens": 16, "accepted_tokens": 6, "accepted_tokens_per_pos": [4, 2]}
    found = summary(counters)
    assert found["acceptance_length"] == 1.75
    assert found["rate_per_position"] == [0.5, 0.25]
    (tmp_path / "p.jsonl").write_text('[1, 2]\n\n{"prompt_ids": [3]}\n')
    assert read_prompts(tmp_path / "p.jsonl") == [[1, 2], [3]]


def test_training_ends_well_where_no_engine_drafts_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(cfg: Config) -> Path:
        raise NotServed("a Heads has no serving layout: no engine drafts with it")

    monkeypatch.setattr("scripts.export.run_export", refuse)
    (tmp_path / "state.json").write_text('{"files": {"model.safetensors": "0"}}')
    cfg = Config(name="run", output_dir=str(tmp_path))
    with caplog.at_level("WARNING"):
        train.stages.export(cfg, tmp_path, Fitted(tmp_path, None, 1))
    assert "export: skipped, a Heads has no serving layout" in caplog.text
