"""Where the answers lie in a rendered conversation, for any chat template and beyond doubt.

Nothing is searched for in the text of a conversation, so text that repeats itself or spells control tokens cannot
mislead. An answer's place follows from renders of the same conversation, each equal to the other by comparison:

* ``prompt`` = the turns before the answer with the generation prompt, what a server feeds: where the answer begins;
* ``upto`` = the turns up to and with the answer. It must begin with ``prompt`` and end with the template's closing
  of an answer (learnt once, from an answer that is one unmistakable word);
* ``full`` = the whole conversation. It must repeat ``upto`` to the answer's last character, otherwise the
  template rewrites history (drops earlier reasoning) and this answer is not what the target would have generated.

Where ``upto`` does not begin with ``prompt``, or shows the answer without its reasoning, the document is put together
as it is served: ``prompt``, the answer as the target generates it, the end-of-turn text. That is done only if the
render shows the answer (or what follows its reasoning) in the very place the generation prompt leads to.

For the usual template all this is worked out once per sequence of roles, on stand-in contents, as a skeleton; a
conversation whose render equals the skeleton with its own contents put in takes over the skeleton's places.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from data.chats.policy import RowRejected
from data.masks.probe import OPENING, any_of, check_kept, learn, shown_parts, stand_ins
from data.masks.reasoning import learn_reasoning
from data.masks.render import Renderer, Renders


class Span(NamedTuple):
    """The supervised characters of an answer: ``start`` (its first) to ``end`` (past its end-of-turn token).

    An answer with reasoning of its own field has several in a row: each ends with what the template puts behind it.
    turn: index of the message. floor: where the generation prompt ends; no supervised token may begin before it.
    stop: past the answer's last character, before what closes it.
    tagged: false if the template has generation tags and they leave this answer out.
    """

    turn: int
    floor: int
    start: int
    stop: int
    end: int
    tagged: bool = True


class Located(NamedTuple):
    """A rendered conversation and the spans of those answers that stand in it just as they were generated.

    as_served: the text is not the template's render, but a prompt of its and the answer.
    """

    text: str
    spans: tuple[Span, ...]
    as_served: bool = False

    def unended(self) -> Located:
        """The same without what closes the last answer, which was cut off."""
        last = self.spans[-1]
        spans = (*self.spans[:-1], last._replace(end=last.stop))
        return self._replace(text=self.text[: last.stop], spans=spans)


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
        ends = [end for _, end in self.places]
        grown = [len(content) - (end - begin) for content, (begin, end) in zip(given, self.places, strict=True)]
        shifts = [0, *accumulate(grown)]

        def moved(position: int) -> int:
            return position + shifts[bisect_right(ends, position)]

        return tuple(
            Span(span.turn, moved(span.floor), moved(span.start), moved(span.stop), moved(span.end), span.tagged)
            for span in self.spans
        )


class Locator:
    """Finds answers in rendered conversations.

    control: the literal text of every added token of the tokenizer; eos: that of the tokens that end a generation.
    """

    def __init__(self, renderer: Renderer, control: Sequence[str], eos: Sequence[str]) -> None:
        self.render = renderer
        self.ends = tuple(token for token in eos if token)
        self.control = any_of(control)
        self._end = re.compile(rf"\s*({any_of(self.ends).pattern})")
        self._skeletons: dict[tuple[str, ...], Skeleton | None] = {}
        self._kept: set[tuple[object, ...]] = set()
        self.manner = learn(renderer, control)
        self.reasoning = learn_reasoning(renderer, self.manner, self.ends)
        closing = self.manner.closing
        match = self.control.search(closing)
        # The end-of-turn token is the first control token that closes an answer; a template without one closes it
        # by words, of which the white space at the end is filler.
        self.end_of_turn = closing[: match.end()] if match else closing.rstrip()

    def locate(self, renders: Renders) -> Located:
        """Answers of a conversation that ends with one. Raises RowRejected if the last answer cannot be placed."""
        turns = renders.turns
        if renders.tools or any(turn["role"] == "tool" or len(turn) > 2 for turn in turns):
            self._check_kept(renders)
            return self._compare(renders)
        roles = tuple(turn["role"] for turn in turns)
        if roles not in self._skeletons:
            self._check_kept(renders)
            self._skeletons[roles] = self._skeleton(roles)
        skeleton = self._skeletons[roles]
        if skeleton is not None and not any(self.manner.may_be_unasked(turn["content"]) for turn in turns):
            text = renders.upto(len(turns) - 1).text
            contents = [turn["content"] for turn in turns]
            spans = skeleton.fit(text, contents) or skeleton.fit(text, [content.strip() for content in contents])
            if spans is not None and self._prompted(renders, text, spans):
                return Located(text, spans)
        return self._compare(renders)

    def _prompted(self, renders: Renders, text: str, spans: Sequence[Span]) -> bool:
        """Whether generation prompts lead to the spans here as they do on stand-ins; no question if they are fixed."""
        if self.render.fixed_prompt:
            return True
        try:
            prompts = [(span, renders.prompt(span.turn)) for span in spans]
        except RowRejected:
            return False
        return all(len(prompt) == span.floor and text.startswith(prompt) for span, prompt in prompts)

    def _check_kept(self, renders: Renders) -> None:
        form = tuple((turn["role"], bool(turn["content"]), len(turn.get("tool_calls", ()))) for turn in renders.turns)
        if (form, bool(renders.tools)) not in self._kept:
            check_kept(self.render, renders)
            self._kept.add((form, bool(renders.tools)))

    def _skeleton(self, roles: tuple[str, ...]) -> Skeleton | None:
        """None where the places depend on the contents, or history is rewritten."""
        standing, words = stand_ins([{"role": role, "content": "ok"} for role in roles])
        try:
            text, spans, as_served = self._compare(Renders(self.render, standing))
        except RowRejected:
            return None
        if as_served or len(spans) < roles.count("assistant") or any(text.count(word) != 1 for word in words):
            return None
        if any(span.start > span.floor for span in spans):  # a block that the template puts before some answers
            return None
        order = sorted(range(len(words)), key=lambda i: text.index(words[i]))
        places = tuple((text.index(words[i]), text.index(words[i]) + len(words[i])) for i in order)
        cuts = [0, *(edge for place in places for edge in place), len(text)]
        pieces = tuple(text[a:b] for a, b in zip(cuts[::2], cuts[1::2], strict=True))
        return Skeleton(pieces, tuple(order), places, spans)

    def _compare(self, renders: Renders) -> Located:
        last = len(renders.turns) - 1
        full, blocks = renders.upto(last)
        spans: list[Span] = []
        for i, turn in enumerate(renders.turns):
            if turn["role"] != "assistant" or "tool_calls" in turn:
                continue
            try:
                found = self._answer(renders, i, full)
            except RowRejected as rejected:
                if i == last and self.reasoning.key in turn:
                    raise
                if i == last:
                    return self._served(renders, rejected)
                continue
            # Generation tags, where a template has them, say which answers its author means to be trained on.
            tagged = not blocks or any(begin < found[-1].stop and found[0].start < end for begin, end in blocks)
            spans += [span._replace(tagged=tagged) for span in found]
        return Located(full, tuple(spans))

    def _answer(self, renders: Renders, i: int, full: str) -> list[Span]:
        """The span of answer i in ``full``, if it stands there after its prompt; several if it has reasoning in a
        field. Raises RowRejected."""
        turn, prompt, upto = renders.turns[i], renders.prompt(i), renders.upto(i).text
        reasoned = self.reasoning.key in turn
        said = turn["content"] if reasoned else self.manner.said(turn["content"], prompt)
        stop = len(upto) - len(self.manner.closing)
        if not upto.startswith(prompt) or not upto.endswith(self.manner.closing) or stop <= len(prompt):
            raise RowRejected("answer_not_located", f"turn {i}: the generation prompt does not lead to the answer")
        if not full.startswith(upto[:stop]):
            raise RowRejected("template_rewrites_answer", f"turn {i} is changed by the turns after it")
        floor, end = len(prompt), self._end_of(full, stop)
        if reasoned:
            thought = turn[self.reasoning.key]
            places = self.reasoning.places(thought, said, upto[floor:stop])
            begin, over, start = (floor + place for place in places)
            header = [Span(i, floor, floor, floor, begin)] if begin > floor else []
            return [*header, Span(i, floor, begin, over, start), Span(i, floor, start, stop, end)]
        start = floor + self._answer_start(upto[floor:stop], said, i)
        if self.manner.opened_by(prompt) and start > len(prompt):  # the template closes the block that the prompt opens
            raise RowRejected("template_rewrites_answer", f"turn {i} is rendered as {upto[len(prompt) :][:60]!r}")
        return [Span(i, floor, start, stop, end)]

    def _served(self, renders: Renders, rejected: RowRejected) -> Located:
        """The last answer after its prompt, as it is served. Raises ``rejected`` if that can't be proven right."""
        manner, last = self.manner, len(renders.turns) - 1
        answer = renders.turns[last]["content"]
        prompt, (upto, blocks) = renders.prompt(last), renders.upto(last)
        said = manner.said(answer, prompt)  # first: an answer that lacks its reasoning is rejected as such
        stop = len(upto) - len(manner.closing)
        if not upto.endswith(manner.closing) or not prompt.endswith(manner.lead + manner.asked):
            raise rejected
        body = upto[:stop].rstrip()
        for shown in shown_parts(answer, manner.opens):
            before = body[: len(body) - len(shown)]
            if body.endswith(shown) and self._leads(before, prompt, answer):
                break
        else:
            raise rejected
        gap = manner.gap
        if not manner.opens:
            blank = before[len(before.rstrip()) :]
            if not manner.asked and shown == answer.strip() and before.rstrip().endswith(manner.lead.rstrip()):
                gap = blank.removeprefix(manner.lead[len(manner.lead.rstrip()) :])
            said = said.strip()
        text = prompt + gap + said.rstrip() + upto[len(body) : stop]
        tagged = not blocks or any(end > len(before) for _, end in blocks)
        span = Span(last, len(prompt), len(prompt), len(text), len(text + self.end_of_turn), tagged)
        return Located(text + self.end_of_turn, (span,), as_served=True)

    def _leads(self, before: str, prompt: str, answer: str) -> bool:
        """Whether ``before``, what a render shows before an answer, is where the generation prompt leads to."""
        manner, shown = self.manner, before.rstrip()
        if manner.lead.strip() and shown.endswith((manner.lead.rstrip(), (manner.lead + manner.instead).rstrip())):
            return True
        # A template may put a block of its own before an answer whose reasoning it has not understood as such.
        bare, opening = prompt.removesuffix(manner.asked), re.match(OPENING, answer.lstrip())
        block = before[len(bare) :].strip()
        return before.startswith(bare) and (not block or (opening is not None and block.startswith(opening.group())))

    def _end_of(self, full: str, stop: int) -> int:
        """Past the end-of-turn token that follows the answer's last character at ``stop``."""
        if self.end_of_turn and full.startswith(self.end_of_turn, stop):
            return stop + len(self.end_of_turn)
        # A template may close an answer by the next role's header: supervised if that ends a generation.
        match = self._end.match(full, stop)
        return match.end() if match else stop

    def _answer_start(self, generated: str, said: str, turn: int) -> int:
        """Offset in the text after the generation prompt at which the answer begins.

        White space that a template puts before an answer is part of what the target generates; anything else
        (an empty reasoning block) is the template's own and not supervised.
        """
        answer = said.strip()
        if generated.strip() == answer or "".join(generated.split()) == "".join(answer.split()):
            return 0
        opening = re.match(OPENING, answer)
        if opening is None or not generated.lstrip().startswith(opening.group()):
            rest = generated.removeprefix(self.manner.own)
            if rest.strip() == answer:  # with the indent that the answer begins with
                return len(generated) - len(rest)
            if generated.rstrip().endswith(answer):
                return len(generated.rstrip()) - len(answer)
        raise RowRejected("template_rewrites_answer", f"turn {turn} is rendered as {generated[:60]!r}")
