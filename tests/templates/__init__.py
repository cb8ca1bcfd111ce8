"""Chat templates with the structure of well-known ones, each with a tokenizer of its family and its rule for answers.

The Jinja files repeat what makes each template hard (markers, blanks, newlines, what is trimmed, moved, dropped or
injected) in our own words. `Fixture` states by hand what of an answer stands in the render and is supervised.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerFast

from data.masks.template import ChatTemplate
from tests.templates.vocabularies import byte_level, control, sentencepiece

CHATML = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TOOL_TAGS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
BRACKETS = (
    *("[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"),
    *("[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
)
LLAMA3 = (
    *("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>"),
    *("<|eot_id|>", "<|eom_id|>", "<|python_tag|>"),
)
GLM = ("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>", "<|endoftext|>")
HARMONY = ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|return|>", "<|call|>", "<|endoftext|>")
BEGIN, END = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"  # DeepSeek's


@dataclass(frozen=True)
class Fixture:
    """A template and, by hand, the supervised text of an answer: ``lead`` + the answer, stripped of ``strips`` at its
    edges + ``tail`` + ``end``.

    strips: "" nothing, "edges" white space on both sides, "newlines" those before the answer, "merged" white space
    that the control tokens beside it swallow. middle: the ``end`` of an answer that another turn follows, if
    different. eos: tokens beside the tokenizer's EOS that end a generation. system: whether it takes system prompts.
    reasons: whether answers carry reasoning in think tags. control: what its tokenizer treats as control text.
    """

    name: str
    vocabulary: Callable[[], PreTrainedTokenizerFast]
    end: str
    lead: str = ""
    tail: str = ""
    strips: str = ""
    middle: str | None = None
    eos: tuple[str, ...] = ()
    system: bool = True
    reasons: bool = False

    @property
    def source(self) -> str:
        return (Path(__file__).parent / f"{self.name}.jinja").read_text(encoding="utf-8")

    @property
    def tokenizer(self) -> PreTrainedTokenizerFast:
        return _tokenizer(self.name)

    @property
    def control(self) -> tuple[str, ...]:
        return tuple(str(token) for token in self.tokenizer.added_tokens_decoder.values())

    def template(self, supervise: str = "assistant", **kwargs: Any) -> ChatTemplate:
        """The same object for the same arguments; kwargs go to the template."""
        return _template(self.name, supervise, tuple(sorted(kwargs.items())))

    def supervised(self, answer: str, *, last: bool) -> str:
        """The supervised text of an answer that is, or isn't, the last of its document."""
        body = {"edges": answer.strip(), "newlines": answer.lstrip("\n")}.get(self.strips, answer)
        end = self.end if last or self.middle is None else self.middle
        return self.lead + body + self.tail + end


def _llama2() -> PreTrainedTokenizerFast:
    return sentencepiece(control(("<s>", "</s>")), bos="<s>", eos="</s>")


def _deepseek() -> PreTrainedTokenizerFast:
    markers = ("<｜User｜>", "<｜Assistant｜>", "<think>", "</think>")
    return byte_level(control((BEGIN, END), markers), bos=BEGIN, eos=END, prepend_bos=True)


def _gemma() -> PreTrainedTokenizerFast:
    special = ("<pad>", "<eos>", "<bos>", "<start_of_turn>", "<end_of_turn>", "<start_of_image>")
    ordinary = ("\n", "\n\n", "<table>", "<b>")  # Gemma's vocabulary has runs of newlines and some HTML as added tokens
    return sentencepiece(control(special, ordinary), bos="<bos>", eos="<eos>", prefix="never")


def _phi3() -> PreTrainedTokenizerFast:
    markers = ("<|endoftext|>", "<|assistant|>", "<|user|>", "<|system|>", "<|end|>")
    added = [*control(("<s>", "</s>")), *control(markers, rstrip=True)]
    return sentencepiece(added, bos="<s>", eos="<|endoftext|>", prepend_bos=False)


def _phi4() -> PreTrainedTokenizerFast:
    return byte_level(control((*CHATML, "<|im_sep|>"), lstrip=True, rstrip=True), eos="<|im_end|>")


def _chatml(*ordinary: str) -> PreTrainedTokenizerFast:
    return byte_level(control(CHATML, ordinary), eos="<|im_end|>")


IM_END, EOT = "<|im_end|>", "<|eot_id|>"
FIXTURES: Mapping[str, Fixture] = {
    fixture.name: fixture
    for fixture in (
        Fixture("smollm2", _chatml, IM_END),
        Fixture("qwen2_5", lambda: _chatml(*TOOL_TAGS[:2]), IM_END),
        Fixture("qwen3", lambda: _chatml(*TOOL_TAGS, "<think>", "</think>"), IM_END, strips="newlines", reasons=True),
        Fixture("llama2", _llama2, "</s>", lead=" ", tail=" ", strips="edges"),
        Fixture(
            "llama3_1",
            lambda: byte_level(control(LLAMA3), bos=LLAMA3[0], eos=EOT, prepend_bos=True),
            EOT,
            strips="edges",
        ),
        Fixture("mistral_v0_1", _llama2, "</s>", system=False),
        Fixture(
            "mistral_v0_3",
            lambda: sentencepiece(control(("<s>", "</s>", *BRACKETS)), bos="<s>", eos="</s>", prefix="first"),
            "</s>",
            lead=" ",
            strips="edges",
        ),
        Fixture(
            "mistral_nemo",
            lambda: byte_level(control(("<s>", "</s>", *BRACKETS)), bos="<s>", eos="</s>", prepend_bos=True),
            "</s>",
        ),
        Fixture("gemma3", _gemma, "<end_of_turn>", strips="edges", eos=("<end_of_turn>",)),
        Fixture("phi3", _phi3, "<|end|>", strips="merged", eos=("<|end|>",)),
        Fixture("phi4", _phi4, IM_END, strips="merged"),
        Fixture("deepseek_v2", _deepseek, END, lead=" "),
        Fixture("deepseek_v3", _deepseek, END),
        Fixture("deepseek_r1", _deepseek, END, reasons=True),
        Fixture("vicuna", _llama2, "</s>", lead=" "),
        Fixture("zephyr", _llama2, "</s>"),
        Fixture(
            "glm4",
            lambda: byte_level(control(GLM), eos="<|endoftext|>"),
            "",
            lead="\n",
            middle="<|user|>",
            eos=("<|user|>", "<|observation|>"),
        ),
        Fixture("tagged", _chatml, IM_END),
        Fixture(
            "gpt_oss",
            lambda: byte_level(control(HARMONY), eos="<|return|>"),
            "<|return|>",
            middle="",
            eos=("<|call|>", "<|endoftext|>"),
        ),
    )
}


@cache
def _tokenizer(name: str) -> PreTrainedTokenizerFast:
    return FIXTURES[name].vocabulary()


@cache
def _template(name: str, supervise: str, kwargs: tuple[tuple[str, Any], ...]) -> ChatTemplate:
    fixture = FIXTURES[name]
    ends = [int(fixture.tokenizer.convert_tokens_to_ids(token)) for token in fixture.eos]
    return ChatTemplate(fixture.tokenizer, fixture.source, dict(kwargs), supervise, eos_ids=ends)
