"""Whether a conversation holds a prompt that the drafter will be measured on: then the measurement flatters it.

Prompts of at least `WORDS` words are recognised by any `WORDS` consecutive ones (GPT-3, arXiv 2005.14165, appendix C,
uses 13), shorter ones as a whole turn. Letter case, white space and punctuation don't count.
"""

from __future__ import annotations

import hashlib
import re
import string
from collections.abc import Iterable, Iterator

from data.chats.conversations import Message

WORDS = 13
_WORD = re.compile(r"\w+")
_PUNCTUATION = {ord(c): " " for c in string.punctuation}


class EvaluationPrompts:
    """The questions of an evaluation, to be recognised in training conversations.

    questions: (name, text) of every user turn. The object is small: a hash for each group of words.
    """

    def __init__(self, questions: Iterable[tuple[str, str]]) -> None:
        self._names: dict[int, str] = {}
        self._questions = 0
        for name, text in questions:
            self._questions += 1
            for key in self._keys(text):
                self._names.setdefault(key, name)

    def __len__(self) -> int:
        return self._questions

    def find(self, messages: Iterable[Message]) -> str:
        """The name of a question that one of the user turns holds, "" if there is none."""
        for message in messages:
            if message.role == "user":
                for key in self._keys(message.content):
                    if key in self._names:
                        return self._names[key]
        return ""

    def fingerprint(self) -> str:
        keys = b"".join(key.to_bytes(8, "little") for key in sorted(self._names))
        return hashlib.blake2b(keys, digest_size=16).hexdigest()

    @staticmethod
    def _keys(text: str) -> Iterator[int]:
        words = _WORD.findall(text.casefold())
        if not words:
            return
        for start in range(max(1, len(words) - WORDS + 1)):
            group = words[start : start + WORDS]
            short = len(words) < WORDS  # a whole turn never equals a part of a longer one
            yield digest64(" ".join(group) + ("$" if short else ""))


def opening(messages: Iterable[Message]) -> int:
    """A digest of the first question: conversations that open alike are no independent test of each other."""
    text = next((message.content for message in messages if message.role == "user"), "")
    plain = text.casefold().translate(_PUNCTUATION)
    return digest64(" ".join(plain.split()) or text)


def digest64(text: str) -> int:
    """Like hash(), but the same in every process."""
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "little")
