"""Cleaning of texts scraped from a web page (``data.clean_html``): page furniture out, code as it stands.

Tags become Markdown (by the library markdownify), buttons and leading "2 / 3" counters go, and the label of a copy
button leaves the language name that it is glued to. Code in backticks is kept, its tags too. A text without such
furniture comes back as it is: a lone ``<div>`` without its ``</div>``, comparisons and type parameters are none.
"""

from __future__ import annotations

import re

from bs4 import BeautifulSoup, Tag
from markdownify import MarkdownConverter

# Tags that a page is built of. Markdown itself may hold <br>, <sub> or <details>: these alone are no sign of a page.
PAGE = "article|button|div|h[1-6]|li|ol|p|pre|section|span|table|td|tr|ul"
OTHER = (
    "a|abbr|b|blockquote|br|code|dd|del|details|dl|dt|em|figure|hr|i|img|kbd|main|path|q|s|samp|small|strong|sub|"
    "summary|sup|svg|tbody|tfoot|th|thead|u"
)
_PAGE_TAG = re.compile(rf"<(/?)({PAGE})\b[^<>]*>", re.IGNORECASE)
_NO_TAG = re.compile(rf"<(?!/?(?:{PAGE}|{OTHER})\b[^<>]*>)", re.IGNORECASE)
_COUNTER = re.compile(r"\s*(\d{1,3}) / (\d{1,3})(?=[ \t]*\n|<)")
_FENCE = re.compile(r"^ {0,3}(`{3,}|~{3,})[^\n`]*(?:\n.*?)??(?:\n {0,3}\1[`~]*[ \t]*$|\Z)", re.MULTILINE | re.DOTALL)
_INLINE_CODE = re.compile(r"(?<!`)(`{1,2})(?!`)[^\n]*?[^`\n]\1(?!`)")
_LABEL = re.compile(r"([ ]{0,3}(?:`{3,}|~{3,}))[ \t]*([\w+#.-]*?)(?:\n([\w+#.-]*?))?Copy code([^\n]*)")
_MARK = re.compile("\ufdd0(\\d+)\ufdd1")


def clean_html(text: str) -> str:
    """The text without page furniture. text: free of U+FDD0 and U+FDD1 (see `data.chats.messages.checked`).

    Raises RecursionError for elements nested more than some hundred deep.
    """
    if not ("<" in text or "Copy code" in text or " / " in text):
        return text
    counter = _COUNTER.match(text)
    if counter and int(counter[1]) <= int(counter[2]):
        text = text[counter.end() :].lstrip("\n")
    kept: list[str] = []

    def mark(code: re.Match[str]) -> str:
        kept.append(code[0])
        return f"\ufdd0{len(kept) - 1}\ufdd1"

    prose = _INLINE_CODE.sub(mark, _FENCE.sub(mark, text))
    tags = {True: set[str](), False: set[str]()}
    for tag in _PAGE_TAG.finditer(prose):
        tags[bool(tag[1])].add(tag[2].lower())
    if tags[True] & tags[False]:
        text = _MARK.sub(lambda found: kept[int(found[1])], _markdown(prose))
    return _FENCE.sub(_without_label, text)


class _Converter(MarkdownConverter):
    """Markdown of what is read, nothing of what is clicked."""

    def convert_button(self, element: Tag, text: str, parent_tags: set[str]) -> str:
        return text if "pre" in parent_tags else ""  # there it parts the language name from the code, see _LABEL

    def convert_ul(self, element: Tag, text: str, parent_tags: set[str]) -> str:
        after = "" if "li" in parent_tags else "\n"  # else what follows would be read as part of the last item
        converted = super().convert_ul(element, text, parent_tags)  # type: ignore[misc] # the stub leaves it out
        return str(converted) + after

    convert_ol = convert_ul  # as in markdownify

    def convert_svg(self, element: Tag, text: str, parent_tags: set[str]) -> str:
        return ""


def _markdown(html: str) -> str:
    """Elements converted, one run of neighbours at a time; the text beside them stays as it is."""
    converter = _Converter(
        escape_asterisks=False, escape_underscores=False, heading_style="ATX", bullets="-", strip_document=None
    )
    pieces: list[str] = []
    run: list[str] = []
    nodes = list(BeautifulSoup(_NO_TAG.sub("&lt;", html), "html.parser").contents)
    for node, following in zip(nodes, [*nodes[1:], None], strict=True):
        between = isinstance(following, Tag) and run and not str(node).strip()
        if isinstance(node, Tag) or between:
            run.append(str(node))
            continue
        _add(pieces, converter.convert("".join(run)))
        _add(pieces, str(node))
        run = []
    _add(pieces, converter.convert("".join(run)).rstrip("\n"))
    return "".join(pieces)


def _add(pieces: list[str], piece: str) -> None:
    """With as many newlines between as the neighbour that asks for more."""
    begins = piece.lstrip("\n")
    if pieces and piece:
        last = pieces[-1].rstrip("\n")
        begins = "\n" * max(len(pieces[-1]) - len(last), len(piece) - len(begins)) + begins
        pieces[-1] = last
    if begins:
        pieces.append(begins)


def _without_label(block: re.Match[str]) -> str:
    """A fence that opens with ``pythonCopy codex=1``: the language onto the fence, the code below it."""
    label = _LABEL.match(block[0])
    if label is None:
        return block[0]
    fence, language, below, code = label.groups()
    body = f"{code.strip()}{block[0][label.end() :]}".lstrip("\n")
    return f"{fence}{below or language}\n{body}"
