"""Masks of well-known chat templates: for each a conversation written out by hand, the supervised text in ⟦ ⟧.

The structure of the templates is in tests/templates. The render itself is also compared with transformers' own.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from data.chats.conversations import Conversation
from data.chats.policy import RowRejected
from data.masks.template import ChatTemplate
from models.batch import valid_slots
from models.errors import EyasError
from tests.templates import FIXTURES, Fixture
from tests.templates.notation import check, ids_of, official, runs, talk, unmarked

QUESTIONS, ANSWERS = ("Hi", "1+1?"), ("Hello!", "Two.")
REASONED = ("<think>\nGreet.\n</think>\n\nHello!", "<think>\nAdd.\n</think>\n\nTwo.")
DATED = (
    "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nKnowledge until: December 2023\n"
    "Today: 01 Jan 2025\n\nBe brief.<|eot_id|>"
)
HARMONY = (
    "<|start|>system<|message|>You are a model with channels.\nKnowledge until: 2024-06\nToday: 2025-01-01\n\n"
    "Reasoning: medium\n\n# Channels: analysis, commentary, final.<|end|>"
    "<|start|>developer<|message|># Instructions\n\nBe brief.<|end|>"
)
CHATML = (
    "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
    "<|im_start|>assistant\n⟦Hello!<|im_end|>⟧\n<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n⟦Two.<|im_end|>⟧\n"
)
SOS = "<｜begin▁of▁sentence｜>"
EOS = "<｜end▁of▁sentence｜>"
# The documents of: system "Be brief." (where the template takes one), "Hi", "Hello!", "1+1?", "Two.". Where there are
# two, the later answer comes first. Answers of templates that keep reasoning have "Greet." and "Add." in think tags.
BY_HAND: dict[str, tuple[str, ...]] = {
    "smollm2": (CHATML,),
    "qwen2_5": (CHATML,),
    "tagged": (CHATML,),
    "qwen3": (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\nHello!<|im_end|>\n<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n⟦<think>\nAdd.\n</think>\n\nTwo.<|im_end|>⟧\n",
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\n⟦<think>\nGreet.\n</think>\n\nHello!<|im_end|>⟧\n",
    ),
    "llama2": ("<s>[INST] <<SYS>>\nBe brief.\n<</SYS>>\n\nHi [/INST]⟦ Hello! </s>⟧<s>[INST] 1+1? [/INST]⟦ Two. </s>⟧",),
    "llama3_1": (
        DATED + "<|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n⟦Hello!<|eot_id|>⟧"
        "<|start_header_id|>user<|end_header_id|>\n\n1+1?<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n⟦Two.<|eot_id|>⟧",
    ),
    "mistral_v0_1": ("<s>[INST] Hi [/INST]⟦Hello!</s>⟧ [INST] 1+1? [/INST]⟦Two.</s>⟧ ",),
    "mistral_v0_3": ("<s>[INST] Be brief.\n\nHi[/INST]⟦ Hello!</s>⟧[INST] 1+1?[/INST]⟦ Two.</s>⟧",),
    "mistral_nemo": (
        "<s>[INST]Hi[/INST]Hello!</s>[INST]Be brief.\n\n1+1?[/INST]⟦Two.</s>⟧",
        "<s>[INST]Be brief.\n\nHi[/INST]⟦Hello!</s>⟧",
    ),
    "gemma3": (
        "<bos><start_of_turn>user\nBe brief.\n\nHi<end_of_turn>\n<start_of_turn>model\n⟦Hello!<end_of_turn>⟧\n"
        "<start_of_turn>user\n1+1?<end_of_turn>\n<start_of_turn>model\n⟦Two.<end_of_turn>⟧\n",
    ),
    "phi3": (
        "<|system|>\nBe brief.<|end|>\n<|user|>\nHi<|end|>\n<|assistant|>\n⟦Hello!<|end|>⟧\n"
        "<|user|>\n1+1?<|end|>\n<|assistant|>\n⟦Two.<|end|>⟧\n<|endoftext|>",
    ),
    "phi4": (
        "<|im_start|>system<|im_sep|>Be brief.<|im_end|><|im_start|>user<|im_sep|>Hi<|im_end|>"
        "<|im_start|>assistant<|im_sep|>⟦Hello!<|im_end|>⟧<|im_start|>user<|im_sep|>1+1?<|im_end|>"
        "<|im_start|>assistant<|im_sep|>⟦Two.<|im_end|>⟧",
    ),
    "deepseek_v2": (f"{SOS}Be brief.\n\nUser: Hi\n\nAssistant:⟦ Hello!{EOS}⟧User: 1+1?\n\nAssistant:⟦ Two.{EOS}⟧",),
    "deepseek_v3": (f"{SOS}Be brief.<｜User｜>Hi<｜Assistant｜>⟦Hello!{EOS}⟧<｜User｜>1+1?<｜Assistant｜>⟦Two.{EOS}⟧",),
    "deepseek_r1": (
        f"{SOS}Be brief.<｜User｜>Hi<｜Assistant｜>\n\nHello!{EOS}<｜User｜>1+1?"
        f"<｜Assistant｜><think>\n⟦Add.\n</think>\n\nTwo.{EOS}⟧",
        f"{SOS}Be brief.<｜User｜>Hi<｜Assistant｜><think>\n⟦Greet.\n</think>\n\nHello!{EOS}⟧",
    ),
    "vicuna": ("<s>Be brief. USER: Hi ASSISTANT:⟦ Hello!</s>⟧USER: 1+1? ASSISTANT:⟦ Two.</s>⟧",),
    "zephyr": (
        "<|system|>\nBe brief.</s>\n<|user|>\nHi</s>\n<|assistant|>\n⟦Hello!</s>⟧\n"
        "<|user|>\n1+1?</s>\n<|assistant|>\n⟦Two.</s>⟧\n",
    ),
    "glm4": (
        "[gMASK]<sop><|system|>\nBe brief.<|user|>\nHi<|assistant|>⟦\nHello!<|user|>⟧\n1+1?<|assistant|>⟦\nTwo.⟧",
    ),
    "gpt_oss": (
        HARMONY + "<|start|>user<|message|>Hi<|end|><|start|>assistant<|channel|>final<|message|>⟦Hello!⟧<|end|>"
        "<|start|>user<|message|>1+1?<|end|><|start|>assistant<|channel|>final<|message|>⟦Two.<|return|>⟧",
    ),
}
# After the prompt: the answer " Two. \n"; its white space is kept, trimmed, or swallowed by the token beside it.
EDGES = {
    **dict.fromkeys(("smollm2", "qwen2_5", "tagged"), "⟦ Two. \n<|im_end|>⟧\n"),
    "qwen3": "<think>\n\n</think>\n\n⟦ Two. \n<|im_end|>⟧\n",
    "llama2": "⟦ Two. </s>⟧",
    "llama3_1": "⟦Two.<|eot_id|>⟧",
    "mistral_v0_1": "⟦ Two. \n</s>⟧ ",
    "mistral_v0_3": "⟦ Two.</s>⟧",
    "mistral_nemo": "⟦ Two. \n</s>⟧",
    "gemma3": "⟦Two.<end_of_turn>⟧\n",
    "phi3": "⟦ Two. \n<|end|>⟧\n<|endoftext|>",
    "phi4": " ⟦Two. \n<|im_end|>⟧",
    "deepseek_v2": f"⟦  Two. \n{EOS}⟧",
    "deepseek_v3": f"⟦ Two. \n{EOS}⟧",
    "deepseek_r1": f"⟦Add.\n</think>\n\n Two. \n{EOS}⟧",
    "vicuna": "⟦  Two. \n</s>⟧",
    "zephyr": "⟦ Two. \n</s>⟧\n",
    "glm4": "⟦\n Two. \n⟧",
    "gpt_oss": "<|channel|>final<|message|>⟦ Two. \n<|return|>⟧",
}
BOS = {"llama2": 2} | dict.fromkeys(("llama3_1", "gemma3", "vicuna", "mistral_v0_1", "mistral_v0_3", "mistral_nemo"), 1)
BOS |= dict.fromkeys(("deepseek_v2", "deepseek_v3", "deepseek_r1"), 1)


def standard(fixture: Fixture) -> Conversation:
    answers = REASONED if fixture.reasons else ANSWERS
    texts = [text for pair in zip(QUESTIONS, answers, strict=True) for text in pair]
    return talk(*texts, system="Be brief." if fixture.system else None)


# --- every template, by hand -----------------------------------------------------------------------------------------


def test_every_template_is_written_out() -> None:
    assert set(BY_HAND) == set(FIXTURES)


@pytest.mark.parametrize("name", FIXTURES)
def test_by_hand(name: str) -> None:
    fixture = FIXTURES[name]
    check(fixture, fixture.template().encode(standard(fixture), 1000), *BY_HAND[name])


@pytest.mark.parametrize("name", FIXTURES)
def test_white_space_at_the_edges_of_an_answer(name: str) -> None:
    fixture = FIXTURES[name]
    said = "<think>\nAdd.\n</think>\n\n Two. \n" if name == "deepseek_r1" else " Two. \n"
    prompt = official(fixture, talk("1+1?").messages, prompt=True)
    check(fixture, fixture.template().encode(talk("1+1?", said), 1000), prompt + EDGES[name])


@pytest.mark.parametrize(
    ("name", "block", "after"),
    [("qwen3", "<think>\n\n</think>\n\n", "\n"), ("gpt_oss", "<|channel|>final<|message|>", "")],
)
def test_an_indented_answer_keeps_its_indent_after_the_templates_own_block(name: str, block: str, after: str) -> None:
    fixture = FIXTURES[name]
    prompt = official(fixture, talk("1+1?").messages, prompt=True)
    expected = f"{prompt}{block}⟦    return x\n    y{fixture.end}⟧{after}"
    check(fixture, fixture.template().encode(talk("1+1?", "    return x\n    y"), 1000), expected)


@pytest.mark.parametrize("name", FIXTURES)
def test_render_is_that_of_transformers(name: str) -> None:
    """A whole conversation, or as served: each answer after the official prompt, of which it may repeat the end."""
    fixture, conversation = FIXTURES[name], standard(FIXTURES[name])
    answers = [i for i, message in enumerate(conversation.messages) if message.role == "assistant"]
    documents = [unmarked(document) for document in BY_HAND[name]]
    if name not in ("mistral_nemo", "deepseek_r1"):
        ends = answers[::-1][: len(documents)]
        assert documents == [official(fixture, conversation.messages[: i + 1]) for i in ends]
        return
    for i, document in zip(answers[::-1], documents, strict=True):
        prompt = official(fixture, conversation.messages[:i], prompt=True)
        assert document.startswith(prompt)
        answer = conversation.messages[i].content.removeprefix("<think>\n")
        assert document.removeprefix(prompt) == answer + fixture.end


@pytest.mark.parametrize("name", FIXTURES)
def test_m10_bos_once_and_the_prompt_is_the_start_of_the_document(name: str) -> None:
    """Most of these tokenizers would put another BOS before a text that has one."""
    fixture, conversation = FIXTURES[name], standard(FIXTURES[name])
    template = fixture.template()
    answers = [i for i, message in enumerate(conversation.messages) if message.role == "assistant"]
    examples = template.encode(conversation, 1000)
    bos = fixture.tokenizer.bos_token_id
    for i, example in zip(answers[::-1], examples, strict=False):
        assert (0 if bos is None else example.input_ids.count(bos)) == BOS.get(name, 0)
        prompt = template.prompt_ids(conversation.messages[:i])
        assert example.input_ids[: len(prompt)] == prompt
        assert prompt == ids_of(fixture, official(fixture, conversation.messages[:i], prompt=True))
        assert not example.supervised[len(prompt) - 1] and example.supervised[len(prompt)] is (name != "gpt_oss")


# --- what misleads ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FIXTURES)
def test_m11_every_turn_says_the_same(name: str) -> None:
    """Three rounds of "ok": three supervised runs, each the answer with what the template puts around it."""
    fixture = FIXTURES[name]
    said = "<think>\nok\n</think>\n\nok" if fixture.reasons else "ok"
    examples = fixture.template().encode(talk(*["ok", said] * 3), 1000)
    found = [run.lstrip(" ") for example in examples for run in runs(example, fixture.tokenizer)]
    shown = said.removeprefix("<think>\n") if name == "deepseek_r1" else said
    expected = [fixture.supervised(shown, last=last or len(examples) > 1).lstrip(" ") for last in (False, False, True)]
    assert found == expected


@pytest.mark.parametrize("name", FIXTURES)
def test_m14_a_user_who_spells_every_marker(name: str) -> None:
    """Text that closes the user's turn and opens an answer stays the user's, whatever the tokenizer makes of it."""
    fixture = FIXTURES[name]
    answers = REASONED if fixture.reasons else ANSWERS
    document = BY_HAND[name][0]
    answered = unmarked(document[document.index("Hi") + 2 : document.index("1+1?")])
    trap = f"x{answered}y " + " ".join(fixture.control)
    examples = fixture.template().encode(talk(trap, answers[0], trap, answers[1]), 5000)
    plain = fixture.template().encode(talk("Hi", answers[0], "1+1?", answers[1]), 5000)
    assert [runs(e, fixture.tokenizer) for e in examples] == [runs(e, fixture.tokenizer) for e in plain]
    prompt = fixture.template().prompt_ids(talk(trap).messages)
    assert examples[-1].input_ids[: len(prompt)] == prompt and not any(examples[-1].supervised[: len(prompt)])


@pytest.mark.parametrize("kwargs", [{}, {"enable_thinking": True}, {"enable_thinking": False}])
def test_m06_the_injected_reasoning_block_is_not_supervised(kwargs: dict[str, Any]) -> None:
    """With the switch off the prompt has the block; otherwise the template injects it into the last turn only."""
    fixture = FIXTURES["qwen3"]
    template = fixture.template(**kwargs)
    head = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    block = "<think>\n\n</think>\n\n"
    check(
        fixture,
        template.encode(talk("Hi", "Hello!", "1+1?", "Two."), 1000),
        f"{head}Hello!<|im_end|>\n<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n{block}⟦Two.<|im_end|>⟧\n",
        f"{head}{block}⟦Hello!<|im_end|>⟧\n",
    )
    assert template.fingerprint() != fixture.template(enable_thinking="another value").fingerprint()
    served = head + (block if kwargs == {"enable_thinking": False} else "")
    assert template.prompt_ids(talk("Hi").messages) == ids_of(fixture, served)


def test_m03_the_same_mask_with_and_without_generation_tags() -> None:
    tagged = FIXTURES["tagged"]
    tags = ("{%- generation -%}", "{%- endgeneration -%}")
    assert all(tag in tagged.source for tag in tags)
    bare = ChatTemplate(tagged.tokenizer, tagged.source.replace(tags[0], "").replace(tags[1], ""))
    (one,), (other,) = (t.encode(standard(tagged), 1000) for t in (tagged.template(), bare))
    assert (one.input_ids, one.supervised) == (other.input_ids, other.supervised) and any(one.supervised)
    nobody = tagged.source.replace("'assistant'", "'nobody'") + "".join(tags)
    with pytest.raises(EyasError, match="tags leave every answer out"):
        ChatTemplate(tagged.tokenizer, nobody)


def test_m15_the_day_is_part_of_the_configuration() -> None:
    for name, says in (("llama3_1", "Today: 26 Jul 2024"), ("gpt_oss", "Today: 2024-07-26")):
        fixture = FIXTURES[name]
        template = fixture.template(today="2024-07-26")
        for ids in (template.encode(talk("a", "b"), 1000)[0].input_ids, template.prompt_ids(talk("a").messages)):
            assert says in fixture.tokenizer.decode(ids)
        assert template.fingerprint() != fixture.template().fingerprint()
    fixed = FIXTURES["llama3_1"].template(date_string="a day")
    assert "Today: a day" in FIXTURES["llama3_1"].tokenizer.decode(fixed.prompt_ids(talk("a").messages))


def test_m16_all_more_than_assistant_more_than_last() -> None:
    for name, fixture in FIXTURES.items():
        if fixture.reasons or name == "mistral_nemo":  # one document an answer
            continue
        counts = [
            sum(e.num_supervised for e in fixture.template(supervise=s).encode(standard(fixture), 1000))
            for s in ("all", "assistant", "last")
        ]
        assert counts[0] > counts[1] > counts[2] > 0, name


# --- reasoning that the prompt opens ---------------------------------------------------------------------------------


def test_m08_reasoning_as_served() -> None:
    """DeepSeek-R1 shows no answer with its reasoning, so a whole render would train on what is never generated."""
    fixture = FIXTURES["deepseek_r1"]
    for kwargs in ({"supervise": "last"}, {"supervise": "assistant"}):
        examples = fixture.template(**kwargs).encode(standard(fixture), 1000)
        check(fixture, examples, *BY_HAND["deepseek_r1"][: len(examples)])
        assert len(examples) == (1 if kwargs["supervise"] == "last" else 2)


def test_answers_without_the_reasoning_that_the_prompt_opens() -> None:
    with pytest.raises(RowRejected) as caught:
        FIXTURES["deepseek_r1"].template().encode(talk("Hi", "Hello!"), 1000)
    assert caught.value.reason == "reasoning_missing"


def test_reasoning_that_a_template_drops_from_the_last_turn() -> None:
    """Qwen3 takes this question for a tool's result, finds no other and shows no reasoning: the answer is as served."""
    fixture = FIXTURES["qwen3"]
    examples = fixture.template().encode(talk("<tool_response>x</tool_response>", REASONED[0]), 1000)
    question = "<|im_start|>user\n<tool_response>x</tool_response><|im_end|>\n"
    answer = "<|im_start|>assistant\n⟦<think>\nGreet.\n</think>\n\nHello!<|im_end|>⟧"
    check(fixture, examples, question + answer)


# --- cut off, too long -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FIXTURES)
def test_an_answer_cut_off_has_no_end(name: str) -> None:
    """The document stops with the answer's last token."""
    fixture = FIXTURES[name]
    said = REASONED[0] if fixture.reasons else "Hello!"
    whole = fixture.template().encode(talk("Hi", said), 1000)[0]
    (cut,) = fixture.template().encode(talk("Hi", said, ended=False), 1000)
    assert cut.input_ids == whole.input_ids[: len(cut.input_ids)]
    assert cut.supervised == whole.supervised[: len(cut.input_ids)] and cut.supervised[-1]
    assert runs(cut, fixture.tokenizer)[0].endswith("Hello!")
    assert not cut.truncated


def test_an_answer_cut_off_in_its_reasoning() -> None:
    """Qwen3's template takes it for an answer without reasoning and would inject a block before it."""
    fixture = FIXTURES["qwen3"]
    examples = fixture.template().encode(talk("Hi", "<think>\nGre", ended=False), 1000)
    check(fixture, examples, "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n⟦<think>\nGre⟧")
    fixture = FIXTURES["deepseek_r1"]
    examples = fixture.template().encode(talk("Hi", "<think>\nGre", ended=False), 1000)
    check(fixture, examples, f"{SOS}<｜User｜>Hi<｜Assistant｜><think>\n⟦Gre⟧")


@pytest.mark.parametrize("name", FIXTURES)
def test_m02_cut_at_any_length_the_mask_is_cut_with_it(name: str) -> None:
    """No slot of a cut document wants a token beyond its end."""
    fixture = FIXTURES[name]
    whole = fixture.template().encode(standard(fixture), 1000)[0]
    first = whole.supervised.index(True)
    for length in range(first + 2, len(whole.input_ids)):
        cut = fixture.template().encode(standard(fixture), length)[0]
        assert cut.truncated
        assert (cut.input_ids, cut.supervised) == (whole.input_ids[:length], whole.supervised[:length])
        slots = valid_slots(torch.tensor(cut.supervised), torch.tensor([0, length]), 1)[0].nonzero().flatten()
        assert int(slots.max()) <= length - 3  # slot p predicts x[p+2]


@pytest.mark.parametrize("name", FIXTURES)
def test_split_by_rounds_loses_none(name: str) -> None:
    """Three equal rounds where two fit: two documents, each as if its rounds were all, the system prompt in both."""
    fixture = FIXTURES[name]
    said = REASONED[0] if fixture.reasons else "Hello!"
    system = "Be brief." if fixture.system else None
    template = fixture.template()
    pair, single = (template.encode(talk(*["Hi", said] * n, system=system), 1000) for n in (2, 1))
    split = ChatTemplate(
        fixture.tokenizer,
        fixture.source,
        eos_ids=[int(fixture.tokenizer.convert_tokens_to_ids(token)) for token in fixture.eos],
        too_long="split",
    )
    longest = max(len(example.input_ids) for example in pair)
    examples = split.encode(talk(*["Hi", said] * 3, system=system), longest)
    assert sorted(e.input_ids for e in examples) == sorted(e.input_ids for e in [*pair, *single])
    assert sorted(e.supervised for e in examples) == sorted(e.supervised for e in [*pair, *single])
