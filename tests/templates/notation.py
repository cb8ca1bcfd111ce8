"""Conversations for the mask tests, and examples written out: the text with the supervised parts between ⟦ and ⟧.

Tokens are laid along the text by what each stands for in its vocabulary, not by the tokenizer's offsets, so that a mask
made from offsets is checked by something else.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any

from tokenizers import pre_tokenizers
from transformers import PreTrainedTokenizerFast

from data.chats.conversations import Conversation, Message
from data.masks.template import Example
from tests.templates import Fixture

CALL_ID = "a1B2c3D4e"
BYTE = re.compile(r"<0x([0-9A-F]{2})>")


def talk(*texts: str, system: str | None = None, ended: bool = True) -> Conversation:
    """Texts of user and assistant in turn; ended: false if the last answer was cut off."""
    head = [] if system is None else [Message("system", system)]
    roles = ("user", "assistant") * len(texts)
    turns = [Message(role, text) for role, text in zip(roles, texts, strict=False)]
    if not ended:
        turns[-1] = Message("assistant", texts[-1], ended=False)
    return Conversation("c", (*head, *turns), "f.jsonl", 7)


def official(fixture: Fixture, messages: Iterable[Message], *, prompt: bool = False, **kwargs: Any) -> str:
    """What transformers renders, on the day that is the default here. Calls have the id CALL_ID."""
    source = fixture.source.replace("strftime_now('%d %b %Y')", "'01 Jan 2025'")
    turns = [_turn(message) for message in messages]
    return str(
        fixture.tokenizer.apply_chat_template(
            turns,
            chat_template=source.replace("strftime_now('%Y-%m-%d')", "'2025-01-01'"),
            add_generation_prompt=prompt,
            tokenize=False,
            **kwargs,
        )
    )


def _turn(message: Message) -> dict[str, Any]:
    """The form of a message that chat templates are written for."""
    turn: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.tool_calls:
        functions = [{"name": call.name, "arguments": dict(call.arguments)} for call in message.tool_calls]
        turn["tool_calls"] = [{"id": CALL_ID, "type": "function", "function": function} for function in functions]
    if message.role == "tool":
        turn |= {"name": message.name, "tool_call_id": CALL_ID}
    return turn


def ids_of(fixture: Fixture, text: str) -> list[int]:
    return list(fixture.tokenizer(text, add_special_tokens=False)["input_ids"])


def check(fixture: Fixture, examples: Sequence[Example], *expected: str) -> None:
    """The examples are the expected documents, in order, token for token and mark for mark."""
    assert len(examples) == len(expected)
    for example, document in zip(examples, expected, strict=True):
        text = unmarked(document)
        assert example.input_ids == ids_of(fixture, text)
        assert marked(example, fixture.tokenizer, text) == document


def unmarked(marked: str) -> str:
    return marked.replace("⟦", "").replace("⟧", "")


def marked(example: Example, tokenizer: PreTrainedTokenizerFast, text: str) -> str:
    """``text`` with marks. AssertionError if the example's tokens don't spell it; white space that a control token
    swallows, and a blank that the tokenizer put before a word, are forgiven."""
    data, at, on = text.encode(), 0, False
    out: list[bytes] = []
    for piece, supervised in zip(_pieces(tokenizer, example.input_ids), example.supervised, strict=True):
        start, piece = _find(data, at, piece)
        if not piece:  # the tokenizer's own blank: nothing of the text
            continue
        skipped = data[at:start]
        mark = b"" if supervised == on else "⟦".encode() if supervised else "⟧".encode()
        out += [skipped, mark, piece] if supervised else [mark, skipped, piece]
        at, on = start + len(piece), supervised
    rest = data[at:]
    assert not rest.strip(), f"no tokens for {rest!r}"
    return b"".join([*out, *(["⟧".encode()] if on else []), rest]).decode()


def runs(example: Example, tokenizer: PreTrainedTokenizerFast) -> list[str]:
    """The supervised runs of tokens, each decoded by the tokenizer."""
    pairs = zip(example.input_ids, example.supervised, strict=True)
    return [
        str(tokenizer.decode([token for token, _ in run], clean_up_tokenization_spaces=False))
        for on, run in groupby(pairs, key=lambda pair: pair[1])
        if on
    ]


def _find(data: bytes, at: int, piece: bytes) -> tuple[int, bytes]:
    start = at
    while True:
        for candidate in (piece, piece.removeprefix(b" ")):
            if data.startswith(candidate, start):
                return start, candidate
        assert start < len(data) and data[at : start + 1].decode(errors="ignore").strip() == "", (
            f"{piece!r} does not follow {data[:at]!r} in {data!r}"
        )
        start += 1


def _pieces(tokenizer: PreTrainedTokenizerFast, ids: list[int]) -> list[bytes]:
    """What each token stands for: a control token for its own text, others for bytes of text."""
    control = {i: str(token) for i, token in tokenizer.added_tokens_decoder.items()}
    pieces = []
    for token, name in zip(ids, tokenizer.convert_ids_to_tokens(ids), strict=True):
        if token in control:
            pieces.append(control[token].encode())
        elif "<0x41>" in tokenizer.get_vocab():
            byte = BYTE.fullmatch(name)
            pieces.append(bytes([int(byte[1], 16)]) if byte else name.replace("▁", " ").encode())
        else:
            pieces.append(bytes(ALPHABET[character] for character in name))
    return pieces


def _alphabet() -> dict[str, int]:
    """The character that stands for each byte in byte-level vocabularies: itself if it can be seen, otherwise the next
    one from U+0100 on (the rule of GPT-2)."""
    seen = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    hidden = [byte for byte in range(256) if byte not in seen]
    table = {chr(byte): byte for byte in seen} | {chr(256 + n): byte for n, byte in enumerate(hidden)}
    assert set(table) == set(pre_tokenizers.ByteLevel.alphabet())
    return table


ALPHABET = _alphabet()
