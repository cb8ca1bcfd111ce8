"""Whether two finished runs are the same: weights, optimizer state, metrics, documents, report, export and files.

For scripts/survive.py and tests: each run lies in ``outputs/NAME`` of a working directory of its own, with its store.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from safetensors.torch import load_file

from models.run_folder import BEST, REPORT, STATE, latest_checkpoint, read_notes

EXACT = 0.0
METRICS, GENERATIONS = "metrics.jsonl", "generations.jsonl"
DOCUMENTS = "documents"  # of a run: which of them went into which bin
CLOCK = frozenset(
    {"seconds", "tokens_per_s", "speed", "cost", "cost_model"}
)  # how long things took, in rows and reports
PLACE = frozenset({"path"})
COUNTED = frozenset({"accuracy", "tau_t0"})  # in rows of metrics: jump where two tokens are nearly as likely
PASSING = (".tmp", ".part", ".old", "-old")  # in names of what a process means to rename or remove
KEPT = (".lock", ".verified.json")  # names that begin or end so stay on purpose


class Comparison(NamedTuple):
    """``largest``: of the differences between tensors; ``wrong``: what must not differ and does, in words."""

    largest: float
    wrong: list[str]


def compare_runs(whole: Path, other: Path, name: str, tolerance: float = EXACT) -> Comparison:
    """The run ``outputs/name`` of the working directory ``other`` against that of ``whole``.

    tolerance: of every number in weights, optimizer state and export, absolutely; of those in metrics and report,
    relatively. With EXACT the files of weights must be the same byte for byte.
    """
    runs = [folder / "outputs" / name for folder in (whole, other)]
    wrong = [*left_behind(other), *files_differ(whole, other), *repeated(runs[1])]
    first, second = (latest_checkpoint(run) for run in runs)
    if first is None or second is None or first.name != second.name:
        return Comparison(math.inf, [*wrong, f"the last whole checkpoints are {first} and {second}"])
    largest = 0.0
    for file in sorted([*first.glob("*.safetensors"), *(runs[0] / "export").rglob("*.safetensors")]):
        found = runs[1] / file.relative_to(runs[0])
        if found.exists():  # otherwise told already
            difference = tensors_differ(file, found)
            largest = max(largest, difference)
            if difference > tolerance or (not tolerance and file.read_bytes() != found.read_bytes()):
                wrong.append(f"{found.relative_to(other)}: differs by {difference:.1e}")
    counted = COUNTED if tolerance else frozenset[str]()
    both: dict[str, list[Any]] = {
        STATE: [facts(read_notes(end / STATE), frozenset({"files"})) for end in (first, second)],
        **{file: [facts(read_notes(run / file)) for run in runs] for file in (BEST, REPORT, "export/config.json")},
        METRICS: [facts(rows_of(run / METRICS), counted) for run in runs],
        GENERATIONS: [rows_of(run / GENERATIONS) for run in runs],
        DOCUMENTS: [bins_of(run / DOCUMENTS) for run in runs],
    }
    for what, (one, two) in both.items():
        wrong += [f"{what}: {told}" for told in values_differ(one, two, tolerance)][:3]
    return Comparison(largest, wrong)


def tensors_differ(a: Path, b: Path) -> float:
    """The largest absolute difference between two files of tensors; infinite where names or shapes differ."""
    first, second = load_file(a), load_file(b)
    if {n: t.shape for n, t in first.items()} != {n: t.shape for n, t in second.items()}:
        return math.inf
    return max((float((t.double() - second[n].double()).abs().max()) for n, t in first.items() if t.numel()), default=0)


def values_differ(a: Any, b: Any, tolerance: float, where: str = "") -> Iterator[str]:
    """Where two JSON values differ; numbers may by ``tolerance``, relatively (near zero absolutely)."""
    if isinstance(a, dict) and isinstance(b, dict) and a.keys() == b.keys():
        for key in a:
            yield from values_differ(a[key], b[key], tolerance, f"{where}.{key}")
    elif isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        for i, (one, two) in enumerate(zip(a, b, strict=True)):
            yield from values_differ(one, two, tolerance, f"{where}[{i}]")
    elif isinstance(a, float) and isinstance(b, float) and math.isclose(a, b, rel_tol=tolerance, abs_tol=tolerance):
        pass
    elif a != b:
        yield f"{where} is {str(b)[:80]} instead of {str(a)[:80]}"


def facts(value: Any, drop: frozenset[str] = frozenset()) -> Any:
    """A JSON value without what two runs never share: the time they took and the place they lie in."""
    if isinstance(value, list):
        return [facts(item, drop) for item in value]
    if isinstance(value, dict):
        return {k: facts(v, drop) for k, v in value.items() if k not in CLOCK | PLACE | drop}
    return value


def rows_of(path: Path) -> list[Any]:
    """The rows of a file of JSON lines, each of which must be whole. Raises ValueError otherwise."""
    return [facts(json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


def bins_of(folder: Path) -> dict[str, list[Any]]:
    """The documents of each bin by "step/bin", whichever process had it."""
    rows = (row for file in sorted(folder.glob("*.jsonl")) for row in rows_of(file))
    found = {f"{row['step']:06d}/{row['bin']:03d}": row["documents"] for row in rows}
    return dict(sorted(found.items()))


def repeated(run: Path) -> list[str]:
    """Rows of metrics and bins of documents that a run holds more than once."""
    rows = Counter(f"{row['kind']} row of step {row['step']}" for row in rows_of(run / "metrics.jsonl"))
    files = (run / DOCUMENTS).glob("*.jsonl")
    rows |= Counter(f"bin {row['bin']} of step {row['step']}" for file in files for row in rows_of(file))
    return [f"{what}: {times} times" for what, times in rows.items() if times > 1][:3]


def left_behind(folder: Path) -> list[str]:
    """Names of temporary things: those that no process but the one that made them should ever have seen."""
    names = (path for path in folder.rglob("*") if not (path.name.startswith(KEPT) or path.name.endswith(KEPT)))
    stray = [path for path in names if path.name.startswith(".") or any(mark in path.name for mark in PASSING)]
    return [f"left behind: {path.relative_to(folder)}" for path in sorted(stray)]


def files_differ(whole: Path, other: Path) -> list[str]:
    """Files of one working directory that the other lacks. Shards of features, and files of the documents' log, are as
    many as there were processes."""

    def names(folder: Path) -> set[str]:
        found = (path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
        apart = (path for path in found if not path.name.endswith(KEPT) and path.parent.name != DOCUMENTS)
        return {str(path) for path in apart if not path.match("shard-*.safetensors")}

    first, second = names(whole), names(other)
    return [f"lacks {name}" for name in sorted(first - second)] + [f"has {name} too" for name in sorted(second - first)]
