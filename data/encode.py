"""Conversations to examples: batches through the chat template, counts what is lost, says how much is supervised."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from data.conversations import Conversation, read_conversations
from data.policy import RowRejected
from data.rejects import RejectLog
from data.template import ChatTemplate, Example
from models.errors import EyasError

__all__ = ["Encoded", "Example", "encode_all", "load_examples", "summary"]

BATCH = 256  # conversations tokenised at a time; the tokenizer spreads them over its threads


class Encoded(NamedTuple):
    """What `load_examples` gives: the documents, every rejected row, and a few lines to print."""

    examples: list[Example]
    rejects: RejectLog
    summary: str


def load_examples(
    paths: str | Path | Iterable[str | Path],
    template: ChatTemplate,
    *,
    max_length: int,
    max_documents: int | None = None,
    roles: Mapping[str, str] | None = None,
    split: str = "train",
    rejects_path: Path | str | None = None,
    key: str = "data.path",
) -> Encoded:
    """Read, render, tokenise and mask; write the rejected rows to ``rejects_path`` (even if nothing is usable).

    Raises EyasError if no row is usable, with a table of the reasons, under the ``key`` that gave the paths.
    """
    rejects = RejectLog()
    conversations = read_conversations(paths, roles=roles, split=split, rejects=rejects, key=key)
    try:
        examples = encode_all(conversations, template, max_length, max_documents, rejects, key)
    finally:
        if rejects_path is not None:
            rejects.write(rejects_path)
    return Encoded(examples, rejects, summary(examples, rejects))


def encode_all(
    conversations: Iterable[Conversation],
    template: ChatTemplate,
    max_length: int,
    max_documents: int | None,
    rejects: RejectLog,
    key: str = "data.path",
) -> list[Example]:
    """Examples of the first ``max_documents`` usable conversations (None: all), in order.

    Every conversation taken is kept or listed in ``rejects``. Raises EyasError, with the table of reasons, if
    nothing is left to train on.
    """
    if max_length < 3:
        raise EyasError(f"data.max_length={max_length}: must be at least 3 tokens")
    if max_documents is not None and max_documents < 1:
        raise EyasError(f"data.max_documents={max_documents}: must be at least 1, or null for all")
    source, examples, kept = iter(conversations), list[Example](), 0
    while max_documents is None or kept < max_documents:
        # Never takes more than can still be kept, so that every row read is kept or rejected.
        batch = list(islice(source, BATCH if max_documents is None else min(BATCH, max_documents - kept)))
        if not batch:
            break
        for conversation, result in zip(batch, template.encode_batch(batch, max_length), strict=True):
            if isinstance(result, RowRejected):
                rejects.add(conversation.source_file, conversation.row, conversation.id, result.reason, result.detail)
                continue
            kept += 1
            examples += result
            if any(example.truncated for example in result):
                rejects.repair("cut_at_max_length")
    if not examples:
        raise EyasError(f"{key}: 0 of {rejects.rows} usable\n{rejects.table()}")
    return examples


def summary(examples: list[Example], rejects: RejectLog) -> str:
    """A few lines for the log, first how much is supervised."""
    tokens = sum(len(example.input_ids) for example in examples)
    supervised = sum(example.num_supervised for example in examples)
    lengths = sorted(len(example.input_ids) for example in examples)
    head = (
        f"SUPERVISED: {supervised:,} of {tokens:,} tokens ({supervised / tokens:.1%}) in {len(examples):,} documents "
        f"(length median {lengths[len(lengths) // 2]:,}, longest {lengths[-1]:,})"
    )
    return f"{head}\n{rejects.table()}"
