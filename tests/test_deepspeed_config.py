"""What DeepSpeed is told: worked out by hand, with and without a file of the user's, and accepted by DeepSpeed."""

from __future__ import annotations

import copy
import json
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from conf.deepspeed import check_accepted, check_installed, deepspeed_config
from conf.schema import OptimConfig, StrategyConfig
from models.errors import EyasError

OPTIM = OptimConfig(lr=2e-4, betas=(0.9, 0.95), weight_decay=0.01, max_grad_norm=0.25)
# The file that transformers documents for ZeRO-3, as users have it lying about
TEMPLATE: dict[str, Any] = {
    "fp16": {"enabled": "auto", "loss_scale": 0, "loss_scale_window": 1000, "initial_scale_power": 16},
    "bf16": {"enabled": "auto"},
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"},
    },
    "scheduler": {
        "type": "WarmupLR",
        "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto"},
    },
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "offload_param": {"device": "none", "pin_memory": True},
        "overlap_comm": True,
        "contiguous_gradients": True,
        "sub_group_size": 1e9,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": 1e4,
        "stage3_gather_16bit_weights_on_model_save": True,
    },
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "steps_per_print": 2000,
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "wall_clock_breakdown": False,
}
ALWAYS = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_accumulation_steps": 1,
    "managed_gradient_accumulation": False,
    "gradient_clipping": 0.25,
    "gradient_allreduce_op": "mean",
    "zero_allow_untested_optimizer": True,
    "zero_force_ds_cpu_optimizer": False,
    "communication_data_type": "fp32",
}


def made(name: str, tmp_path: Path | None = None, content: Any = None, *, offload: bool = False) -> dict[str, Any]:
    """The configuration for 2 processes, with ``content`` as the user's file; DeepSpeed accepts it."""
    strategy = StrategyConfig(name=name, offload=offload)
    if tmp_path is not None:
        strategy.deepspeed = str(tmp_path / "mine.json")
        (tmp_path / "mine.json").write_text(content if isinstance(content, str) else json.dumps(content))
    found = deepspeed_config(strategy, OPTIM, 2)
    check_accepted(copy.deepcopy(found), strategy)
    return found


def with_zero(**keys: Any) -> dict[str, Any]:
    return TEMPLATE | {"zero_optimization": TEMPLATE["zero_optimization"] | keys}


# --- without a file ---


@pytest.mark.parametrize(
    ("name", "offload", "zero"),
    [
        ("zero1", False, {"stage": 1, "overlap_comm": False}),
        ("zero2", False, {"stage": 2, "overlap_comm": True}),
        ("zero3", False, {"stage": 3, "overlap_comm": True}),
        ("zero1", True, {"stage": 1, "overlap_comm": False, "offload_optimizer": {"device": "cpu"}}),
        ("zero2", True, {"stage": 2, "overlap_comm": True, "offload_optimizer": {"device": "cpu"}}),
        (
            "zero3",
            True,
            {
                "stage": 3,
                "overlap_comm": True,
                "offload_optimizer": {"device": "cpu"},
                "offload_param": {"device": "cpu"},
            },
        ),
    ],
)
def test_the_keys_of_eyas_alone_say_all(name: str, offload: bool, zero: dict[str, Any]) -> None:
    """No section for half precision: weights and gradients stay float32. No optimizer: it is given."""
    expected = ALWAYS | {"zero_optimization": {"reduce_bucket_size": 50_000_000} | zero}
    assert made(name, offload=offload) == expected


def test_deepspeed_reads_it_as_it_is_meant() -> None:
    from deepspeed.runtime.config import DeepSpeedConfig

    read = DeepSpeedConfig(made("zero2", offload=True))
    assert (read.zero_optimization_stage, read.zero_config.offload_optimizer.device) == (2, "cpu")
    assert (read.gradient_clipping, read.managed_gradient_accumulation) == (0.25, False)
    assert not (read.float16_config.enabled or read.bfloat16_config.enabled or read.torch_autocast_enabled)
    assert (read.steps_per_print, read.wall_clock_breakdown) == (None, False)  # it prints nothing
    assert read.optimizer_name is None and read.scheduler_name is None
    assert str(read.communication_data_type) == "torch.float32"


# --- with a file ---


def test_the_file_of_another_framework_serves_as_it_is(tmp_path: Path) -> None:
    """Eyas fills in what is left open; the file's own numbers stay; what nobody decides is DeepSpeed's default."""
    zero = dict(TEMPLATE["zero_optimization"]) | {"reduce_bucket_size": 50_000_000}
    del zero["stage3_prefetch_bucket_size"]
    expected = ALWAYS | {"steps_per_print": 2000, "wall_clock_breakdown": False, "zero_optimization": zero}
    assert made("zero3", tmp_path, TEMPLATE) == expected


def test_offload_reaches_into_the_file(tmp_path: Path) -> None:
    content = with_zero(offload_optimizer={"device": "auto", "pin_memory": False}, offload_param=None)
    zero = made("zero3", tmp_path, content, offload=True)["zero_optimization"]
    assert zero["offload_optimizer"] == {"device": "cpu", "pin_memory": False}
    assert zero["offload_param"] == {"device": "cpu"}


def test_values_that_eyas_would_give_may_stand_there(tmp_path: Path) -> None:
    content = {
        "train_batch_size": 2,
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.25,
        "bf16": {"enabled": False},
        "amp": {"enabled": False, "opt_level": "O1"},
        "activation_checkpointing": {"partition_activations": False, "number_checkpoints": None},
        "optimizer": {"type": "AdamW", "params": {"lr": 2e-4, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.01}},
        "zero_optimization": {"stage": 1, "reduce_bucket_size": 1000, "overlap_comm": False},
        "communication_data_type": "bf16",
    }
    expected = ALWAYS | {
        "communication_data_type": "bf16",
        "zero_optimization": {"stage": 1, "reduce_bucket_size": 1000, "overlap_comm": False},
    }
    assert made("zero1", tmp_path, content) == expected
    assert made("zero2", tmp_path, {}) == made("zero2")
    assert made("zero2", tmp_path, "\ufeff{}") == made("zero2")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"train_batch_size": 16}, "train_batch_size=16: train.bins_per_step decides"),
        ({"train_micro_batch_size_per_gpu": 4}, "train_micro_batch_size_per_gpu=4: train.bin_tokens decides"),
        ({"gradient_accumulation_steps": 8}, "gradient_accumulation_steps=8: train.bins_per_step decides"),
        ({"gradient_accumulation_steps": True}, "gradient_accumulation_steps=true: train.bins_per_step decides"),
        ({"managed_gradient_accumulation": True}, "managed_gradient_accumulation=true: train.bins_per_step decides"),
        ({"gradient_clipping": 1.0}, "gradient_clipping=1.0: optim.max_grad_norm decides"),
        ({"zero_allow_untested_optimizer": False}, "zero_allow_untested_optimizer=false: optim.name decides"),
        ({"zero_force_ds_cpu_optimizer": True}, "zero_force_ds_cpu_optimizer=true: optim.name decides"),
        ({"gradient_allreduce_op": "sum"}, 'gradient_allreduce_op="sum": Eyas decides'),
        ({"fp16": {"enabled": True}}, 'fp16={"enabled": true}: train.precision decides'),
        ({"bf16": {"enabled": True}}, 'bf16={"enabled": true}: train.precision decides'),
        ({"amp": {"enabled": True}}, 'amp={"enabled": true}: train.precision decides'),
        ({"torch_autocast": {"enabled": True, "dtype": "bf16"}}, "torch_autocast="),
        ({"activation_checkpointing": {"cpu_checkpointing": True}}, "activation_checkpointing="),
        ({"optimizer": {"type": "Lamb"}}, 'optimizer.type="lamb": optim.name decides'),
        ({"optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}, "optimizer.params.lr=0.001: optim.lr decides"),
        ({"optimizer": {"params": {"betas": [0.9, 0.99]}}}, "optimizer.params.betas=[0.9, 0.99]: optim.betas decides"),
        ({"optimizer": {"params": {"weight_decay": 1}}}, "optimizer.params.weight_decay=1: optim.weight_decay"),
        ({"optimizer": {"params": {"amsgrad": True}}}, "optimizer.params.amsgrad=true: optim.name decides"),
        ({"scheduler": {"type": "OneCycle", "params": {"cycle_min_lr": 0}}}, "scheduler.params.cycle_min_lr=0: optim."),
        ({"zero_optimization": {"stage": 2}}, "zero_optimization.stage=2: strategy.name decides"),
        (
            {"zero_optimization": {"offload_param": {"device": "nvme"}}},
            'zero_optimization.offload_param.device="nvme": strategy.offload decides',
        ),
        ({"zero_optimization": {"offload_optimizer": "cpu"}}, 'offload_optimizer="cpu": strategy.offload decides'),
        ({"zero_optimization": {"offload_optimizer": {"super_offload": True}}}, "super_offload: Eyas can't train"),
        ({"zero_optimization": {"zenflow": {"topk_ratio": 0.1}}}, "zero_optimization.zenflow: Eyas can't train"),
        ({"data_efficiency": {"enabled": True}}, "data_efficiency: Eyas can't train"),
        ({"zero_optimization": True}, "must be an object, with an object for zero_optimization"),
        ([TEMPLATE], "must be an object"),
        ("", "not a JSON file that can be read"),
        ('{"gradient_clipping": 0.25,', "not a JSON file that can be read"),
        ('{"gradient_clipping": 0.25, "gradient_clipping": 0.25}', "a key comes twice: gradient_clipping"),
    ],
)
def test_what_the_file_may_not_say(content: Any, words: str, tmp_path: Path) -> None:
    with pytest.raises(EyasError) as refused:
        made("zero3", tmp_path, content)
    assert str(tmp_path / "mine.json") in str(refused.value) and words in str(refused.value), refused.value


def test_more_that_it_may_not_say_with_some_strategies(tmp_path: Path) -> None:
    with pytest.raises(EyasError, match=r"overlap_comm=true: strategy\.name decides"):
        made("zero1", tmp_path, {"zero_optimization": {"overlap_comm": True}})
    with pytest.raises(EyasError, match=r'offload_optimizer\.device="none": strategy\.offload decides'):
        made("zero2", tmp_path, {"zero_optimization": {"offload_optimizer": {"device": "none"}}}, offload=True)


def test_a_file_that_can_not_be_read_is_named(tmp_path: Path) -> None:
    for path, words in ((tmp_path / "nowhere.json", "No such file"), (tmp_path, "Is a directory")):
        with pytest.raises(EyasError) as refused:
            deepspeed_config(StrategyConfig(name="zero1", deepspeed=str(path)), OPTIM, 1)
        assert str(refused.value).startswith(f"strategy.deepspeed={path}: {words}")
    (tmp_path / "latin.json").write_bytes(b'{"a": "\xe9"}')
    with pytest.raises(EyasError, match="not a JSON file"):
        deepspeed_config(StrategyConfig(name="zero1", deepspeed=str(tmp_path / "latin.json")), OPTIM, 1)


@pytest.mark.parametrize(
    "content",
    [
        {"zero_optimization": {"reduce_buckets": 1}},
        {"zero_optimization": {"reduce_bucket_size": "many"}},
        {"elasticity": {"enabled": True}},
        {"communication_data_type": "fp12"},
    ],
)
def test_what_only_deepspeed_knows_to_be_wrong_is_told_too(content: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(EyasError, match=r"strategy\.deepspeed=.*mine\.json: DeepSpeed refuses it: "):
        made("zero2", tmp_path, content)


# --- whether it is there ---


@pytest.mark.parametrize(("version", "words"), [(None, "it is not installed"), ("0.16.4", "0.16.4 is installed")])
def test_deepspeed_that_is_missing_or_too_old(version: str | None, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check_installed()

    def found(name: str) -> str:
        if version is None:
            raise metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr("importlib.metadata.version", found)
    with pytest.raises(EyasError) as refused:
        check_installed()
    assert words in str(refused.value) and "pip install 'eyas[deepspeed]'" in str(refused.value)


def test_a_misspelt_section_is_told(tmp_path: Path) -> None:
    """DeepSpeed would overlook it."""
    path = tmp_path / "own.json"
    path.write_text('{"zero_optimisation": {"stage": 2}}')
    with pytest.raises(EyasError, match="zero_optimisation: DeepSpeed has no such key; did you mean zero_optimization"):
        deepspeed_config(StrategyConfig(name="zero2", deepspeed=str(path)), OptimConfig(), 1)
