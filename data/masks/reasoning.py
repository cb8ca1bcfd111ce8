"""Reasoning that the data gives in a field of its own: what the target would have written of it, learnt from stand-ins.

Templates take reasoning as a field of the assistant turn, under one of three names, or know it by think tags before the
answer. Where both render alike, or the template has no such field, the tags are used; where it shows the field in
another way (channels), that way is the target's, if it continues the generation prompt.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import NamedTuple

from data.chats.messages import Message
from data.chats.policy import RowRejected
from data.masks.probe import FOLDED, Manner, any_of, end_tag, stand_in
from data.masks.render import Renderer, Turns

KEYS = ("reasoning_content", "thinking", "reasoning")
_TAGS = re.compile(r"[<\[]/?\w+[>\]]")


class Reasoning(NamedTuple):
    """How a template takes the reasoning of an answer.

    key: the field of the turn that it reads, "" if reasoning goes before the answer in think tags. header: what it puts
    between the generation prompt and the reasoning; bridge: between reasoning and answer. tags: whether think tags are
    what the target writes. refusal: why nothing is known to be what it writes, "" if something is.
    """

    key: str = ""
    header: str = ""
    bridge: str = ""
    tags: bool = True
    refusal: str = ""

    def given(self, message: Message) -> Message:
        """The message as the template is to get it: its reasoning in the field, or folded into its content.

        Raises RowRejected if the target would not write that.
        """
        if message.role != "assistant":
            return message
        if not self.tags and message.content.lstrip().startswith(FOLDED):
            raise RowRejected("answer_not_located", f"reasoning in {FOLDED}, which the target writes another way")
        if not message.reasoning:
            return message
        if self.refusal:
            raise RowRejected("answer_not_located", self.refusal)
        return message if self.key else replace(message, content=_folded(message), reasoning="")

    def places(self, thought: str, answer: str, generated: str) -> tuple[int, int, int]:
        """Where in the text after the generation prompt the reasoning begins and ends, and the answer begins.

        Raises RowRejected if there is anything else in it.
        """
        for said, told in product((thought, thought.strip(), thought.strip("\n")), (answer, answer.strip())):
            if generated == self.header + said + self.bridge + told:
                begin = len(self.header)
                return begin, begin + len(said), len(generated) - len(told)
        raise RowRejected("template_rewrites_answer", f"with its reasoning it is rendered as {generated[:60]!r}")


def learn_reasoning(render: Renderer, manner: Manner, ends: Sequence[str]) -> Reasoning:
    """``ends``: the texts of the tokens that end a generation."""
    question, thought, answer = (stand_in(i) for i in range(3))
    asked = [{"role": "user", "content": question}]
    turn = {"role": "assistant", "content": answer}
    for key in KEYS:
        text = _text(render, [*asked, {**turn, key: thought}])
        if thought in text:
            break
    else:
        # A header that is more than a block of tags is another way to tell reasoning from answers.
        if _TAGS.sub("", manner.own).strip():
            return Reasoning(tags=False, refusal="the chat template has channels but shows no reasoning")
        return Reasoning()
    folded = _folded(Message("assistant", answer, reasoning=thought))
    if text == _text(render, [*asked, {**turn, "content": folded}]):
        return Reasoning()
    prompt = render(asked, True).text
    before, _, after = text.partition(thought)
    bridge, _, closing = after.partition(answer)
    header = before.removeprefix(prompt)
    tags = before.rstrip().endswith(FOLDED) and bridge.lstrip().startswith(end_tag(FOLDED))
    once = text.count(thought) == text.count(answer) == 1
    # A generation goes on to the answer: nothing before it may end one.
    if once and before.startswith(prompt) and closing == manner.closing and not any_of(ends).search(header + bridge):
        return Reasoning(key, header, bridge, tags)
    if tags:
        return Reasoning()
    return Reasoning(tags=False, refusal="the chat template shows reasoning where its generation prompt does not lead")


def _folded(message: Message) -> str:
    """The content after its reasoning in think tags, as a server without a reasoning parser returns it."""
    if not message.content.strip():  # a call, which says nothing
        return message.content
    return f"{FOLDED}\n{message.reasoning.strip()}\n{end_tag(FOLDED)}\n\n{message.content}"


def _text(render: Renderer, turns: Turns) -> str:
    try:
        return render(turns).text
    except RowRejected:
        return ""
