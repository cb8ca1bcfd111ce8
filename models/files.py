"""Writing files that a killed process can't leave half done: temporary name, fsync, rename. The only place for it."""

from __future__ import annotations

import os
from pathlib import Path


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
    temporary.write_bytes(content.encode() if isinstance(content, str) else content)
    sync(temporary)
    publish(temporary, path)
