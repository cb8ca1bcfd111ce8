"""Raw rows to documents, in this process or in several: the same documents and the same counts either way.

Reading and parsing is one stream. What costs time (roles and contents, rendering, tokenising, masks) is done a batch
at a time, wherever; what depends on the rows before (counts, duplicates, the limit) is done on the ordered results.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import threading
import time
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from typing import NamedTuple

from data.chats.conversations import Conversation, conversation_of
from data.chats.dialects import Dialect, id_of
from data.chats.policy import RowRejected
from data.chats.rows import Row, Source
from data.documents.decontaminate import EvaluationPrompts, opening
from data.masks.template import ChatTemplate, Encoded, Packed
from models.errors import EyasError

BATCH = 512  # rows sent to a worker at a time
BATCH_CHARACTERS = 4 << 20  # the same in characters
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
    digest: int = 0
    opening: int = 0
    evaluation: str = ""


@dataclass(frozen=True)
class Encoder:
    """Everything that turns a raw row into documents; goes to worker processes as a whole."""

    template: ChatTemplate
    dialect: Dialect
    max_length: int
    evaluation: EvaluationPrompts | None = None

    def __call__(self, rows: Sequence[Row], prove: bool = False) -> list[Outcome]:
        """The outcome of every row, in order. prove: see `ChatTemplate.encode_batch`."""
        read: list[tuple[Conversation, list[str]] | RowRejected] = []
        for row in rows:
            try:
                if row.problem:
                    raise RowRejected(row.problem, row.detail)
                read.append(conversation_of(row, self.dialect))
            except RowRejected as rejected:
                read.append(rejected)
        conversations = [item[0] for item in read if not isinstance(item, RowRejected)]
        encoded = iter(self.template.encode_batch(conversations, self.max_length, prove=prove))
        outcomes = []
        for row, item in zip(rows, read, strict=True):
            if isinstance(item, RowRejected):
                outcomes.append(self._rejected(row, item))
                continue
            result = next(encoded)
            if isinstance(result, RowRejected):
                outcomes.append(self._rejected(row, result))
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

    def _rejected(self, row: Row, rejected: RowRejected) -> Outcome:
        found = id_of(row.value, self.dialect)
        return Outcome(row.file, row.row, row.input, found, rejected.reason, rejected.detail)


def _digest(conversation: Conversation) -> int:
    """Of what the target sees of a conversation, 64 bits."""
    digest = hashlib.blake2b(digest_size=8)
    for message in conversation.messages:
        digest.update(f"{message.role}\0{message.content}\0{message.reasoning}\0".encode())
        for call in message.tool_calls:
            digest.update(json.dumps([call.name, call.arguments], sort_keys=True, default=str).encode())
    if conversation.tools:
        digest.update(json.dumps(conversation.tools, sort_keys=True, default=str).encode())
    return int.from_bytes(digest.digest(), "little")


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
        pool, work = ProcessPoolExecutor(workers, context, _start, (encoder, os.getpid())), _work
    else:
        pool, work = ThreadPoolExecutor(THREADS), encoder
    broken: list[EyasError] = []
    try:
        waiting: deque[tuple[Future[list[Outcome]], list[Row], bool]] = deque()
        for number, batch in enumerate(_batches(_until_broken(rows, broken))):
            prove = number == 0  # the proof is of the first rows, wherever they go
            waiting.append((pool.submit(work, batch, prove), batch, prove))
            if len(waiting) > 2 * max(2, workers):  # bounds what is held in memory
                yield from _result(*waiting.popleft(), encoder)
        while waiting:
            yield from _result(*waiting.popleft(), encoder)
        if broken:  # told after the rows before it, however far the reader is ahead
            raise broken[0]
    except BrokenProcessPool:
        raise EyasError(
            f"data.workers={workers}: a worker process died, most likely for want of memory; give fewer"
        ) from None
    finally:
        pool.shutdown(cancel_futures=True)


def _result(future: Future[list[Outcome]], batch: list[Row], prove: bool, encoder: Encoder) -> list[Outcome]:
    try:
        return future.result()
    except RecursionError:  # nested too deeply to be sent to another process
        return encoder(batch, prove)


def _until_broken(rows: Iterable[Row], broken: list[EyasError]) -> Iterator[Row]:
    try:
        yield from rows
    except EyasError as error:
        broken.append(error)


def pick_workers(workers: int | None, sources: Sequence[Source]) -> int:
    """``data.workers``, or as many as the input is worth: none for small files, otherwise one a core."""
    if workers is not None:
        return workers
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    large = sum(source.size() for source in sources) >= LARGE or any(source.kind == "hub" for source in sources)
    return min(cores, MOST_WORKERS) if large and cores >= FEW_CORES else 0


_encoder: Encoder | None = None  # of a worker process


def _start(encoder: Encoder, parent: int) -> None:
    global _encoder
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the threads
    _encoder = encoder


def _end_with(parent: int) -> None:
    """A killed reader can't tell its workers to stop."""
    while True:
        time.sleep(1)
        try:
            os.kill(parent, 0)
        except ProcessLookupError:
            os._exit(1)


def _work(rows: list[Row], prove: bool) -> list[Outcome]:
    assert _encoder is not None
    return _encoder(rows, prove)


def _batches(rows: Iterable[Row]) -> Iterator[list[Row]]:
    """At most `BATCH` rows, and not many more than `BATCH_CHARACTERS`."""
    batch: list[Row] = []
    held = 0
    for row in rows:
        size = _size(row.value)
        if batch and (len(batch) == BATCH or held + size > BATCH_CHARACTERS):
            yield batch
            batch, held = [], 0
        batch.append(row)
        held += size
    if batch:
        yield batch


def _size(value: object, depth: int = 4) -> int:
    """Characters in a raw row, as far down as text is to be expected."""
    if isinstance(value, str):
        return len(value)
    if not depth or not isinstance(value, dict | list):
        return 0
    return sum(_size(item, depth - 1) for item in (value.values() if isinstance(value, dict) else value))
