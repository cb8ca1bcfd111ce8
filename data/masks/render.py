"""Renders a chat template: the Jinja dialect that transformers and the serving engines use, with the clock stopped.

The dialect is the documented one (transformers, "Writing a chat template"): sandboxed Jinja with trimmed blocks,
loop controls, ``raise_exception``, ``strftime_now``, an unescaped ``tojson`` and ``{% generation %}`` tags.
`data.masks.template` checks at start-up that the result equals the tokenizer's own ``apply_chat_template``.
``strftime_now`` gives a fixed day, so that a dump, its resumption a day later and the evaluation see the same text.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NamedTuple, NoReturn

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from data.chats.policy import RowRejected
from models.errors import EyasError

Turns = Sequence[dict[str, Any]]  # role, content and what `data.tools` adds for calls and results
Tools = Sequence[Mapping[str, Any]]
PROMPT = "add_generation_prompt"
OPEN, CLOSE = "\ufdd0", "\ufdd1"  # around the text of a generation block, taken out again after rendering


class Rendered(NamedTuple):
    """The rendered text and the character ranges of its ``{% generation %}`` blocks."""

    text: str
    blocks: tuple[tuple[int, int], ...]


class _GenerationTag(Extension):
    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

    def _mark(self, caller: jinja2.runtime.Macro) -> str:
        return f"{OPEN}{caller()}{CLOSE}"


class Renderer:
    """``renderer(turns, prompt, tools)`` -> Rendered; ``prompt`` appends the generation prompt.

    fixed_prompt: whether the generation prompt is known to be the same whatever the turns say.
    variables: what the template sees beside the messages (special tokens, ``target.template_kwargs``).
    """

    def __init__(self, source: str, variables: Mapping[str, Any], day: datetime) -> None:
        def strftime_now(form: str) -> str:
            return day.strftime(form)

        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = strftime_now
        self._variables = {"tools": None, "documents": None, **variables}
        try:
            self._template = environment.from_string(source)
            self._template.globals = dict(self._template.globals)  # a chain of mappings, copied at every render
            self.fixed_prompt = _is_fixed(environment.parse(source))
        except jinja2.TemplateSyntaxError as error:
            raise EyasError(f"target.chat_template: not a valid Jinja template, line {error.lineno}: {error}") from None

    def __call__(self, turns: Turns, prompt: bool = False, tools: Tools = ()) -> Rendered:
        """Raises RowRejected (template_error) if the template refuses or fails."""
        variables = {**self._variables, "tools": list(tools)} if tools else self._variables
        try:
            text = self._template.render(messages=turns, add_generation_prompt=prompt, **variables)
        except Exception as error:  # the template is the user's program: whatever it raises concerns this row only
            raise RowRejected("template_error", f"{type(error).__name__}: {error}") from None
        return _unmark(text) if OPEN in text else Rendered(text, ())


class Renders:
    """The renders of a conversation's beginnings, each made once."""

    def __init__(self, renderer: Renderer, turns: Turns, tools: Tools = ()) -> None:
        self._renderer, self.turns, self.tools = renderer, turns, tools
        self._made: dict[tuple[int, bool], Rendered] = {}

    def first(self, count: int) -> Renders:
        """The conversation's first ``count`` turns, with the renders made so far."""
        renders = Renders(self._renderer, self.turns[:count], self.tools)
        renders._made = self._made
        return renders

    def prompt(self, i: int) -> str:
        """The turns before turn i with the generation prompt: what a server feeds. Raises RowRejected."""
        return self._render(i, True).text

    def upto(self, i: int) -> Rendered:
        """The turns up to and with turn i. Raises RowRejected."""
        return self._render(i + 1, False)

    def _render(self, count: int, prompt: bool) -> Rendered:
        if (count, prompt) not in self._made:
            self._made[count, prompt] = self._renderer(self.turns[:count], prompt, self.tools)
        return self._made[count, prompt]


def _is_fixed(tree: nodes.Template) -> bool:
    """Whether the generation prompt is used only as ``{% if add_generation_prompt %}``, around nothing but text and
    variables from outside."""
    uses = [name for name in tree.find_all(nodes.Name) if name.name == PROMPT]
    blocks = [node for node in tree.find_all(nodes.If) if isinstance(node.test, nodes.Name) and node.test in uses]
    inside = {name.name for block in blocks for node in block.body for name in _names(node)}
    outside = meta.find_undeclared_variables(tree) - {"messages", "tools", PROMPT}
    return len(uses) == len(blocks) and inside <= outside


def _names(node: nodes.Node) -> list[nodes.Name]:
    return [*([node] if isinstance(node, nodes.Name) else []), *node.find_all(nodes.Name)]


def _unmark(text: str) -> Rendered:
    pieces: list[str] = []
    blocks: list[tuple[int, int]] = []
    length = 0
    for piece in text.split(OPEN):
        inside, closed, after = piece.partition(CLOSE)
        if closed:
            blocks.append((length, length + len(inside)))
        pieces += (inside, after)
        length += len(inside) + len(after)
    return Rendered("".join(pieces), tuple(blocks))


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
