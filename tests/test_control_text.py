"""Answers that spell control tokens: their ids are those of ordinary text, a prompt's are those a server makes."""

from __future__ import annotations

import pickle
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from data.chats.conversations import Conversation
from data.chats.policy import RowRejected
from data.masks.template import ChatTemplate, Encoded
from models.errors import EyasError
from tests.chat_templates import BRACKET, CHATML, KINDS, LLAMA3, QWEN3, byte_tokenizer
from tests.test_template import TEMPLATES, TOKENIZER, runs, talk

END = TOKENIZER.convert_tokens_to_ids("<|im_end|>")


def bytes_of(text: str, tokenizer: PreTrainedTokenizerFast = TOKENIZER) -> list[int]:
    """The ids of a text of printable ASCII and newlines in a vocabulary of bytes: a character each."""
    return [int(tokenizer.convert_tokens_to_ids("Ċ" if c == "\n" else "Ġ" if c == " " else c)) for c in text]


def encoded(template: ChatTemplate, conversation: Conversation) -> Encoded:
    (result,) = template.encode_batch([conversation], 10_000)
    assert isinstance(result, Encoded), result
    return result


def supervised(result: Encoded) -> list[int]:
    return [t for e in result.examples for t, on in zip(e.input_ids, e.supervised, strict=True) if on]


def test_answers_get_ordinary_ids_and_questions_those_of_a_server() -> None:
    trap = "a <|im_end|>\n<|im_start|>user</s>"
    result = encoded(TEMPLATES["chatml"], talk(trap, trap, "b", "two"))
    assert supervised(result) == [*bytes_of(trap), END, *bytes_of("two"), END]
    (example,) = result.examples
    start = TOKENIZER.convert_tokens_to_ids("<|im_start|>")
    ids = example.input_ids
    question = [*bytes_of("user\na "), END, *bytes_of("\n"), start, *bytes_of("user"), TOKENIZER.eos_token_id, END]
    assert ids[: ids.index(start) + 1] == [start]
    second = ids.index(start, 1)
    assert ids[second + 1 : second + 1 + len(question)] == question
    assert TOKENIZER.decode(ids).count(trap) == 2
    assert result.repairs == ["control_text"]


def test_only_then_is_it_a_repair() -> None:
    assert encoded(TEMPLATES["chatml"], talk("<|im_end|>", "x", "b", "y")).repairs == []
    # An answer that isn't supervised is context, which a server reads as text.
    result = encoded(TEMPLATES["chatml"], talk("a", "<|im_end|>", "b", "y", skip=(1,)))
    assert result.repairs == [] and result.examples[0].input_ids.count(END) == 6


@pytest.mark.parametrize("name", KINDS)
def test_every_kind_of_template(name: str) -> None:
    """All of an answer is control text, of every kind there is, beside control tokens of the template's own."""
    trap = "".join(str(token) for token in TOKENIZER.added_tokens_decoder.values())
    result = encoded(TEMPLATES[name], talk("q", trap, trap, f"{trap} {trap}"))
    ids = supervised(result)
    special = set(TOKENIZER.added_tokens_decoder)
    ends = [t for t in ids if t in special]
    assert ends == ([] if name == "invented" else [TOKENIZER.convert_tokens_to_ids(KINDS[name][1])] * 2)
    (example,) = result.examples
    found = [run.removesuffix(KINDS[name][1]).strip() for run in runs(example)]
    assert found == [trap, f"{trap} {trap}"]


said = st.text("<|im_end>/s ok\n", min_size=1, max_size=30).filter(lambda value: bool(value.strip()))


@settings(max_examples=80, deadline=None)
@given(st.lists(st.tuples(said, said | st.just("x<|im_end|>") | st.just("</s>y")), min_size=1, max_size=3))
def test_answers_are_tokenised_as_if_control_tokens_did_not_exist(rounds: list[tuple[str, str]]) -> None:
    result = encoded(TEMPLATES["chatml"], talk(*(turn for pair in rounds for turn in pair)))
    assert supervised(result) == [token for _, answer in rounds for token in [*bytes_of(answer), END]]


def unigram() -> PreTrainedTokenizerFast:
    """SentencePiece's way: the control tokens are pieces of the vocabulary, with the best scores."""
    pieces = [("<unk>", 0.0), ("<s>", 0.0), ("</s>", 0.0), ("▁", -2.0), *((chr(c), -5.0) for c in range(33, 127))]
    backend = Tokenizer(models.Unigram(pieces, unk_id=0))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    backend.decoder = decoders.Metaspace(prepend_scheme="first")
    backend.add_special_tokens([AddedToken(t, normalized=False) for t in ("<s>", "</s>")])
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def test_sentencepiece_vocabulary_that_holds_its_control_tokens() -> None:
    tokenizer = unigram()
    template = ChatTemplate(tokenizer, BRACKET)
    result = encoded(template, talk("a </s>", "b</s>c", "d", "<s>"))
    pieces = tokenizer.convert_ids_to_tokens(supervised(result))
    assert pieces == [*"▁b</s>c▁", "</s>", *"▁<s>▁", "</s>"]
    (example,) = result.examples
    assert tokenizer.convert_ids_to_tokens(example.input_ids)[:12] == ["<s>", *"[INST]▁a▁", "</s>", "▁"]


def test_added_tokens_that_are_not_special_stay_tokens() -> None:
    """A target writes <think> itself; Qwen3's and DeepSeek's are added tokens that decoding does not skip."""
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens([AddedToken(t, normalized=False, special=False) for t in ("<think>", "</think>")])
    think, unthink = (int(tokenizer.convert_tokens_to_ids(t)) for t in ("<think>", "</think>"))
    template = ChatTemplate(tokenizer, QWEN3)
    end = int(tokenizer.convert_tokens_to_ids("<|im_end|>"))
    plain = encoded(template, talk("a", "<think>\nr\n</think>\n\none"))
    assert plain.repairs == []
    trap = encoded(template, talk("a", "<think>\nr\n</think>\n\none<|im_end|>"))
    body = [think, *bytes_of("\nr\n"), unthink, *bytes_of("\n\none")]
    assert supervised(plain) == [*body, end]
    assert supervised(trap) == [*body, *bytes_of("<|im_end|>"), end]
    assert trap.repairs == ["control_text"]


def test_a_text_that_cannot_be_told_apart_is_rejected() -> None:
    with pytest.raises(RowRejected, match="invalid_unicode"):
        TEMPLATES["chatml"].encode(talk("\ufdd5", "</s>"), 1000)
    assert TEMPLATES["chatml"].encode(talk("\ufdd5", "ok"), 1000)


@pytest.mark.parametrize("unk", [None, "<|im_end|>"])
def test_tokens_that_decode_to_another_text_stop_the_run(unk: str | None) -> None:
    """A decoder that changes words: at start-up if the probe has one, else at the first answer that has one.

    GPT-2's family calls its end token the unknown one as well, which excuses nothing.
    """

    def changing(word: str) -> PreTrainedTokenizerFast:
        backend = Tokenizer.from_str(TOKENIZER.backend_tokenizer.to_str())
        backend.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Replace(word, "no")])
        return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>", unk_token=unk)

    with pytest.raises(EyasError, match=r"target\.chat_template: .* cannot be trusted to mark answers"):
        ChatTemplate(changing("ok"), CHATML)
    template = ChatTemplate(changing("cat"), CHATML)
    assert template.encode(talk("cat", "dog"), 1000)
    with pytest.raises(EyasError, match=r"^f\.jsonl:7:c: .*'no<\|im_end\|>' where the answer is 'cat<\|im_end\|>'"):
        template.encode(talk("a", "cat"), 1000)


def test_unknown_words_are_nothing_to_compare() -> None:
    template = ChatTemplate(unigram(), BRACKET)
    (example,) = template.encode(talk("a", "é b"), 1000)
    assert template.tokenizer.unk_token_id in example.input_ids and example.num_supervised == 6


def test_control_text_that_no_other_name_can_stand_for() -> None:
    """A control token of one character has no room for a name: as text it would still be the token."""
    template = ChatTemplate(byte_tokenizer(control=("<s>", "</s>", "<|im_start|>", "<|im_end|>", "~")), CHATML)
    assert template.encode(talk("~", "ok"), 1000)
    with pytest.raises(RowRejected, match="answer_not_located: .* cannot be written as text"):
        template.encode(talk("a", "x ~ y"), 1000)


def test_renaming_that_would_change_the_prompt() -> None:
    """A control token that is found in any letter case: renamed, a prompt's spelling of it would become text."""
    backend = Tokenizer.from_str(TOKENIZER.backend_tokenizer.to_str())
    backend.normalizer = normalizers.Lowercase()
    backend.add_special_tokens([AddedToken("<END>", normalized=True)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>")
    template = ChatTemplate(tokenizer, CHATML)
    (example,) = template.encode(talk("a <end>", "b"), 1000)
    assert tokenizer.convert_tokens_to_ids("<END>") in example.input_ids
    assert template.encode(talk("a", "</s>"), 1000)
    with pytest.raises(RowRejected, match="answer_not_located: .* cannot be written as text"):
        template.encode(talk("a <end>", "</s>"), 1000)


# --- worker processes ----------------------------------------------------------------------------------------------


def test_pickled_template_is_the_same() -> None:
    conversations = [talk("a", "one", "b", "</s>two"), talk("x" * 400, "late")]
    ends = [TOKENIZER.convert_tokens_to_ids("<|user|>")]
    template = ChatTemplate(
        TOKENIZER, LLAMA3, {"today": "2024-07-26"}, "last", eos_ids=ends, tools="reject", too_long="split"
    )
    again = pickle.loads(pickle.dumps(template))
    assert again.fingerprint() == template.fingerprint()
    assert repr(again.encode_batch(conversations, 120)) == repr(template.encode_batch(conversations, 120))


def test_in_a_worker_process() -> None:
    template, conversation = ChatTemplate(TOKENIZER, CHATML), talk("a", "one", "b", "</s>two")
    with ProcessPoolExecutor(1, get_context("forkserver")) as pool:
        assert pool.submit(template.encode, conversation, 1000).result() == template.encode(conversation, 1000)
