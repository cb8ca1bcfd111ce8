"""For any conversation and every template of tests/templates: the supervised text is the answers and nothing else.

What of an answer is supervised is stated in one table, `tests.templates.FIXTURES` (what the template puts around it,
strips, and ends it with); what a tokenizer may do to white space is in `same`.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from data.chats.conversations import Message
from tests.templates import FIXTURES, Fixture
from tests.templates.notation import ids_of, official, runs, talk

HTML = ("<table>", "<b>")  # added tokens of Gemma, which are ordinary text
OWN_BLOCK = ("qwen3", "gpt_oss")  # templates that put more than white space between generation prompt and answer
RESULT = ("<tool_response>", "</tool_response>")
Round = tuple[str, str]  # what the user says, and what the assistant answers

characters = st.characters(exclude_categories=["Cs"], exclude_characters="\x00\ufdd0\ufdd1")
words = st.text(st.sampled_from("ok HiTwo \n\t.<>|[]/é漢🙂") | characters, min_size=1, max_size=10)
lines = st.sampled_from(
    ["ok", " ok", "ok ", "\nok", "ok\n\n", "\n\n ok", "ok\u00a0", "\u2028ok", "e\u0301", "\u200bok", "a\r\nb",
     "\x1cok\x1f", "def f(x):\n    return x\n", "```\n<b>\n```", "<table>\n\n<b>ok", "[[A]] x", "USER: x ASSISTANT: y"]
)  # fmt: skip
said = (words | lines).filter(lambda text: bool(text.strip()))


def asked(fixture: Fixture) -> st.SearchStrategy[str]:
    """What a user may say: also all that this template and its tokenizer use as markers."""
    pieces = st.lists(st.sampled_from(fixture.control) | said, min_size=1, max_size=3)
    text = said | pieces.map("".join).filter(lambda text: bool(text.strip()))
    # Qwen3 takes such a turn for the result of a tool (tests/test_masks.py has one by hand).
    return text.filter(lambda text: not (text.startswith(RESULT[0]) and text.endswith(RESULT[1])))


def answered(fixture: Fixture) -> st.SearchStrategy[str]:
    """What an assistant may say, without control text, which tests/test_control_text.py is about."""
    markers = [token for token in fixture.control if token.strip() and token not in HTML]
    plain = said.filter(lambda text: not any(marker in text for marker in markers))
    if not fixture.reasons:
        return plain
    pairs = st.tuples(plain.map(lambda text: text.strip("\n")), plain.map(lambda text: text.lstrip("\n")))
    reasoned = pairs.map(lambda pair: f"<think>\n{pair[0]}\n</think>\n\n{pair[1]}")
    return reasoned if fixture.name == "deepseek_r1" else plain | reasoned


def talks(fixture: Fixture) -> st.SearchStrategy[tuple[str | None, list[Round]]]:
    system = st.none() | said if fixture.system else st.none()
    one = st.tuples(asked(fixture), answered(fixture))
    return st.tuples(system, st.lists(one, min_size=1, max_size=3) | one.map(lambda same: [same] * 3))


def same(fixture: Fixture, found: Sequence[str], expected: Sequence[str]) -> bool:
    """Equal, as multisets: a conversation may become several documents. White space counts except

    * before the answer, where it may merge with the header's, or be the blank that SentencePiece puts before a word
      (not where the template's own block precedes the answer);
    * beside control tokens that swallow it ("merged").
    """

    def plain(text: str) -> str:
        if fixture.strips == "merged":
            return text.removesuffix(fixture.end).strip() + text[len(text.removesuffix(fixture.end)) :]
        return text if fixture.name in OWN_BLOCK else text.lstrip()

    return sorted(map(plain, found)) == sorted(map(plain, expected))


@pytest.mark.parametrize("name", FIXTURES)
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow])
@given(data=st.data())
def test_supervised_text_is_exactly_the_answers(name: str, data: st.DataObject) -> None:
    fixture = FIXTURES[name]
    system, rounds = data.draw(talks(fixture))
    conversation = talk(*(text for pair in rounds for text in pair), system=system)
    examples = fixture.template().encode(conversation, 100_000)
    answers = [answer.removeprefix("<think>\n") if name == "deepseek_r1" else answer for _, answer in rounds]
    alone = len(examples) == len(rounds)  # a document for each answer, which is then the last of its document
    expected = [fixture.supervised(answer, last=alone or i == len(answers) - 1) for i, answer in enumerate(answers)]
    found = [run for example in examples for run in runs(example, fixture.tokenizer)]
    assert same(fixture, found, expected)
    check_ids(fixture, conversation.messages, [example.input_ids for example in examples])
    turns = [i for i, message in enumerate(conversation.messages) if message.role == "assistant"]
    for i, example in zip(turns[::-1], examples, strict=False):
        prompt = fixture.template().prompt_ids(conversation.messages[:i])
        if example.input_ids[: len(prompt)] == prompt:  # else the header's last token merges with the answer's first
            assert not example.supervised[len(prompt) - 1] and any(example.supervised[len(prompt) :])
        else:
            assert answers[-1 if i == turns[-1] else turns.index(i)][:1].isspace()


def check_ids(fixture: Fixture, messages: Sequence[Message], documents: Sequence[list[int]]) -> None:
    """The ids are those of transformers: of the whole conversation, or of the turns up to each answer."""
    turns = [i for i, message in enumerate(messages) if message.role == "assistant"]
    for i, ids in zip(turns[::-1], documents, strict=False):
        whole = official(fixture, messages[: i + 1])
        prompt = official(fixture, messages[:i], prompt=True)
        if not whole.startswith(prompt):  # as served: the prompt, and the answer as generated
            whole = prompt + messages[i].content.removeprefix("<think>\n") + fixture.end
        assert ids == ids_of(fixture, whole)
