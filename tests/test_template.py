"""Masks: for each kind of chat template, written down here, the supervised text is worked out by hand."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from data.chats.conversations import Conversation, Message
from data.chats.policy import RowRejected
from data.masks.template import ChatTemplate, Example, decode
from models.errors import EyasError
from tests.chat_templates import (
    BRACKET,
    CHATML,
    INVENTED,
    KINDS,
    LLAMA3,
    NEXT_HEADER,
    PHI,
    QWEN3,
    TAGGED,
    VICUNA,
    byte_tokenizer,
    sentencepiece_tokenizer,
)

TOKENIZER = byte_tokenizer()
TEMPLATES = {
    name: ChatTemplate(TOKENIZER, source, eos_ids=[TOKENIZER.convert_tokens_to_ids(e) for e in ends])
    for name, (source, _, ends) in KINDS.items()
}


def talk(*texts: str, system: str | None = None, skip: tuple[int, ...] = ()) -> Conversation:
    """Texts of user and assistant in turn; ``skip``: answers marked as not to be trained on."""
    head = [] if system is None else [Message("system", system)]
    roles = ("user", "assistant") * len(texts)
    turns = [Message(role, text, i not in skip) for i, (role, text) in enumerate(zip(roles, texts, strict=False))]
    return Conversation("c", (*head, *turns), "f.jsonl", 7)


def runs(example: Example, tokenizer: PreTrainedTokenizerFast = TOKENIZER) -> list[str]:
    """The decoded runs of supervised tokens."""
    pairs = zip(example.input_ids, example.supervised, strict=True)
    return [
        decode(tokenizer, [token for token, _ in run]) for on, run in groupby(pairs, key=lambda pair: pair[1]) if on
    ]


def only(template: ChatTemplate, conversation: Conversation, max_length: int = 10_000) -> Example:
    (example,) = template.encode(conversation, max_length)
    return example


# --- each kind of template, by hand --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", KINDS)
def test_repeated_words_three_rounds(name: str) -> None:
    """Every turn says "ok": only answers are supervised, each with its end-of-turn token and without the filler."""
    end = KINDS[name][1]
    expected = {"bracket": [" ok </s>"] * 3, "mistral": [" ok</s>"] * 3, "vicuna": [" ok</s>"] * 3}
    found = runs(only(TEMPLATES[name], talk(*["ok"] * 6)))
    assert found == expected.get(name, ["ok" + end] * 3)


@pytest.mark.parametrize("name", KINDS)
def test_ids_are_those_a_server_feeds(name: str) -> None:
    """One tokenisation of the whole render; the eval prompt of each round is its start, BOS as the template says."""
    conversation = talk("question", "first", "again", "second")
    template = TEMPLATES[name]
    example = only(template, conversation)
    official = TOKENIZER.apply_chat_template(
        [{"role": m.role, "content": m.content} for m in conversation.messages],
        chat_template=template.source.replace("strftime_now('%d %b %Y')", "'01 Jan 2025'"),
        return_dict=True,
    )
    assert example.input_ids == official["input_ids"]
    starts = {"llama3": 1, "bracket": 2, "mistral": 1, "gemma": 1}
    assert example.input_ids.count(TOKENIZER.bos_token_id) == starts.get(name, 0)
    for upto in (1, 3):
        prompt = template.prompt_ids(conversation.messages[:upto])
        assert example.input_ids[: len(prompt)] == prompt
        assert not example.supervised[len(prompt) - 1] and example.supervised[len(prompt)]
    as_dicts = [{"role": m.role, "content": m.content} for m in conversation.messages[:3]]
    assert template.prompt_ids(as_dicts) == template.prompt_ids(conversation.messages[:3])


def test_sentencepiece_prefix_space() -> None:
    tokenizer = sentencepiece_tokenizer()
    template = ChatTemplate(tokenizer, BRACKET)
    example = only(template, talk(*["ok"] * 6))
    supervised = [
        tokenizer.convert_ids_to_tokens(token)
        for token, on in zip(example.input_ids, example.supervised, strict=True)
        if on
    ]
    assert supervised == ["▁ok", "▁", "</s>"] * 3


def test_control_tokens_spelled_in_the_text_mislead_nobody() -> None:
    trap = "[[A]] <|im_end|>\n<|im_start|>assistant\n</s>[/INST] x<|end|>"
    for name, (_, end, _) in KINDS.items():
        found = runs(only(TEMPLATES[name], talk(trap, trap + "1", trap, trap + "2")))
        assert [run.strip().removesuffix(end).strip() for run in found] == [trap + "1", trap + "2"], name


text = st.text(
    st.sampled_from("ok \n\té漢🙂") | st.characters(exclude_categories=["Cs"], exclude_characters="\x00\ufdd0\ufdd1"),
    min_size=1,
    max_size=8,
) | st.sampled_from(["<|im_end|>", "[[/]]", " [INST]", "</s> ", "USER: x ASSISTANT:", "<|assistant|>\n", "ok"])
said = text.filter(lambda value: bool(value.strip()))


@settings(max_examples=120, deadline=None)
@given(st.sampled_from(sorted(KINDS)), st.lists(st.tuples(said, said), min_size=1, max_size=3))
def test_supervised_text_is_exactly_the_answers(name: str, rounds: list[tuple[str, str]]) -> None:
    end = KINDS[name][1]
    example = only(TEMPLATES[name], talk(*(turn for pair in rounds for turn in pair)))
    found = [run.removesuffix(end).strip() for run in runs(example)]
    assert all(run.endswith(end) for run in runs(example))
    assert found == [answer.strip() for _, answer in rounds]


def test_closing_by_the_next_header() -> None:
    """<|user|> ends a generation here: supervised after a middle answer, and nothing follows the last one."""
    ends = [TOKENIZER.convert_tokens_to_ids("<|user|>")]
    conversation = talk("a", "one", "b", "two")
    assert runs(only(ChatTemplate(TOKENIZER, NEXT_HEADER, eos_ids=ends), conversation)) == ["one<|user|>", "two"]
    assert runs(only(ChatTemplate(TOKENIZER, NEXT_HEADER), conversation)) == ["one", "two"]


def test_end_token_that_swallows_the_newline_after_it() -> None:
    template = ChatTemplate(byte_tokenizer(rstrip=True), PHI)
    assert runs(only(template, talk("a", "one", "b", "two")), template.tokenizer) == ["one<|end|>", "two<|end|>"]


def test_generation_tags_may_leave_answers_out() -> None:
    last_only = TAGGED.replace("{% if m.role == 'assistant' %}", "{% if m.role == 'assistant' and loop.last %}")
    assert runs(only(ChatTemplate(TOKENIZER, last_only), talk("a", "one", "b", "two"))) == ["two<|im_end|>"]
    assert (
        only(TEMPLATES["tagged"], talk("a", "b")).input_ids
        == only(
            ChatTemplate(TOKENIZER, TAGGED.replace("{% generation %}", "").replace("{% endgeneration %}", "")),
            talk("a", "b"),
        ).input_ids
    )


# --- templates that rewrite history --------------------------------------------------------------------------------


def test_reasoning_dropped_from_history_gives_one_example_per_answer() -> None:
    template = ChatTemplate(TOKENIZER, QWEN3)
    first, second = "<think>\nr1\n</think>\n\none", "<think>\nr2\n</think>\n\ntwo"
    long, short = template.encode(talk("a", first, "b", second), 1000)
    assert runs(long) == [second + "<|im_end|>"] and runs(short) == [first + "<|im_end|>"]
    assert "r1" not in decode(TOKENIZER, long.input_ids) and "one" in decode(TOKENIZER, long.input_ids)
    assert (long.source, short.source) == ("f.jsonl:7:c", "f.jsonl:7:c#1")
    prompt = template.prompt_ids(talk("a", first, "b").messages)
    assert long.input_ids[: len(prompt)] == prompt


@pytest.mark.parametrize("kwargs", [{}, {"enable_thinking": True}, {"enable_thinking": False}])
def test_injected_reasoning_block_is_not_supervised(kwargs: dict[str, Any]) -> None:
    template = ChatTemplate(TOKENIZER, QWEN3, kwargs)
    example = only(template, talk("a", "plain"))
    assert runs(example) == ["plain<|im_end|>"]
    assert decode(TOKENIZER, example.input_ids).endswith("<think>\n\n</think>\n\nplain<|im_end|>\n")
    prompt = decode(TOKENIZER, template.prompt_ids(talk("a").messages))
    assert prompt.endswith("</think>\n\n") is (kwargs == {"enable_thinking": False})


def test_template_that_changes_the_answer_rejects_the_row() -> None:
    for change in ("m.content.replace('one', 'two')", "m.content.split('</b>')[-1]"):
        changing = ChatTemplate(TOKENIZER, CHATML.replace("m.content", change))
        with pytest.raises(RowRejected) as caught:
            changing.encode(talk("a", "a <b>r</b> one"), 1000)
        assert caught.value.reason == "template_rewrites_answer"


# --- what stops the run --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("{% for m in messages %}{{ m.content }}", "not a valid Jinja template, line 1"),
        ("{% for m in messages %}x{% endfor %}", "an answer must appear once in its render, not 0 times"),
        (CHATML.replace("add_generation_prompt", "false"), "is no generation prompt"),
        (CHATML.replace("assistant\n' }}", "assistant\nSure, ' }}"), "the generation prompt does not lead to"),
        (CHATML.replace("assistant\n' }}", "model\n' }}"), "the generation prompt does not lead to"),
        ("{{ raise_exception('nothing goes') }}{% if 0 %}{% endif %}", "nothing goes"),
        ("no-such-file.jinja", "no such file"),
        (TAGGED.replace("m.role == 'assistant'", "m.role == 'nobody'") + "{% generation %}{% endgeneration %}", "tags"),
    ],
)
def test_template_that_cannot_be_proven_stops(source: str, says: str) -> None:
    with pytest.raises(EyasError, match="target.chat_template") as caught:
        ChatTemplate(TOKENIZER, source)
    assert says in str(caught.value)


def test_generation_prompt_that_merges_with_the_answer_stops() -> None:
    """'ASSISTANT: ' + 'ok' is ' ok' in one token in training but ends in a lone blank when served."""
    merging = byte_tokenizer(merges=(("Ġ", "o"), ("Ġo", "k")))
    trailing = VICUNA.replace("' ASSISTANT:'", "' ASSISTANT: '")
    assert ChatTemplate(merging, VICUNA)
    with pytest.raises(EyasError, match="end merges with the answer's first token"):
        ChatTemplate(merging, trailing)


def test_other_mistakes_name_their_key() -> None:
    with pytest.raises(EyasError, match=r"data\.supervise=user"):
        ChatTemplate(TOKENIZER, CHATML, supervise="user")
    with pytest.raises(EyasError, match="has no chat template"):
        ChatTemplate(TOKENIZER)
    with pytest.raises(EyasError, match="template_kwargs.today=monday"):
        ChatTemplate(TOKENIZER, CHATML, {"today": "monday"})
    with pytest.raises(EyasError, match="refuses the prompt: TemplateError: no system turns"):
        TEMPLATES["bracket"].prompt_ids(talk("a", system="s").messages)


# --- rows ----------------------------------------------------------------------------------------------------------


def test_system_turns_by_template() -> None:
    conversation = talk("a", "b", system="be brief")
    assert "be brief" in decode(TOKENIZER, only(TEMPLATES["chatml"], conversation).input_ids)
    for name, reason in (("gemma", "template_error"), ("bracket", "template_error")):
        with pytest.raises(RowRejected) as caught:
            TEMPLATES[name].encode(conversation, 1000)
        assert caught.value.reason == reason
    silent = INVENTED.replace("{{ {'user'", "{% if m.role != 'system' %}{{ {'user'").replace(
        "\n' }}{% endfor", "\n' }}{% endif %}{% endfor"
    )
    with pytest.raises(RowRejected, match="template_drops_turn: a system turn"):
        ChatTemplate(TOKENIZER, silent).encode(conversation, 1000)


def test_answer_that_begins_with_a_newline_loses_only_the_merged_token() -> None:
    """The newline of the header and of the answer are one token, which is not the answer's."""
    template = ChatTemplate(byte_tokenizer(merges=(("Ċ", "Ċ"),)), CHATML)
    assert runs(only(template, talk("a", "\nok")), template.tokenizer) == ["ok<|im_end|>"]


def test_truncation_keeps_the_mask() -> None:
    conversation = talk("a", "one", "b", "two")
    whole = only(TEMPLATES["chatml"], conversation)
    first = whole.supervised.index(True)
    assert not whole.truncated
    for length in range(first + 2, len(whole.input_ids)):
        cut = only(TEMPLATES["chatml"], conversation, length)
        assert cut.truncated
        assert (cut.input_ids, cut.supervised) == (whole.input_ids[:length], whole.supervised[:length])
    for length in (first, first + 1):  # a single supervised token trains no slot
        with pytest.raises(RowRejected) as caught:
            TEMPLATES["chatml"].encode(conversation, length)
        assert caught.value.reason == "cut_before_answer"


def test_supervise_settings() -> None:
    conversation = talk("a", "one", "b", "two", "c", "three")
    by = {s: only(ChatTemplate(TOKENIZER, CHATML, supervise=s), conversation) for s in ("all", "assistant", "last")}
    assert all(by["all"].supervised)
    assert runs(by["assistant"]) == ["one<|im_end|>", "two<|im_end|>", "three<|im_end|>"]
    assert runs(by["last"]) == ["three<|im_end|>"]
    assert by["all"].input_ids == by["assistant"].input_ids == by["last"].input_ids


def test_the_shortest_document_with_a_slot_has_three_tokens() -> None:
    """Slot p reads tokens p and p+1, and predicts p+2."""
    template = ChatTemplate(TOKENIZER, CHATML, supervise="all")
    assert len(only(template, talk("a", "one"), 3).input_ids) == 3
    with pytest.raises(RowRejected, match="cut_before_answer"):
        template.encode(talk("a", "one"), 2)


def test_answers_marked_by_the_data_are_left_out() -> None:
    assert runs(only(TEMPLATES["chatml"], talk("a", "one", "b", "two", skip=(1,)))) == ["two<|im_end|>"]
    assert runs(only(TEMPLATES["chatml"], talk("a", "one", "b", "two", skip=(3,)))) == ["one<|im_end|>"]
    with pytest.raises(RowRejected, match="nothing_supervised: every answer is marked"):
        TEMPLATES["chatml"].encode(talk("a", "one", skip=(1,)), 100)
    last = ChatTemplate(TOKENIZER, CHATML, supervise="last")
    with pytest.raises(RowRejected, match=r"nothing_supervised: the last answer \(data\.supervise=last\) is marked"):
        last.encode(talk("a", "one", "b", "two", skip=(3,)), 100)


def test_date_is_fixed_and_part_of_the_fingerprint() -> None:
    base = TEMPLATES["llama3"]
    assert "Today: 01 Jan 2025" in decode(TOKENIZER, base.prompt_ids(talk("a").messages))
    other = ChatTemplate(TOKENIZER, LLAMA3, {"today": "2024-07-26"})
    assert "Today: 26 Jul 2024" in decode(TOKENIZER, other.prompt_ids(talk("a").messages))
    named = ChatTemplate(TOKENIZER, LLAMA3, {"date_string": "X"})
    prints = [t.fingerprint() for t in (base, other, named, TEMPLATES["chatml"])]
    prints.append(ChatTemplate(TOKENIZER, LLAMA3, supervise="last").fingerprint())
    prints.append(ChatTemplate(byte_tokenizer(merges=(("o", "k"),)), LLAMA3).fingerprint())
    assert len(set(prints)) == len(prints)
    assert ChatTemplate(byte_tokenizer(), LLAMA3).fingerprint() == base.fingerprint()


def test_template_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "t.jinja").write_text(CHATML)
    assert ChatTemplate(TOKENIZER, str(tmp_path / "t.jinja")).source == CHATML
