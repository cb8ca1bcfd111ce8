"""Conversations longer than data.max_length: cut, rejected, or split into documents of whole rounds."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.chats.conversations import Conversation, Message, ToolCall
from data.chats.policy import RowRejected
from data.masks.rounds import groups
from data.masks.template import ChatTemplate, Encoded
from tests.chat_templates import CHATML, LLAMA3, QWEN3
from tests.test_served import OPENS_AND_DROPS
from tests.test_template import TOKENIZER, runs, talk
from tests.test_tools import AS_OBJECT, TOOL

SPLIT = ChatTemplate(TOKENIZER, CHATML, too_long="split")
CUT = ChatTemplate(TOKENIZER, CHATML)
# The tokens of CHATML with a byte a token, and one for each of <|im_start|> and <|im_end|>.
SYSTEM = len("system\nYou help.\n") + 2
ROUND = len("user\n\n") + 2 + len("assistant\n\n") + 2


def encoded(template: ChatTemplate, conversation: Conversation, max_length: int) -> Encoded:
    (result,) = template.encode_batch([conversation], max_length)
    assert isinstance(result, Encoded), result
    return result


def test_by_hand() -> None:
    """Rounds of 2, 2, 20 and 2 bytes of text; two short ones fit together, the long one alone fits nowhere."""
    conversation = talk("a", "1", "b", "2", "c" * 10, "3" * 10, "d", "4")
    result = encoded(SPLIT, conversation, SYSTEM + 2 * (ROUND + 2))
    assert [runs(e) for e in result.examples] == [
        ["1<|im_end|>", "2<|im_end|>"],
        ["3333333333<|im_end|>"],
        ["4<|im_end|>"],
    ]
    assert [len(e.input_ids) - SYSTEM for e in result.examples] == [2 * (ROUND + 2), ROUND + 20, ROUND + 2]
    assert [e.source for e in result.examples] == ["f.jsonl:7:c", "f.jsonl:7:c#1", "f.jsonl:7:c#2"]
    assert not any(e.truncated for e in result.examples)
    assert result.repairs == ["split_by_rounds"]


def test_one_token_less_and_the_round_goes_to_the_next_document() -> None:
    conversation = talk("a", "1", "b", "2", "c", "3")
    for max_length, rounds in ((3 * (ROUND + 2), 3), (3 * (ROUND + 2) - 1, 2), (2 * (ROUND + 2) - 1, 1)):
        result = encoded(SPLIT, conversation, SYSTEM + max_length)
        assert len(runs(result.examples[0])) == rounds
        assert result.repairs == ([] if rounds == 3 else ["split_by_rounds"])


def test_a_round_too_long_by_itself_is_cut_or_dropped() -> None:
    room = SYSTEM + ROUND + 2
    result = encoded(SPLIT, talk("a", "1", "b", "2" * 9, "c", "3"), room)
    # In the middle, the end of turn and the newline after it give way to two more characters.
    assert [runs(e) for e in result.examples] == [["1<|im_end|>"], ["222"], ["3<|im_end|>"]]
    assert [(e.truncated, len(e.input_ids)) for e in result.examples] == [(False, room), (True, room), (False, room)]
    assert result.repairs == ["split_by_rounds", "cut_at_max_length"]
    result = encoded(SPLIT, talk("a", "1", "b" * 90, "2", "c", "3"), room)
    assert [runs(e) for e in result.examples] == [["1<|im_end|>"], ["3<|im_end|>"]]
    assert result.repairs == ["split_by_rounds", "round_dropped"]
    with pytest.raises(RowRejected, match=r"cut_before_answer: \d+ tokens, data\.max_length=30"):
        SPLIT.encode(talk("a" * 90, "1", "b" * 90, "2"), 30)


def test_too_long_rejects() -> None:
    template = ChatTemplate(TOKENIZER, CHATML, too_long="reject")
    conversation = talk("a", "1", "b", "2")
    length = SYSTEM + 2 * (ROUND + 2)
    assert template.encode(conversation, length) == CUT.encode(conversation, length)
    with pytest.raises(RowRejected, match=rf"too_long: {length} tokens, data\.max_length={length - 1}"):
        template.encode(conversation, length - 1)


def test_cutting_says_so() -> None:
    assert encoded(CUT, talk("a", "1", "b", "2"), SYSTEM + ROUND + 2 + 3).repairs == ["cut_at_max_length"]
    assert encoded(CUT, talk("a", "1", "b", "2"), 1000).repairs == []


def test_the_system_prompt_and_the_tools_stand_before_every_part() -> None:
    call = Message("assistant", "", supervised=False, tool_calls=(ToolCall("add", {"x": 1}),))
    turns = [Message("system", "S!")]
    for i in range(4):
        turns += [Message("user", f"q{i}"), call, Message("tool", f"r{i}", False), Message("assistant", f"a{i}")]
    conversation = Conversation("c", tuple(turns), "f.jsonl", 1, (TOOL,))
    whole = ChatTemplate(TOKENIZER, AS_OBJECT).encode(conversation, 10_000)[0]
    template = ChatTemplate(TOKENIZER, AS_OBJECT, too_long="split")
    result = encoded(template, conversation, len(whole.input_ids) - 1)
    assert [runs(e) for e in result.examples] == [[f"a{i}<|im_end|>" for i in range(3)], ["a3<|im_end|>"]]
    for example in result.examples:
        text = template.tokens.decode(example.input_ids)
        assert text.startswith("<|im_start|>tools\n") and text.count("<|im_start|>system\nS!<|im_end|>\n") == 1
    last = template.tokens.decode(result.examples[1].input_ids)
    assert "q3" in last and "r3" in last and "CALL add/call00000" in last and "q2" not in last and "r2" not in last


@pytest.mark.parametrize("source", [QWEN3, OPENS_AND_DROPS])
def test_templates_that_rewrite_history(source: str) -> None:
    """A document for each answer, as served; what doesn't fit begins a new conversation."""
    texts = [text for i in range(6) for text in (f"q{i}", f"<think>\nr{i}\n</think>\n\na{i}")]
    single = max(
        len(e.input_ids) for i in range(6) for e in ChatTemplate(TOKENIZER, source).encode(talk(*texts[:2]), 999)
    )
    result = encoded(ChatTemplate(TOKENIZER, source, too_long="split"), talk(*texts), single + ROUND + 5)
    shown = [TOKENIZER.decode(e.input_ids) for e in result.examples]
    supervised = [run for e in result.examples for run in runs(e)]
    tag = "<think>\n" if source == QWEN3 else ""
    assert sorted(supervised) == [f"{tag}r{i}\n</think>\n\na{i}<|im_end|>" for i in range(6)]
    assert all(len(e.input_ids) <= single + ROUND + 5 for e in result.examples)
    for text in shown:
        questions = [i for i in range(6) if f"q{i}" in text]
        assert len(questions) in (1, 2) and f"r{questions[-1]}\n" in text
    assert result.repairs == ["split_by_rounds"]


def test_settings_of_supervision() -> None:
    conversation = talk("a", "1", "b", "2", "c", "3", skip=(3,))
    room = SYSTEM + ROUND + 2
    assert [runs(e) for e in SPLIT.encode(conversation, room)] == [["1<|im_end|>"], ["3<|im_end|>"]]
    last = ChatTemplate(TOKENIZER, CHATML, supervise="last", too_long="split")
    assert [runs(e) for e in last.encode(conversation, room)] == [["3<|im_end|>"]]
    everything = ChatTemplate(TOKENIZER, CHATML, supervise="all", too_long="split").encode(conversation, room)
    assert len(everything) == 3 and all(all(e.supervised) for e in everything)


def test_an_unended_answer_stays_unended() -> None:
    turns = (*talk("a", "1", "b").messages, Message("assistant", "22", ended=False))
    result = encoded(SPLIT, Conversation("c", turns, "f.jsonl", 7), SYSTEM + ROUND + 3)
    assert [runs(e) for e in result.examples] == [["1<|im_end|>"], ["22"]]


text = st.text(st.sampled_from("ab \n漢🙂"), min_size=1, max_size=30).filter(lambda value: bool(value.strip()))


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(text, text), min_size=2, max_size=8),
    st.integers(60, 200),
    st.sampled_from([None, "be brief", "be very brief " * 3]),
)
def test_greedy_and_none_lost(rounds: list[tuple[str, str]], max_length: int, system: str | None) -> None:
    """Against lengths measured one group at a time on the unsplit encoding of just these rounds."""

    def measure(group: list[tuple[str, str]]) -> Any:
        (example,) = CUT.encode(talk(*(t for pair in group for t in pair), system=system), 10**6)
        return example

    expected, left = [], rounds
    while left:
        count = max([n for n in range(1, len(left) + 1) if len(measure(left[:n]).input_ids) <= max_length] or [1])
        expected.append(measure(left[:count]))
        left = left[count:]
    try:
        examples = SPLIT.encode(talk(*(t for pair in rounds for t in pair), system=system), max_length)
    except RowRejected as rejected:
        assert rejected.reason == "cut_before_answer"
        examples = []
    cut = [(e.input_ids[:max_length], e.supervised[:max_length]) for e in expected]
    cut = [(ids, mask) for ids, mask in cut if any(a and b for a, b in zip(mask, mask[1:], strict=False))]
    assert [(e.input_ids, e.supervised) for e in examples] == cut


def test_not_quadratic(monkeypatch: pytest.MonkeyPatch) -> None:
    """300 rounds of very uneven length: all that is encoded is a few times the conversation."""
    draw = random.Random(1)
    texts = [("漢" if draw.random() < 0.5 else "ok ") * draw.choice([1, 5, 60]) for _ in range(600)]
    template = ChatTemplate(TOKENIZER, LLAMA3, too_long="split")
    (whole,) = ChatTemplate(TOKENIZER, LLAMA3).encode(talk(*texts), 10**9)
    counted = 0
    original = template.tokens.encode_batch

    def counting(batch: list[str]) -> Any:
        nonlocal counted
        made = original(batch)
        counted += sum(len(encoding) for encoding in made)
        return made

    monkeypatch.setattr(template.tokens, "encode_batch", counting)
    result = encoded(template, talk(*texts), 2000)
    assert sum(len(runs(e)) for e in result.examples) == 300
    assert counted < 6 * len(whole.input_ids)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=40), st.integers(1, 40), st.randoms(use_true_random=False))
def test_groups_from_any_guess(lengths: list[int], room: int, draw: random.Random) -> None:
    """Whatever is guessed: whole, in order, each as large as fits."""
    starts = sorted(draw.randint(0, 200) for _ in range(len(lengths) + 1))

    def fits(first: int, end: int) -> int | None:
        total = sum(lengths[first:end])
        return total if total <= room else None

    at = 0
    for first, end, found in groups(starts, room, fits):
        assert first == at < end
        assert found == fits(first, end) and (found is not None or end == first + 1)
        assert end == len(lengths) or fits(first, end + 1) is None
        at = end
    assert at == len(lengths)
