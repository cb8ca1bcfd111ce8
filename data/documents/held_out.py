"""What is held out, and training conversations that hold what the drafter is measured on."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from itertools import islice
from typing import Any

import numpy as np

from data.chats.conversations import read_conversations
from data.chats.dialects import Dialect
from data.chats.prompts import read_questions
from data.chats.rejects import RejectLog
from data.documents.decontaminate import EvaluationPrompts
from data.documents.document_set import DocumentSet
from models.errors import EyasError

SHOWN = 3  # documents or conversations that a message names
CHECKED = 100_000  # conversations that an evaluation looks through

log = logging.getLogger(__name__)


def split_held_out(
    documents: DocumentSet, fraction: float, decontaminate: str = "warn"
) -> tuple[DocumentSet, DocumentSet]:
    """(to train on, held out): ``fraction`` of the conversations (at least one of two), evenly spaced; no seed.

    All documents of one conversation, and documents with the same tokens, stay on one side. Conversations that open
    with the question of a held-out one stay in training (``warn`` says how many) or are left out (``drop``).
    """
    if not 0 <= fraction < 1:
        raise EyasError(f"data.valid_fraction={fraction}: must be 0 or more and below 1")
    names, group = np.unique(documents.conversations, return_inverse=True)
    count = min(len(names) - 1, max(1, round(fraction * len(names)))) if fraction else 0
    chosen = np.zeros(len(names), dtype=bool)
    chosen[[(2 * i + 1) * len(names) // (2 * count) for i in range(count)]] = True
    held = chosen[group]
    valid = documents.take(documents.numbers[held])
    same = _same_tokens(documents, valid) & ~held
    alike = np.isin(documents.openings, valid.openings) & ~held & ~same
    why = "open with the question of a held-out one"
    if decontaminate == "drop":
        _say_left_out(documents, alike, why)
    elif alike.any() and decontaminate == "warn":
        log.warning(
            "%d training documents %s: the held-out numbers flatter the drafter "
            "(data.decontaminate=drop leaves them out)",
            int(alike.sum()),
            why,
        )
    _say_left_out(documents, same, "have the tokens of a held-out one")
    train = ~held & ~same & ~(alike & (decontaminate == "drop"))
    if not train.any():
        raise EyasError("data.path: nothing is left to train on beside the held-out conversations; give more of them")
    return documents.take(documents.numbers[train]), valid


def _same_tokens(documents: DocumentSet, others: DocumentSet) -> np.ndarray:
    """Which documents have the tokens of one of the others, [D] bool."""
    digests = {others.digest(i) for i in range(len(others))}
    likely = np.isin(_shapes(documents), _shapes(others))  # only these are worth a digest
    return np.array([bool(likely[i]) and documents.digest(i) in digests for i in range(len(documents))], dtype=bool)


def _shapes(documents: DocumentSet) -> np.ndarray:
    return documents.lengths << 32 | documents.supervised


def _say_left_out(documents: DocumentSet, which: np.ndarray, why: str) -> None:
    if which.any():
        first = ", ".join(documents[i].source for i in np.flatnonzero(which)[:SHOWN].tolist())
        log.info("%d documents are not trained on, since they %s: %s ...", int(which.sum()), why, first)


def evaluation_prompts(data: Mapping[str, Any], prompts: str | None) -> EvaluationPrompts | None:
    """The questions of ``verify.prompts`` and of ``data.valid_path``; None if there are none."""
    dialect = Dialect.of_section(data)
    given = {"verify.prompts": prompts, "data.valid_path": data["valid_path"]}
    found = EvaluationPrompts(
        (f"question {question.id or question.row} of {question.source_file}", text)
        for key, paths in given.items()
        if paths is not None
        for question in read_questions(paths, dialect=dialect, rejects=RejectLog(), key=key, split=data["split"])
        for text in question.turns
    )
    return found if len(found) else None


def check_training_data(data: Mapping[str, Any], prompts: str) -> None:
    """For an evaluation on ``prompts``: warn if the first conversations of ``data.path`` hold some of them."""
    if data["path"] is None or data["decontaminate"] == "keep":
        return
    evaluation = evaluation_prompts({**data, "valid_path": None}, prompts)
    if evaluation is None:
        return
    dialect = Dialect.of_section(data)
    read = read_conversations(data["path"], dialect=dialect, split=data["split"], rejects=RejectLog(), key="data.path")
    held = list[str]()
    try:
        for conversation in islice(read, CHECKED):
            name = evaluation.find(conversation.messages)
            if name:
                held.append(f"{conversation.source_file}, row {conversation.row} holds {name}")
    except EyasError as error:  # the training data may be gone by now
        log.info("not checked for prompts in the training data: %s", error)
    warn_of_prompts(len(held), held[:SHOWN])


def warn_of_prompts(conversations: int, first: Iterable[str]) -> None:
    if conversations:
        log.warning(
            "%d conversations of data.path hold prompts that the drafter is measured on: the measurement flatters it "
            "(training with data.decontaminate=drop leaves them out)\n  %s",
            conversations,
            "\n  ".join(first),
        )
