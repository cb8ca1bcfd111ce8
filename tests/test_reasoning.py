"""Reasoning in a field of its own: shown and supervised as the target writes it, or the row is rejected."""

from __future__ import annotations

from typing import Any

import pytest

from data.chats.conversations import Conversation, Message, ToolCall
from data.masks.template import ChatTemplate, Encoded
from tests.chat_templates import CHATML, QWEN3
from tests.templates import FIXTURES
from tests.templates.notation import check, official, talk
from tests.test_served import DROPS, HEAD, OPENS, OPENS_AND_DROPS, Q1, Q2, REFILLS, documents, reject
from tests.test_template import TOKENIZER

ANSWERS = (("Greet.", "Hello!"), ("Add.", "Two."))
GPT_OSS = FIXTURES["gpt_oss"]
FINAL = "<|channel|>final<|message|>"


def reasoned(*answers: tuple[str, str], ended: bool = True) -> Conversation:
    """Questions "a", "b", and answers with their reasoning."""
    turns: list[Message] = []
    for question, (reasoning, answer) in zip("ab", answers, strict=False):
        turns += [Message("user", question), Message("assistant", answer, reasoning=reasoning, ended=ended)]
    return Conversation("c", tuple(turns), "f.jsonl", 7)


def folded(*answers: tuple[str, str]) -> Conversation:
    texts = [t for q, (r, a) in zip("ab", answers, strict=False) for t in (q, f"<think>\n{r}\n</think>\n\n{a}")]
    return talk(*texts)


def encoded(template: ChatTemplate, conversation: Conversation) -> Encoded:
    (result,) = template.encode_batch([conversation], 10_000)
    assert isinstance(result, Encoded), result
    return result


# --- think tags ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("source", [CHATML, QWEN3, OPENS, OPENS_AND_DROPS, DROPS, REFILLS, FIXTURES["qwen3"].source])
def test_think_tags_where_the_template_knows_no_other_way(source: str) -> None:
    template = ChatTemplate(TOKENIZER, source)
    given, written = (encoded(template, talk(*ANSWERS)) for talk in (reasoned, folded))
    assert [(e.input_ids, e.supervised) for e in given.examples] == [
        (e.input_ids, e.supervised) for e in written.examples
    ]
    assert (given.repairs, written.repairs) == (["reasoning_folded"], [])
    assert template.prompt_ids(reasoned(*ANSWERS).messages[:3]) == template.prompt_ids(folded(*ANSWERS).messages[:3])


@pytest.mark.parametrize("kwargs", [{}, {"enable_thinking": True}])
def test_qwen3_by_hand(kwargs: dict[str, Any]) -> None:
    fixture = FIXTURES["qwen3"]
    head = "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n"
    check(
        fixture,
        fixture.template(**kwargs).encode(reasoned(*ANSWERS), 1000),
        f"{head}Hello!<|im_end|>\n<|im_start|>user\nb<|im_end|>\n<|im_start|>assistant\n"
        "⟦<think>\nAdd.\n</think>\n\nTwo.<|im_end|>⟧\n",
        f"{head}⟦<think>\nGreet.\n</think>\n\nHello!<|im_end|>⟧\n",
    )


def test_reasoning_that_the_prompt_has_closed() -> None:
    template = ChatTemplate(TOKENIZER, QWEN3, {"enable_thinking": False})
    assert reject(template, reasoned(("r", "one"))) == "reasoning_unasked"


def spacing(condition: str = "m.reasoning_content") -> str:
    """A template that puts its field in tags without newlines, but leaves a content with tags as it is."""
    field = "{% if CONDITION %}{{ '<think>' + m.reasoning_content + '</think>' }}{% endif %}"
    source = CHATML.replace("'<|im_start|>' + m.role + '\n' + m.content", "'<|im_start|>' + m.role + '\n' }}" + field)
    source = source.replace("{% endif %} + '<|im_end|>'", "{% endif %}{{ m.content + '<|im_end|>'")
    return source.replace("CONDITION", condition)


def test_tags_as_the_template_spaces_them() -> None:
    template = ChatTemplate(TOKENIZER, spacing())
    (text,) = documents(template, reasoned(("r1", "one"), ("r2", "two")))
    assert text.endswith(f"{Q1}{HEAD}⟦<think>r1</think>one<|im_end|>⟧\n{Q2}{HEAD}⟦<think>r2</think>two<|im_end|>⟧\n")
    assert encoded(template, reasoned(("r1", "one"))).repairs == []
    opening = ChatTemplate(TOKENIZER, spacing().replace("assistant\n' }}", "assistant\n<think>' }}"))
    (text,) = documents(opening, reasoned(("r1", "one")))
    assert text.endswith(f"{Q1}{HEAD}<think>⟦r1</think>one<|im_end|>⟧\n")
    assert reject(opening, talk("a", "one")) == "reasoning_missing"
    # The prompt spaces them another way than the field: then as an answer in tags.
    other = ChatTemplate(TOKENIZER, spacing().replace("assistant\n' }}", "assistant\n<think>\n' }}"))
    (text,) = documents(other, reasoned(("r1", "one")))
    assert text.endswith(f"{Q1}{HEAD}<think>\n⟦r1\n</think>\n\none<|im_end|>⟧\n")
    assert encoded(other, reasoned(("r1", "one"))).repairs == ["reasoning_folded"]


def test_reasoning_that_the_template_leaves_out_once() -> None:
    """An answer is never taught without the reasoning before it."""
    template = ChatTemplate(TOKENIZER, spacing("m.reasoning_content and 'dog' not in m.reasoning_content"))
    assert len(documents(template, reasoned(("a cat", "one")))) == 1
    assert reject(template, reasoned(("a dog", "one"))) == "template_rewrites_answer"


def test_of_a_call_it_stands_before_its_text() -> None:
    call = Message("assistant", "I add.", False, tool_calls=(ToolCall("add", {"x": 1}),), reasoning="r")
    turns = (Message("user", "a"), call, Message("tool", "3", False), Message("assistant", "one"))
    source = CHATML.replace("m.content", "m.content + m.tool_calls | default('') | string")
    (text,) = documents(ChatTemplate(TOKENIZER, source), Conversation("c", turns, "f", 1))
    assert f"{HEAD}<think>\nr\n</think>\n\nI add." in text and text.endswith(f"{HEAD}⟦one<|im_end|>⟧\n")


# --- channels --------------------------------------------------------------------------------------------------------


def test_channels_by_hand() -> None:
    """All that follows the generation prompt is what the target writes; history has no reasoning."""
    prompts = [
        official(GPT_OSS, [Message("user", "a")], prompt=True),
        official(GPT_OSS, talk("a", "Hello!", "b").messages, prompt=True),
    ]
    written = [f"⟦<|channel|>analysis<|message|>{r}<|end|><|start|>assistant{FINAL}{a}<|return|>⟧" for r, a in ANSWERS]
    examples = GPT_OSS.template().encode(reasoned(*ANSWERS), 1000)
    check(GPT_OSS, examples, prompts[1] + written[1], prompts[0] + written[0])
    assert encoded(GPT_OSS.template(), reasoned(*ANSWERS)).repairs == []
    assert (
        GPT_OSS.template().prompt_ids(reasoned(*ANSWERS).messages[:1])
        == examples[1].input_ids[: examples[1].supervised.index(True)]
    )
    # Beside an answer without reasoning, whose header stays the template's.
    mixed = GPT_OSS.template().encode(reasoned(ANSWERS[0], ("", "Two.")), 1000)
    check(GPT_OSS, mixed, f"{prompts[1]}{FINAL}⟦Two.<|return|>⟧", prompts[0] + written[0])


def test_channels_of_reasoning_that_spells_control_tokens_and_of_a_cut_answer() -> None:
    (example,) = GPT_OSS.template().encode(reasoned(("see <|end|> \n", " <|return|>x")), 1000)
    ids = [t for t, on in zip(example.input_ids, example.supervised, strict=True) if on]
    special = [GPT_OSS.tokenizer.convert_ids_to_tokens(t) for t in ids if t in GPT_OSS.tokenizer.added_tokens_decoder]
    assert special == [
        *("<|channel|>", "<|message|>", "<|end|>", "<|start|>", "<|channel|>", "<|message|>", "<|return|>")
    ]
    assert GPT_OSS.tokenizer.decode(ids) == (
        f"<|channel|>analysis<|message|>see <|end|> \n<|end|><|start|>assistant{FINAL} <|return|>x<|return|>"
    )
    (cut,) = GPT_OSS.template().encode(reasoned(("r", "hal"), ended=False), 1000)
    prompt = official(GPT_OSS, [Message("user", "a")], prompt=True)
    check(GPT_OSS, [cut], f"{prompt}⟦<|channel|>analysis<|message|>r<|end|><|start|>assistant{FINAL}hal⟧")


def test_channels_know_no_think_tags() -> None:
    assert reject(GPT_OSS.template(), folded(("r", "one"))) == "answer_not_located"
    cut = Conversation("c", (Message("user", "a"), Message("assistant", "<think>\nr", ended=False)), "f", 1)
    assert reject(GPT_OSS.template(), cut) == "answer_not_located"


@pytest.mark.parametrize(
    "change",
    [
        ("message.thinking", "message.nothing"),  # shows no reasoning at all
        ("'<|start|>assistant<|channel|>analysis", "'<|start|>thinker<|channel|>analysis"),  # not after the prompt
        ("message.thinking + '<|end|>'", "message.thinking + '<|return|>'"),  # where a generation would have ended
    ],
)
def test_reasoning_of_which_nothing_shows_what_the_target_writes(change: tuple[str, str]) -> None:
    source = GPT_OSS.source.replace(*change)
    assert source != GPT_OSS.source
    template = ChatTemplate(GPT_OSS.tokenizer, source)
    assert reject(template, reasoned(("r", "one"))) == "answer_not_located"
    check(
        GPT_OSS,
        template.encode(talk("a", "one"), 1000),
        f"{official(GPT_OSS, [Message('user', 'a')], prompt=True)}{FINAL}⟦one<|return|>⟧",
    )


def test_reasoning_that_stands_after_its_answer() -> None:
    source = CHATML.replace("m.content", "m.content + m.reasoning | default('')")
    assert reject(ChatTemplate(TOKENIZER, source), reasoned(("r", "one"))) == "answer_not_located"


def test_reasoning_that_the_template_changes() -> None:
    source = GPT_OSS.source.replace(
        "message.thinking + '<|end|>'", "message.thinking | replace('dog', 'cat') + '<|end|>'"
    )
    assert reject(ChatTemplate(GPT_OSS.tokenizer, source), reasoned(("a dog", "one"))) == "template_rewrites_answer"
