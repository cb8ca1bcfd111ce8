"""What DeepSpeed is told: Eyas's keys as its configuration, on top of the user's own JSON file if there is one.

Only :func:`check_accepted` imports deepspeed, so a mistake is told before hours of work.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any, NoReturn

from packaging.version import Version

from conf.schema import OptimConfig, StrategyConfig
from models.errors import EyasError

STAGES = {"zero1": 1, "zero2": 2, "zero3": 3}
OLDEST = "0.19.8"  # with managed_gradient_accumulation, which older ones would overlook without a word
AUTO = "auto"  # in a file made for another framework: for that framework to fill in
BUCKET = 50_000_000  # numbers: a buffer of 200 MB, whatever the size of the module (DeepSpeed's default makes it 2 GB)
ADAM_EPS = 1e-8  # torch's, which train/optim.py leaves as it is

ZERO = "zero_optimization"
OFFLOADS = ("offload_optimizer", "offload_param")
# Sections and switches that Eyas leaves off, and what decides in their place
OFF = {
    "fp16": "train.precision",
    "bf16": "train.precision",
    "bfloat16": "train.precision",
    "amp": "train.precision",
    "torch_autocast": "train.precision",
    "activation_checkpointing": "train.recompute",
}
# What would change the module, its batches or its steps behind Eyas's back
UNSUPPORTED = ("compression_training", "data_efficiency", "hybrid_engine", "pipeline", "tensor_parallel", "compile")
KNOWN = (  # keys of DeepSpeed's documentation, by which a misspelt one is known
    *OFF, *UNSUPPORTED, ZERO, "optimizer", "scheduler", "train_batch_size", "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps", "gradient_clipping", "gradient_predivide_factor", "gradient_allreduce_op",
    "prescale_gradients", "communication_data_type", "sparse_gradients", "steps_per_print", "wall_clock_breakdown",
    "dump_state", "memory_breakdown", "flops_profiler", "comms_logger", "tensorboard", "wandb", "csv_monitor",
    "monitor_config", "autotuning", "elasticity", "checkpoint", "data_types", "aio", "timers", "disable_allgather",
    "zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer", "managed_gradient_accumulation", "sparse_attention",
)  # fmt: skip
UNSUPPORTED_ZERO = ("zenflow",)


def deepspeed_config(strategy: StrategyConfig, optim: OptimConfig, world: int) -> dict[str, Any]:
    """The configuration of ``deepspeed.initialize`` for ``world`` processes.

    Weights stay float32 and are exchanged as such; a step takes as many passes as the trainer makes, so the batch sizes
    are a formality. ``strategy.deepspeed`` names a JSON file that is taken as the base: what Eyas decides must be
    absent, "auto" or the same there, other "auto" values become the ones here or DeepSpeed's defaults.

    Raises EyasError, naming file and key, for a file that is missing, damaged or says otherwise.
    """
    stage = STAGES[strategy.name]
    decided, decided_zero = _decided(optim), _decided_zero(stage)
    base: dict[str, Any] = {}
    if strategy.deepspeed is not None:
        file = OwnFile(Path(strategy.deepspeed))
        file.check(decided | {"train_batch_size": (world, "train.bins_per_step")}, decided_zero, optim, strategy)
        base = file.rest()
    zero = {"overlap_comm": stage > 1, "reduce_bucket_size": BUCKET} | base.get(ZERO, {}) | _values(decided_zero)
    for key in OFFLOADS if stage == 3 else OFFLOADS[:1]:
        if strategy.offload:
            zero[key] = (zero.get(key) or {}) | {"device": "cpu"}
    return {"communication_data_type": "fp32"} | base | _values(decided) | {ZERO: zero}


def check_installed() -> None:
    """Raise EyasError unless a DeepSpeed that can do this is installed. Doesn't import it."""
    try:
        found = metadata.version("deepspeed")
    except metadata.PackageNotFoundError:
        found = None
    if found is None or Version(found) < Version(OLDEST):
        which = "it is not installed" if found is None else f"{found} is installed"
        raise EyasError(
            f"strategy: zero1, zero2 and zero3 need DeepSpeed {OLDEST} or newer, and {which}: "
            "pip install 'eyas[deepspeed]'"
        )


def check_accepted(config: Mapping[str, Any], strategy: StrategyConfig) -> None:
    """Raise EyasError if DeepSpeed itself refuses a configuration: a key that it doesn't know, or a value.

    Imports deepspeed, which takes seconds.
    """
    from deepspeed.runtime.config import DeepSpeedConfig

    try:
        DeepSpeedConfig(dict(config))
    except Exception as error:  # of many types: its checks are assertions and those of pydantic
        raise EyasError(f"strategy.deepspeed={strategy.deepspeed}: DeepSpeed refuses it: {error}") from None


Decided = dict[str, tuple[Any, str]]  # key -> value, and what decides it


def _values(decided: Decided) -> dict[str, Any]:
    return {key: value for key, (value, _) in decided.items()}


def _decided(optim: OptimConfig) -> Decided:
    return {
        "train_micro_batch_size_per_gpu": (1, "train.bin_tokens"),
        "gradient_accumulation_steps": (1, "train.bins_per_step"),
        "managed_gradient_accumulation": (False, "train.bins_per_step"),
        "gradient_clipping": (optim.max_grad_norm, "optim.max_grad_norm"),
        "gradient_allreduce_op": ("mean", "Eyas"),
        "zero_allow_untested_optimizer": (True, "optim.name"),
        "zero_force_ds_cpu_optimizer": (False, "optim.name"),
    }


def _decided_zero(stage: int) -> Decided:
    found: Decided = {"stage": (stage, "strategy.name")}
    if stage == 1:  # gradients are reduced once a step, after the last backward pass, with nothing to overlap
        found["overlap_comm"] = (False, "strategy.name")
    return found


class OwnFile:
    """A DeepSpeed JSON file of the user's. Raises EyasError if it can't be read as one."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            content = json.loads(path.read_text(encoding="utf-8-sig"), object_pairs_hook=_without_doubles)
        except OSError as error:
            raise EyasError(f"strategy.deepspeed={path}: {error.strerror} (looked in {Path.cwd()})") from None
        except (ValueError, RecursionError) as error:
            raise EyasError(f"strategy.deepspeed={path}: not a JSON file that can be read: {error}") from None
        if not isinstance(content, dict) or not isinstance(content.get(ZERO, {}), dict):
            raise EyasError(f"strategy.deepspeed={path}: must be an object, with an object for {ZERO} if it has one")
        self.content: dict[str, Any] = content
        self.zero: dict[str, Any] = content.get(ZERO, {})

    def check(self, decided: Decided, zero: Decided, optim: OptimConfig, strategy: StrategyConfig) -> None:
        for key, (value, who) in decided.items():
            self._same(key, self.content.get(key, AUTO), value, who)
        for key, (value, who) in zero.items():
            self._same(f"{ZERO}.{key}", self.zero.get(key, AUTO), value, who)
        for key, who in OFF.items():
            if _asks(self.content.get(key)):
                self._refuse(key, self.content[key], who)
        self._spelling()
        self._optimizer(optim)
        for key, value in _leaves(self.content.get("scheduler", {}), "scheduler"):
            if key != "scheduler.type":  # the name of a template whose numbers are all left open
                self._same(key, value, AUTO, "optim.schedule")
        for section, prefix, keys in ((self.content, "", UNSUPPORTED), (self.zero, f"{ZERO}.", UNSUPPORTED_ZERO)):
            for key in keys:
                if _asks(section.get(key)):
                    raise EyasError(f"{self.path}: {prefix}{key}: Eyas can't train with it; leave it out")
        self._offloads(strategy)

    def _spelling(self) -> None:
        """DeepSpeed overlooks a key that it doesn't know, which is mostly a known one misspelt."""
        for key in self.content:
            near = difflib.get_close_matches(key, KNOWN, n=1, cutoff=0.8)
            if key not in KNOWN and near:
                raise EyasError(f"{self.path}: {key}: DeepSpeed has no such key; did you mean {near[0]}?")

    def rest(self) -> dict[str, Any]:
        """What is left to DeepSpeed: without the sections that Eyas leaves off, and without "auto"."""
        gone = {*OFF, *UNSUPPORTED, "optimizer", "scheduler", "train_batch_size"}
        return _without_auto({key: value for key, value in self.content.items() if key not in gone})

    def _optimizer(self, optim: OptimConfig) -> None:
        section = self.content.get("optimizer", {})
        params = {
            "lr": (optim.lr, "optim.lr"),
            "betas": (list(optim.betas), "optim.betas"),
            "weight_decay": (optim.weight_decay, "optim.weight_decay"),
            "eps": (ADAM_EPS, "optim.name"),
        }
        for key, value in _leaves(section, "optimizer"):
            if key == "optimizer.type":
                self._same(key, str(value).lower(), optim.name, "optim.name")
            else:
                expected, who = params.get(key.removeprefix("optimizer.params."), (AUTO, "optim.name"))
                self._same(key, value, expected, who)

    def _offloads(self, strategy: StrategyConfig) -> None:
        for key in OFFLOADS:
            section = self.zero.get(key) or {}
            if section == AUTO:
                continue
            if not isinstance(section, dict):
                self._refuse(f"{ZERO}.{key}", section, "strategy.offload")
            device = section.get("device", AUTO)
            # Checkpoints are put together from what is in memory, so not from nvme
            if device not in (AUTO, "cpu") and (strategy.offload or device != "none"):
                self._refuse(f"{ZERO}.{key}.device", device, "strategy.offload")
            if section.get("super_offload"):
                raise EyasError(f"{self.path}: {ZERO}.{key}.super_offload: Eyas can't train with it; leave it out")

    def _same(self, key: str, given: Any, value: Any, who: str) -> None:
        alike = given == value and isinstance(given, bool) == isinstance(value, bool)
        if given != AUTO and not alike:
            self._refuse(key, given, who)

    def _refuse(self, key: str, given: Any, who: str) -> NoReturn:
        raise EyasError(f'{self.path}: {key}={json.dumps(given)}: {who} decides this; leave the key out, or "auto"')


def _without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [key for key, _ in pairs]
        raise ValueError(f"a key comes twice: {next(key for key in names if names.count(key) > 1)}")
    return found


def _asks(section: Any) -> bool:
    """Whether a section switches something on: by its ``enabled``, or without one by any value."""
    if isinstance(section, dict) and "enabled" in section:
        return section["enabled"] not in (False, AUTO)
    return any(value and value != AUTO for _, value in _leaves(section, ""))


def _leaves(section: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Values of nested objects, by their dotted keys."""
    if not isinstance(section, dict):
        yield name, section
        return
    for key, value in section.items():
        yield from _leaves(value, f"{name}.{key}")


def _without_auto(section: dict[str, Any]) -> dict[str, Any]:
    kept = {key: _without_auto(value) if isinstance(value, dict) else value for key, value in section.items()}
    return {key: value for key, value in kept.items() if value != AUTO}
