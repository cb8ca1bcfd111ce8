"""Values of a configuration by their dotted keys: looked up, told about, and paths in them made whole."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from conf import CONF_DIR
from conf.schema import Config
from models.errors import EyasError

NGRAM, MODEL = "ngram", "model:"  # entries of drafter_path that are no folders
PACKAGED = "eyas:"  # data files shipped with the package: eyas:quickstart/train.jsonl
PACKAGED_DIR = CONF_DIR.parent / "data"


def packaged(key: str, path: Any) -> Any:
    """``eyas:quickstart/train.jsonl`` -> that file inside the installed package; lists item by item."""
    if isinstance(path, list):
        return [packaged(key, item) for item in path]
    if isinstance(path, dict):
        return path | {"path": packaged(key, path["path"])}
    if not isinstance(path, str) or not path.startswith(PACKAGED):
        return path
    name = path.removeprefix(PACKAGED)
    shipped = sorted(p.relative_to(PACKAGED_DIR).as_posix() for p in PACKAGED_DIR.rglob("*.jsonl"))
    if name not in shipped:
        raise EyasError(f"{key}={path}: no such packaged file; there are {', '.join(PACKAGED + s for s in shipped)}")
    return str(PACKAGED_DIR / name)


def typed_keys(overrides: Sequence[str]) -> set[str]:
    """The keys named on the command line (``+key=``, ``~key`` and ``++key=`` included)."""
    return {override.partition("=")[0].lstrip("+~") for override in overrides}


def expand(cfg: Config, key: str) -> None:
    """``~/x`` -> that path; shells leave the ``~`` of ``key=~/x`` alone."""
    section, _, name = key.rpartition(".")
    node = value(cfg, section) if section else cfg
    if getattr(node, name) is not None:
        setattr(node, name, str(Path(getattr(node, name)).expanduser()))


def value(cfg: Config, key: str) -> Any:
    node: Any = cfg
    for part in key.split("."):
        node = getattr(node, part)
    return node


def refuse(cfg: Config, key: str, reason: str) -> None:
    raise EyasError(f"{key}={value(cfg, key)}: {reason}")


def drafters(cfg: Config) -> list[str]:
    """The entries of ``drafter_path``; none: this run's own."""
    given = cfg.drafter_path
    return [] if given is None else list(given) if isinstance(given, list) else [given]


def is_folder(entry: str) -> bool:
    """Whether an entry of ``drafter_path`` names a folder: a trained drafter."""
    return entry != NGRAM and not entry.startswith(MODEL)
