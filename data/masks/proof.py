"""Proof, at start-up, that the answers of a chat template can be marked with a tokenizer; otherwise the run stops."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tokenizers import Encoding

from data.chats.policy import RowRejected
from data.masks.probe import end_tag
from data.masks.render import Renders, Turns
from data.masks.spans import Locator
from data.masks.tokens import Tokens, covered_text, tokens_of
from models.errors import EyasError


def prove(locator: Locator, tokens: Tokens, source: str, kwargs: Mapping[str, Any]) -> None:
    """Probe a template (``source``, variables ``kwargs``) with turns that repeat the same word.

    Raises EyasError that says what is wrong with it.
    """
    answer = "ok"
    if tag := locator.manner.opens:
        answer = f"{locator.manner.asked}ok\n{end_tag(tag)}\n\nok"
    probe = [{"role": "user", "content": "ok"}, {"role": "assistant", "content": answer}] * 2
    try:
        for turns in (probe[:2], probe):
            _prove_turns(locator, tokens, turns)
            if "strftime_now" not in source:
                _compare_official(locator, tokens, source, kwargs, turns)
    except RowRejected as error:
        raise EyasError(
            f"target.chat_template: the answers of this template cannot be marked ({error.reason}: "
            f"{error.detail}). Give another template with target.chat_template=FILE."
        ) from None


def _prove_turns(locator: Locator, tokens: Tokens, turns: Turns) -> None:
    renders = Renders(locator.render, turns)
    text, spans, _ = locator.locate(renders)
    if not any(span.tagged for span in spans):
        raise RowRejected("answer_not_located", "its generation tags leave every answer out")
    encoding = tokens.encode(text)
    for span in spans:
        prompt, bare = renders.prompt(span.turn), renders.upto(span.turn - 1).text
        header = text[span.floor : span.start]
        if prompt == bare and header.strip():
            raise RowRejected("answer_not_located", f"{header!r} precedes an answer but is no generation prompt")
        head = tokens.encode(prompt).ids
        if encoding.ids[: len(head)] != head:
            raise RowRejected("answer_not_located", "the generation prompt's end merges with the answer's first token")
        first, stop = tokens_of(span, text, encoding)
        covered = covered_text(text, encoding, first, stop)
        if covered.strip() != text[span.start : span.end].strip() or first == stop:
            raise RowRejected("answer_not_located", f"no tokens cover just {text[span.start : span.end]!r}")
        check_decoded(tokens, text, encoding, encoding.ids, first, stop, "target.chat_template")


def check_decoded(
    tokens: Tokens, text: str, encoding: Encoding, ids: list[int], first: int, stop: int, source: str
) -> None:
    """The supervised ids must decode to the text they are said to stand for: the answer and its end token.

    Not the span's edges: a token that merges with what is beside the answer is left out of the mask.
    """
    expected = covered_text(text, encoding, first, stop)
    if not tokens.agrees(ids[first:stop], expected):
        decoded = tokens.decode(ids[first:stop])
        raise EyasError(
            f"{source}: the supervised tokens decode to {decoded[:80]!r} where the answer is {expected[:80]!r}: "
            "this tokenizer's offsets cannot be trusted to mark answers"
        )


def _compare_official(locator: Locator, tokens: Tokens, source: str, kwargs: Mapping[str, Any], turns: Turns) -> None:
    """Texts and ids must be those of the tokenizer's own ``apply_chat_template``."""
    variables = {key: value for key, value in kwargs.items() if key != "today"}
    for given, prompt in ((turns, False), (turns[:-1], True)):
        text = locator.render(given, prompt).text
        official = tokens.tokenizer.apply_chat_template(
            [dict(turn) for turn in given],
            chat_template=source,
            add_generation_prompt=prompt,
            tokenize=False,
            **variables,
        )
        if official != text:
            raise EyasError(
                f"target.chat_template: renders as {text[:200]!r} here but as {str(official)[:200]!r} in transformers"
            )
        if list(tokens.tokenizer(text, add_special_tokens=False)["input_ids"]) != list(tokens.encode(text).ids):
            raise EyasError("target: the tokenizer does more than its fast backend, so its ids cannot be reproduced")
