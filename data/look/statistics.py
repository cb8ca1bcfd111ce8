"""Statistics of the documents and of the rows they come from: for the manifest, the terminal and the HTML page."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from rich.text import Text

from data.chats.rejects import RejectLog

QUANTILES = {"min": 0.0, "p5": 0.05, "median": 0.5, "p95": 0.95, "p99": 0.99, "max": 1.0}
EIGHTHS = " ▏▎▍▌▋▊▉"


def describe(lengths: np.ndarray, supervised: np.ndarray, log: RejectLog, conversations: int) -> dict[str, Any]:
    """What the data is like, ready for JSON.

    lengths, supervised [documents] integers: tokens of each document and how many of them are supervised.
    conversations: how many the documents come from. Quantiles are lengths that occur: p95 is the smallest length
    that at least 95 % of the documents do not exceed. Histogram bins end at powers of two, both ends included, so
    that documents cut at a round data.max_length lie in the bin of that name. Rows, ``rejected`` by reason with the
    ``first`` row of each, and ``repaired`` by name are the log's.
    """
    assert lengths.shape == supervised.shape and lengths.ndim == 1, (lengths.shape, supervised.shape)
    tokens, counted = int(lengths.sum()), int(supervised.sum())
    return {
        "documents": len(lengths),
        "conversations": conversations,
        "tokens": tokens,
        "supervised_tokens": counted,
        "supervised_share": counted / tokens if tokens else 0.0,
        "length": spread(lengths),
        "supervised_length": spread(supervised),
        "kept": log.kept,
        "rejected_rows": log.rejected,
        **log.to_json(),
    }


def spread(lengths: np.ndarray) -> dict[str, Any]:
    """Quantiles, mean and histogram of lengths [n]; empty of no documents."""
    if not len(lengths):
        return {}
    values = np.quantile(lengths, list(QUANTILES.values()), method="inverted_cdf")
    quantiles = {name: int(value) for name, value in zip(QUANTILES, values, strict=True)}
    return {**quantiles, "mean": float(lengths.mean()), "histogram": histogram(lengths)}


def histogram(lengths: np.ndarray) -> list[dict[str, int]]:
    """Bins 0, 1, 2, 3-4, 5-8, 9-16 ... from the shortest to the longest of lengths [n], with what lies in each."""
    powers = 1 << np.arange(int(lengths.max()).bit_length() + 1)
    edges = np.concatenate(([0], powers))
    bins = np.searchsorted(edges, lengths)  # edges[i - 1] < length <= edges[i]
    documents = np.bincount(bins)
    tokens = np.zeros(len(documents), dtype=np.int64)
    np.add.at(tokens, bins, lengths)
    return [
        {
            "from": int(edges[i - 1]) + 1 if i else 0,
            "to": int(edges[i]),
            "documents": int(documents[i]),
            "tokens": int(tokens[i]),
        }
        for i in range(int(bins.min()), len(documents))
    ]


def bin_label(bin: Mapping[str, int]) -> str:
    return f"{bin['from']:,}" if bin["from"] == bin["to"] else f"{bin['from']:,}-{bin['to']:,}"


def length_line(statistics: Mapping[str, Any]) -> str:
    """The quantiles in words."""
    length = statistics["length"]
    return (
        f"shortest {length['min']:,}, median {length['median']:,}, mean {length['mean']:,.1f}, "
        f"p95 {length['p95']:,}, p99 {length['p99']:,}, longest {length['max']:,}"
    )


def histogram_text(statistics: Mapping[str, Any], width: int = 80, encoding: str = "utf-8") -> Text:
    """The length histogram for a terminal ``width`` columns wide: tokens of a document, a bar, documents, their share.

    Bars are of # if ``encoding`` has no block characters. A bin that is not empty always shows.
    """
    total = statistics["documents"]
    if not total:
        return Text("no documents")
    bins = statistics["length"]["histogram"]
    labels = [bin_label(bin) for bin in bins]
    counts = [f"{bin['documents']:,}  {bin['documents'] / total:>6.1%}" for bin in bins]
    left, right = max(map(len, labels)), max(map(len, counts))
    room = max(width - left - right - 2, 1)
    most = max(bin["documents"] for bin in bins)
    text = Text(f"tokens in each of {total:,} documents: {length_line(statistics)}")
    for bin, label, count in zip(bins, labels, counts, strict=True):
        bar = _bar(bin["documents"] / most * room, encodes(EIGHTHS + "█", encoding)).ljust(room)
        text.append(f"\n{label:>{left}} ").append(bar, style="green").append(f" {count:>{right}}")
    return text


def encodes(text: str, encoding: str) -> bool:
    """Whether a stream of this encoding can write the text."""
    return text.encode(encoding, "replace").decode(encoding) == text


def encodable(text: str, encoding: str) -> str:
    """The text with escapes for what a stream of this encoding cannot write."""
    return text.encode(encoding, "backslashreplace").decode(encoding)


def _bar(cells: float, blocks: bool) -> str:
    """A bar so many cells long, at least a sliver unless that is 0."""
    if not blocks:
        return "#" * (max(round(cells), 1) if cells else 0)
    eighths = max(round(cells * 8), 1) if cells else 0
    return "█" * (eighths // 8) + EIGHTHS[eighths % 8].strip()
