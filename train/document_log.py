"""``train.log_documents``: proof of what a run has read, whatever was killed and on however many processes it went on.

    RUN/documents/rank00000.jsonl    {"step", "bin", "world", "documents"}: a line for each packed forward that counted

A resumed run drops the rows of the steps that it will do again, so that a finished run has read each bin of each step
exactly once: what :func:`read_documents` proves.
"""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypedDict

from models.errors import EyasError
from models.files import write_atomic

FOLDER = "documents"
FILES = "rank*.jsonl"


class Row(TypedDict):
    """One packed forward. step: counts from 0; bin: its number in the step; world: processes there were then."""

    step: int
    bin: int
    world: int
    documents: list[str]


class DocumentLog:
    """The rows of one process. Open it after :func:`rewind` has gone through the files of all processes."""

    def __init__(self, run_dir: Path, rank: int, world: int) -> None:
        folder = run_dir / FOLDER
        folder.mkdir(parents=True, exist_ok=True)
        self.world = world
        self._file = (folder / f"rank{rank:05d}.jsonl").open("a", encoding="utf-8")

    def write(self, step: int, number: int, documents: Sequence[str]) -> None:
        """Note bin ``number`` of ``step`` with the sources of its documents, out of reach of a SIGKILL.

        Called before the gradients of the step are summed over processes: a step that any process has finished is
        then in the files of all.
        """
        row = Row(step=step, bin=number, world=self.world, documents=list(documents))
        self._file.write(json.dumps(row) + "\n")
        self._file.flush()

    def sync(self) -> None:
        """Put all rows on disk: every process does, before a checkpoint that counts on them."""
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self.sync()
        self._file.close()


def rewind(run_dir: Path, step: int) -> None:
    """Drop the rows of ``step`` and later, and lines that a killed process did not finish, from every process's file.

    For one process, before any opens its file; processes that no longer take part have files too.
    """
    for path in files(run_dir):
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
        kept = [line for i, line in enumerate(lines) if _stays(parse(line), step, last=i == len(lines) - 1)]
        if kept != lines or not path.read_bytes().endswith(b"\n"):
            write_atomic(path, "".join(line + "\n" for line in kept))


def read_documents(run_dir: Path) -> dict[int, list[tuple[int, list[str]]]]:
    """The bins of every step, both in order: ``{step: [(bin, sources of its documents), ...]}``.

    Raises EyasError, naming file and line, where a bin was read twice or a line can't be read (that which is being
    written is passed over).
    """
    found: dict[int, dict[int, list[str]]] = defaultdict(dict)
    for path in files(run_dir):
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
        for number, line in enumerate(lines, 1):
            row = parse(line)
            if row is None:
                if number == len(lines) and not line.endswith("\n"):
                    continue
                raise EyasError(f"{path}, line {number}: can't be read")
            step, bins = row["step"], found[row["step"]]
            if row["bin"] in bins:
                raise EyasError(f"{path}, line {number}: step {step}, bin {row['bin']} was read before")
            bins[row["bin"]] = row["documents"]
    return {step: sorted(bins.items()) for step, bins in sorted(found.items())}


def files(run_dir: Path) -> list[Path]:
    return sorted((run_dir / FOLDER).glob(FILES))


def parse(line: str) -> Row | None:
    """The row of a line; None if it is none."""
    try:
        row: Any = json.loads(line)
    except ValueError:
        return None
    whole = isinstance(row, dict) and all(type(row.get(key)) is int for key in ("step", "bin", "world"))
    return Row(**row) if whole and row.keys() == Row.__annotations__.keys() else None  # type: ignore[typeddict-item]


def _stays(row: Row | None, step: int, *, last: bool) -> bool:
    """Damage within a file stays, for the reader to complain of: nothing tells which step it was."""
    return not last if row is None else row["step"] < step
