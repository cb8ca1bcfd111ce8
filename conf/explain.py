"""What went wrong, in the user's words: configuration mistakes as one message that names the key."""

from __future__ import annotations

import difflib
import errno
import re
from collections.abc import Iterable, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, get_args, get_origin, get_type_hints

from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from conf import GROUPS
from conf.schema import Config
from models.errors import EyasError

MISTAKES = (EyasError, HydraException, OmegaConfBaseException)
# What the machine refuses, not what the code gets wrong: those keep their stack trace (a file that is missing, say).
FROM_THE_DISK = frozenset(
    (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO, errno.ESTALE)
    + (errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENAMETOOLONG, errno.ELOOP, errno.EMFILE)
)
FREE = ("data.roles", "data.columns", "target.template_kwargs")  # sections whose keys are the user's own
HELP = "--help lists recipes and keys"


def explain(mistake: BaseException) -> str:
    """The message for an EyasError, or for a mistake that Hydra or OmegaConf found while composing."""
    if isinstance(mistake, EyasError):
        return str(mistake)
    if isinstance(mistake, OverrideParseException):
        return quoting(mistake.override)
    if isinstance(mistake, MissingConfigException) and mistake.options:
        group, _, choice = str(mistake.missing_cfg_file).rpartition("/")
        return f"{group}={choice}: there is no such choice; there are {', '.join(mistake.options)}"
    ambiguous = re.match(r"Ambiguous value for argument '(.+?)=(.*)'", str(mistake))
    if ambiguous:
        return several(*ambiguous.groups())
    cause = mistake if isinstance(mistake, OmegaConfBaseException) else mistake.__cause__
    if isinstance(cause, OmegaConfBaseException) and cause.full_key:
        return about_key(cause)
    return f"{str(mistake).strip()} ({HELP})"


def of_the_disk(error: OSError) -> str | None:
    """``FILE: No space left on device``; None for an error that is not the machine's."""
    if error.errno not in FROM_THE_DISK:
        return None
    return f"{error.filename}: {error.strerror}" if error.filename else str(error.strerror)


def check_arguments(overrides: Sequence[str]) -> None:
    """Refuse what Hydra's parser accepts and its composer then trips over."""
    for override in overrides:
        key, _, value = override.partition("=")
        if not key:
            raise EyasError(f"cannot read {override!r}: overrides look like key=value")
        if key in GROUPS and re.fullmatch(r"true|false|null|[\d.+-]*|[{\[].*", value, re.IGNORECASE | re.DOTALL):
            raise EyasError(f"{key}={value}: choose by name; {HELP}")


def about_key(error: OmegaConfBaseException) -> str:
    """``optim.lrr: there is no such key; did you mean optim.lr?`` or the reason why a value does not fit."""
    key = str(error.full_key)
    reason = (error.msg or str(error)).strip().splitlines()[0]
    if "is not in struct" in reason or f"not in '{error.object_type_str}'" in reason:
        siblings = [str(k) for k in error.parent_node] if isinstance(error.parent_node, DictConfig) else []
        return unknown(key, siblings)
    if reason.endswith("is not Optional"):
        reason = "must not be null"
    return f"{key}: {reason}"


def unknown(key: str, siblings: Iterable[str]) -> str:
    """The message for a key that does not exist, with the nearest one of its section, or of any section."""
    section, _, name = key.rpartition(".")
    if section in FREE:
        return f"{key}: a new key here is added with a plus: +{key}=VALUE"
    near = difflib.get_close_matches(name, [*siblings], n=1)
    candidates = [f"{section}.{k}" if section else k for k in near]
    candidates += [k for k in every_key() if k.endswith(f".{name}")]
    candidates += [] if section else difflib.get_close_matches(key, every_key(), n=1)
    hint = f"; did you mean {candidates[0]}?" if candidates else ""
    return f"{key}: there is no such key{hint} ({HELP})"


def quoting(override: str) -> str:
    """An override that Hydra's grammar refuses is nearly always a value that needs its own quotes."""
    key, found, value = override.partition("=")
    if not found or not key:
        return f"cannot read {override!r}: overrides look like key=value ({HELP})"
    if value[:1] in ("[", "{"):
        return f"{key}: cannot read {value!r}; a list or mapping is quoted for the shell alone: '{key}=[a, b]'"
    escaped = value.strip("\"'").replace("\\", "\\\\").replace('"', '\\"')
    return (
        f"{key}: cannot read {value!r}; what has = , : brackets or foreign letters needs quotes: '{key}=\"{escaped}\"'"
    )


def several(key: str, value: str) -> str:
    """Commas mean a sweep to Hydra, and a sweep needs --multirun."""
    return (
        f"{key}: {value!r} is several values: write {key}=[{value}] for a list, '{key}=\"{value}\"' for one text, "
        "or add --multirun to run one after the other"
    )


def text_keys(node: Any = Config, prefix: str = "") -> set[str]:
    """The dotted keys whose value may be a text."""
    hints = get_type_hints(node)
    keys: set[str] = set()
    for item in fields(node):
        kind, key = hints[item.name], f"{prefix}{item.name}"
        if is_dataclass(kind):
            keys |= text_keys(kind, f"{key}.")
        elif kind is Any or str in (kind, *get_args(kind)) and get_origin(kind) not in (list, dict):
            keys.add(key)
    return keys


def every_key(node: Any = Config, prefix: str = "") -> list[str]:
    """Every dotted key of the schema."""
    hints = get_type_hints(node)
    keys: list[str] = []
    for item in fields(node):
        kind = hints[item.name]
        keys += every_key(kind, f"{prefix}{item.name}.") if is_dataclass(kind) else [prefix + item.name]
    return keys
