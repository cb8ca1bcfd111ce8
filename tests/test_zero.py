"""ZeRO in one process: the trainer's steps, its checkpoints and what goes on from them are those of plain AdamW.

What several processes share out is tested with real ones, in tests/test_strategies.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from conf.schema import Config, JointConfig, StrategyConfig
from models.errors import EyasError
from tests import test_joint_training, test_trainer
from tests.tiny import tiny_target
from train.trainer import Fitted

STEPS = 6
ORDER = ("none", "zero1", "zero2", "zero3")


def config(strategy: str, **train: Any) -> Config:
    cfg = test_trainer.config(steps=STEPS, save_every=1, eval_every=2, keep_last=9, save_minutes=0.0, **train)
    cfg.strategy = StrategyConfig(name=strategy)
    return cfg


def tensors(run: Path, step: int) -> dict[str, torch.Tensor]:
    folder = run / f"checkpoints/step_{step:08d}"
    found: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        found |= {f"{path.name}: {name}": tensor for name, tensor in load_file(path).items()}
    return found


def assert_close(run: Path, other: Path, step: int, tolerance: float) -> None:
    """Weights and optimizer state: the same names, shapes and, within the tolerance, numbers."""
    found, want = tensors(run, step), tensors(other, step)
    assert found.keys() == want.keys()
    for name, tensor in want.items():
        torch.testing.assert_close(found[name], tensor, rtol=tolerance, atol=tolerance, msg=f"{name}: {{}}".format)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("plain")
    test_trainer.fit(run, config("none"))
    return run


@pytest.mark.parametrize("strategy", ORDER[1:])
def test_a_run_is_that_of_plain_adamw(tmp_path: Path, plain: Path, strategy: str) -> None:
    test_trainer.fit(tmp_path, config(strategy))
    for step in (1, STEPS):
        assert_close(tmp_path, plain, step, 1e-6)


@pytest.mark.parametrize("turn", [1, 3])
def test_another_strategy_goes_on_with_a_checkpoint(
    tmp_path: Path, plain: Path, monkeypatch: pytest.MonkeyPatch, turn: int
) -> None:
    """A step each under none, zero1, zero2, zero3 and again, or the other way round."""

    class Enough(Exception):
        pass

    for step in range(STEPS):
        trainer = test_trainer.make(tmp_path, config(ORDER[turn * step % 4]))
        train_step = trainer._train_step
        begun: list[int] = []

        def one(number: int, begun: list[int] = begun, train_step: Any = train_step) -> None:
            if begun:
                raise Enough
            begun.append(number)
            train_step(number)

        monkeypatch.setattr(trainer, "_train_step", one)
        if step < STEPS - 1:
            with pytest.raises(Enough):
                trainer.fit()
        else:
            trainer.fit()
        assert begun == [step]
    assert_close(tmp_path, plain, STEPS, 1e-6)


@pytest.mark.parametrize("strategy", ["zero2", "zero3"])
@pytest.mark.parametrize("backbone", ["lora", "full"])
def test_a_target_that_joins_in_later(tmp_path: Path, strategy: str, backbone: str) -> None:
    """Medusa-2's two stages: the target's own moments begin with the second one, whatever its gradients were before.
    Activations are made again under ZeRO, where weights may be gone by then."""
    folder = tiny_target(tmp_path / "target", "llama", layers=3)

    def fit(name: str) -> Fitted:
        cfg = test_joint_training.config(
            JointConfig(backbone=backbone, warmup=2, lr=1e-3, rank=4), steps=5, save_every=1
        )
        cfg.train.keep_last = 9
        cfg.strategy = StrategyConfig(name=name)
        cfg.train.recompute = name != "none"
        return test_joint_training.make(folder, tmp_path / name, cfg).fit()

    fit("none")
    fit(strategy)
    for step in (2, 3, 5):
        assert_close(tmp_path / strategy, tmp_path / "none", step, 2e-5)
    early = [name for name in tensors(tmp_path / strategy, 2) if "backbone" in name and "exp_avg" in name]
    late = [name for name in tensors(tmp_path / strategy, 3) if "backbone" in name and "exp_avg" in name]
    assert not early and late


def test_products_in_bfloat16_and_weights_in_float32(tmp_path: Path) -> None:
    for strategy in ("none", "zero3"):
        test_trainer.fit(tmp_path / strategy, config(strategy, precision="bf16"))
    assert_close(tmp_path / "zero3", tmp_path / "none", STEPS, 1e-4)
    floats = {tensor.dtype for name, tensor in tensors(tmp_path / "zero3", STEPS).items() if "draft_vocab" not in name}
    assert floats == {torch.float32}


def test_a_key_that_deepspeed_does_not_know_is_told_before_any_work(tmp_path: Path) -> None:
    from train.strategy import build_accelerator
    from train.zero import check_engine

    (tmp_path / "own.json").write_text('{"zero_optimization": {"reduce_bucket_sise": 5}}')
    strategy = StrategyConfig(name="zero2", deepspeed=str(tmp_path / "own.json"))
    with pytest.raises(EyasError, match=r"own\.json: DeepSpeed refuses it: (.|\n)*reduce_bucket_sise"):
        check_engine(strategy, config("zero2").optim, build_accelerator("cpu"))
