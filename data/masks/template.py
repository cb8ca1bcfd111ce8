"""Token ids and supervised mask of conversations, by the target's own chat template.

The whole rendered conversation is tokenised once, without adding special tokens (a template writes its own BOS), so
the ids are those a server feeds. Answers are located in the text by `spans` and mapped to tokens by offsets (`tokens`);
at start-up, and again on the first real conversations, the supervised spans are decoded and compared.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tokenizers import Encoding
from transformers import PreTrainedTokenizerBase

from data.chats.conversations import Conversation, Message
from data.chats.policy import RowRejected
from data.masks.examples import Encoded, Example, Packed
from data.masks.proof import check_decoded, prove
from data.masks.render import Renderer, Renders, Tools
from data.masks.rounds import groups, guess_starts, rounds_of
from data.masks.spans import Located, Locator
from data.masks.tokens import Tokens, decode, tokens_of
from data.masks.tools import CallForm, find_form, is_plain, offers_tools, turns_of
from models.errors import EyasError

__all__ = ["ChatTemplate", "Encoded", "Example", "Packed", "decode"]

SUPERVISE = ("assistant", "last", "all")
TOOLS = ("render", "reject")
TOO_LONG = ("cut", "split", "reject")
DAY = "2025-01-01"  # what strftime_now says unless target.template_kwargs.today gives another day
RULE_VERSION = 3  # of the mask; part of the fingerprint
AT_ONCE = 1 << 22  # characters
PROVEN = 64  # how many real conversations are decoded and compared, beside the probes


class _Document(NamedTuple):
    """A whole document before its length is looked at. spelled: an answer spells control tokens."""

    located: Located
    encoding: Encoding
    ids: list[int]
    mask: np.ndarray
    spelled: bool


class _Shown(NamedTuple):
    """What is rendered of a conversation. wanted: indices of the answers to supervise (all of them, if all tokens
    are)."""

    messages: Sequence[Message]
    tools: Tools
    wanted: frozenset[int]


class _Draft(NamedTuple):
    """A conversation rendered, but not yet tokenised."""

    shown: _Shown
    locations: list[Located]
    repairs: list[str]


class ChatTemplate:
    """Encodes conversations for one target. Can be pickled.

    template: Jinja source, or a file of it, in place of the tokenizer's own. kwargs: variables for the template
    (``enable_thinking``, ``date_string``); the key ``today`` (YYYY-MM-DD) sets the day of ``strftime_now``.
    supervise: ``assistant`` answers, only the ``last`` answer of each conversation, or ``all`` tokens.
    eos_ids: further ids that end a generation (the target's), for templates that close a turn by the next header.
    tools: ``render`` tool calls and results as the template does, or ``reject`` conversations that have any.
    too_long: ``cut`` conversations on a token boundary, ``split`` them into documents of whole rounds, ``reject`` them.
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
        tools: str = "render",
        too_long: str = "cut",
    ) -> None:
        for key, value, allowed in (
            ("supervise", supervise, SUPERVISE),
            ("tools", tools, TOOLS),
            ("too_long", too_long, TOO_LONG),
        ):
            if value not in allowed:
                raise EyasError(f"data.{key}={value}: must be one of {', '.join(allowed)}")
        self.tokenizer, self.supervise, self.tools, self.too_long = tokenizer, supervise, tools, too_long
        self.source = _source(tokenizer, template)
        self.kwargs, self.eos_ids = dict(kwargs or {}), tuple(eos_ids)
        ends = {*self.eos_ids, *([tokenizer.eos_token_id] if tokenizer.eos_token_id is not None else [])}
        eos = [str(tokenizer.convert_ids_to_tokens(i)) for i in sorted(ends) if i < len(tokenizer)]
        self.tokens = Tokens(tokenizer, ends)
        variables = {**tokenizer.special_tokens_map, **self.kwargs}
        renderer = Renderer(self.source, variables, _day(variables.pop("today", DAY)))
        self.locator = Locator(renderer, self.tokens.control, eos)
        prove(self.locator, self.tokens, self.source, self.kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        rebuild = partial(ChatTemplate, eos_ids=self.eos_ids, tools=self.tools, too_long=self.too_long)
        return rebuild, (self.tokenizer, self.source, self.kwargs, self.supervise)

    # --- encoding ----------------------------------------------------------------------------------------------------

    def encode(self, conversation: Conversation, max_length: int) -> list[Example]:
        """The examples of one conversation, usually one. Raises RowRejected. See `encode_batch`."""
        result = self.encode_batch([conversation], max_length)[0]
        if isinstance(result, RowRejected):
            raise result
        return result.examples

    def encode_batch(
        self, conversations: Sequence[Conversation], max_length: int, *, prove: bool = True
    ) -> list[Encoded | RowRejected]:
        """Per conversation its examples, or why it has none.

        A template that rewrites history (drops the reasoning of earlier turns) gives one example for each answer
        that stands differently in a longer render, every one as it is served; each answer is supervised once.
        What is longer than ``max_length`` tokens is cut, split or rejected. prove: decode and compare the answers of
        the first `PROVEN` conversations; EyasError if they differ.
        """
        drafts = [self._draft(conversation) for conversation in conversations]
        results: list[Encoded | RowRejected] = []
        for group in _groups(drafts):
            texts = [text for i in group for text in _texts(drafts[i])]
            encodings = iter(self.tokens.encode_batch(texts))
            for i in group:
                results.append(self._finish(conversations[i], drafts[i], encodings, max_length, prove and i < PROVEN))
        return results

    def _draft(self, conversation: Conversation) -> _Draft | RowRejected:
        try:
            shown, repairs = self._shown(conversation)
            return _Draft(shown, list(self._locate(shown)), repairs)
        except RowRejected as rejected:
            return rejected

    def _finish(
        self,
        conversation: Conversation,
        draft: _Draft | RowRejected,
        encodings: Iterator[Encoding],
        max_length: int,
        prove: bool,
    ) -> Encoded | RowRejected:
        """``encodings`` are those of the draft's texts and of the drafts behind it."""
        if isinstance(draft, RowRejected):
            return draft
        pairs = [(located, next(encodings)) for located in draft.locations]
        try:
            documents = [self._document(*pair, conversation.source, prove) for pair in pairs]
            return self._encoded(conversation, draft.shown, documents, draft.repairs, max_length)
        except RowRejected as rejected:
            return rejected

    def prompt_ids(self, messages: Sequence[Message | Mapping[str, Any]], tools: Tools = ()) -> list[int]:
        """Ids of the turns with the generation prompt: what the target reads before it answers.

        Equal to the start of the training render of the same turns and their answer. tools: those on offer, as
        OpenAI's API takes them. Raises EyasError if the template refuses the turns.
        """
        try:
            text = self.locator.render(self._turns(messages), True, tools).text
        except RowRejected as error:
            raise EyasError(f"target.chat_template refuses the prompt: {error.detail}") from None
        return list(self.tokens.encode(text).ids)

    def fingerprint(self) -> str:
        """Digest of all that determines ids and masks: template, variables, mask rule, tokenizer."""
        digest = hashlib.sha256()
        variables = dict(self.tokenizer.special_tokens_map)
        rule = [RULE_VERSION, self.supervise, self.tools, self.too_long, self.locator.ends]
        digest.update(
            json.dumps([rule, self.source, self.kwargs, DAY, variables], sort_keys=True, default=str).encode()
        )
        digest.update(self.tokens.to_str().encode())
        return digest.hexdigest()

    # --- what is rendered --------------------------------------------------------------------------------------------

    @cached_property
    def _call_form(self) -> CallForm | None:
        return find_form(self.locator.render)

    @cached_property
    def _offers_tools(self) -> bool:
        return offers_tools(self.locator.render)

    def _form(self, messages: Sequence[Message | Mapping[str, Any]]) -> CallForm | None:
        """How the template takes tool calls, None if there are none. Raises RowRejected."""
        if is_plain(messages):
            return None
        if self.tools == "reject":
            raise RowRejected("tool_turns", "data.tools=reject")
        if self._call_form is None:
            raise RowRejected("tool_turns", "the chat template doesn't show calls and results")
        return self._call_form

    def _turns(self, messages: Sequence[Message | Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Turns for the template, reasoning included. Raises RowRejected."""
        reasoning = self.locator.reasoning
        given = [reasoning.given(message) if isinstance(message, Message) else message for message in messages]
        return turns_of(given, self._form(given), reasoning.key)

    def _shown(self, conversation: Conversation) -> tuple[_Shown, list[str]]:
        """What is rendered of a conversation, and the repairs. Raises RowRejected."""
        messages = [self.locator.reasoning.given(message) for message in conversation.messages]
        folded = any(a.content != b.content for a, b in zip(messages, conversation.messages, strict=True))
        repairs = ["reasoning_folded"] if folded else []
        self._form(messages)
        answers = {i for i, message in enumerate(messages) if message.role == "assistant" and not message.tool_calls}
        wanted = {i for i in answers if messages[i].supervised}
        if self.supervise == "last":
            wanted &= {len(messages) - 1}
        if not wanted:
            which = "the last answer (data.supervise=last)" if self.supervise == "last" else "every answer"
            raise RowRejected("nothing_supervised", f"{which} is marked as not to be trained on")
        tools = conversation.tools
        if tools and not self._offers_tools:
            tools, repairs = (), [*repairs, "tools_ignored"]
        return _Shown(messages, tools, frozenset(answers if self.supervise == "all" else wanted)), repairs

    def _locate(self, shown: _Shown) -> Iterator[Located]:
        """Renders of a conversation, each with the spans that are supervised in it. Raises RowRejected."""
        messages, everything = shown.messages, self.supervise == "all"
        renders = Renders(self.locator.render, self._turns(messages), shown.tools)
        wanted = set(shown.wanted)
        while wanted:
            last = max(wanted)
            located = self.locator.locate(renders.first(last + 1))
            if not messages[last].ended:
                located = located.unended()
            if not everything:
                spans = tuple(span for span in located.spans if span.turn in wanted and span.tagged)
                yield located._replace(spans=spans)
            elif located.as_served or last == max(shown.wanted):  # the longest render shows all of the others
                yield located
            # Ends: the last answer of a render is always among the spans, or the row was rejected.
            wanted -= {span.turn for span in located.spans}

    # --- ids, masks and lengths --------------------------------------------------------------------------------------

    def _document(self, located: Located, encoding: Encoding, source: str, prove: bool = False) -> _Document:
        ids = encoding.ids
        places = [tokens_of(span, located.text, encoding) for span in located.spans]
        spelled = self.tokens.spells_control(located, encoding, ids, places)
        if spelled:
            encoding = self.tokens.encode_spelled(located, encoding, ids)
            ids = encoding.ids
            places = [tokens_of(span, located.text, encoding) for span in located.spans]
        mask = np.full(len(ids), self.supervise == "all")
        for first, stop in places:
            mask[first:stop] = True
            if prove:
                check_decoded(self.tokens, located.text, encoding, ids, first, stop, source)
        return _Document(located, encoding, ids, mask, spelled)

    def _encoded(
        self, conversation: Conversation, shown: _Shown, documents: list[_Document], repairs: list[str], max_length: int
    ) -> Encoded:
        """Documents as examples, by the policy for long ones. Raises RowRejected if none is left."""
        longest = max(len(document.ids) for document in documents)
        parts = [documents]
        if longest > max_length and self.too_long == "reject":
            raise RowRejected("too_long", f"{longest} tokens, data.max_length={max_length}")
        if longest > max_length and self.too_long == "split":
            parts = list(self._split(conversation, shown, documents[0], max_length))
            repairs = [*repairs, *(["split_by_rounds"] if len(parts) > 1 else [])]
        packed, dropped = list[Packed](), False
        for document in (document for part in parts for document in part):
            long = len(document.ids) > max_length
            if not _drafts(document.mask[:max_length]):
                dropped |= long and _drafts(document.mask)
                continue
            source = conversation.source if not packed else f"{conversation.source}#{len(packed)}"
            ids = np.array(document.ids[:max_length], dtype=np.int32)
            packed.append(Packed(ids, document.mask[:max_length], source, long))
            repairs = [*repairs, *(["control_text"] * document.spelled), *(["cut_at_max_length"] * long)]
        if not packed and dropped:
            raise RowRejected("cut_before_answer", f"{longest} tokens, data.max_length={max_length}")
        if not packed:
            raise RowRejected("nothing_supervised", "no two consecutive tokens lie wholly inside an answer")
        if dropped:
            repairs = [*repairs, "round_dropped" if self.too_long == "split" else "cut_at_max_length"]
        return Encoded(packed, list(dict.fromkeys(repairs)))

    def _split(
        self, conversation: Conversation, shown: _Shown, whole: _Document, max_length: int
    ) -> Iterator[list[_Document]]:
        """The documents of groups of consecutive rounds, each group of as many as fit."""
        messages = shown.messages
        rounds = [*rounds_of(messages), len(messages)]

        def documents(first: int, end: int) -> list[_Document]:
            begin, head = rounds[first], rounds[0]
            wanted = {i - begin + head for i in shown.wanted if begin <= i < rounds[end]}
            part = _Shown([*messages[:head], *messages[begin : rounds[end]]], shown.tools, frozenset(wanted))
            located = list(self._locate(part))
            encodings = self.tokens.encode_batch([item.text for item in located])
            pairs = zip(located, encodings, strict=True)
            return [self._document(*pair, conversation.source) for pair in pairs]

        def fits(first: int, end: int) -> list[_Document] | None:
            found = documents(first, end)
            return found if all(len(document.ids) <= max_length for document in found) else None

        starts = guess_starts(messages, rounds[:-1], whole.located.text, whole.encoding)
        for first, end, found in groups(starts, max_length, fits):
            yield documents(first, end) if found is None else found


def _texts(draft: _Draft | RowRejected) -> list[str]:
    return [] if isinstance(draft, RowRejected) else [located.text for located in draft.locations]


def _groups(drafts: Sequence[_Draft | RowRejected]) -> Iterator[range]:
    """Consecutive drafts of about `AT_ONCE` characters: what a tokenizer says of a text needs many times its size."""
    first, held = 0, 0
    for i, draft in enumerate(drafts):
        size = sum(map(len, _texts(draft)))
        if held and held + size > AT_ONCE:
            yield range(first, i)
            first, held = i, 0
        held += size
    if first < len(drafts):
        yield range(first, len(drafts))


def _drafts(mask: np.ndarray) -> bool:
    """Whether some slot counts at depth 0: two supervised tokens in a row, after at least one token."""
    return bool((mask[1:-1] & mask[2:]).any())


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


def _day(value: Any) -> datetime:
    try:
        return datetime.fromisoformat(str(value))
    except ValueError:
        raise EyasError(f"target.template_kwargs.today={value}: must be a date, YYYY-MM-DD") from None
