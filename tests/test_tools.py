"""Tool calls and results: shown as the template shows them, never supervised; texts by hand."""

from __future__ import annotations

import json
from typing import Any

import pytest

from data.chats.conversations import Conversation, Message, ToolCall
from data.chats.policy import RowRejected
from data.masks.template import ChatTemplate, Encoded
from models.errors import EyasError
from tests.chat_templates import CHATML
from tests.test_served import HEAD, Q1, documents
from tests.test_template import TOKENIZER, talk

HEADER = "{{ '<|im_start|>' + m.role + '\n' }}"
END = "{{ '<|im_end|>\n' }}"
OFFER = "{% if tools %}{{ '<|im_start|>tools\n' + tools | tojson + '<|im_end|>\n' }}{% endif %}"
PROMPT = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"


def template_of(call: str, *, when: str = "m.tool_calls", offer: str = OFFER) -> str:
    """ChatML with calls written by the expression ``call`` of ``c`` and ``f``, results with the id of their call."""
    return (
        offer
        + "{% for m in messages %}"
        + HEADER
        + "{% if "
        + when
        + " %}{% for c in m.tool_calls %}{% set f = c.function %}{{ "
        + call
        + " }}{% endfor %}{% elif m.role == 'tool' %}{{ m.name + '/' + m.tool_call_id + '=' + m.content }}"
        + "{% else %}{{ m.content }}{% endif %}"
        + END
        + "{% endfor %}"
        + PROMPT
    )


AS_OBJECT = template_of("'CALL ' + f.name + '/' + c.id + ' ' + f.arguments | tojson")
AS_TEXT = template_of("'CALL ' + f.name + ' ' + f.arguments", when="m.content is none", offer="")
TOOL = {"type": "function", "function": {"name": "add", "description": "adds", "parameters": {}}}


def calling(*, text: str = "", results: tuple[Message, ...] | None = None, tools: tuple[Any, ...] = ()) -> Conversation:
    calls = (ToolCall("add", {"x": 1}, "A"), ToolCall("sub", {"y": "é"}, "B"))
    given = results or (Message("tool", "3", False, name="add"), Message("tool", "4", False, name="sub"))
    turns = (
        *(Message("user", "a"), Message("assistant", text, supervised=False, tool_calls=calls), *given),
        *(Message("assistant", "one"), Message("user", "b"), Message("assistant", "two")),
    )
    return Conversation("c", turns, "f.jsonl", 1, tools)


def encoded(template: ChatTemplate, conversation: Conversation) -> Encoded:
    (result,) = template.encode_batch([conversation], 10_000)
    assert isinstance(result, Encoded)
    return result


def rejected(template: ChatTemplate, conversation: Conversation) -> RowRejected:
    (result,) = template.encode_batch([conversation], 10_000)
    assert isinstance(result, RowRejected)
    return result


def test_calls_and_results_are_shown_but_not_supervised() -> None:
    (text,) = documents(ChatTemplate(TOKENIZER, AS_OBJECT), calling())
    assert text == (
        Q1 + HEAD + 'CALL add/call00000 {"x": 1}CALL sub/call00001 {"y": "é"}<|im_end|>\n'
        "<|im_start|>tool\nadd/call00000=3<|im_end|>\n<|im_start|>tool\nsub/call00001=4<|im_end|>\n"
        f"{HEAD}⟦one<|im_end|>⟧\n<|im_start|>user\nb<|im_end|>\n{HEAD}⟦two<|im_end|>⟧\n"
    )


def test_arguments_as_text_and_no_content_where_the_template_wants_that() -> None:
    (text,) = documents(ChatTemplate(TOKENIZER, AS_TEXT), calling())
    assert 'CALL add {"x": 1}CALL sub {"y": "é"}<|im_end|>\n' in text
    assert text.endswith(f"{HEAD}⟦two<|im_end|>⟧\n")


def test_results_go_to_their_calls_by_id() -> None:
    results = (Message("tool", "4", False, call_id="B"), Message("tool", "3", False, call_id="A"))
    (text,) = documents(ChatTemplate(TOKENIZER, AS_OBJECT), calling(results=results))
    assert "tool\nsub/call00001=4<|im_end|>\n<|im_start|>tool\nadd/call00000=3<|im_end|>" in text
    (text,) = documents(ChatTemplate(TOKENIZER, AS_OBJECT), calling(results=results[:1]))
    assert "tool\nsub/call00001=4<|im_end|>\n" + HEAD in text


def test_templates_without_calls_reject_the_row() -> None:
    for source in (CHATML, template_of("f.name"), template_of("f.arguments | tojson")):
        refusal = rejected(ChatTemplate(TOKENIZER, source), calling())
        assert (refusal.reason, refusal.detail) == ("tool_turns", "the chat template doesn't show calls and results")
    refusal = rejected(ChatTemplate(TOKENIZER, AS_OBJECT, tools="reject"), calling())
    assert (refusal.reason, refusal.detail) == ("tool_turns", "data.tools=reject")
    assert encoded(ChatTemplate(TOKENIZER, AS_OBJECT, tools="reject"), talk("a", "b")).repairs == []


def test_a_call_that_a_template_drops_beside_a_text_rejects_the_row() -> None:
    assert len(documents(ChatTemplate(TOKENIZER, AS_OBJECT), calling(text="I add."))) == 1
    refusal = rejected(ChatTemplate(TOKENIZER, AS_TEXT), calling(text="I add."))
    assert refusal.reason == "template_drops_turn" and refusal.detail.startswith("a tool call of user / assistant")


def test_a_result_that_a_template_drops_rejects_the_row() -> None:
    first_only = AS_OBJECT.replace("'=' + m.content", "('=' + m.content if loop.index == 3 else '')")
    refusal = rejected(ChatTemplate(TOKENIZER, first_only), calling())
    assert refusal.reason == "template_drops_turn" and refusal.detail.startswith("a tool turn of user / assistant")


def test_tools_on_offer() -> None:
    offered = calling(tools=(TOOL,))
    (text,) = documents(ChatTemplate(TOKENIZER, AS_OBJECT), offered)
    assert text.startswith(f"<|im_start|>tools\n{json.dumps([TOOL])}<|im_end|>\n{Q1}")
    # Never called: shown all the same, or said to be left out.
    plain = Conversation("c", talk("a", "one").messages, "f", 1, (TOOL,))
    template = ChatTemplate(TOKENIZER, AS_OBJECT)
    assert encoded(template, plain).repairs == []
    assert documents(template, plain) == [
        f"<|im_start|>tools\n{json.dumps([TOOL])}<|im_end|>\n{Q1}{HEAD}⟦one<|im_end|>⟧\n"
    ]
    without, bare = (encoded(ChatTemplate(TOKENIZER, CHATML), c) for c in (plain, talk("a", "one")))
    assert (without.repairs, bare.repairs) == (["tools_ignored"], [])
    assert without.examples[0].input_ids == bare.examples[0].input_ids
    assert encoded(ChatTemplate(TOKENIZER, AS_TEXT), offered).repairs == ["tools_ignored"]


def test_prompts_with_tools() -> None:
    template, conversation = ChatTemplate(TOKENIZER, AS_OBJECT), calling(tools=(TOOL,))
    (example,) = template.encode(conversation, 1000)
    for upto in (4, 6):
        prompt = template.prompt_ids(conversation.messages[:upto], conversation.tools)
        assert example.input_ids[: len(prompt)] == prompt
        assert not example.supervised[len(prompt) - 1] and example.supervised[len(prompt)]
    as_api = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "one"}]
    assert template.prompt_ids(as_api) == template.prompt_ids([Message("user", "a"), Message("assistant", "one")])
    with pytest.raises(EyasError, match="target.chat_template refuses the prompt: the chat template doesn't show"):
        ChatTemplate(TOKENIZER, CHATML).prompt_ids(conversation.messages[:4])


def test_tools_that_move_to_the_last_question_give_a_document_each() -> None:
    """As in Mistral's templates: what an earlier answer was given to is not what a later render shows."""
    name = "'<|im_start|>tools\n' + tools[0].function.name + '\n'"
    offer = "{% if tools and loop.index0 == ns.last %}{{ " + name + " }}{% endif %}"
    moving = (
        "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}"
        "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
        + AS_OBJECT.replace(OFFER, "").replace(HEADER, offer + HEADER)
    )
    long, short = documents(ChatTemplate(TOKENIZER, moving), calling(tools=(TOOL,)))
    offered = "<|im_start|>tools\nadd\n"
    assert short.startswith(offered + Q1) and short.endswith(f"{HEAD}⟦one<|im_end|>⟧\n")
    assert long.startswith(Q1) and f"{HEAD}one<|im_end|>\n{offered}<|im_start|>user\nb" in long
    assert long.endswith(f"{HEAD}⟦two<|im_end|>⟧\n")


def test_supervise_all_covers_calls() -> None:
    (example,) = ChatTemplate(TOKENIZER, AS_OBJECT, supervise="all").encode(calling(), 1000)
    assert all(example.supervised)


def test_settings_of_tools_and_length() -> None:
    with pytest.raises(EyasError, match=r"data\.tools=drop: must be one of render, reject"):
        ChatTemplate(TOKENIZER, CHATML, tools="drop")
    with pytest.raises(EyasError, match=r"data\.too_long=drop: must be one of cut, split, reject"):
        ChatTemplate(TOKENIZER, CHATML, too_long="drop")
    made = [
        ChatTemplate(TOKENIZER, CHATML),
        ChatTemplate(TOKENIZER, CHATML, tools="reject"),
        ChatTemplate(TOKENIZER, CHATML, too_long="split"),
        ChatTemplate(TOKENIZER, CHATML, too_long="reject"),
    ]
    assert len({template.fingerprint() for template in made}) == 4
