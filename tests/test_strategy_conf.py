"""The keys of strategies: what goes together, what training asks DeepSpeed for, and recipes for many processes."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from omegaconf import OmegaConf

from conf.schema import StrategyConfig
from conf.validate import resolve
from models.errors import EyasError
from tests.commands import config, refusal, workplace  # noqa: F401
from tests.test_conf import debug_recipe


def resolved(arguments: list[str]) -> StrategyConfig:
    cfg = debug_recipe().copy()
    for argument in arguments:
        key, _, text = argument.partition("=")
        OmegaConf.update(cfg, key, yaml.safe_load(text.replace("nan", ".nan")))
    return resolve(cfg, "train", arguments)[0].strategy


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["train.save_minutes=-1"], ["train.save_minutes=-1", "0 or more"]),
        (["train.save_minutes=nan"], ["train.save_minutes=nan"]),
        (["strategy.name=fsdp"], ["strategy.name=fsdp", "none, ddp, zero1, zero2, zero3"]),
        (["strategy.timeout_minutes=0"], ["strategy.timeout_minutes=0", "above 0"]),
        (["strategy.offload=true"], ["strategy.offload=True", "only with strategy=zero1, zero2 or zero3"]),
        (["strategy.name=ddp", "strategy.deepspeed=x.json"], ["strategy.deepspeed=x.json", "only with strategy=zero1"]),
        (["strategy.name=zero1", "optim.name=muon"], ["optim.name=muon", "whole matrices", "strategy=ddp"]),
        (
            ["strategy.name=zero3", "joint.backbone=lora", "train.tau=measured"],
            ["train.tau=measured", "strategy=zero3", "train.tau=simulated"],
        ),
        (
            ["strategy.name=zero3", "joint.backbone=lora", "target.quantize=4bit"],
            ["target.quantize=4bit", "strategy=zero2"],
        ),
    ],
)
def test_impossible_values_and_combinations_name_the_key(arguments: list[str], parts: list[str]) -> None:
    with pytest.raises(EyasError) as refused:
        resolved(arguments)
    assert all(part in str(refused.value) for part in parts), refused.value


@pytest.mark.parametrize(
    "arguments",
    [
        ["strategy.name=ddp", "optim.name=muon"],
        ["strategy.name=zero3", "train.tau=measured"],  # the target stays whole
        ["strategy.name=zero2", "train.tau=measured", "joint.backbone=lora", "strategy.offload=true"],
        ["strategy.name=zero3", "joint.backbone=full", "target.dtype=float32", "train.save_minutes=0"],
        ["strategy.name=zero3", "target.quantize=4bit"],
        ["strategy.name=zero2", "joint.backbone=lora", "target.quantize=4bit"],
    ],
)
def test_what_strategies_can_do(arguments: list[str]) -> None:
    assert resolved(arguments).name == arguments[0].partition("=")[2]


def test_deepspeed_and_its_file_are_asked_for_by_training_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    typed = ("strategy=zero3", 'strategy.deepspeed="~/mine.json"')
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "mine.json").write_text('{"gradient_clipping": 3.0}')
    told = refusal(capsys, *typed)
    assert f"{tmp_path}/mine.json: gradient_clipping=3.0: optim.max_grad_norm decides" in told
    assert config(*typed, job="eval").strategy.deepspeed == f"{tmp_path}/mine.json"
    (tmp_path / "mine.json").write_text('{"train_batch_size": 2}')
    assert "train_batch_size=2: train.bins_per_step decides" in refusal(capsys, *typed)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")  # as the launcher tells each of two processes
    assert config(*typed).strategy == StrategyConfig(name="zero3", deepspeed=f"{tmp_path}/mine.json")


def test_the_batch_of_a_step_does_not_depend_on_the_number_of_gpus() -> None:
    """Recipes for more of them keep its tokens, and so the learning rate, with a bin or more for every GPU."""
    one, eight, sixteen = (
        config(f"conf={name}", "data.path=x") for name in ("eagle3_llama", "eagle3_llama_8gpu", "eagle3_llama_2nodes")
    )
    assert [cfg.train.bins_per_step for cfg in (one, eight, sixteen)] == [8, 8, 16]
    assert {cfg.train.bins_per_step * cfg.train.bin_tokens for cfg in (one, eight, sixteen)} == {65536}
    assert one.optim == eight.optim == sixteen.optim
    assert all(cfg.data.max_length <= cfg.train.bin_tokens for cfg in (one, eight, sixteen))
    assert (sixteen.strategy.name, sixteen.features) == ("ddp", "online")
    joint = config("conf=medusa2_llama_zero3", "data.path=x")
    assert (joint.strategy.name, joint.joint.backbone, joint.target.dtype) == ("zero3", "full", "float32")


def test_processes_without_a_bin_are_told_about(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    for world, told in (
        (8, ""),
        (16, "train.bins_per_step=8 leaves 8 of 16 processes nothing to do; with 16 bins of train.bin_tokens=4096 "),
    ):
        monkeypatch.setenv("RANK", "0")
        monkeypatch.setenv("WORLD_SIZE", str(world))
        config("conf=eagle3_llama", "data.path=x", f"name=on{world}")
        log = (tmp_path / f"outputs/on{world}/train.log").read_text()
        assert told in log and bool(log) == bool(told)
