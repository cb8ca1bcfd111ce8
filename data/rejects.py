"""Counts what is kept, rejected and repaired. Kept + rejected = rows, always; the names are `data.policy`'s."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path

from data.policy import REJECTS, REPAIRS
from models.files import write_atomic


@dataclass(frozen=True)
class Reject:
    """One row that is not used. ``row`` counts from 1: the line of a JSONL file, the element of an array."""

    file: str
    row: int
    id: str
    reason: str
    detail: str


@dataclass
class RejectLog:
    """Counts rows as they pass through reading and encoding."""

    rows: int = 0
    rejects: list[Reject] = field(default_factory=list)
    repairs: Counter[str] = field(default_factory=Counter)

    def add(self, file: str, row: int, id: str, reason: str, detail: str = "") -> None:
        assert reason in REJECTS, reason
        self.rejects.append(Reject(file, row, id, reason, detail[:500]))

    def repair(self, name: str) -> None:
        assert name in REPAIRS, name
        self.repairs[name] += 1

    @property
    def rejected(self) -> int:
        return len(self.rejects)

    @property
    def kept(self) -> int:
        return self.rows - self.rejected

    def counts(self) -> Counter[str]:
        """Rejected rows by reason."""
        return Counter(reject.reason for reject in self.rejects)

    def table(self) -> str:
        """Reasons and repairs with their counts, most frequent first, each with its meaning and first place."""
        first: dict[str, Reject] = {}
        for reject in self.rejects:
            first.setdefault(reject.reason, reject)
        lines = [f"{self.kept} of {self.rows} rows usable, {self.rejected} rejected"]
        for reason, count in self.counts().most_common():
            where = first[reason]
            lines.append(f"  {count:>7}  rejected  {reason}: {REJECTS[reason]}")
            detail = f": {where.detail}" if where.detail else ""
            lines.append(f"  {'':>7}            first: {where.file}, row {where.row} (id {where.id!r}){detail}")
        for name, count in self.repairs.most_common():
            lines.append(f"  {count:>7}  repaired  {name}: {REPAIRS[name]}")
        return "\n".join(lines)

    def write(self, path: Path | str) -> None:
        """Write one JSON object per rejected row, atomically."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, "".join(json.dumps(asdict(reject)) + "\n" for reject in self.rejects))
