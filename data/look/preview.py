"""Shows what is supervised, in the terminal: documents with their supervised tokens marked, and a length histogram."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby, islice
from typing import Any, NamedTuple

from rich.console import Console
from rich.text import Text
from transformers import PreTrainedTokenizerBase

from data.look.statistics import encodable, encodes, histogram_text
from data.masks.template import Example, decode
from models.target import special_ids
from models.visible import visible

SUPERVISED = "bold green"
READ = "dim"
CONTROL = "underline"  # beside one of the two
MARKS = ("⟦", "⟧", "│")  # around a supervised run, behind a token
ASCII_MARKS = ("[[", "]]", "|")

UNFINISHED = "\ufffd"  # what the bytes of half a character decode to
MOST_TOKENS = 16  # of one piece; a character has at most four bytes, but tokens may overlap two characters


class Piece(NamedTuple):
    """Tokens ``first`` .. ``stop`` - 1 and their text: one token, or several that only together make up characters."""

    text: str
    first: int
    stop: int


class Excerpt(NamedTuple):
    """What is shown of a document: all of it in ``head``, or its two ends with the positions in ``gap`` left out."""

    head: list[Piece]
    gap: range
    tail: list[Piece]


def pieces(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> Iterator[Piece]:
    """The ids in order, each with the text that it adds to the document.

    A token is decoded behind the one before it, since decoders treat the first token in a special way.
    Tokens that end inside a character wait for the rest of it, so that every character comes whole and once.
    """
    context = start = 0  # ids[context:start] are told already: as ``told``
    told = held = ""  # held: the text of ids[context:i] if that ends inside a character
    for i in range(len(ids)):
        text = decode(tokenizer, ids[context : i + 1])
        if text.endswith(UNFINISHED):
            if i + 1 < len(ids) and i + 1 - start < MOST_TOKENS:
                held = text
                continue
        elif held and text.startswith(held):  # this token did not finish it: broken bytes, or U+FFFD itself
            yield Piece(held[len(told) :], start, i)
            context, start, told = start, i, decode(tokenizer, ids[start:i])
            text = decode(tokenizer, ids[context : i + 1])
        own = text[len(told) :] if text.startswith(told) else decode(tokenizer, ids[start : i + 1])
        yield Piece(own, start, i + 1)
        context, start, held = start, i + 1, ""
        told = decode(tokenizer, ids[context:start])


def excerpt(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], limit: int) -> Excerpt:
    """At most ``limit`` tokens of a document, cut in the middle and never through a character."""
    n, ids = len(ids), list(ids)
    if n <= limit:
        return Excerpt(list(pieces(tokenizer, ids)), range(n, n), [])
    stop = (limit + 1) // 2
    first = n - limit // 2
    # Some tokens more on either side of the cut tell whether it would go through a character.
    head = [piece for piece in pieces(tokenizer, ids[: stop + MOST_TOKENS]) if piece.stop <= stop]
    begin = max(first - MOST_TOKENS, 0)
    shifted = (Piece(text, a + begin, b + begin) for text, a, b in pieces(tokenizer, ids[begin:]))
    tail = [piece for piece in shifted if piece.first >= first]
    return Excerpt(head, range(head[-1].stop if head else 0, tail[0].first if tail else n), tail)


def gap_note(example: Example, gap: range) -> str:
    supervised = sum(example.supervised[gap.start : gap.stop])
    return f"... {len(gap):,} tokens left out here, {supervised:,} of them supervised ..."


def heading(example: Example) -> str:
    """Where a document comes from and how much of it is supervised, on one line."""
    cut = ", cut at data.max_length" if example.truncated else ""
    counts = f"{sum(example.supervised):,} of {len(example.input_ids):,} tokens supervised{cut}"
    return f"{visible(example.source, kept='')}: {counts}"


def preview_text(
    example: Example,
    tokenizer: PreTrainedTokenizerBase,
    max_tokens: int = 400,
    *,
    boundaries: bool = False,
    encoding: str = "utf-8",
) -> Text:
    """The decoded example; supervised, merely read and control tokens differ in style.

    Supervised runs also stand between the brackets ⟦ and ⟧, for output without colour. ``boundaries`` puts a │
    behind each token (several behind a character of several tokens). A document of more than ``max_tokens`` is
    cut in the middle. What ``encoding``, the terminal's, cannot write is escaped.
    """
    marks = MARKS if encodes("".join(MARKS), encoding) else ASCII_MARKS
    control = frozenset(special_ids(tokenizer, set()))
    head, gap, tail = excerpt(tokenizer, example.input_ids, max_tokens)
    styled = [*_styled(example, head, control, marks, boundaries)]
    if gap:
        styled += [(f"\n{gap_note(example, gap)}\n", "italic"), *_styled(example, tail, control, marks, boundaries)]
    text = Text()
    for style, run in groupby(styled, key=lambda pair: pair[1]):
        text.append(encodable("".join(piece for piece, _ in run), encoding), style=style)
    return text


def _styled(
    example: Example, part: Iterable[Piece], control: frozenset[int], marks: tuple[str, str, str], boundaries: bool
) -> Iterator[tuple[str, str]]:
    """Texts and their styles, with the marks around supervised runs and, if wanted, behind tokens."""
    opening, closing, edge = marks
    for supervised, run in groupby(part, key=lambda piece: is_supervised(example, piece)):
        style = SUPERVISED if supervised else READ
        if supervised:
            yield opening, style
        for text, first, stop in run:
            shown = visible(text).replace("⟦", "\\u27e6").replace("⟧", "\\u27e7")  # not to be taken for the marks
            yield shown, f"{style} {CONTROL}" if example.input_ids[first] in control else style
            if boundaries:
                yield edge * (stop - first), style
        if supervised:
            yield closing, style


def is_supervised(example: Example, piece: Piece) -> bool:
    return any(example.supervised[piece.first : piece.stop])


def token_repr(tokenizer: PreTrainedTokenizerBase, token: int) -> str:
    """The text of one token in quotes, its leading blank included; of part of a character, the vocabulary's name."""
    once = decode(tokenizer, [token])
    text = decode(tokenizer, [token, token]).removeprefix(once) or once  # the first token of a text may lose its blank
    return repr(str(tokenizer.convert_ids_to_tokens(token)) if UNFINISHED in text else text)


def print_preview(
    examples: Iterable[Example],
    tokenizer: PreTrainedTokenizerBase,
    *,
    count: int = 1,
    max_tokens: int = 400,
    boundaries: bool = False,
    statistics: Mapping[str, Any] | None = None,
    console: Console | None = None,
) -> None:
    """Print the first ``count`` examples, each under a line that names its source and counts its tokens.

    ``statistics`` (of `data.look.statistics.describe`): print their length histogram too.
    """
    console = console or Console()
    encoding = console.encoding
    line = "─" if encodes("─", encoding) else "-"
    for example in islice(examples, count):
        console.rule(characters=line)
        console.print(Text(encodable(heading(example), encoding), style="bold"), soft_wrap=True)
        text = preview_text(example, tokenizer, max_tokens, boundaries=boundaries, encoding=encoding)
        console.print(text, soft_wrap=True)
    console.rule(characters=line)
    if statistics is not None:
        console.print(histogram_text(statistics, console.width, encoding), soft_wrap=True)
