"""Writing files that a killed process can't leave half done, in a folder that one process writes at a time; reading
what may be damaged."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from models.errors import EyasError

if TYPE_CHECKING:
    from torch import Tensor


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file. Raises EyasError if there is none, or something else."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise EyasError(f"{path}: can't be read ({error})") from error
    if not isinstance(found, dict):
        raise EyasError(f"{path}: must hold a JSON object")
    return found


def sync(path: Path) -> None:
    """Make a file's content, or a folder's list of names, durable."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def publish(temporary: Path, path: Path) -> None:
    """Give a whole, synced file its final name and make the name durable."""
    temporary.replace(path)
    sync(path.parent)


def write_atomic(path: Path, content: bytes | str) -> None:
    """Replace a file in one move: a reader sees the old content or the new, never a part. Text is UTF-8."""
    temporary = path.with_name(f".{path.name}.tmp")  # the same every time: a leftover is overwritten
    try:
        temporary.write_bytes(content.encode() if isinstance(content, str) else content)
        sync(temporary)
        publish(temporary, path)
    except BaseException:  # a full disk, or a signal
        temporary.unlink(missing_ok=True)
        raise


def lock(folder: Path, doing: str) -> IO[bytes]:
    """Take the folder (made if need be) for this process, until the file returned is closed or the process ends.

    Raises EyasError if another process has it: it is ``doing`` what this one was to do.
    """
    folder.mkdir(parents=True, exist_ok=True)
    file = (folder / ".lock").open("wb")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        time.sleep(0.1)  # whoever asks if it is held (train/standing.py) holds it for a moment
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            file.close()
            raise EyasError(f"{folder}: another process is {doing}; wait for it or stop it") from error
    except OSError:  # a filesystem without locks: go on without
        pass
    return file


@contextmanager
def turn(path: Path) -> Iterator[None]:
    """Wait until no other process holds this file (made if need be), and hold it meanwhile: one works, others wait."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        with suppress(OSError):  # a filesystem without locks: go on without
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextmanager
def out_of_space(path: Path, advice: str) -> Iterator[None]:
    """Turn "disk full", "over quota" and "file too large" into a message that says how to go on."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        raise EyasError(f"{path}: {os.strerror(error.errno)}. {advice}") from error


def save_tensors(tensors: Mapping[str, Tensor], path: Path, metadata: Mapping[str, str] | None = None) -> None:
    """Write a safetensors file. Raises OSError for what the disk refuses, which safetensors tells in words only."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        save_file(dict(tensors), path, metadata={"format": "pt"} if metadata is None else dict(metadata))
    except SafetensorError as error:
        told = re.search(r"os error (\d+)", str(error))
        if told is None:
            raise
        raise OSError(int(told[1]), os.strerror(int(told[1])), str(path)) from error
