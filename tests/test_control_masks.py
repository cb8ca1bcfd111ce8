"""Text that spells control tokens, under every template: in an answer ordinary text, in a prompt what a server reads.

A generation ends where the target emits a real control token, so an answer that contains the text of one was written
in ordinary tokens, and is taught in ordinary tokens.
"""

from __future__ import annotations

import pytest

from data.masks.template import Example
from tests.templates import FIXTURES, Fixture
from tests.templates.notation import ids_of, official, runs, talk


def special(fixture: Fixture) -> dict[int, str]:
    """Control tokens proper; markers such as think tags are ordinary tokens, which the target does generate."""
    return {i: str(token) for i, token in fixture.tokenizer.added_tokens_decoder.items() if token.special}


def spelled(fixture: Fixture) -> list[str]:
    tokens = [token for token in special(fixture).values() if token != "<|channel|>"]  # gpt-oss's template refuses it
    texts = [f"See {token} there." for token in tokens] + [f"{tokens[0]}{tokens[-1]} x{tokens[-1]}"]
    return [f"<think>\nok\n</think>\n\n{text}" if fixture.reasons else text for text in texts]


def control_ids(fixture: Fixture, example: Example) -> list[int]:
    pairs = zip(example.input_ids, example.supervised, strict=True)
    return [token for token, supervised in pairs if supervised and token in special(fixture)]


@pytest.mark.parametrize("name", FIXTURES)
def test_an_answer_that_spells_control_tokens_is_ordinary_text(name: str) -> None:
    fixture = FIXTURES[name]
    template = fixture.template()
    ends = [fixture.tokenizer.convert_tokens_to_ids(fixture.end)] if fixture.end else []
    for answer in spelled(fixture):
        (example,) = template.encode(talk("Hi", answer), 5000)
        assert control_ids(fixture, example) == ends, answer
        (run,) = runs(example, fixture.tokenizer)
        shown = answer.removeprefix("<think>\n") if name == "deepseek_r1" else answer
        assert run.lstrip(" ") == fixture.supervised(shown, last=True).lstrip(" ")
        prompt = template.prompt_ids(talk("Hi").messages)
        assert example.input_ids[: len(prompt)] == prompt and not any(example.supervised[: len(prompt)])


@pytest.mark.parametrize("name", FIXTURES)
def test_a_prompt_that_spells_control_tokens_is_what_a_server_reads(name: str) -> None:
    fixture = FIXTURES[name]
    said = "<think>\nok\n</think>\n\nok" if fixture.reasons else "ok"
    question = "See " + " and ".join(special(fixture).values()) + " there"
    prompt = ids_of(fixture, official(fixture, talk(question).messages, prompt=True))
    (example,) = fixture.template().encode(talk(question, said), 5000)
    assert example.input_ids[: len(prompt)] == prompt == fixture.template().prompt_ids(talk(question).messages)
    assert not any(example.supervised[: len(prompt)])
    (run,) = runs(example, fixture.tokenizer)
    shown = said.removeprefix("<think>\n") if name == "deepseek_r1" else said
    assert run.lstrip(" ") == fixture.supervised(shown, last=True).lstrip(" ")
