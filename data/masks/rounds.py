"""Conversations that are too long, as several of whole consecutive rounds.

A round begins at a user turn; tool calls and results stay with theirs. What precedes the first round (the system
prompt) stands before every group of rounds.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import TypeVar

from tokenizers import Encoding

from data.chats.conversations import Message

T = TypeVar("T")


def rounds_of(messages: Sequence[Message]) -> list[int]:
    """Indices at which rounds begin."""
    return [i for i, message in enumerate(messages) if message.role == "user"]


def guess_starts(messages: Sequence[Message], rounds: Sequence[int], text: str, encoding: Encoding) -> list[int]:
    """About which token of the whole conversation each round begins at, and where the last one ends.

    The template's own text is taken to be spread evenly over the turns.
    """
    lengths = [len(message.content) for message in messages]
    own = max(len(text) - sum(lengths), 0) / len(messages)
    offsets = [begin for begin, _ in encoding.offsets]
    ends = [0, *accumulate(lengths)]
    starts = [bisect_right(offsets, ends[first] + own * first) for first in rounds]
    return [*starts, len(offsets)]


def groups(
    starts: Sequence[int], max_length: int, fits: Callable[[int, int], T | None]
) -> Iterator[tuple[int, int, T | None]]:
    """Rounds in groups (first, past the last, what ``fits`` gave), each of as many rounds as fit.

    starts [rounds + 1]: a guess of where each begins, in tokens. fits(first, end): something if these rounds together
    have at most ``max_length`` tokens, None if not. A single round that doesn't fit is a group with None.
    """
    count, first = len(starts) - 1, 0
    while first < count:
        room = max_length - starts[0] + starts[first]
        guess = min(max(bisect_right(starts, room) - 1, first + 1), count)
        tried: dict[int, T | None] = {}

        def fit(end: int, first: int = first, tried: dict[int, T | None] = tried) -> bool:
            if end not in tried:
                tried[end] = fits(first, end)
            return tried[end] is not None

        end = _furthest(fit, first + 1, guess, count)
        yield first, end, tried[end]
        first = end


def _furthest(fits: Callable[[int], bool], low: int, guess: int, high: int) -> int:
    """The largest number from ``low`` to ``high`` that fits, ``low`` if none does; steps away from the guess."""
    good, bad, step = low - 1, high + 1, 1
    if fits(guess):
        good = guess
        while bad > high > good:
            number = min(high, good + step)
            good, bad = (number, bad) if fits(number) else (good, number)
            step *= 2
    else:
        bad = guess
        while bad > low > good:
            number = max(low, bad - step)
            good, bad = (number, bad) if fits(number) else (good, number)
            step *= 2
    while bad - good > 1:
        middle = (good + bad) // 2
        good, bad = (middle, bad) if fits(middle) else (good, middle)
    return max(good, low)
