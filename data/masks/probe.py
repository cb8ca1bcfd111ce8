"""What a chat template does around answers, learnt once from renders of stand-in turns.

Nothing here knows a model family: a stand-in is a word that no template holds and no template changes, so what stands
around it in a render is the template's own.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from itertools import product
from typing import Any, NamedTuple

from data.chats.policy import RowRejected
from data.masks.render import Renderer, Renders, Turns
from models.errors import EyasError

# A tag that opens a block: <think>, [THINK]. Role markers hold other characters: <|assistant|>, [/INST].
OPENING = r"[<\[]\w+[>\]]"
_OPENED = re.compile(rf"(?P<tag>{OPENING})\s*$")
_CLOSED = re.compile(r"(?P<tag>(?P<open>[<\[])(?P<name>\w+)(?P<close>[>\]]))\s*(?P=open)/(?P=name)(?P=close)\s*$")
FOLDED = "<think>"  # what reasoning given in a field of its own is put into


class Manner(NamedTuple):
    """A template's manner of showing an answer.

    closing: all it puts after the last answer. lead: what it puts between a question and an answer. asked: what its
    generation prompt adds to ``lead``: the tag of a reasoning block that it opens (``<think>`` and a newline), a block
    that it opens and closes, or nothing. instead: what a render without reasoning shows in its place.
    opens: the tag of the block that the generation prompt leaves open, which the answer is then to close; closes: that
    of the one it closes, so that no reasoning is asked for. gap: white space that the template puts before an answer;
    own: a block or header that it puts there, with the white space around it.
    """

    closing: str
    lead: str
    asked: str
    instead: str
    opens: str
    closes: str
    gap: str
    own: str

    def opened_by(self, prompt: str) -> bool:
        """Whether a prompt ends in an open reasoning block; after tool results, for instance, it may not."""
        return bool(self.opens) and prompt.endswith(self.asked)

    def may_be_unasked(self, content: str) -> bool:
        """Whether an answer begins to reason, and the generation prompt has closed that already."""
        return bool(self.closes) and content.lstrip().startswith(self.closes)

    def said(self, content: str, prompt: str) -> str:
        """What the target generates of an answer after ``prompt``, which may have opened its reasoning.

        Raises RowRejected if it has and the answer has no reasoning, or if it has closed it and the answer has some.
        """
        answer = content.lstrip()
        if self.may_be_unasked(content) and prompt.endswith(self.lead + self.asked):
            raise RowRejected("reasoning_unasked", "leave it out, or turn it on (target.template_kwargs)")
        if not self.opened_by(prompt):
            return content
        if answer.startswith(self.opens):
            return answer.removeprefix(self.opens).removeprefix(self.asked.partition(self.opens)[2])
        if end_tag(self.opens) in answer:  # a server's raw response goes on where the prompt stopped
            return content
        raise RowRejected(
            "reasoning_missing",
            f"no {self.opens}: let the target answer (data.regenerate), or turn it off (target.template_kwargs)",
        )


def learn(render: Renderer, control: Sequence[str]) -> Manner:
    """``control``: the literal text of every added token.

    Raises EyasError if the template cannot render a question and its answer, or shows the answer not just once.
    """
    question, answer = stand_in(0), stand_in(1)
    turns = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    try:
        text, prompt = render(turns).text, render(turns[:1], prompt=True).text
    except RowRejected as error:
        raise EyasError(f"target.chat_template: cannot render a question and its answer: {error.detail}") from None
    times = text.count(answer)
    if times != 1:
        raise EyasError(f"target.chat_template: an answer must appear once in its render, not {times} times")
    before, _, closing = text.partition(answer)
    asked, instead = _asked(prompt, [before, *_in_history(render, turns, answer)], control)
    bare = prompt.removesuffix(asked)
    opened = _OPENED.fullmatch(asked)
    gap = before.removeprefix(bare)
    own = before.removeprefix(prompt) if before.startswith(prompt) else ""
    return Manner(
        closing,
        lead=bare.rpartition(question)[2],
        asked=asked,
        instead=instead,
        opens=opened["tag"] if opened else "",
        closes=_closes(prompt, asked),
        gap="" if asked or gap.strip() else gap,
        own=own if own.strip() else "",
    )


def _asked(prompt: str, shown: Sequence[str], control: Sequence[str]) -> tuple[str, str]:
    """``asked`` and ``instead`` of a manner. shown: what renders show before an answer without reasoning, first if it
    is the last turn, then if another question follows."""
    for pattern, before in product((_OPENED, _CLOSED), shown):
        if match := pattern.search(prompt):
            bare, tag = prompt[: match.start()], match["tag"]
            instead = before.removeprefix(bare)
            allowed = ["", end_tag(tag)] + [tag + end_tag(tag)] * (pattern is _OPENED)
            if before.startswith(bare) and "".join(instead.split()) in allowed:
                return prompt[len(bare) :], instead
    added = prompt[len(shown[0]) :] if prompt.startswith(shown[0]) else ""
    # A block between two control tokens: nothing is left to say in it.
    first, last = (any_of(control).match(added.strip()), re.search(f"({any_of(control).pattern})$", added.strip()))
    closed = first is not None and last is not None and first.end() <= last.start()
    return (added, "") if closed or not added.strip() else ("", "")


def _closes(prompt: str, asked: str) -> str:
    if closed := _CLOSED.search(prompt):
        return str(closed["tag"])
    closes = prompt.rstrip().endswith(end_tag(FOLDED)) or (asked.strip() and not _OPENED.fullmatch(asked))
    return FOLDED if closes else ""


def _in_history(render: Renderer, turns: Turns, answer: str) -> list[str]:
    """What precedes an answer that another question follows, if a template takes one."""
    try:
        text = render([*turns, {"role": "user", "content": stand_in(2)}], prompt=True).text
    except RowRejected:
        return []
    before, found, _ = text.partition(answer)
    return [before] if found else []


def stand_in(i: int) -> str:
    """A word that no template holds and no template changes."""
    return f"qx{i}zjvk{i}xq"


def stand_ins(turns: Turns) -> tuple[Turns, list[str]]:
    """The turns with stand-ins for contents and calls, and those words that a render of them has to show.

    A turn that calls tools may be shown without its text: what counts is the call.
    """
    words: list[str] = []

    def word() -> str:
        words.append(stand_in(len(words)))
        return words[-1]

    standing: list[dict[str, Any]] = []
    for turn in turns:
        if "tool_calls" not in turn:
            standing.append({**turn, "content": word() if turn["content"] else turn["content"]})
            continue
        calls = []
        for call in turn["tool_calls"]:
            name, value = word(), word()
            arguments: Any = {"argument": value}
            if isinstance(call["function"]["arguments"], str):
                arguments = json.dumps(arguments)
            calls.append({**call, "function": {"name": name, "arguments": arguments}})
        content = stand_in(10**6 + len(standing)) if turn["content"] else turn["content"]
        standing.append({**turn, "content": content, "tool_calls": calls})
    return standing, words


def check_kept(render: Renderer, renders: Renders) -> None:
    """RowRejected if the template leaves a turn out, in what the target reads before the last answer or with it."""
    standing, words = stand_ins(renders.turns)
    stood = Renders(render, standing, renders.tools)
    last = len(standing) - 1
    try:
        shown = stood.prompt(last) + stood.upto(last).text
    except RowRejected:
        return  # refused as a whole, as the real turns will be
    missing = [word for word in words if word not in shown]
    for turn in standing:
        if any(word in json.dumps(turn) for word in missing):
            what = "a tool call" if "tool_calls" in turn else f"a {turn['role']} turn"
            roles = " / ".join(turn["role"] for turn in standing)
            raise RowRejected("template_drops_turn", f"{what} of {roles[:200]}")


def shown_parts(answer: str, tag: str) -> list[str]:
    """What a template may show of an answer: all of it, or what follows the reasoning block at its beginning.

    tag: opens the block if the answer doesn't (the generation prompt did), or "".
    """
    parts = [answer.strip()]
    opening = re.match(OPENING, answer.lstrip())
    tag = opening.group() if opening else tag
    if tag and end_tag(tag) in answer:
        parts += [answer.partition(end_tag(tag))[2].strip(), answer.rpartition(end_tag(tag))[2].strip()]
    return parts


def end_tag(tag: str) -> str:
    """``</think>`` of ``<think>``."""
    return f"{tag[0]}/{tag[1:]}"


def any_of(tokens: Sequence[str]) -> re.Pattern[str]:
    """Matches any of the texts, the longest first; nothing if there is none."""
    return re.compile("|".join(re.escape(token) for token in sorted(tokens, key=len, reverse=True)) or "(?!)")
