"""Text of unknown origin, made fit to be shown."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable

KEPT = frozenset("\n\t\u200c\u200d")  # not printable, yet shown as they are: scripts and emoji need the joiners


def visible(text: str, kept: Iterable[str] = KEPT) -> str:
    """The text with escapes (``\\x1b``, ``\\u202e``) for what a terminal or browser would obey or not show at all.

    That is control and format characters (directions of writing, zero-width blanks), surrogates, private-use and
    unassigned characters; not those in ``kept``.
    """
    if text.isprintable():
        return text
    return "".join(
        c if c.isprintable() or c in kept or unicodedata.category(c) == "Zs" else c.encode("unicode_escape").decode()
        for c in text
    )
