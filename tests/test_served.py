"""Documents as served: prompt, answer as generated, end of turn, where a render doesn't show that. Texts by hand."""

from __future__ import annotations

from typing import Any

import pytest

from data.chats.conversations import Conversation, Message, ToolCall
from data.chats.policy import RowRejected
from data.masks.template import ChatTemplate
from models.errors import EyasError
from tests.chat_templates import CHATML, PHI, QWEN3, byte_tokenizer
from tests.test_template import TOKENIZER, runs, talk

SYSTEM = "<|im_start|>system\nYou help.<|im_end|>\n"
Q1, Q2 = "<|im_start|>user\na<|im_end|>\n", "<|im_start|>user\nb<|im_end|>\n"
HEAD = "<|im_start|>assistant\n"
FIRST, SECOND = "<think>\nr1\n</think>\n\none", "<think>\nr2\n</think>\n\ntwo"
OPENS = CHATML.replace("assistant\n' }}", "assistant\n<think>\n' }}")  # and keeps all of an answer in history
OPENS_AND_DROPS = OPENS.replace("m.content", "m.content.split('</think>')[-1].lstrip('\n')")
DROPS = CHATML.replace("m.content", "m.content.split('</think>')[-1].lstrip('\n')")
# Qwen3-Thinking-2507's way: reasoning after the last question only, there always, and opened by the prompt.
REFILLS = (
    "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}{% for m in messages %}{% if m.role == 'assistant' %}"
    "{% set r = '' %}{% set c = m.content %}"
    "{% if '</think>' in c %}{% set r = c.split('</think>')[0].split('<think>')[-1].strip('\n') %}"
    "{% set c = c.split('</think>')[-1].lstrip('\n') %}{% endif %}{{ '<|im_start|>assistant\n' }}"
    "{% if loop.index0 > ns.last %}{{ '<think>\n' + r + '\n</think>\n\n' }}{% endif %}{{ c + '<|im_end|>\n' }}"
    "{% else %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n' }}{% endif %}"
)


def documents(template: ChatTemplate, conversation: Conversation) -> list[str]:
    """Every document with its supervised runs in ⟦ ⟧."""
    shown = []
    for example in template.encode(conversation, 10_000):
        text = template.tokens.decode(example.input_ids)
        for run in runs(example, template.tokenizer):
            before, _, after = text.rpartition(run)
            text = f"{before}⟦{run}⟧{after}"
        shown.append(text)
    return shown


def reject(template: ChatTemplate, conversation: Conversation) -> str:
    with pytest.raises(RowRejected) as caught:
        template.encode(conversation, 10_000)
    return caught.value.reason


def test_prompt_opens_the_reasoning_and_history_drops_it() -> None:
    template = ChatTemplate(TOKENIZER, OPENS_AND_DROPS)
    long, short = documents(template, talk("a", FIRST, "b", SECOND))
    assert short == f"{SYSTEM}{Q1}{HEAD}<think>\n⟦r1\n</think>\n\none<|im_end|>⟧"
    assert long == (f"{SYSTEM}{Q1}{HEAD}one<|im_end|>\n{Q2}{HEAD}<think>\n⟦r2\n</think>\n\ntwo<|im_end|>⟧")


def test_prompt_opens_the_reasoning_and_history_keeps_it() -> None:
    """Then the whole render is what was served, and one document shows it all."""
    template = ChatTemplate(TOKENIZER, OPENS)
    assert documents(template, talk("a", FIRST, "b", SECOND)) == [
        f"{SYSTEM}{Q1}{HEAD}<think>\n⟦r1\n</think>\n\none<|im_end|>⟧\n"
        f"{Q2}{HEAD}<think>\n⟦r2\n</think>\n\ntwo<|im_end|>⟧\n"
    ]


def test_template_that_fills_in_the_block_its_prompt_opens() -> None:
    template = ChatTemplate(TOKENIZER, REFILLS)
    long, short = documents(template, talk("a", FIRST, "b", SECOND))
    assert short == f"{Q1}{HEAD}<think>\n⟦r1\n</think>\n\none<|im_end|>⟧\n"
    assert long == f"{Q1}{HEAD}one<|im_end|>\n{Q2}{HEAD}<think>\n⟦r2\n</think>\n\ntwo<|im_end|>⟧\n"
    assert reject(template, talk("a", "one")) == "reasoning_missing"


@pytest.mark.parametrize("source", [OPENS, OPENS_AND_DROPS])
def test_answers_without_the_reasoning_that_the_prompt_opens(source: str) -> None:
    template = ChatTemplate(TOKENIZER, source)
    assert reject(template, talk("a", "one")) == "reasoning_missing"
    assert reject(template, talk("a", "one", "b", SECOND)) == "reasoning_missing"
    # An answer that isn't trained on may lack it.
    skipped = documents(template, talk("a", "one", "b", SECOND, skip=(1,)))
    assert [text.partition("⟦")[2] for text in skipped] == ["r2\n</think>\n\ntwo<|im_end|>⟧" + "\n" * (source == OPENS)]


def test_raw_responses_go_on_where_the_prompt_stopped() -> None:
    """A server's text begins inside the block that the prompt opened."""
    for source in (OPENS, OPENS_AND_DROPS):
        (text,) = documents(ChatTemplate(TOKENIZER, source), talk("a", "r1\n</think>\n\none"))
        assert text == f"{SYSTEM}{Q1}{HEAD}<think>\n⟦r1\n</think>\n\none<|im_end|>⟧"


def test_template_that_drops_the_reasoning_of_the_last_answer_too() -> None:
    template = ChatTemplate(TOKENIZER, DROPS)
    long, short = documents(template, talk("a", FIRST, "b", SECOND))
    assert short == f"{SYSTEM}{Q1}{HEAD}⟦{FIRST}<|im_end|>⟧"
    assert long == f"{SYSTEM}{Q1}{HEAD}one<|im_end|>\n{Q2}{HEAD}⟦{SECOND}<|im_end|>⟧"
    assert documents(template, talk("a", "one", "b", "two")) == [
        f"{SYSTEM}{Q1}{HEAD}⟦one<|im_end|>⟧\n{Q2}{HEAD}⟦two<|im_end|>⟧\n"
    ]


def test_render_that_shows_no_reasoning_as_a_block_of_its_own() -> None:
    """GLM-4.7's way: '</think>' before an answer without reasoning, and the prompt opens '<think>'."""
    call = (
        "'<|assistant|>' + ('<think>' + m.content.split('</think>')[0].split('<think>')[-1].strip() + '</think>'"
        " if '</think>' in m.content and loop.last else '</think>') + m.content.split('</think>')[-1].strip()"
    )
    source = (
        "{% for m in messages %}{% if m.role == 'user' %}{{ '<|user|>' + m.content }}{% else %}{{ " + call + " }}"
        "{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|><think>' }}{% endif %}"
    )
    template = ChatTemplate(TOKENIZER, source, eos_ids=[TOKENIZER.convert_tokens_to_ids("<|user|>")])
    answers = ("<think>r1</think>one", "<think>r2</think>two")
    assert documents(template, talk("a", answers[0], "b", answers[1])) == [
        "<|user|>a<|assistant|></think>one<|user|>b<|assistant|><think>⟦r2</think>two⟧",
        "<|user|>a<|assistant|><think>⟦r1</think>one⟧",
    ]
    assert reject(template, talk("a", "one")) == "reasoning_missing"


def test_last_answer_shown_after_the_whole_generation_prompt() -> None:
    """Nemotron-Nano's way: the last turn stands after what its prompt opens, whatever it says; history drops that."""
    head = "{{ '<|im_start|>assistant\n' + ('<think>\n' if loop.last else '') }}"
    source = (
        "{% for m in messages %}{% if m.role == 'assistant' %}" + head + "{{ m.content if loop.last else "
        "m.content.split('</think>')[-1].strip() }}{% else %}{{ '<|im_start|>' + m.role + '\n' + m.content }}"
        "{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n' }}{% endif %}"
    )
    template = ChatTemplate(TOKENIZER, source)
    assert documents(template, talk("a", FIRST, "b", SECOND)) == [
        f"{Q1}{HEAD}one<|im_end|>\n{Q2}{HEAD}<think>\n⟦r2\n</think>\n\ntwo<|im_end|>⟧",
        f"{Q1}{HEAD}<think>\n⟦r1\n</think>\n\none<|im_end|>⟧",
    ]
    assert reject(template, talk("a", "one")) == "reasoning_missing"


def test_prompt_that_ends_with_the_end_of_reasoning() -> None:
    """DeepSeek-V3.1's way of turning it off."""
    source = CHATML.replace("'<|im_start|>' + m.role + '\n'", "'<|im_start|>' + m.role + '\n' + think[m.role]")
    source = "{% set think = {'user': '', 'assistant': '</think>'} %}" + source.replace(
        "assistant\n' }}", "assistant\n</think>' }}"
    )
    template = ChatTemplate(TOKENIZER, source)
    assert documents(template, talk("a", "one")) == [f"{SYSTEM}{Q1}{HEAD}</think>⟦one<|im_end|>⟧\n"]
    assert reject(template, talk("a", FIRST)) == "reasoning_unasked"


def test_an_answer_cut_off_in_reasoning_that_the_prompt_has_closed() -> None:
    for template in (
        ChatTemplate(TOKENIZER, QWEN3, {"enable_thinking": False}),
        ChatTemplate(TOKENIZER, CHATML.replace("assistant\n' }}", "assistant\n<think>\n\n</think>\n\n' }}")),
    ):
        turns = (Message("user", "a"), Message("assistant", "<think>\nhalf of the reas", ended=False))
        assert reject(template, Conversation("c", turns, "f", 1)) == "reasoning_unasked"


SWITCHED = CHATML.replace(
    "{{ '<|im_start|>assistant\n' }}",
    "{{ '<|im_start|>assistant\n' }}"
    "{% if '/no_think' in messages[-1].content %}{{ '<think>\n\n</think>\n\n' }}{% endif %}",
)


def test_generation_prompt_that_depends_on_what_a_turn_says() -> None:
    """No render shows what such a prompt adds, so nothing proves where its answer goes on."""
    assert SWITCHED != CHATML
    template = ChatTemplate(TOKENIZER, SWITCHED)
    assert documents(template, talk("a", "one")) == [f"{SYSTEM}{Q1}{HEAD}⟦one<|im_end|>⟧\n"]
    assert reject(template, talk("a /no_think", "one")) == "answer_not_located"
    assert reject(template, talk("a", "one", "b /no_think", "two")) == "answer_not_located"
    assert reject(template, talk("a /no_think", "one", "b", "two")) == "answer_not_located"
    skipped = documents(template, talk("a /no_think", "one", "b", "two", skip=(1,)))
    assert skipped == [f"{SYSTEM}{Q1.replace('a<', 'a /no_think<')}{HEAD}one<|im_end|>\n{Q2}{HEAD}⟦two<|im_end|>⟧\n"]


@pytest.mark.parametrize("block", ["<think>\n</think>", "<think>\n\n</think>\n\n", "<s>thought\n<|end|>"])
@pytest.mark.parametrize("drops", [False, True])
def test_prompt_that_closes_a_block_which_no_render_shows(block: str, drops: bool) -> None:
    """Reasoning is turned off by an empty block in the generation prompt: answers follow it, one document each."""
    source = CHATML.replace("assistant\n' }}", "assistant\n" + block.replace("\n", "\\n") + "' }}")
    if drops:
        source = source.replace("m.content", "m.content.split('</think>')[-1].lstrip('\n')")
    template = ChatTemplate(TOKENIZER, source)
    assert documents(template, talk("a", "one", "b", "two")) == [
        f"{SYSTEM}{Q1}{HEAD}one<|im_end|>\n{Q2}{HEAD}{block}⟦two<|im_end|>⟧",
        f"{SYSTEM}{Q1}{HEAD}{block}⟦one<|im_end|>⟧",
    ]
    assert reject(template, talk("a", FIRST)) == "reasoning_unasked"


def test_prompt_that_opens_no_reasoning_after_a_tool_result() -> None:
    """DeepSeek-R1's way: only a question is followed by the opened block; the answer to a result goes right on."""
    source = (
        "{% for m in messages %}{% if m.role == 'user' %}{{ '<|user|>' + m.content }}"
        "{% elif m.role == 'tool' %}{{ '[' + m.content + ']' }}"
        "{% elif m.tool_calls %}{% for c in m.tool_calls %}{{ c.function | tojson }}{% endfor %}"
        "{% else %}{% if messages[loop.index0 - 1].role == 'user' %}{{ '<|assistant|>' }}{% endif %}"
        "{{ m.content.split('</think>')[-1] + '<|end|>' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt and messages[-1].role == 'user' %}{{ '<|assistant|><think>\n' }}{% endif %}"
    )
    call = Message("assistant", "", supervised=False, tool_calls=(ToolCall("f", {}),))
    turns = (Message("user", "a"), call, Message("tool", "3", False), Message("assistant", "one"))
    later = (Message("user", "b"), Message("assistant", SECOND))
    template = ChatTemplate(TOKENIZER, source)
    begin = '<|user|>a{"name": "f", "arguments": {}}[3]'
    assert documents(template, Conversation("c", (*turns, *later), "f", 1)) == [
        f"{begin}one<|end|><|user|>b<|assistant|><think>\n⟦r2\n</think>\n\ntwo<|end|>⟧",
        f"{begin}⟦one<|end|>⟧",
    ]


def test_white_space_that_only_the_generation_prompt_has() -> None:
    """'<|assistant|>' + answer in the render, but the target is asked with '<|assistant|>' and a newline."""
    source = PHI.replace("m.role + '|>\n'", "m.role + '|>'")
    long, short = documents(ChatTemplate(TOKENIZER, source), talk("a", "one", "b", "two"))
    assert short == "<|user|>a<|end|>\n<|assistant|>\n⟦one<|end|>⟧"
    assert long == "<|user|>a<|end|>\n<|assistant|>one<|end|>\n<|user|>b<|end|>\n<|assistant|>\n⟦two<|end|>⟧"


def test_prompt_ids_are_the_start_of_every_document() -> None:
    conversation = talk("a", FIRST, "b", SECOND)
    for source in (OPENS, OPENS_AND_DROPS, DROPS, REFILLS):
        template = ChatTemplate(TOKENIZER, source)
        for example in template.encode(conversation, 1000):
            first = example.supervised.index(True)
            upto = 3 if "r2" in template.tokens.decode(example.input_ids) else 1
            assert template.prompt_ids(conversation.messages[:upto]) == example.input_ids[:first] or source == OPENS


def test_supervise_all_and_last_as_served() -> None:
    conversation = talk("a", FIRST, "b", SECOND)
    parts = ChatTemplate(TOKENIZER, OPENS_AND_DROPS).encode(conversation, 1000)
    whole = ChatTemplate(TOKENIZER, OPENS_AND_DROPS, supervise="all").encode(conversation, 1000)
    assert [e.input_ids for e in whole] == [e.input_ids for e in parts]
    assert all(all(e.supervised) for e in whole)
    assert ChatTemplate(TOKENIZER, OPENS_AND_DROPS, supervise="last").encode(conversation, 1000) == parts[:1]


@pytest.mark.parametrize(
    ("source", "answer", "expected"),
    [
        (CHATML, "on", f"{SYSTEM}{Q1}{HEAD}⟦on⟧"),
        (PHI, "on", "<|user|>\na<|end|>\n<|assistant|>\n⟦on⟧"),
        (OPENS, "<think>\nab", f"{SYSTEM}{Q1}{HEAD}<think>\n⟦ab⟧"),
        (OPENS_AND_DROPS, "<think>\nr1\n</think>\n\non", f"{SYSTEM}{Q1}{HEAD}<think>\n⟦r1\n</think>\n\non⟧"),
        (OPENS_AND_DROPS, "<think>\nab", f"{SYSTEM}{Q1}{HEAD}<think>\n⟦ab⟧"),
        (REFILLS, "<think>\nab", f"{Q1}{HEAD}<think>\n⟦ab⟧"),
        (DROPS, "<think>\nab", f"{SYSTEM}{Q1}{HEAD}⟦<think>\nab⟧"),
    ],
)
def test_unended_answers_end_with_their_last_token(source: str, answer: str, expected: str) -> None:
    conversation = Conversation("c", (Message("user", "a"), Message("assistant", answer, ended=False)), "f", 1)
    assert documents(ChatTemplate(TOKENIZER, source), conversation) == [expected]
    (example,) = ChatTemplate(TOKENIZER, source, supervise="all").encode(conversation, 1000)
    assert TOKENIZER.decode(example.input_ids) == expected.replace("⟦", "").replace("⟧", "")


def test_only_the_last_answer_may_be_unended_and_the_ones_before_keep_their_end() -> None:
    turns = (*talk("a", "one", "b").messages, Message("assistant", "tw", ended=False))
    (text,) = documents(ChatTemplate(TOKENIZER, CHATML), Conversation("c", turns, "f", 1))
    assert text == f"{SYSTEM}{Q1}{HEAD}⟦one<|im_end|>⟧\n{Q2}{HEAD}⟦tw⟧"


@pytest.mark.parametrize(
    "change",
    [
        ("assistant\n' }}", "assistant\n<think>\nHm' }}"),  # more than a tag: nothing says that answers go on there
        ("assistant\n' }}", "assistant\n<|end|>' }}"),
        ("assistant\n' }}", "bot\n<think>\n' }}"),
    ],
)
def test_prompts_that_prove_nothing_stop(change: tuple[str, str]) -> None:
    with pytest.raises(EyasError, match=r"target\.chat_template: the answers of this template cannot be marked"):
        ChatTemplate(byte_tokenizer(), CHATML.replace(*change))


def test_a_prompt_that_leads_elsewhere_for_one_conversation_rejects_the_row() -> None:
    """No reasoning is asked for (the prompt closes an empty block), but the answer has some."""
    kwargs: dict[str, Any] = {"enable_thinking": False}
    closes = REFILLS.replace("<think>\n' }}{% endif %}", "<think>\n\n</think>\n\n' }}{% endif %}")
    template = ChatTemplate(TOKENIZER, closes, kwargs)
    assert documents(template, talk("a", "one")) == [f"{Q1}{HEAD}<think>\n\n</think>\n\n⟦one<|im_end|>⟧\n"]
    assert reject(template, talk("a", FIRST)) == "reasoning_unasked"
