"""Counts what is kept, rejected and repaired. Kept + rejected = rows, always; the names are `data.chats.policy`'s."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TextIO

from data.chats.policy import REJECTS, REPAIRS
from models.files import publish, sync, write_atomic
from models.visible import visible

KEPT = 100_000  # rejected rows held in memory


@dataclass(frozen=True)
class Reject:
    """One row that is not used. ``row`` counts from 1: the line of a JSONL file, the element of an array.

    Texts hold nothing that a terminal obeys, see `models.visible`.
    """

    file: str
    row: int
    id: str
    reason: str
    detail: str


@dataclass
class RejectLog:
    """Counts rows as they pass through reading and encoding; keeps the first rejected row of each reason.

    path: a file to write every rejected row to as they come, one JSON object a line; finished by :meth:`close`.
    Without one the first `KEPT` of them stand in ``rejects``.
    """

    path: Path | None = None
    rows: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    repairs: Counter[str] = field(default_factory=Counter)
    first: dict[str, Reject] = field(default_factory=dict)
    rejects: list[Reject] = field(default_factory=list)
    _file: TextIO | None = field(default=None, repr=False)

    def add(self, file: str, row: int, id: str, reason: str, detail: str = "") -> None:
        assert reason in REJECTS, reason
        # All three are texts of the data or of a file system, and end in terminals, logs and pages.
        file, id, detail = (visible(text, kept="") for text in (file, id, detail[:500]))
        reject = Reject(file, row, id, reason, detail)
        self.reasons[reason] += 1
        self.first.setdefault(reason, reject)
        if self.path is None:
            if len(self.rejects) < KEPT:
                self.rejects.append(reject)
        else:
            if self._file is None:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                self._file = self._temporary.open("w", encoding="utf-8")
            self._file.write(json.dumps(asdict(reject)) + "\n")

    def repair(self, name: str) -> None:
        assert name in REPAIRS, name
        self.repairs[name] += 1

    @property
    def rejected(self) -> int:
        return sum(self.reasons.values())

    @property
    def kept(self) -> int:
        return self.rows - self.rejected

    def counts(self) -> Counter[str]:
        """Rejected rows by reason."""
        return Counter(self.reasons)

    @property
    def _temporary(self) -> Path:
        assert self.path is not None
        return self.path.with_name(f".{self.path.name}.tmp")

    def close(self) -> None:
        """Give the file its name; an empty one says that nothing was rejected."""
        if self.path is None:
            return
        if self._file is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(self.path, "")
            return
        self._file.close()
        self._file = None
        sync(self._temporary)
        publish(self._temporary, self.path)

    def to_json(self) -> dict[str, Any]:
        """Counts, and the first row of each reason; :meth:`from_json` reads it back."""
        return {
            "rows": self.rows,
            "rejected": dict(self.reasons.most_common()),
            "repaired": dict(self.repairs.most_common()),
            "first": {reason: asdict(reject) for reason, reject in self.first.items()},
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> RejectLog:
        first = {reason: Reject(**reject) for reason, reject in value["first"].items()}
        return cls(None, value["rows"], Counter(value["rejected"]), Counter(value["repaired"]), first, [])

    def table(self) -> str:
        """Reasons and repairs with their counts, most frequent first, each with its meaning and first place."""
        lines = [f"{self.kept} of {self.rows} rows usable, {self.rejected} rejected"]
        for reason, count in self.reasons.most_common():
            where = self.first[reason]
            lines.append(f"  {count:>7}  rejected  {reason}: {REJECTS[reason]}")
            detail = f": {where.detail}" if where.detail else ""
            lines.append(f"  {'':>7}            first: {where.file}, row {where.row} (id {where.id!r}){detail}")
        for name, count in self.repairs.most_common():
            lines.append(f"  {count:>7}  repaired  {name}: {REPAIRS[name]}")
        return "\n".join(lines)
