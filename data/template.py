"""Token ids and supervised mask of conversations, by the target's own chat template.

The whole rendered conversation is tokenised once, without adding special tokens (a template writes its own BOS), so
the ids are those a server feeds. Answers are located in the text by `data.spans` and mapped to tokens by offsets;
at start-up, and again on the first real conversations, the supervised spans are decoded and compared.
"""

from __future__ import annotations

import copy
import hashlib
import json
import unicodedata
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from tokenizers import Encoding, Tokenizer, processors
from transformers import PreTrainedTokenizerBase

from data.conversations import Conversation, Message
from data.policy import RowRejected
from data.render import Renderer
from data.spans import Located, Locator, Span, Turns
from models.errors import EyasError

SUPERVISE = ("assistant", "last", "all")
DAY = "2025-01-01"  # what strftime_now says unless target.template_kwargs.today gives another day
RULE_VERSION = 1  # of the mask; part of the fingerprint
PROVEN_EXAMPLES = 64  # how many real examples are decoded and compared, beside the probes


@dataclass(frozen=True)
class Example:
    """input_ids [n] and supervised [n] of one document; source is ``file:row:id``."""

    input_ids: list[int]
    supervised: list[bool]
    source: str
    truncated: bool = False

    @property
    def num_supervised(self) -> int:
        return sum(self.supervised)


class ChatTemplate:
    """Encodes conversations for one target.

    template: Jinja source, or a file of it, in place of the tokenizer's own. kwargs: variables for the template
    (``enable_thinking``, ``date_string``); the key ``today`` (YYYY-MM-DD) sets the day of ``strftime_now``.
    supervise: ``assistant`` answers, only the ``last`` answer of each conversation, or ``all`` tokens.
    eos_ids: further ids that end a generation (the target's), for templates that close a turn by the next header.
    Raises EyasError if the mask cannot be proven for this template and tokenizer.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        template: str | None = None,
        kwargs: Mapping[str, Any] | None = None,
        supervise: str = "assistant",
        *,
        eos_ids: Iterable[int] = (),
    ) -> None:
        if supervise not in SUPERVISE:
            raise EyasError(f"data.supervise={supervise}: must be one of {', '.join(SUPERVISE)}")
        self.tokenizer, self.supervise = tokenizer, supervise
        self.source = _source(tokenizer, template)
        self.kwargs = dict(kwargs or {})
        self._backend = _backend(tokenizer)
        ends = {*eos_ids, *([tokenizer.eos_token_id] if tokenizer.eos_token_id is not None else [])}
        variables = {**tokenizer.special_tokens_map, **self.kwargs}
        renderer = Renderer(self.source, variables, _day(variables.pop("today", DAY)))
        control = [str(token) for token in tokenizer.added_tokens_decoder.values()]
        eos = [str(tokenizer.convert_ids_to_tokens(i)) for i in sorted(ends) if i < len(tokenizer)]
        self.locator = Locator(renderer, control, eos)
        self._to_prove = PROVEN_EXAMPLES
        self._prove()

    # --- encoding ----------------------------------------------------------------------------------------------------

    def encode(self, conversation: Conversation, max_length: int) -> list[Example]:
        """The examples of one conversation, usually one. Raises RowRejected. See `encode_batch`."""
        result = self.encode_batch([conversation], max_length)[0]
        if isinstance(result, RowRejected):
            raise result
        return result

    def encode_batch(self, conversations: Sequence[Conversation], max_length: int) -> list[list[Example] | RowRejected]:
        """Per conversation its examples, or why it has none.

        A template that rewrites history (drops the reasoning of earlier turns) gives one example for each answer
        that stands differently in a longer render, every one as it is served; each answer is supervised once.
        Longer than ``max_length`` tokens: cut on a token boundary, the mask with it.
        """
        located: list[list[Located] | RowRejected] = []
        for conversation in conversations:
            try:
                located.append(list(self._located(conversation)))
            except RowRejected as rejected:
                located.append(rejected)
        texts = [item.text for result in located if not isinstance(result, RowRejected) for item in result]
        encodings = iter(self._backend.encode_batch(texts, add_special_tokens=False))
        results: list[list[Example] | RowRejected] = []
        for conversation, result in zip(conversations, located, strict=True):
            if isinstance(result, RowRejected):
                results.append(result)
                continue
            pairs = [(item, next(encodings)) for item in result]
            try:
                results.append([*self._examples(conversation, pairs, max_length)])
            except RowRejected as rejected:
                results.append(rejected)
        return results

    def prompt_ids(self, messages: Sequence[Message | Mapping[str, str]]) -> list[int]:
        """Ids of the turns with the generation prompt: what the target reads before it answers.

        Equal to the start of the training render of the same turns and their answer. Raises EyasError if the
        template refuses the turns.
        """
        turns = [message if isinstance(message, Mapping) else _turn(message) for message in messages]
        try:
            text = self.locator.render([dict(turn) for turn in turns], prompt=True).text
        except RowRejected as error:
            raise EyasError(f"target.chat_template refuses the prompt: {error.detail}") from None
        return list(self._backend.encode(text, add_special_tokens=False).ids)

    def fingerprint(self) -> str:
        """Digest of all that determines ids and masks: template, variables, mask rule, tokenizer."""
        digest = hashlib.sha256()
        variables = dict(self.tokenizer.special_tokens_map)
        settings = [RULE_VERSION, self.source, self.kwargs, self.supervise, DAY, variables, self.locator.ends]
        digest.update(json.dumps(settings, sort_keys=True, default=str).encode())
        digest.update(self._backend.to_str().encode())
        return digest.hexdigest()

    def _located(self, conversation: Conversation) -> Iterator[Located]:
        """Renders of the conversation, each with the spans that are supervised in it."""
        messages = conversation.messages
        turns = [_turn(message) for message in messages]
        wanted = {i for i, message in enumerate(messages) if message.role == "assistant" and message.supervised}
        if self.supervise == "last":
            wanted &= {len(messages) - 1}
        if not wanted:
            raise RowRejected("nothing_supervised", "every answer is marked as not to be trained on")
        if self.supervise == "all":
            yield Located(self.locator.render(turns).text, ())
            return
        while wanted:
            text, spans = self.locator.locate(turns[: max(wanted) + 1])
            yield Located(text, tuple(span for span in spans if span.turn in wanted and span.tagged))
            # Ends: the last answer of a render is always among the spans, or the row was rejected.
            wanted -= {span.turn for span in spans}

    def _examples(
        self, conversation: Conversation, pairs: Sequence[tuple[Located, Encoding]], max_length: int
    ) -> Iterator[Example]:
        reason, detail = "nothing_supervised", "no token lies wholly inside an answer"
        some = False
        for number, (located, encoding) in enumerate(pairs):
            ids, mask = list(encoding.ids), [True] * len(encoding.ids)
            if self.supervise != "all":
                mask = self._mask(located, encoding, conversation.source)
            if not _drafts(mask[:max_length]):
                if _drafts(mask):
                    reason, detail = "cut_before_answer", f"{len(ids)} tokens, data.max_length={max_length}"
                continue
            some = True
            source = conversation.source if number == 0 else f"{conversation.source}#{number}"
            yield Example(ids[:max_length], mask[:max_length], source, truncated=len(ids) > max_length)
        if not some:
            raise RowRejected(reason, detail)

    # --- masks and their proof ---------------------------------------------------------------------------------------

    def _mask(self, located: Located, encoding: Encoding, source: str) -> list[bool]:
        offsets = encoding.offsets
        mask = [False] * len(offsets)
        for span in located.spans:
            first, stop = _tokens_of(span, located.text, offsets)
            mask[first:stop] = [True] * (stop - first)
            if self._to_prove > 0:
                self._compare_decoded(located.text, encoding.ids[first:stop], offsets[first:stop], source)
        self._to_prove -= 1
        return mask

    def _compare_decoded(self, text: str, ids: Sequence[int], offsets: Sequence[tuple[int, int]], source: str) -> None:
        """The supervised ids must decode to the text they are said to stand for: the answer and its end token."""
        if not ids or self.tokenizer.unk_token_id in ids:  # an unknown word decodes to nothing comparable
            return
        decoded = decode(self.tokenizer, ids)
        # Not the span's edges: a token that merges with what is beside the answer is left out of the mask.
        expected = text[offsets[0][0] : offsets[-1][1]]
        if _plain(decoded) != _plain(expected):
            raise EyasError(
                f"{source}: the supervised tokens decode to {decoded[:80]!r} where the answer is {expected[:80]!r}: "
                "this tokenizer's offsets cannot be trusted to mark answers"
            )

    def _prove(self) -> None:
        """Probe the template with turns that repeat the same word; EyasError says what is wrong with it."""
        probe: list[dict[str, str]] = [{"role": role, "content": "ok"} for role in ("user", "assistant") * 2]
        try:
            for turns in (probe[:2], probe):
                self._prove_turns(turns)
        except RowRejected as error:
            raise EyasError(
                f"target.chat_template: the answers of this template cannot be marked ({error.reason}: "
                f"{error.detail}). Give another template with target.chat_template=FILE."
            ) from None

    def _prove_turns(self, turns: Turns) -> None:
        text, spans = self.locator.locate(turns)
        if not any(span.tagged for span in spans):
            raise RowRejected("answer_not_located", "its generation tags leave every answer out")
        encoding = self._backend.encode(text, add_special_tokens=False)
        if "strftime_now" not in self.source:
            self._compare_official(turns, text, encoding)
        for span in spans:
            first, stop = _tokens_of(span, text, encoding.offsets)
            prompt, bare = (self.locator.render(turns[: span.turn], prompt=p).text for p in (True, False))
            header = text[span.floor : span.start]
            if prompt == bare and header.strip():
                raise RowRejected("answer_not_located", f"{header!r} precedes an answer but is no generation prompt")
            head = self.prompt_ids(turns[: span.turn])
            if encoding.ids[: len(head)] != head:
                raise RowRejected(
                    "answer_not_located", "the generation prompt's end merges with the answer's first token"
                )
            offsets = encoding.offsets[first:stop]
            covered = text[offsets[0][0] : offsets[-1][1]] if offsets else ""
            if not offsets or covered.strip() != text[span.start : span.end].strip():
                raise RowRejected("answer_not_located", f"no tokens cover just {text[span.start : span.end]!r}")
            self._compare_decoded(text, encoding.ids[first:stop], offsets, "target.chat_template")

    def _compare_official(self, turns: Turns, text: str, encoding: Encoding) -> None:
        """The text and ids must be those of the tokenizer's own ``apply_chat_template``."""
        kwargs = {key: value for key, value in self.kwargs.items() if key != "today"}
        official = self.tokenizer.apply_chat_template(
            [dict(turn) for turn in turns], chat_template=self.source, tokenize=False, **kwargs
        )
        if official != text:
            raise EyasError(
                f"target.chat_template: renders as {text[:200]!r} here but as {str(official)[:200]!r} in transformers"
            )
        if list(self.tokenizer(text, add_special_tokens=False)["input_ids"]) != list(encoding.ids):
            raise EyasError("target: the tokenizer does more than its fast backend, so its ids cannot be reproduced")


def _tokens_of(span: Span, text: str, offsets: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """First and past-the-last token of a span, offsets ascending.

    A token counts if it lies in the span, or hangs out of it by white space only (a word's leading blank, a control
    token that swallows the newline after it) and does not begin inside the generation prompt.
    """
    first = bisect_right(offsets, span.start, key=lambda offset: offset[1])
    stop = bisect_left(offsets, span.end, key=lambda offset: offset[0])
    while first < stop and (offsets[first][0] < span.floor or text[offsets[first][0] : span.start].strip()):
        first += 1
    while stop > first and text[span.end : offsets[stop - 1][1]].strip():
        stop -= 1
    return first, stop


def _drafts(mask: Sequence[bool]) -> bool:
    """Whether some slot counts at depth 0: two supervised tokens in a row, after at least one token."""
    return any(a and b for a, b in zip(mask[1:], mask[2:], strict=False))


def _turn(message: Message) -> dict[str, str]:
    return {"role": message.role, "content": message.content}


def decode(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> str:
    """The text of token ids as it stands, control tokens and blanks included."""
    return str(tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))


def _plain(text: str) -> str:
    """For comparing decoded text: normal forms, letter case and white space are the tokenizer's freedom."""
    return "".join(unicodedata.normalize("NFKC", text).casefold().split())


def _source(tokenizer: PreTrainedTokenizerBase, template: str | None) -> str:
    if template is not None and "{%" not in template and "{{" not in template:
        path = Path(template).expanduser()
        if not path.is_file():
            raise EyasError(f"target.chat_template={template}: no such file")
        return path.read_text(encoding="utf-8")
    try:
        return str(tokenizer.get_chat_template(template))
    except ValueError:
        raise EyasError(
            f"target: the tokenizer of {tokenizer.name_or_path or 'this target'} has no chat template; "
            "give one with target.chat_template=FILE"
        ) from None


def _backend(tokenizer: PreTrainedTokenizerBase) -> Tokenizer:
    """A private copy of the fast tokenizer that neither cuts nor pads, and whose offsets keep leading blanks."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if not isinstance(backend, Tokenizer):
        raise EyasError(f"target: {type(tokenizer).__name__} gives no character offsets; a fast tokenizer is needed")
    backend = copy.deepcopy(backend)
    backend.no_truncation()
    backend.no_padding()
    backend.post_processor = processors.ByteLevel(trim_offsets=False)
    return backend


def _day(value: Any) -> datetime:
    try:
        return datetime.fromisoformat(str(value))
    except ValueError:
        raise EyasError(f"target.template_kwargs.today={value}: must be a date, YYYY-MM-DD") from None
