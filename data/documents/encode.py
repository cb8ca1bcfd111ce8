"""Raw rows to documents, in this process or in several: the same documents and the same counts either way.

Reading and parsing is one stream. What costs time (roles and contents, rendering, tokenising, masks) is done a batch
at a time, wherever; what depends on the rows before (counts, duplicates, the limit) is done on the ordered results.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

from data.chats.conversations import Conversation, conversation_of
from data.chats.dialects import Dialect, id_of
from data.chats.policy import RowRejected
from data.chats.rows import Row, Source
from data.documents.decontaminate import EvaluationPrompts, opening
from data.masks.template import ChatTemplate, Encoded, Packed
from models.errors import EyasError

BATCH = 512  # rows sent to a worker, and tokenised, at a time
LARGE = 64 << 20  # bytes of input from which on starting workers pays
FEW_CORES = 4  # with fewer the tokenizer's own threads keep all of them busy
THREADS = 3  # without workers: enough that the tokenizer never waits
MOST_WORKERS = 16  # that one reader can feed


class Outcome(NamedTuple):
    """What became of a row: documents, or the reason why there are none.

    digest: of its turns, equal for duplicates. opening: of its first question. evaluation: name of an evaluation
    prompt that it holds, "" if none.
    """

    file: str
    row: int
    input: int
    id: str
    reason: str = ""
    detail: str = ""
    repairs: tuple[str, ...] = ()
    documents: tuple[Packed, ...] = ()
    digest: bytes = b""
    opening: int = 0
    evaluation: str = ""


@dataclass(frozen=True)
class Encoder:
    """Everything that turns a raw row into documents; goes to worker processes as a whole."""

    template: ChatTemplate
    dialect: Dialect
    max_length: int
    evaluation: EvaluationPrompts | None = None

    def __call__(self, rows: Sequence[Row]) -> list[Outcome]:
        """The outcome of every row, in order."""
        read: list[tuple[Conversation, list[str]] | RowRejected] = []
        for row in rows:
            try:
                if row.problem:
                    raise RowRejected(row.problem, row.detail)
                read.append(conversation_of(row, self.dialect))
            except RowRejected as rejected:
                read.append(rejected)
        conversations = [item[0] for item in read if not isinstance(item, RowRejected)]
        encoded = iter(self.template.encode_batch(conversations, self.max_length))
        outcomes = []
        for row, item in zip(rows, read, strict=True):
            if isinstance(item, RowRejected):
                outcomes.append(_rejected(row, item))
                continue
            result = next(encoded)
            if isinstance(result, RowRejected):
                outcomes.append(_rejected(row, result))
            else:
                outcomes.append(self._kept(row, *item, result))
        return outcomes

    def _kept(self, row: Row, conversation: Conversation, read: list[str], encoded: Encoded) -> Outcome:
        messages = conversation.messages
        return Outcome(
            row.file,
            row.row,
            row.input,
            conversation.id,
            repairs=(*read, *encoded.repairs),
            documents=tuple(encoded.documents),
            digest=_digest(conversation),
            opening=opening(messages),
            evaluation=self.evaluation.find(messages) if self.evaluation else "",
        )


def _rejected(row: Row, rejected: RowRejected) -> Outcome:
    return Outcome(row.file, row.row, row.input, id_of(row.value), rejected.reason, rejected.detail)


def _digest(conversation: Conversation) -> bytes:
    """Of what the target sees of a conversation."""
    digest = hashlib.blake2b(digest_size=16)
    for message in conversation.messages:
        digest.update(f"{message.role}\0{message.content}\0".encode())
        for call in message.tool_calls:
            digest.update(json.dumps([call.name, call.arguments], sort_keys=True, default=str).encode())
    if conversation.tools:
        digest.update(json.dumps(conversation.tools, sort_keys=True, default=str).encode())
    return digest.digest()


# --- one process or several ----------------------------------------------------------------------------------------


def outcomes(encoder: Encoder, rows: Iterable[Row], workers: int) -> Generator[Outcome, None, None]:
    """Outcomes of all rows in their order. workers: processes beside this one, which then only reads.

    With 0 of them a few threads take turns: while some wait for the tokenizer, which has threads of its own and needs
    no interpreter meanwhile, another renders the next batch. Raises EyasError if a worker process dies.
    """
    pool: Executor
    if workers:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__])
        pool, work = ProcessPoolExecutor(workers, context, _start, (encoder,)), _work
    else:
        pool, work = ThreadPoolExecutor(THREADS), encoder
    try:
        waiting: deque[Future[list[Outcome]]] = deque()
        for batch in _batches(rows):
            waiting.append(pool.submit(work, batch))
            if len(waiting) > 2 * max(2, workers):  # bounds what is held in memory
                yield from waiting.popleft().result()
        while waiting:
            yield from waiting.popleft().result()
    except BrokenProcessPool:
        raise EyasError(
            f"data.workers={workers}: a worker process died, most likely for want of memory; give fewer"
        ) from None
    finally:
        pool.shutdown(cancel_futures=True)


def pick_workers(workers: int | None, sources: Sequence[Source]) -> int:
    """``data.workers``, or as many as the input is worth: none for small files, otherwise one a core."""
    if workers is not None:
        return workers
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    large = sum(source.size() for source in sources) >= LARGE or any(source.kind == "hub" for source in sources)
    return min(cores, MOST_WORKERS) if large and cores >= FEW_CORES else 0


_encoder: Encoder | None = None  # of a worker process


def _start(encoder: Encoder) -> None:
    global _encoder
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the threads
    _encoder = encoder


def _work(rows: list[Row]) -> list[Outcome]:
    assert _encoder is not None
    return _encoder(rows)


def _batches(rows: Iterable[Row]) -> Iterator[list[Row]]:
    source = iter(rows)
    while batch := list(islice(source, BATCH)):
        yield batch
