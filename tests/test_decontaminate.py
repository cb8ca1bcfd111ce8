"""Evaluation prompts in training conversations are recognised, and nothing else is."""

from __future__ import annotations

import pytest

from data.chats.conversations import Message
from data.documents.decontaminate import EvaluationPrompts, opening

LONG = "Write a short poem about a falcon that learns to fly over the northern sea at dawn"  # 17 words
PROMPTS = EvaluationPrompts([("long", LONG), ("short", "What is 2+2?"), ("blank", "  ")])


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (LONG, "long"),
        ("WRITE a short poem, about a falcon\nthat learns to fly: over the northern sea at dawn!", "long"),
        (f"Please do this: {LONG}. Thank you.", "long"),
        (" ".join(LONG.split()[4:]), "long"),  # 13 words in a row
        (" ".join(LONG.split()[5:]), ""),  # only 12
        ("what is 2 + 2", "short"),
        ("What is 2+2? And what is 3+3?", ""),  # a short prompt counts only as a whole turn
        ("?!", ""),
    ],
)
def test_user_turns(text: str, found: str) -> None:
    assert PROMPTS.find([Message("user", text)]) == found
    assert PROMPTS.find([Message("user", "hello"), Message("assistant", "hi"), Message("user", text)]) == found
    assert PROMPTS.find([Message("assistant", text), Message("system", text)]) == ""


def test_fingerprint_tells_prompts_apart() -> None:
    assert PROMPTS.fingerprint() != EvaluationPrompts([("long", LONG)]).fingerprint()
    assert EvaluationPrompts([("x", LONG)]).fingerprint() == EvaluationPrompts([("y", LONG.upper())]).fingerprint()


def test_opening_is_the_first_question() -> None:
    one = opening([Message("system", "s"), Message("user", "Hi there!"), Message("assistant", "a")])
    assert one == opening([Message("user", "hi  there"), Message("assistant", "b"), Message("user", "more")])
    assert one != opening([Message("user", "hi you")]) and opening([Message("user", "?")]) != opening(
        [Message("user", "!")]
    )
