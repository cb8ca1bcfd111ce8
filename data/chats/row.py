"""The type of a raw row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Row:
    """A raw row. ``row`` from 1; ``problem`` is a reason out of `data.chats.policy.REJECTS` when there is no value.

    input: which of the given inputs it came from, from 0.
    """

    file: str
    row: int
    value: Any = None
    problem: str | None = None
    detail: str = ""
    input: int = 0
