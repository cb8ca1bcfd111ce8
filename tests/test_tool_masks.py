"""Masks of conversations that call tools, by hand: calls and results are rendered and never supervised."""

from __future__ import annotations

import re

import pytest

from data.chats.conversations import Conversation, Message, ToolCall
from data.chats.policy import RowRejected
from tests.templates import FIXTURES
from tests.templates.notation import CALL_ID, check, official, runs, unmarked

TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather in a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
JSON = (
    '{"type": "function", "function": {"name": "weather", "description": "The weather in a city", '
    '"parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}}'
)
INDENTED = """{
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather in a city",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {
                    "type": "string"
                }
            }
        }
    }
}"""
CALLED = (
    Message("user", "Is it warm in Rome?"),
    Message("assistant", "", supervised=False, tool_calls=(ToolCall("weather", {"city": "Rome"}),)),
    Message("tool", "18 degrees", supervised=False, name="weather"),
    Message("assistant", "Yes, 18 degrees."),
)
THANKS = (Message("user", "Thanks!"), Message("assistant", "Welcome."))

TOOLS_OF_QWEN = (
    "# Tools\n\nThese functions can be called:\n<tools>\n" + JSON + "\n</tools>\n\nA call is written:\n"
    '<tool_call>\n{"name": ..., "arguments": {...}}\n</tool_call><|im_end|>\n'
)
CALL_OF_QWEN = (
    "<|im_start|>user\nIs it warm in Rome?<|im_end|>\n<|im_start|>assistant\n"
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call><|im_end|>\n'
    "<|im_start|>user\n<tool_response>\n18 degrees\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
)
CALL_OF_MISTRAL = (
    '[INST] Is it warm in Rome?[/INST][TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Rome"}, "id": "ID"}]</s>'
    '[TOOL_RESULTS] {"content": 18 degrees, "call_id": "ID"}[/TOOL_RESULTS]'
)
OFFER_OF_MISTRAL = f"[AVAILABLE_TOOLS] [{JSON}][/AVAILABLE_TOOLS]"
BY_HAND: dict[str, tuple[str, ...]] = {
    "qwen2_5": (
        "<|im_start|>system\nYou are an assistant of the second series.\n\n" + TOOLS_OF_QWEN + CALL_OF_QWEN
        + "⟦Yes, 18 degrees.<|im_end|>⟧\n<|im_start|>user\nThanks!<|im_end|>\n<|im_start|>assistant\n"
        "⟦Welcome.<|im_end|>⟧\n",
    ),
    # The answer after the result gets an empty reasoning block while it is the last, and loses it when it is history.
    "qwen3": (
        "<|im_start|>system\n" + TOOLS_OF_QWEN + CALL_OF_QWEN + "Yes, 18 degrees.<|im_end|>\n"
        "<|im_start|>user\nThanks!<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n⟦Welcome.<|im_end|>⟧\n",
        "<|im_start|>system\n" + TOOLS_OF_QWEN + CALL_OF_QWEN + "<think>\n\n</think>\n\n⟦Yes, 18 degrees.<|im_end|>⟧\n",
    ),
    "llama3_1": (
        "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nEnvironment: ipython\n"
        "Knowledge until: December 2023\nToday: 01 Jan 2025\n\n<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\n"
        'Answer with a call of one of these functions, as JSON {"name": ..., "parameters": {...}}.\n\n'
        + INDENTED + "\n\nIs it warm in Rome?<|eot_id|>"
        '<|start_header_id|>assistant<|end_header_id|>\n\n{"name": "weather", "parameters": {"city": "Rome"}}<|eot_id|>'
        '<|start_header_id|>ipython<|end_header_id|>\n\n"18 degrees"<|eot_id|>'
        "<|start_header_id|>assistant<|end_header_id|>\n\n⟦Yes, 18 degrees.<|eot_id|>⟧"
        "<|start_header_id|>user<|end_header_id|>\n\nThanks!<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n⟦Welcome.<|eot_id|>⟧",
    ),
    # The offer moves to the last question, so that the first answer stands in a document of its own.
    "mistral_v0_3": (
        f"<s>{CALL_OF_MISTRAL} Yes, 18 degrees.</s>{OFFER_OF_MISTRAL}[INST] Thanks![/INST]⟦ Welcome.</s>⟧",
        f"<s>{OFFER_OF_MISTRAL}{CALL_OF_MISTRAL}⟦ Yes, 18 degrees.</s>⟧",
    ),
}  # fmt: skip
WITHOUT_TOOLS = ("smollm2", "llama2", "gemma3", "phi4", "deepseek_v3", "vicuna", "zephyr", "tagged")


def conversation(*messages: Message) -> Conversation:
    return Conversation("c", messages, "f.jsonl", 7, (TOOL,))


@pytest.mark.parametrize("name", BY_HAND)
def test_a_call_its_result_and_two_answers(name: str) -> None:
    fixture = FIXTURES[name]
    examples = fixture.template().encode(conversation(*CALLED, *THANKS), 5000)
    documents = list(BY_HAND[name])
    for i, example in enumerate(examples):
        if ids := re.findall(r'"(?:call_)?id": "(\w*)"', fixture.tokenizer.decode(example.input_ids)):
            assert len(set(ids)) == 1 and re.fullmatch("[A-Za-z0-9]{9}", ids[0])
            documents[i] = documents[i].replace('"ID"', f'"{ids[0]}"')
    check(fixture, examples, *documents)


@pytest.mark.parametrize("name", BY_HAND)
def test_the_render_is_that_of_transformers(name: str) -> None:
    ends = (6, 4)  # the later answer first
    for end, document in zip(ends, BY_HAND[name], strict=False):
        text = official(FIXTURES[name], (*CALLED, *THANKS)[:end], tools=[TOOL])
        assert unmarked(document).replace('"ID"', f'"{CALL_ID}"') == text


@pytest.mark.parametrize("name", [*BY_HAND, "mistral_nemo"])
def test_only_the_answer_is_supervised(name: str) -> None:
    """Another conversation with the same roles: two calls in a row, one round."""
    fixture = FIXTURES[name]
    again = Message("assistant", "", supervised=False, tool_calls=(ToolCall("weather", {"city": "Oslo"}),))
    cold = Message("tool", "3 degrees", supervised=False, name="weather")
    both = Message("assistant", "Rome 18, Oslo 3.")
    (example,) = fixture.template().encode(conversation(*CALLED[:3], again, cold, both), 5000)
    (run,) = runs(example, fixture.tokenizer)
    assert run.lstrip(" ") == "Rome 18, Oslo 3." + fixture.end
    text = str(fixture.tokenizer.decode(example.input_ids))
    assert text.index("Rome?") < text.index('"Rome"') < text.index("18 degrees") < text.index('"Oslo"')
    assert text.index('"Oslo"') < text.index("3 degrees") < text.index("Rome 18, Oslo 3.")


@pytest.mark.parametrize("name", BY_HAND)
def test_the_prompt_of_a_verifier_has_the_tools(name: str) -> None:
    fixture = FIXTURES[name]
    template = fixture.template()
    prompt = template.prompt_ids(CALLED[:3], tools=(TOOL,))
    example = template.encode(conversation(*CALLED), 5000)[0]
    assert example.input_ids[: len(prompt)] == prompt
    assert not any(example.supervised[: len(prompt)]) and any(example.supervised[len(prompt) :])


@pytest.mark.parametrize("name", WITHOUT_TOOLS)
def test_a_template_without_tools_rejects_calls_by_name(name: str) -> None:
    with pytest.raises(RowRejected) as caught:
        FIXTURES[name].template().encode(conversation(*CALLED), 5000)
    assert caught.value.reason == "tool_turns"


@pytest.mark.parametrize("name", WITHOUT_TOOLS)
def test_tools_that_are_never_called_are_left_out_where_the_template_has_no_place(name: str) -> None:
    fixture = FIXTURES[name]
    offered = fixture.template().encode(conversation(*THANKS), 5000)
    plain = fixture.template().encode(Conversation("c", THANKS, "f.jsonl", 7), 5000)
    assert [e.input_ids for e in offered] == [e.input_ids for e in plain]
