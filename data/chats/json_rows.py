"""JSON of any shape to raw rows: an array, an object a line, or objects one after the other; told apart by content.

A file of any size is read in pieces of about a mebibyte. A broken line costs that line; in an array, or in objects
over several lines, nothing tells where the next row begins, so that a broken one stops the reading.
"""

from __future__ import annotations

import codecs
import gzip
import io
import json
import re
import unicodedata
import zlib
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any, NoReturn

from data.chats.row import Row
from models.errors import EyasError

CHUNK = 1 << 20  # read at a time
HEAD = 1 << 20  # looked at to tell the shape
SAMPLE = 1000  # characters looked at to tell text from other data
Stream = io.BufferedReader | gzip.GzipFile

_JSON = json.JSONDecoder(strict=False)
_BLANK = b" \t\r\n"
_SPACE = re.compile(r"[ \t\r\n]*")
_WORDS = ("true", "false", "null", "NaN", "Infinity", "-Infinity")
_CUT_NUMBER = re.compile(r"\.|[eE][+-]?")  # what may stand between a number's digits and its end
_CUT_ESCAPE = re.compile(r"u[0-9a-fA-F]{0,4}")
_EXPECTED = "expected a JSON array of conversations or one JSON object a line"


def read_json(stream: Stream, file: str) -> Iterator[Row]:
    """The rows of a JSON text. Raises EyasError if it is none, or damaged where no row can be told from the next."""
    pieces = _Pieces(stream, file)
    head = pieces.head
    if head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise EyasError(f"{file}: is UTF-16; save it as UTF-8")
    if not head:
        yield Row(file, 1, problem="truncated_file" if pieces.cut else "empty_file")
        return
    text = head.decode("utf-8", "surrogateescape")
    newline = "\r" if pieces.newlines["\r"] and not pieces.newlines["\n"] else "\n"
    if _is_sequence(text, newline):
        rows = _read_values(pieces, file)
    elif _is_lines(text, newline):
        rows = (_parse_line(file, number, line) for number, line in _lines(pieces, newline.encode()))
    else:
        raise EyasError(f"{file}: {_EXPECTED}, found {_beginning(text)}")
    row = Row(file, 0)
    for row in rows:
        yield row
    if pieces.cut and row.problem != "truncated_file":  # cut just behind a row
        yield Row(file, row.row + 1, problem="truncated_file", detail="the gzip stream is cut short")


def _beginning(text: str) -> str:
    """The first characters of a file, if they are text."""
    if any(char not in "\t\r\n\f" and unicodedata.category(char) in ("Cc", "Cs") for char in text[:SAMPLE]):
        return "data that is no UTF-8 text"
    return repr(text[:40].strip())


# --- which shape -------------------------------------------------------------------------------------------------


def _is_sequence(text: str, newline: str) -> bool:
    """Whether the head of a file is that of an array, or of objects that share lines or take several of them."""
    first, _, rest = text.partition(newline)
    if text[0] == "[":
        # Unless it is a stray line, "[log]" or "[]", before objects a line.
        return "{" in first or _is_open(first) or not _is_object(rest.lstrip().partition(newline)[0])
    if text[0] != "{":
        return False
    try:
        _, end = _JSON.raw_decode(text)
    except json.JSONDecodeError as error:
        if any(_is_object(line) for line in rest.split(newline)):
            return False  # the first of many lines is broken
        return newline in text and (unfinished(error, text) or error.pos > len(first))
    except (ValueError, RecursionError):
        return False
    return end > len(first) or first[end:].lstrip()[:1] in ("{", ",")


def _is_lines(text: str, newline: str) -> bool:
    """Whether the head of a file is that of one JSON value a line, of which some lines may be broken."""
    first, found, rest = text.partition(newline)
    if text[0] == "{" or any(_is_object(line) for line in rest.split(newline)):
        return True
    return _is_json(first) or (not found and _is_open(first))


def _is_json(text: str) -> bool:
    try:
        _JSON.decode(text)
    except (ValueError, RecursionError):
        return False
    return True


def _is_object(line: str) -> bool:
    return line[:1] == "{" and _is_json(line)


def _is_open(text: str) -> bool:
    """Whether more text could make this a JSON value."""
    try:
        _JSON.raw_decode(text)
    except json.JSONDecodeError as error:
        return unfinished(error, text)
    except (ValueError, RecursionError):
        pass
    return False


def unfinished(error: json.JSONDecodeError, text: str) -> bool:
    """Whether the decoder failed only because the text ends: more of it could still make it valid."""
    if error.msg.startswith("Unterminated string"):
        return True
    blank = _SPACE.match(text, error.pos)
    if blank and blank.end() == len(text):
        return True
    rest = text[error.pos : error.pos + 10]
    if error.pos + len(rest) < len(text):
        return False
    if error.msg.startswith("Invalid \\u"):
        return _CUT_ESCAPE.fullmatch(rest) is not None
    if error.msg == "Expecting value":
        return any(word.startswith(rest) for word in _WORDS)
    return text[error.pos - 1 : error.pos].isdecimal() and _CUT_NUMBER.fullmatch(rest) is not None


# --- reading -----------------------------------------------------------------------------------------------------


class _Pieces:
    """The bytes of a stream in pieces, without byte order mark and leading blanks.

    head: the beginning, about a mebibyte. skipped, skipped_newlines: bytes and newlines left out before it.
    newlines: of either kind, in what is left out and in the head. cut: whether a gzip stream ended too early; it then
    just ends, as the JSON in it does not. Raises EyasError if the stream cannot be read.
    """

    def __init__(self, stream: Stream, file: str) -> None:
        self._stream, self._file = stream, file
        self.cut = False
        self.skipped = 0
        self.skipped_newlines = dict.fromkeys("\r\n", 0)
        read, size = list[bytes](), 0
        while size < HEAD and (piece := self._next()):
            piece = piece if read or self.skipped else piece.removeprefix(codecs.BOM_UTF8)
            kept = piece if read else piece.lstrip(_BLANK)
            self._skip(piece[: len(piece) - len(kept)])
            read += [kept] if kept else []
            size += len(kept)
        self.head = b"".join(read)
        self.newlines = {char: self.skipped_newlines[char] + self.head.count(char.encode()) for char in "\r\n"}

    def __iter__(self) -> Iterator[bytes]:
        return chain([self.head], iter(self._next, b""))

    def _skip(self, blanks: bytes) -> None:
        self.skipped += len(blanks)
        for char in self.skipped_newlines:
            self.skipped_newlines[char] += blanks.count(char.encode())

    def _next(self) -> bytes:
        try:
            return self._stream.read1(CHUNK)
        except EOFError:
            self.cut = True
            return b""
        except (OSError, zlib.error) as error:
            raise EyasError(f"{self._file}: cannot be read: {error}") from None


def _lines(pieces: _Pieces, newline: bytes) -> Iterator[tuple[int, bytes]]:
    """Numbered lines that are not blank; split at one kind of newline only, since JSON text may hold U+2028 and so on.

    All but the last end in a newline.
    """
    held: list[bytes] = []
    number = pieces.skipped_newlines[newline.decode()]
    for piece in pieces:
        *whole, tail = piece.split(newline)
        if whole:
            whole[0] = b"".join((*held, whole[0]))
            held = []
        for line in whole:
            number += 1
            if line.strip():
                yield number, line + newline
        held.append(tail)
    last = b"".join(held)
    if last.strip():
        yield number + 1, last


def _parse_line(file: str, number: int, line: bytes) -> Row:
    text = line.decode("utf-8", "surrogateescape")  # broken UTF-8: lone surrogates, which the text check rejects
    reason = "broken_json"
    try:
        return Row(file, number, json.loads(text, strict=False))
    except json.JSONDecodeError as error:
        why = str(error)
        if text[-1] not in "\r\n" and unfinished(error, text):
            reason = "truncated_file"
    except (ValueError, RecursionError) as error:
        why = str(error)
    return Row(file, number, problem=reason, detail=f"line {number}: {why}")


def _read_values(pieces: _Pieces, file: str) -> Iterator[Row]:
    """The elements of a JSON array, or JSON objects one after the other, read piece by piece."""
    cursor = _Cursor(pieces, file, pieces.skipped)
    array = cursor.peek() == "["
    if array:
        cursor.pos += 1
    row = 0
    while True:
        char = cursor.peek()
        if char == "" or (array and char == "]"):
            break
        if char == ",":
            cursor.pos += 1
            continue
        row += 1
        try:
            yield Row(file, row, cursor.value(row))
        except EOFError:
            yield Row(file, row, problem="truncated_file", detail=f"the file ends inside row {row}")
            return
    if array and char == "":
        yield Row(file, row + 1, problem="truncated_file", detail="the file ends before the array does")
    elif array:
        cursor.pos += 1
        if cursor.peek():
            raise EyasError(f"{file}: {_EXPECTED}, found more data after the end of an array of {row} elements")
        if row == 0:
            yield Row(file, 1, problem="empty_file", detail="an empty array")


class _Cursor:
    """A position in a text that arrives in pieces; what lies behind the position is forgotten.

    before: characters left out at the beginning.
    """

    def __init__(self, pieces: Iterable[bytes], file: str, before: int) -> None:
        self._decode = codecs.getincrementaldecoder("utf-8")("surrogateescape").decode
        self._pieces, self._file = iter(pieces), file
        self._before = before  # and those forgotten since, for error messages
        self._ended = False
        self.text, self.pos = "", 0

    def peek(self) -> str:
        """The next character that is not white space, "" at the end."""
        while True:
            match = _SPACE.match(self.text, self.pos)
            self.pos = match.end() if match else self.pos
            if self.pos < len(self.text) or not self._more():
                return self.text[self.pos : self.pos + 1]

    def value(self, row: int) -> Any:
        """Decode one JSON value, that of ``row``. EOFError: the text ends inside it. EyasError: it is not JSON."""
        while True:
            try:
                value, end = _JSON.raw_decode(self.text, self.pos)
            except json.JSONDecodeError as error:
                if not unfinished(error, self.text):
                    self._refuse(row, error.pos, error.msg)
                if not self._more():
                    raise EOFError from None
                continue
            except (ValueError, RecursionError) as error:
                self._refuse(row, self.pos, str(error))
            size = end - self.pos  # `_more` moves the position
            if end + len("e+0") <= len(self.text) or not self._more():  # a number may go on in the next piece
                self.pos += size
                return value

    def _refuse(self, row: int, pos: int, why: str) -> NoReturn:
        where = self._before + pos
        raise EyasError(f"{self._file}: not valid JSON in row {row}, at character {where}: {why}") from None

    def _more(self) -> bool:
        """Read on, at least as much as is already held, so that a huge value is not parsed again too often."""
        pieces, size = [], 0
        while size < max(CHUNK, len(self.text) - self.pos):
            piece = next(self._pieces, None)
            if piece is None:
                break
            pieces.append(piece)
            size += len(piece)
        final = not pieces
        added = self._decode(b"".join(pieces), final) if not self._ended else ""
        self._ended = final
        self._before += self.pos
        self.text, self.pos = self.text[self.pos :] + added, 0
        return bool(added) or not final
