"""Statistics: every number worked out by hand."""

import json

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from data.chats.rejects import RejectLog
from data.look.statistics import describe, histogram, histogram_text


def stats(*lengths: int, log: RejectLog | None = None) -> dict:
    return describe(np.array(lengths, dtype=np.int64), np.ones(len(lengths), dtype=np.int64), log or RejectLog(), 1)


def test_counts_of_rows_documents_and_tokens() -> None:
    log = RejectLog(rows=9)
    log.add("a.jsonl", 3, "x", "broken_json", "here")
    log.add("b.jsonl", 1, "y", "unknown_role", "humman")
    log.add("b.jsonl", 7, "z", "unknown_role", "bungee")
    log.repair("user_turns_joined")
    found = describe(np.array([10, 30, 60]), np.array([5, 5, 15], dtype=np.int32), log, 2)
    assert json.loads(json.dumps(found)) == found
    counts = {"documents": 3, "conversations": 2, "tokens": 100, "supervised_tokens": 25, "supervised_share": 0.25}
    assert {key: found[key] for key in counts} == counts
    assert (found["rows"], found["kept"], found["rejected_rows"]) == (9, 6, 3)
    assert found["rejected"] == {"unknown_role": 2, "broken_json": 1}
    first = {"file": "b.jsonl", "row": 1, "id": "y", "reason": "unknown_role", "detail": "humman"}
    assert found["first"]["unknown_role"] == first
    assert found["repaired"] == {"user_turns_joined": 1}


def test_quantiles_are_lengths_that_occur() -> None:
    # Of 100, 200 ... 2000: the 1st (5 % of 20), the 10th, the 19th, the 20th (99 % of 20 is 19.8).
    found = stats(*range(100, 2001, 100))["length"]
    del found["histogram"]
    assert found == {"min": 100, "p5": 100, "median": 1000, "p95": 1900, "p99": 2000, "max": 2000, "mean": 1050.0}


def test_bins_end_at_powers_of_two() -> None:
    # Documents cut at 2048 share the bin of what is just below, not of what is above.
    bins = histogram(np.array([1, 3, 4, 2048, 1025, 2049, 4]))
    found = {(b["from"], b["to"]): (b["documents"], b["tokens"]) for b in bins if b["documents"]}
    assert found == {(1, 1): (1, 1), (3, 4): (3, 11), (1025, 2048): (2, 3073), (2049, 4096): (1, 2049)}
    assert [(b["from"], b["to"]) for b in bins][:4] == [(1, 1), (2, 2), (3, 4), (5, 8)]
    assert len(bins) == 13  # 1, 2, 4 ... 4096, without a hole
    assert histogram(np.array([0, 0, 2])) == [
        {"from": 0, "to": 0, "documents": 2, "tokens": 0},
        {"from": 1, "to": 1, "documents": 0, "tokens": 0},
        {"from": 2, "to": 2, "documents": 1, "tokens": 2},
    ]
    assert histogram(np.array([0]))[-1]["to"] == 0


@given(st.lists(st.integers(0, 1 << 20), min_size=1, max_size=40))
def test_every_document_is_in_one_bin(lengths: list[int]) -> None:
    bins = histogram(np.array(lengths))
    for bin in bins:
        inside = [n for n in lengths if bin["from"] <= n <= bin["to"]]
        assert (bin["documents"], bin["tokens"]) == (len(inside), sum(inside))
    assert sum(bin["documents"] for bin in bins) == len(lengths)
    assert all(a["to"] + 1 == b["from"] for a, b in zip(bins, bins[1:], strict=False))
    assert bins[0]["documents"] and bins[-1]["documents"]


def test_no_documents() -> None:
    found = stats()
    assert (found["documents"], found["supervised_share"], found["length"]) == (0, 0.0, {})
    assert histogram_text(found).plain == "no documents"


def test_histogram_in_text() -> None:
    found = stats(3, 5, 6, 7, 8)
    head, *lines = histogram_text(found, 28).plain.splitlines()
    assert head == ("tokens in each of 5 documents: shortest 3, median 6, mean 5.8, p95 8, p99 8, longest 8")
    # Labels 3 wide, counts 9 wide, 2 blanks: bars of 14 cells; a fourth of them is 3.5.
    assert lines == ["3-4 ███▌           1   20.0%", "5-8 ██████████████ 4   80.0%"]
    lines = histogram_text(found, 28, "ascii").plain.splitlines()[1:]
    assert lines == ["3-4 ####           1   20.0%", "5-8 ############## 4   80.0%"]


def test_a_narrow_terminal_still_shows_every_bin_that_is_not_empty() -> None:
    found = stats(*[1000] * 5000, 9)
    for width, encoding in ((10, "utf-8"), (40, "utf-8"), (40, "ascii"), (200, "latin-1")):
        lines = histogram_text(found, width, encoding).plain.splitlines()[1:]
        assert lines[0].split()[0] == "9-16" and lines[0].split()[1] in "▏#"
        assert lines[-1].split()[0] == "513-1,024" and "5,000" in lines[-1]
        assert all(len(line) <= max(width, 28) for line in lines)
