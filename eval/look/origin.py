"""How each token of a generation came about, from the passes in a row of generations.jsonl."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

PREFILL, ACCEPTED, BONUS, OWN, UNDRAFTED = "prefill", "accepted", "bonus", "own", "undrafted"


class Origin(NamedTuple):
    """kind: one of the names above; depth: draft depth (0-based) of an accepted draft, of the target's OWN token the
    depth whose drafts were all rejected; pass_number: counts from 0, None for prefill."""

    kind: str
    depth: int | None = None
    pass_number: int | None = None

    @property
    def words(self) -> str:
        if self.kind == PREFILL:
            return "from prefill"
        said = {
            ACCEPTED: f"a draft, accepted at depth {self.depth}",
            BONUS: "the target's bonus after a wholly accepted path",
            OWN: f"the target's own, drafts of depth {self.depth} rejected",
            UNDRAFTED: "the target's own, nothing was drafted",
        }
        return f"pass {self.pass_number}: {said[self.kind]}"


def origins(row: Mapping[str, Any]) -> list[Origin]:
    """One for each of the row's output_ids.

    The first output token is prefill's. A pass yields its accepted path and then one token of the target, of which
    the first ``kept`` are in the output (see eval.numbers.metrics for passes cut by the end).
    """
    output = row["output_ids"]
    found = [Origin(PREFILL)] if output else []
    for number, spent in enumerate(row["rounds"]):
        found += list(_of_pass(spent, number))[: spent["kept"]]
    assert len(found) == len(output), "generations: the passes' kept tokens and prefill's are not the output"
    return found


def cut(row: Mapping[str, Any]) -> list[int]:
    """Drafts that the last pass accepted but that came after the end, so that they are not in the output."""
    if not row["rounds"]:
        return []
    last = row["rounds"][-1]
    path = last.get("path") or ()
    return [last["tokens"][node] for node in path[last["kept"] :]]


def _of_pass(spent: Mapping[str, Any], number: int) -> Iterator[Origin]:
    accepted = spent["accepted"]
    for depth in range(accepted):
        yield Origin(ACCEPTED, depth, number)
    if not spent["drafted"]:
        yield Origin(UNDRAFTED, None, number)
    elif _whole(spent):
        yield Origin(BONUS, accepted, number)
    else:
        yield Origin(OWN, accepted, number)


def _whole(spent: Mapping[str, Any]) -> bool:
    """Whether the accepted path ends at a leaf of the tree, so that nothing was rejected behind it."""
    path: Sequence[int] = spent.get("path") or ()
    if len(path) != spent["accepted"]:  # no tree was recorded: on a chain the depth tells
        return bool(spent["accepted"] == spent["drafted"])
    return bool(path) and path[-1] not in spent["parents"]
