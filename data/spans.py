"""Where the answers lie in a rendered conversation, for any chat template and beyond doubt.

Nothing is searched for in the text of a conversation, so text that repeats itself or spells control tokens cannot
mislead. An answer's place follows from renders of the same conversation, each equal to the other by comparison:

* ``prompt`` = the turns before the answer with the generation prompt, what a server feeds: where the answer begins;
* ``turn`` = the turns up to and with the answer. It must begin with ``prompt`` and end with the template's closing
  of an answer (learnt once, from an answer that is one unmistakable word);
* ``full`` = the whole conversation. It must repeat ``turn`` up to the answer's last character, otherwise the
  template rewrites history (drops earlier reasoning) and this answer is not what the target would have generated.

For the usual template this is worked out once per sequence of roles, on stand-in contents, as a skeleton; a
conversation whose render equals the skeleton with its own contents put in takes over the skeleton's places.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from data.policy import RowRejected
from data.render import Renderer
from models.errors import EyasError

Turns = Sequence[dict[str, str]]  # role and content


class Span(NamedTuple):
    """The supervised characters of an answer: ``start`` (its first) to ``end`` (past its end-of-turn token).

    turn: index of the message. floor: where the generation prompt ends; no supervised token may begin before it.
    tagged: false if the template has generation tags and they leave this answer out.
    """

    turn: int
    floor: int
    start: int
    end: int
    tagged: bool = True


class Located(NamedTuple):
    """A rendered conversation and the spans of those answers that stand in it just as they were generated."""

    text: str
    spans: tuple[Span, ...]


@dataclass(frozen=True)
class Skeleton:
    """The render of stand-in contents. pieces: the template's text before, between and after them; order: which
    message stands in each gap; spans: as found in ``text``, with stand-ins at ``places`` (begin, end)."""

    pieces: tuple[str, ...]
    order: tuple[int, ...]
    places: tuple[tuple[int, int], ...]
    spans: tuple[Span, ...]

    def fit(self, text: str, contents: Sequence[str]) -> tuple[Span, ...] | None:
        """The spans in ``text`` if it is this skeleton with ``contents`` put in, else None."""
        given = [contents[i] for i in self.order]
        parts = [self.pieces[0]]
        for content, piece in zip(given, self.pieces[1:], strict=True):
            parts += (content, piece)
        if "".join(parts) != text:
            return None

        def moved(position: int) -> int:
            shift = 0
            for content, (begin, end) in zip(given, self.places, strict=True):
                if end > position:
                    break
                shift += len(content) - (end - begin)
            return position + shift

        return tuple(s._replace(floor=moved(s.floor), start=moved(s.start), end=moved(s.end)) for s in self.spans)


class Locator:
    """Finds answers in rendered conversations.

    control: the literal text of every added token of the tokenizer; eos: that of the tokens that end a generation.
    """

    def __init__(self, renderer: Renderer, control: Sequence[str], eos: Sequence[str]) -> None:
        self.render = renderer
        self.ends = tuple(token for token in eos if token)
        self._control = _any_of(control)
        self._end = re.compile(rf"\s*({_any_of(self.ends).pattern})")
        self._skeletons: dict[tuple[str, ...], Skeleton | None] = {}
        self.closing = self._learn_closing()
        match = self._control.search(self.closing)
        # The end-of-turn token is the first control token that closes an answer; a template without one closes it
        # by words, of which the white space at the end is filler.
        self.end_of_turn = self.closing[: match.end()] if match else self.closing.rstrip()

    def locate(self, turns: Turns) -> Located:
        """Answers of a conversation that ends with one. Raises RowRejected if the last answer cannot be placed."""
        roles = tuple(turn["role"] for turn in turns)
        if roles not in self._skeletons:
            self._skeletons[roles] = self._skeleton(roles)
        skeleton = self._skeletons[roles]
        if skeleton is not None:
            text = self.render(turns).text
            contents = [turn["content"] for turn in turns]
            spans = skeleton.fit(text, contents) or skeleton.fit(text, [content.strip() for content in contents])
            if spans is not None:
                return Located(text, spans)
        return self._compare(turns)

    def _learn_closing(self) -> str:
        word = _stand_in(1)
        try:
            text = self.render([{"role": "user", "content": _stand_in(0)}, {"role": "assistant", "content": word}]).text
        except RowRejected as error:
            raise EyasError(f"target.chat_template: cannot render a question and its answer: {error.detail}") from None
        times = text.count(word)
        if times != 1:
            raise EyasError(f"target.chat_template: an answer must appear once in its render, not {times} times")
        return text.partition(word)[2]

    def _skeleton(self, roles: tuple[str, ...]) -> Skeleton | None:
        """None where the places depend on the contents, or history is rewritten. RowRejected: a turn is left out."""
        words = [_stand_in(i) for i in range(len(roles))]
        turns = [{"role": role, "content": word} for role, word in zip(roles, words, strict=True)]
        try:
            text, spans = self._compare(turns)
        except RowRejected:
            return None
        for word, role in zip(words, roles, strict=True):
            if word not in text:
                raise RowRejected("template_drops_turn", f"a {role} turn of {' / '.join(roles)}")
        if len(spans) < roles.count("assistant") or any(text.count(word) > 1 for word in words):
            return None
        order = sorted(range(len(words)), key=lambda i: text.index(words[i]))
        places = tuple((text.index(words[i]), text.index(words[i]) + len(words[i])) for i in order)
        cuts = [0, *(edge for place in places for edge in place), len(text)]
        pieces = tuple(text[a:b] for a, b in zip(cuts[::2], cuts[1::2], strict=True))
        return Skeleton(pieces, tuple(order), places, spans)

    def _compare(self, turns: Turns) -> Located:
        full, blocks = self.render(turns)
        last = len(turns) - 1
        spans: list[Span] = []
        for i, turn in enumerate(turns):
            if turn["role"] != "assistant":
                continue
            try:
                span, stop = self._answer(turns, i, full)
            except RowRejected:
                if i == last:
                    raise
                continue
            # Generation tags, where a template has them, say which answers its author means to be trained on.
            tagged = not blocks or any(begin < stop and span.start < end for begin, end in blocks)
            spans.append(span._replace(tagged=tagged))
        return Located(full, tuple(spans))

    def _answer(self, turns: Turns, i: int, full: str) -> tuple[Span, int]:
        """The span of answer i in ``full`` and where its text ends (before the end-of-turn token)."""
        prompt = self.render(turns[:i], prompt=True).text
        turn = full if i == len(turns) - 1 else self.render(turns[: i + 1]).text
        stop = len(turn) - len(self.closing)
        if not turn.startswith(prompt) or not turn.endswith(self.closing) or stop <= len(prompt):
            raise RowRejected("answer_not_located", f"turn {i}: the generation prompt does not lead to the answer")
        if not full.startswith(turn[:stop]):
            raise RowRejected("template_rewrites_answer", f"turn {i} is changed by the turns after it")
        start = len(prompt) + _answer_start(turn[len(prompt) : stop], turns[i]["content"], i)
        return Span(i, len(prompt), start, self._end_of(full, stop)), stop

    def _end_of(self, full: str, stop: int) -> int:
        """Past the end-of-turn token that follows the answer's last character at ``stop``."""
        if self.end_of_turn and full.startswith(self.end_of_turn, stop):
            return stop + len(self.end_of_turn)
        # A template may close an answer by the next role's header: supervised if that ends a generation.
        match = self._end.match(full, stop)
        return match.end() if match else stop


def _answer_start(generated: str, content: str, turn: int) -> int:
    """Offset in the text after the generation prompt at which the answer begins.

    White space that a template puts before an answer is part of what the target generates; anything else
    (an empty reasoning block) is the template's own and not supervised.
    """
    answer = content.strip()
    if generated.strip() == answer or "".join(generated.split()) == "".join(answer.split()):
        return 0
    if generated.rstrip().endswith(answer):
        return len(generated.rstrip()) - len(answer)
    raise RowRejected("template_rewrites_answer", f"turn {turn} is rendered as {generated[:60]!r}")


def _any_of(tokens: Sequence[str]) -> re.Pattern[str]:
    """Matches any of the texts, the longest first; nothing if there is none."""
    return re.compile("|".join(re.escape(token) for token in sorted(tokens, key=len, reverse=True)) or "(?!)")


def _stand_in(i: int) -> str:
    """A word that no template holds and no template changes."""
    return f"qx{i}zjvk{i}xq"
