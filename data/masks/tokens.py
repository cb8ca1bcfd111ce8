"""Texts to token ids, spans of text to spans of tokens, and answers that spell control tokens.

The text of a prompt is tokenised as a server does it, which takes the text of a control token for the token. An answer
is different: a real control token would have ended it, so what looks like one was generated as ordinary text and has to
get ordinary ids. Tokens that are added but not special (``<think>``) are part of what a target writes and stay tokens.
"""

from __future__ import annotations

import copy
import json
import threading
import unicodedata
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any

from tokenizers import Encoding, Tokenizer, processors
from transformers import PreTrainedTokenizerBase

from data.chats.policy import RowRejected
from data.masks.probe import any_of
from data.masks.spans import Located, Span
from models.errors import EyasError

# Names of control tokens in texts that spell them: noncharacters, which no text has a use for. The first character
# begins a name, the others are its digits.
NAMES = [chr(code) for code in range(0xFDD0, 0xFDF0)]


class Tokens:
    """The target's tokenizer, without what it adds to or cuts off a text.

    ends: ids that end a generation. Raises EyasError if the tokenizer gives no character offsets.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, ends: Iterable[int]) -> None:
        self.tokenizer = tokenizer
        self._backend = _backend(tokenizer)
        self._turn = threading.Lock()
        self._added = tokenizer.added_tokens_decoder
        self.control = [str(token) for token in self._added.values()]
        ends = frozenset(ends)
        self.special = frozenset(i for i, token in self._added.items() if token.special) | ends
        # GPT-2's family names its end token as the unknown one too, which its bytes have no need of.
        self._unknown = None if tokenizer.unk_token_id in ends else tokenizer.unk_token_id

    def encode_batch(self, texts: Sequence[str]) -> list[Encoding]:
        """Spread over the tokenizer's threads, one batch after the other: batches side by side would end together,
        and leave the tokenizer idle while all of them are worked on."""
        with self._turn:
            return list(self._backend.encode_batch(texts, add_special_tokens=False))

    def encode(self, text: str) -> Encoding:
        return self._backend.encode(text, add_special_tokens=False)

    def to_str(self) -> str:
        return str(self._backend.to_str())

    def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids as it stands, control tokens and blanks included."""
        return decode(self.tokenizer, ids)

    def agrees(self, ids: Sequence[int], text: str) -> bool:
        """Whether ids decode to a text; normal forms, letter case and white space are the tokenizer's freedom."""
        if self._unknown in ids:  # an unknown word decodes to nothing comparable
            return True
        return _plain(self.decode(ids)) == _plain(text)

    # --- answers that spell control tokens ---------------------------------------------------------------------------

    def spells_control(
        self, located: Located, encoding: Encoding, ids: Sequence[int], places: Sequence[tuple[int, int]]
    ) -> bool:
        """Whether a special token was taken out of the text of an answer. places: `tokens_of` each span."""
        for span, (first, stop) in zip(located.spans, places, strict=True):
            # Cheap first: nothing special inside, the last token begins behind the answer, the one before ends in time.
            if (
                self.special.isdisjoint(ids[first : stop - 1])
                and (stop == first or ids[stop - 1] not in self.special or _chars(encoding, stop - 1)[0] >= span.stop)
                and (first == 0 or ids[first - 1] not in self.special or _chars(encoding, first - 1)[1] <= span.start)
            ):
                continue
            if self._first_special(span, located.text, encoding, ids) is not None:
                return True
        return False

    def encode_spelled(self, located: Located, encoding: Encoding, ids: Sequence[int]) -> Encoding:
        """The encoding with ordinary ids for the answers, offsets exact. Raises RowRejected if that can't be had.

        The template's own control tokens go under another name of the same length, so that their old text is text.
        """
        text, spans = located.text, located.spans
        if any(mark in text for mark in NAMES):
            raise RowRejected("invalid_unicode", "a noncharacter beside the text of a control token")
        pieces, position = [], 0
        for span in spans:
            pieces += [self._rename(text[position : span.start]), text[span.start : span.stop]]
            position = span.stop
        pieces.append(self._rename(text[position:]))
        renamed = self._renamed.encode("".join(pieces), add_special_tokens=False)
        found = renamed.ids
        for span in spans:
            first, stop = tokens_of(span._replace(end=span.stop), text, renamed)
            if self._first_special(span, text, renamed, found) is not None or not self.agrees(
                found[first:stop], covered_text(text, renamed, first, stop)
            ):
                raise RowRejected(
                    "answer_not_located", "an answer spells a control token that cannot be written as text"
                )
        before = next(k for s in spans if (k := self._first_special(s, text, encoding, ids)) is not None)
        same = max((k for k in range(before) if ids[k] in self.special), default=-1) + 1
        if found[:same] != list(ids[:same]):  # renaming changed more than it should
            raise RowRejected("answer_not_located", "an answer spells a control token that cannot be written as text")
        return renamed

    def _first_special(self, span: Span, text: str, encoding: Encoding, ids: Sequence[int]) -> int | None:
        """The first token of a span that is special and, but for white space it swallows, made of the answer's text."""
        first, stop = tokens_of(span._replace(floor=0, end=span.stop), text, encoding)
        for k in range(first, stop):
            if ids[k] not in self.special:
                continue
            begin, end = _chars(encoding, k)
            core = text[begin:end]
            begin, end = begin + len(core) - len(core.lstrip()), end - len(core) + len(core.rstrip())
            if ids[k] == self._unknown and text[begin:end] != self.tokenizer.unk_token:
                continue  # a word that the vocabulary lacks
            if span.start <= begin and end <= span.stop:
                return k
        return None

    @cached_property
    def _names(self) -> dict[str, str]:
        """Another name of the same length for every special token."""
        names = {}
        for number, i in enumerate(sorted(self.special & self._added.keys())):
            content, digits = str(self._added[i]), ""
            while len(digits) < len(content) - 1:
                number, digit = divmod(number, len(NAMES) - 1)
                digits += NAMES[1 + digit]
            if not number:  # otherwise it is too short to get a name of its own; the check after encoding tells
                names[content] = NAMES[0] + digits
        return names

    @cached_property
    def _pattern(self) -> Any:
        return any_of(self.control)

    def _rename(self, text: str) -> str:
        return str(self._pattern.sub(lambda match: self._names.get(match.group(), match.group()), text))

    @cached_property
    def _renamed(self) -> Tokenizer:
        """The tokenizer that knows special tokens by their other names only."""
        content = json.loads(self._backend.to_str())
        for token in content["added_tokens"]:
            token["content"] = self._names.get(token["content"], token["content"])
        model = content["model"]
        if isinstance(model["vocab"], dict):
            model["vocab"] = {self._names.get(piece, piece): i for piece, i in model["vocab"].items()}
        else:
            model["vocab"] = [[self._names.get(piece, piece), score] for piece, score in model["vocab"]]
        return Tokenizer.from_str(json.dumps(content))


def tokens_of(span: Span, text: str, encoding: Encoding) -> tuple[int, int]:
    """First and past-the-last token of a span.

    A token counts if it lies in the span, or hangs out of it by white space only (a word's leading blank, a control
    token that swallows the newline after it) and does not begin inside the generation prompt.
    """
    first, stop = _touching(span, text, encoding)
    while first < stop:
        begin = _chars(encoding, first)[0]
        if begin >= span.floor and not text[begin : span.start].strip():
            break
        first += 1
    while stop > first and text[span.end : _chars(encoding, stop - 1)[1]].strip():
        stop -= 1
    return first, stop


def _touching(span: Span, text: str, encoding: Encoding) -> tuple[int, int]:
    """The tokens with a character inside the span."""
    total = len(encoding)
    first = encoding.char_to_token(span.start)
    stop = total if span.end >= len(text) else encoding.char_to_token(span.end)
    if first is None or stop is None:  # a character that no token stands for
        offsets = encoding.offsets
        return (
            bisect_right(offsets, span.start, key=lambda offset: offset[1]),
            bisect_left(offsets, span.end, key=lambda offset: offset[0]),
        )
    while stop < total and _chars(encoding, stop)[0] < span.end:
        stop += 1
    while stop > first and _chars(encoding, stop - 1)[0] >= span.end:
        stop -= 1
    return first, stop


def _chars(encoding: Encoding, token: int) -> tuple[int, int]:
    chars = encoding.token_to_chars(token)
    assert chars is not None  # only tokens that a tokenizer puts around a text have none
    return chars


def covered_text(text: str, encoding: Encoding, first: int, stop: int) -> str:
    """The text that the tokens from ``first`` to before ``stop`` stand for."""
    return text[_chars(encoding, first)[0] : _chars(encoding, stop - 1)[1]] if first < stop else ""


def decode(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> str:
    """The text of token ids as it stands, control tokens and blanks included."""
    return str(tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))


def _plain(text: str) -> str:
    return "".join(unicodedata.normalize("NFKC", text).casefold().split())


def _backend(tokenizer: PreTrainedTokenizerBase) -> Tokenizer:
    """A private copy of the fast tokenizer that neither cuts nor pads, and whose offsets keep leading blanks."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if not isinstance(backend, Tokenizer):
        raise EyasError(f"target: {type(tokenizer).__name__} gives no character offsets; a fast tokenizer is needed")
    backend = copy.deepcopy(backend)
    backend.no_truncation()
    backend.no_padding()
    backend.post_processor = processors.ByteLevel(trim_offsets=False)
    return backend
