"""Shows what is supervised: an example's text with the supervised tokens in colour."""

from __future__ import annotations

from itertools import groupby

from rich.console import Console
from rich.text import Text
from transformers import PreTrainedTokenizerBase

from data.template import Example, decode

SUPERVISED = "bold green"
READ = "dim"


def preview_text(example: Example, tokenizer: PreTrainedTokenizerBase, max_tokens: int = 400) -> Text:
    """The decoded example; runs of supervised and of merely read tokens differ in style.

    Without colour (a file, a pipe) the supervised runs still show, between the brackets ⟦ and ⟧.
    """
    text = Text()
    pairs = zip(example.input_ids[:max_tokens], example.supervised[:max_tokens], strict=True)
    for supervised, run in groupby(pairs, key=lambda pair: pair[1]):
        ids = [token for token, _ in run]
        piece = decode(tokenizer, ids)
        text.append(f"⟦{piece}⟧" if supervised else piece, style=SUPERVISED if supervised else READ)
    left = len(example.input_ids) - max_tokens
    if left > 0:
        text.append(f"\n... {left} more tokens", style="italic")
    return text


def print_preview(
    examples: list[Example],
    tokenizer: PreTrainedTokenizerBase,
    *,
    count: int = 1,
    max_tokens: int = 400,
    console: Console | None = None,
) -> None:
    """Print the first ``count`` examples, each under a line that names its source and counts its tokens."""
    console = console or Console()
    for example in examples[:count]:
        title = f"{example.source}: {example.num_supervised} of {len(example.input_ids)} tokens supervised"
        console.rule(Text(title), align="left")
        console.print(preview_text(example, tokenizer, max_tokens), soft_wrap=True)
    console.rule()
