"""The configuration a run was begun with (config.yaml), and what may differ when it goes on."""

from __future__ import annotations

import logging
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml

from conf.schema import Config
from models.errors import EyasError
from models.files import write_atomic
from models.run_folder import CONFIG

# Keys, or sections, that change no weight: where things lie, how they are shown, how the work is cut up.
# Those of target and data are proven by content instead: the digests of a checkpoint's state.
HARMLESS = (
    "name", "output_dir", "device", "threads", "features", "drafter_path", "strategy", "tracker", "verify", "export",
    "target.path", "target.revision", "target.chat_template", "target.template_kwargs", "target.trust_remote_code",
    "target.taps", "target.dtype", "data", "store",
    "train.log_every", "train.eval_every", "train.save_every", "train.save_minutes", "train.keep_last", "train.chunk",
    "train.recompute", "train.log_documents",
    "train.tau", "train.tau_prompts", "train.patience",  # where it stops and what is best, not what it learns
)  # fmt: skip

OPEN_SECTIONS = ("drafter",)  # its keys are the options of a class, and may be left out
ABSENT = "not set"

log = logging.getLogger(__name__)


def settle_config(cfg: Config, run_dir: Path, *, begun: bool, write: bool) -> None:
    """Store the configuration of a new run; compare that of one that has ``begun`` (has a checkpoint).

    Differences are shown. Raises EyasError where one would change the result. Only with ``write`` (the main
    process) is anything written.
    """
    path = run_dir / CONFIG
    now = asdict(cfg)
    if not begun or not path.exists():
        if write:
            run_dir.mkdir(parents=True, exist_ok=True)
            write_atomic(path, yaml.safe_dump(_plain(now), sort_keys=False))
        return
    changes = differences(read_config(path), _plain(now))
    fatal = [line for key, line in changes.items() if not _harmless(key)]
    if fatal:
        raise EyasError(
            f"{path}: this run was begun with another configuration, and going on with a new one would give weights "
            "that neither describes:\n  " + "\n  ".join(fatal) + "\nUndo the change, or train under another name="
        )
    for key, line in changes.items() if write else ():
        free = key == "strategy" or key.startswith("strategy.")  # made to be changed
        log.log(logging.INFO if free else logging.WARNING, "differs from %s: %s", path, line)


def read_config(path: Path) -> dict[str, Any]:
    """A stored configuration. Raises EyasError if it is none."""
    try:
        stored = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (ValueError, yaml.YAMLError):
        stored = None
    if not isinstance(stored, dict):
        raise EyasError(
            f"{path}: not the configuration that a run stores, so nothing tells what trained its checkpoints; "
            "restore it, or train under another name="
        )
    return stored


def differences(old: dict[str, Any], new: dict[str, Any]) -> dict[str, str]:
    """Changed keys, each with a line "key: old -> new".

    A fixed key that ``old`` lacks was added by a later version, whose default is what the run had.
    """
    before, after = _flat(_completed(old)), _flat(new)
    pairs = {key: (before.get(key, ABSENT), after.get(key, ABSENT)) for key in {**before, **after}}
    return {key: f"{key}: {was} -> {now}" for key, (was, now) in pairs.items() if was != now}


def _completed(old: dict[str, Any]) -> dict[str, Any]:
    """A stored configuration with the defaults of the fixed keys that it lacks."""
    defaults = _plain(asdict(Config()))
    for key, value in old.items():
        fixed = isinstance(value, dict) and isinstance(defaults.get(key), dict) and key not in OPEN_SECTIONS
        defaults[key] = defaults[key] | value if fixed else value
    return dict(defaults)


def _harmless(key: str) -> bool:
    return any(key == known or key.startswith(f"{known}.") for known in HARMLESS)


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) and value else {f"{prefix}{key}": value}
    return flat


def _plain(value: Any) -> Any:
    """Only what YAML gives back unchanged: dicts, lists and scalars."""
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items()}
    return [_plain(v) for v in value] if isinstance(value, (list, tuple)) else value
