"""Shapes of draft trees: which nodes a proposer drafts, level by level, for several sequences at once.

A static tree is a list of paths of ranks: [1, 0] is the first choice after the root's second choice (the notation of
Medusa, arXiv:2401.10774, and EAGLE, arXiv:2401.15077). A chain is one. The dynamic tree of EAGLE-2 (arXiv:2406.16858)
grows where the drafter is sure of itself.

**Trimming.** Levels beyond the drafter's max_depth, or beyond what a sequence has room for, are left out. So are
nodes of a rank that the draft vocabulary does not have, with everything below them.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
import yaml
from torch import Tensor

from conf import CONF_DIR
from eval.drafts.draws import Draws, Level, Start
from eval.drafts.dynamic_tree import DynamicTree
from eval.drafts.tree import ROOT, DraftTree, Drawn
from models.errors import EyasError
from models.files import write_atomic

__all__ = [
    "AdaptiveDepth",
    "DynamicTree",
    "Shape",
    "StaticTree",
    "chain",
    "classic",
    "fit",
    "read_tree",
    "save_tree",
]

A_TREE = "a list of paths of ranks such as [[0], [1], [0, 0]]"
SHOWN = 60  # characters of a wrong entry

Ranks = tuple[int, ...]  # of the nodes from the root's child down to a node

log = logging.getLogger(__name__)


class Shape(Protocol):
    """levels: of the deepest tree; nodes: drafted tokens of the largest; fixed: whether drafts are a point mass at
    T > 0 too, however ``draws`` are set."""

    @property
    def levels(self) -> int: ...

    @property
    def nodes(self) -> int: ...

    @property
    def fixed(self) -> bool: ...

    def trimmed(self, max_depth: int | None, vocab: int) -> tuple[Shape, int]:
        """The shape for a drafter of so many levels (None: any) and draft tokens, and how many nodes it loses."""
        ...

    def draft(self, start: Start, draws: Draws) -> list[DraftTree]:
        """One tree per sequence. Those of a sequence don't depend on the others."""
        ...


def fit(shape: Shape, name: str, max_depth: int | None, vocab: int) -> Shape:
    """The shape trimmed to a drafter, with a warning if that takes something away; ``name``: what to call it."""
    fitted, dropped = shape.trimmed(max_depth, vocab)
    if dropped:
        log.warning("%s: %d nodes are left out, the drafter has %s", name, dropped, reach(max_depth, vocab))
    return fitted


def reach(max_depth: int | None, vocab: int) -> str:
    """What a drafter can draft, in words."""
    levels = "" if max_depth is None else f"{max_depth} level{'s' * (max_depth != 1)} and "
    return f"{levels}{vocab} tokens"


class Step(NamedTuple):
    """One level of a static tree. start: number of its first node; parents: the nodes that its nodes continue;
    ranks: those of the children of each parent."""

    start: int
    parents: tuple[int, ...]
    ranks: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class StaticTree:
    """The same tree in every pass. paths: by level, in each level in lexical order (see :meth:`of_paths`).

    Fixed drafts are the tokens of the ranks that the paths name. Drawn ones are a node's draws in order: there a rank
    says only which sibling comes first. A sibling drawn twice is drafted twice, each with its own continuation.
    """

    paths: tuple[Ranks, ...]

    @classmethod
    def of_paths(cls, paths: Iterable[Sequence[int]]) -> StaticTree:
        """Every prefix of a path is a path too. Raises EyasError that names the entry, counted from 1."""
        numbers: dict[Ranks, int] = {}
        for number, entry in enumerate(paths, 1):
            if not isinstance(entry, (list, tuple)) or not entry:
                raise EyasError(f"{_named(number, entry)}: must be a list of ranks such as [0, 1]")
            if any(not isinstance(rank, int) or isinstance(rank, bool) or rank < 0 for rank in entry):
                raise EyasError(f"{_named(number, entry)}: ranks are whole numbers, 0 for the likeliest token")
            if (path := tuple(entry)) in numbers:
                raise EyasError(f"{_named(number, entry)}: the same as entry {numbers[path]}")
            numbers[path] = number
        for path, number in numbers.items():
            if len(path) > 1 and path[:-1] not in numbers:
                raise EyasError(f"{_named(number, list(path))}: its parent {_shown(list(path[:-1]))} is missing")
        if not numbers:
            raise EyasError("a tree needs at least one path")
        return cls(tuple(sorted(numbers, key=lambda path: (len(path), path))))

    @property
    def levels(self) -> int:
        return len(self.paths[-1])

    @property
    def nodes(self) -> int:
        return len(self.paths)

    @property
    def fixed(self) -> bool:
        return False

    def trimmed(self, max_depth: int | None, vocab: int) -> tuple[StaticTree, int]:
        deepest = self.levels if max_depth is None else max_depth
        kept = tuple(path for path in self.paths if len(path) <= deepest and max(path) < vocab)
        if not kept:
            raise EyasError(f"verify.tree: none of its nodes can be drafted, the drafter has {reach(max_depth, vocab)}")
        return StaticTree(kept), len(self.paths) - len(kept)

    @cached_property
    def parents(self) -> tuple[int, ...]:
        numbers = {(): ROOT, **{path: number for number, path in enumerate(self.paths)}}
        return tuple(numbers[path[:-1]] for path in self.paths)

    @cached_property
    def lines(self) -> dict[int, tuple[int, ...]]:
        """The nodes from the root's child down to each node, that included; none for ROOT."""
        lines: dict[int, tuple[int, ...]] = {ROOT: ()}
        for node, parent in enumerate(self.parents):
            lines[node] = (*lines[parent], node)
        return lines

    @cached_property
    def steps(self) -> tuple[Step, ...]:
        steps, start = list[Step](), 0
        for depth in range(1, self.levels + 1):
            ranks: dict[int, tuple[int, ...]] = {}
            level = [node for node, path in enumerate(self.paths) if len(path) == depth]
            for node in level:
                ranks[self.parents[node]] = (*ranks.get(self.parents[node], ()), self.paths[node][-1])
            steps.append(Step(start, tuple(ranks), tuple(ranks.values())))
            start += len(level)
        return tuple(steps)

    @cached_property
    def rows(self) -> dict[int, int]:
        """Where the children of each inner node are drawn from: 0 for the root, else 1 + its number of expansion."""
        return {node: row for row, node in enumerate(node for step in self.steps for node in step.parents)}

    def draft(self, start: Start, draws: Draws) -> list[DraftTree]:
        found = [Growing() for _ in start.limits]
        active, logits = list(range(len(found))), start.logits
        for depth, step in enumerate(self.steps, 1):
            uniforms = [start.uniforms[slot] for slot in active for _ in step.parents]
            contexts = self._contexts(start, found, active, step) if draws.needs_context else ()
            level = draws.level(logits, step.ranks * len(active), uniforms, contexts)
            tokens = level.tokens.view(len(active), -1)
            for row, slot in enumerate(active):
                found[slot].add(level, row, len(active), told=draws.needs_context)
            going = [row for row, slot in enumerate(active) if start.limits[slot] > depth]
            if depth == self.levels or not going:
                break
            active = [active[row] for row in going]
            logits = self._expand(start, active, tokens if len(going) == len(tokens) else tokens[going], depth)
        return finished(found, self.parents, tuple(self.rows[parent] for parent in self.parents), draws.kind)

    def _expand(self, start: Start, active: list[int], tokens: Tensor, depth: int) -> Tensor:
        """Draft logits after the inner nodes of a level, whose nodes have ``tokens`` [len(active), n]."""
        first, inner = self.steps[depth - 1].start, self.steps[depth].parents
        columns = [node - first for node in inner]
        parents = [self.rows[self.parents[node]] - 1 for node in inner]
        chosen = tokens if columns == list(range(tokens.shape[1])) else tokens[:, columns]
        slots = [slot for slot in active for _ in inner]
        return start.expand(slots, torch.tensor(parents * len(active)), chosen.flatten(), depth)

    def _contexts(self, start: Start, found: list[Growing], active: list[int], step: Step) -> list[list[int]]:
        """The tokens before each row of a level: the confirmed ones and the parent's path."""
        rows = ((slot, parent) for slot in active for parent in step.parents)
        return [[*start.texts[slot], *(found[slot].told[n] for n in self.lines[parent])] for slot, parent in rows]


def _named(number: int, entry: object) -> str:
    return f"entry {number} ({_shown(entry)})"


def _shown(entry: object) -> str:
    """An entry of a tree file as a message shows it, whatever it is."""
    try:
        text = repr(entry)
    except (ValueError, RecursionError):  # a number of thousands of digits, which YAML can write in hexadecimal
        return "too long to show"
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."


def chain(gamma: int) -> StaticTree:
    """``gamma`` tokens, one after the other."""
    if gamma < 1:
        raise EyasError(f"verify.gamma={gamma}: must be at least 1")
    return StaticTree(tuple((0,) * depth for depth in range(1, gamma + 1)))


@dataclass
class Growing:
    """What has been drafted for one sequence; told: the same tokens on the host, where processors read them."""

    tokens: list[Tensor] = field(default_factory=list)
    q: list[Tensor] = field(default_factory=list)
    real: list[Tensor] = field(default_factory=list)
    told: list[int] = field(default_factory=list)

    def add(self, level: Level, row: int, rows: int, *, told: bool) -> None:
        """Take this sequence's part, the ``row``-th of ``rows`` equal ones."""
        tokens, q, real = (None if part is None else part.unflatten(0, (rows, -1))[row] for part in level)
        assert tokens is not None
        self.tokens.append(tokens)
        self.q += [] if q is None else q.unbind()
        self.real.append(torch.ones_like(tokens, dtype=torch.bool) if real is None else real)
        self.told += tokens.tolist() if told else []


def finished(found: Sequence[Growing], parents: tuple[int, ...], rows: tuple[int, ...], kind: Drawn) -> list[DraftTree]:
    """The trees of what was drafted; ``parents`` and ``rows`` (of q) are those of the whole shape's nodes.

    Draws without replacement that found nothing left are taken out, with all below them. Only where that can happen
    does this wait for the device.
    """
    trees = []
    for one in found:
        tokens = torch.cat(one.tokens)
        size = tokens.numel()
        q_row = rows[:size] if one.q else ()
        trees.append(DraftTree(tokens, parents[:size], (kind,) * size, tuple(one.q), q_row))
    if kind is not Drawn.DISTINCT or all(tree.is_chain for tree in trees):
        return trees
    real = torch.cat([flags for one in found for flags in one.real]).tolist()
    for number, tree in enumerate(trees):
        own, real = real[: len(tree)], real[len(tree) :]
        for node, parent in enumerate(tree.parents):
            own[node] = own[node] and (parent == ROOT or own[parent])
        trees[number] = tree.only([node for node, there in enumerate(own) if there])
    return trees


class AdaptiveDepth:
    """Levels of the next tree from a moving average of what the last passes accepted, for each slot on its own.

    ``levels = min(round(average) + 1, most)``: one more than is accepted on average, so that there is room to find out
    that more would be; never none. The average starts at ``most`` and keeps ``decay`` of itself at every pass.
    """

    def __init__(self, most: int, decay: float = 0.9) -> None:
        self.most, self.decay = most, decay
        self.averages: dict[int, float] = {}

    def begin(self, slot: int) -> None:
        self.averages[slot] = float(self.most)

    def move(self, source: int, to: int) -> None:
        self.averages[to] = self.averages.pop(source)

    def learn(self, slot: int, accepted: int) -> None:
        """``accepted`` drafts of a pass that had some."""
        self.averages[slot] = self.decay * self.averages[slot] + (1 - self.decay) * accepted

    def levels(self, slot: int) -> int:
        return min(math.floor(self.averages[slot] + 0.5) + 1, self.most)


# --- trees by name and in files ------------------------------------------------------------------------------


def classic(name: str) -> StaticTree:
    """A published shape: medusa (63 nodes, 4 levels) or eagle1 (25 nodes, 5 levels), from conf/trees."""
    return read_tree(CONF_DIR / "trees" / f"{name}.json")


def read_tree(file: str | Path) -> StaticTree:
    """A static tree from JSON or YAML: a list of paths, or a mapping with that list under ``paths``.

    Raises EyasError that names ``verify.tree``, the file and the entry.
    """
    path = Path(file)
    try:
        content = _content(path)
        paths = content.get("paths") if isinstance(content, dict) else content
        if not isinstance(paths, list):
            raise EyasError(f"must hold {A_TREE}")
        return StaticTree.of_paths(paths)
    except EyasError as error:
        raise EyasError(f"verify.tree={path}: {error}") from error


def _content(path: Path) -> Any:
    """What a file of JSON or YAML holds. Raises EyasError that says why it can't be read, without its name."""
    is_json = path.suffix == ".json"
    try:
        text = path.read_text(encoding="utf-8-sig")
        if not text.strip():
            raise EyasError(f"the file is empty; it must hold {A_TREE}")
        return json.loads(text) if is_json else yaml.safe_load(text)
    except EyasError:
        raise
    except IsADirectoryError:
        raise EyasError(f"is a folder; give a file that holds {A_TREE}") from None
    except FileNotFoundError:
        raise EyasError(f"no such file (looked in {Path.cwd()})") from None
    except OSError as error:
        raise EyasError(f"cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise EyasError("is not UTF-8 text") from error
    except json.JSONDecodeError as error:
        raise EyasError(f"is not valid JSON: {error.msg} in line {error.lineno}, column {error.colno}") from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f": {getattr(error, 'problem', None)} in line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise EyasError(f"is not valid YAML{where}") from error
    except RecursionError as error:
        raise EyasError(f"is nested too deeply; it must hold {A_TREE}") from error
    except (ValueError, LookupError, AttributeError) as error:  # thousands of digits; what YAML makes of bad dates
        raise EyasError(f"holds a value that is no rank; it must hold {A_TREE}") from error


def save_tree(file: str | Path, tree: StaticTree, about: str) -> None:
    """Write a tree that :func:`read_tree` reads, one level a line; ``about``: where it comes from."""
    levels = [[list(p) for p in tree.paths if len(p) == depth] for depth in range(1, tree.levels + 1)]
    lines = ",\n".join("    " + json.dumps(level)[1:-1] for level in levels)
    write_atomic(Path(file), f'{{\n  "about": {json.dumps(about)},\n  "paths": [\n{lines}\n  ]\n}}\n')
