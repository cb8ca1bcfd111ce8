"""The keys of joint training, of measured tau and of the losses: refused, noted, and what a resumed run may change."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from conf.rules import OVERLAP_ONLY
from conf.schema import Config, JointConfig
from conf.validate import notes, validate
from data.__main__ import main
from models import objective
from models.eagle3 import Eagle3Drafter
from models.errors import EyasError
from models.tuned import LORA_KEYS
from tests.commands import config, workplace  # noqa: F401
from tests.test_mistakes import whole
from train.drift import settle_config

EAGLE3 = {"_target_": "models.eagle3.Eagle3Drafter"}
LIVE = "a target that is trained along (joint.backbone) runs in the training loop"


def told(**changes: Any) -> list[str]:
    """Notes on a valid configuration whose ``changes`` were all typed."""
    cfg = whole(drafter=EAGLE3, **changes)
    typed = [f"{key.replace('__', '.')}=x" for key in changes]
    validate(cfg, typed)
    return notes(cfg, typed)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"joint__backbone": "adapters"}, "joint.backbone=adapters: must be one of none, lora, full"),
        ({"joint__schedule": "linear"}, "joint.schedule=linear: must be one of constant, sine"),
        ({"joint__weight": -0.1}, "joint.weight=-0.1: must be 0 or more"),
        ({"joint__warmup": -1.0}, "joint.warmup=-1.0: must be 0 or more"),
        ({"joint__lr": 0.0}, "joint.lr=0.0: must be above 0"),
        ({"joint__rank": 0}, "joint.rank=0: must be at least 1"),
        ({"joint__alpha": 0.0}, "joint.alpha=0.0: must be above 0"),
        ({"joint__dropout": 1.0}, "joint.dropout=1.0: must be 0 or more and below 1"),
        ({"joint__backbone": "full", "joint__distill": True}, "joint.distill=True: needs joint.backbone=lora"),
        ({"joint__backbone": "full", "target__quantize": "8bit"}, "target.quantize=8bit: quantized weights"),
        ({"joint__backbone": "full", "target__dtype": "bfloat16"}, "target.dtype=bfloat16: too coarse to train"),
        ({"joint__backbone": "lora", "joint__warmup": 9, "train__steps": 9}, "joint.warmup=9: as long as the whole"),
        ({"target__quantize": "2bit"}, "target.quantize=2bit: must be one of null, 8bit, 4bit"),
        ({"train__loss": "mse"}, "train.loss=mse: must be one of ce, kl, lk, tv, expected_length, nll"),
        ({"train__top_k": -1}, "train.top_k=-1: must be at least 0"),
        ({"train__top_k_weight": 0.0}, "train.top_k_weight=0.0: must be above 0"),
        ({"train__tau": "guessed"}, "train.tau=guessed: must be one of simulated, measured"),
        ({"train__tau_prompts": 0}, "train.tau_prompts=0: must be at least 1"),
        ({"train__patience": 0}, "train.patience=0: must be at least 1"),
        ({"export__layout": "pickle"}, "export.layout=pickle: EAGLE-3 is written as vllm"),
    ],
)
def test_impossible_values_name_their_key(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(EyasError) as refused:
        told(**changes)
    assert str(refused.value).startswith(words), refused.value


def test_possible_ones_pass_without_a_word() -> None:
    lora = {"joint__backbone": "lora", "joint__distill": True, "joint__rank": 8, "target__quantize": "4bit"}
    assert told(**lora, joint__weight=0.0, joint__warmup=8.0, train__steps=9) == []
    assert told(joint__backbone="full", joint__warmup=0.5, joint__lr=1e-4) == []
    assert told(train__tau="measured", train__tau_prompts=2, train__patience=3) == []
    held_out = {"data__valid_fraction": 0.0, "data__valid_path": "v.json"}
    cfg = whole(drafter=EAGLE3, train__patience=3, **held_out)
    assert notes(cfg, ["train.patience=3"]) == []
    assert told(train__loss="nll", train__top_k=10, train__top_k_weight=0.5, export__layout="vllm") == []


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        *(({f"joint__{f.name}": f.default}, "joint.backbone is none") for f in fields(JointConfig)[1:]),
        *(({f"joint__{key}": 1, "joint__backbone": "full"}, "joint.backbone is not lora") for key in ("rank", "alpha")),
        ({"joint__dropout": 0.5, "joint__backbone": "full"}, "joint.backbone is not lora"),
        ({"train__top_k_weight": 0.5}, "train.top_k is 0"),
        ({"train__tau_prompts": 3}, "train.tau is not measured"),
        *(
            ({key: given, "joint__backbone": "lora"}, LIVE)
            for key, given in (("features", "online"), ("store__dir", "x"), ("store__dtype", "float32"))
        ),
        *(
            ({key: given, "data__valid_fraction": 0.0}, "nothing is held out (data.valid_fraction=0)")
            for key, given in (("train__tau", "measured"), ("train__patience", 2))
        ),
    ],
)
def test_keys_without_effect_are_told(changes: dict[str, Any], words: str) -> None:
    key = next(iter(changes)).replace("__", ".")
    assert told(**changes) == [f"{key} has no effect: {words}"]


def test_the_adapters_keys_are_those_that_adapters_read() -> None:
    assert set(LORA_KEYS) <= {f.name for f in fields(JointConfig)}


def test_no_features_are_dumped_for_a_target_that_is_trained_along(monkeypatch: pytest.MonkeyPatch) -> None:
    for backbone, dumped in (("lora", False), ("none", True)):
        typed = ["data", "conf=debug", f"joint.backbone={backbone}", "device=cpu", "preview=0"]
        monkeypatch.setattr(sys, "argv", typed)
        main()
        assert Path("outputs/features").exists() is dumped


# --- losses that see the overlap alone ---


def test_losses_of_the_overlap_want_a_trained_start() -> None:
    assert OVERLAP_ONLY == objective.OVERLAP_ONLY
    for loss in ("tv", "expected_length"):
        (note,) = told(train__loss=loss)
        assert (
            note.startswith(f"train.loss={loss} learns next to nothing from scratch") and "train.init_from=RUN" in note
        )
        assert told(train__loss=loss, train__init_from="outputs/ce") == []
    for loss in ("ce", "kl", "lk", "nll"):
        assert told(train__loss=loss) == []


# --- how deep a method drafts ---


def deep(monkeypatch: pytest.MonkeyPatch, levels: int | None, recursive: bool = False) -> None:
    def own(cls: type, options: Mapping[str, Any]) -> int | None:
        return levels

    monkeypatch.setattr(Eagle3Drafter, "levels", classmethod(own))
    monkeypatch.setattr(Eagle3Drafter, "recursive", recursive)


def test_deeper_drafts_than_training_are_told_unless_the_method_means_to(monkeypatch: pytest.MonkeyPatch) -> None:
    words = "verify.gamma=5 drafts deeper than train.depths=3: the depths beyond are never trained"
    assert told(verify__gamma=5, train__depths=3) == [words]
    deep(monkeypatch, None, recursive=True)
    assert told(verify__gamma=5, train__depths=1) == []
    deep(monkeypatch, 3)  # three heads: the tree is trimmed to them, and all are trained
    assert told(verify__gamma=5, train__depths=3) == []
    deep(monkeypatch, 4)  # the fourth head is used, and was never trained
    assert told(verify__gamma=5, train__depths=3) == [words]


def test_no_deeper_training_than_there_are_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    deep(monkeypatch, 3)
    with pytest.raises(EyasError, match=r"train\.depths=4: deeper than the drafter can draft \(3 levels"):
        told(train__depths=4)


def test_methods_with_a_head_for_each_level_say_so() -> None:
    for recipe, key, levels in (
        ("medusa1_smollm2", "num_heads", 2),
        ("mtp_parallel_smollm2", "num_heads", 3),
        ("mtp_smollm2", "num_modules", 2),
    ):
        with pytest.raises(SystemExit):
            config(f"conf={recipe}", f"drafter.{key}={levels}")
        assert config(f"conf={recipe}", f"drafter.{key}={levels}", f"train.depths={levels}").train.depths == levels
    assert config("conf=mtp_smollm2", "drafter.num_modules=1", "train.depths=7").train.depths == 7  # again and again


def test_a_term_of_the_methods_own_keeps_its_decay() -> None:
    """EAGLE-1's regression counts decay^k at depth k, whatever weighs the objective."""
    for drafter, words in (
        ("eagle3.Eagle3Drafter", ["train.depth_weights is not decay"]),
        ("eagle1.Eagle1Drafter", []),
    ):
        cfg = whole(drafter={"_target_": f"models.{drafter}"}, train__depth_weights="dpace")
        assert notes(cfg, ["train.decay=0.5"]) == [f"train.decay has no effect: {why}" for why in words]


# --- continuing a run ---


def changed(tmp_path: Any, **changes: Any) -> None:
    begun = whole(drafter=EAGLE3)
    settle_config(begun, tmp_path, begun=False, write=True)
    settle_config(whole(drafter=EAGLE3, **changes), tmp_path, begun=True, write=True)


def test_what_a_run_may_change_when_it_goes_on(tmp_path: Any) -> None:
    """What is learned at a step must stay; when the run stops, which step is best and how it is written need not."""
    changed(tmp_path, train__patience=2, train__tau="measured", train__tau_prompts=3, export__layout="vllm")
    weights = {
        "train__loss": "nll",
        "train__top_k": 10,
        "train__top_k_weight": 2.0,
        "joint__backbone": "lora",
        "joint__rank": 8,
        "joint__weight": 0.1,
        "target__quantize": "8bit",
    }
    for key, given in weights.items():
        with pytest.raises(EyasError, match=f"{key.replace('__', '.')}: .* -> {given}"):
            changed(tmp_path, **{key: given})


def test_the_command_line_reaches_the_new_sections() -> None:
    cfg = config(
        "joint.backbone=lora", "joint.lr=1e-4", "joint.distill=true", "target.quantize=8bit", "train.patience=2"
    )
    assert isinstance(cfg, Config)
    assert (cfg.joint.backbone, cfg.joint.lr, cfg.joint.distill, cfg.joint.rank) == ("lora", 1e-4, True, 32)
    assert (cfg.target.quantize, cfg.train.patience, cfg.export.layout, cfg.export.stitch) == ("8bit", 2, None, False)
