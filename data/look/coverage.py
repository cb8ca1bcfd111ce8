"""The draft-vocabulary report: how many of the supervised tokens a drafter's own head could predict, by its size."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from rich.table import Table
from rich.text import Text
from torch import Tensor

from data.look.statistics import encodable
from models.errors import EyasError
from models.files import write_atomic
from models.vocab import DraftVocab

LISTED = tuple(1024 << i for i in range(9))  # 1k .. 256k
ENOUGH = 0.99  # the share of supervised tokens that the recommended size covers
NO_BREAK = "\u00a0"  # a blank inside one of the tokens named
EXAMPLES = 8  # lost tokens that are named, of each size
EXPLANATION = (
    "A token outside the draft vocabulary cannot be drafted: there the chain ends, however good the drafter. tau at "
    "most: what a drafter that guesses everything else right reaches with a chain of {gamma}, if lost tokens fall "
    "independently with coverage c: 1 + c + ... + c^{gamma}."
)


class Lost(NamedTuple):
    """A token outside a draft vocabulary and how often it is supervised."""

    id: int
    occurrences: int
    text: str


class Size(NamedTuple):
    """A draft vocabulary of ``size`` tokens and the shares of the supervised tokens it holds (None: none are given)."""

    size: int
    train: float
    held_out: float | None

    @property
    def share(self) -> float:
        """The honest one: the vocabulary is chosen by the training tokens, so their own coverage is optimistic."""
        return self.train if self.held_out is None else self.held_out


@dataclass(frozen=True, eq=False)
class Coverage:
    """Coverage by size; build it with :meth:`of`.

    counts, held_out [V] int64: how often each token is supervised. always: special and EOS ids, members whatever
    their count. hidden: width of the head; 0: unknown. chosen: the configured size. gamma: length of the chain.
    """

    counts: Tensor
    always: tuple[int, ...]
    listed: tuple[int, ...]
    chosen: int
    hidden: int
    held_out: Tensor | None
    gamma: int
    token_text: Callable[[int], str]

    @classmethod
    def of(
        cls,
        counts: Tensor,
        always: Iterable[int],
        sizes: Iterable[int] | None = None,
        *,
        chosen: int | None = None,
        hidden: int = 0,
        held_out: Tensor | None = None,
        gamma: int = 4,
        token_text: Callable[[int], str] = "#{}".format,
    ) -> Coverage:
        """Of the listed ``sizes`` (None: 1k, 2k, 4k ...) below V, the ``chosen`` one (None: all of V) and V.

        Vocabularies are those that training would build (`DraftVocab.from_counts`). Listed sizes that cannot hold
        ``always`` are left out; EyasError if the chosen one cannot, or if nothing is supervised.
        token_text: names a lost token, see `data.look.preview.token_repr`.
        """
        vocab, always = counts.numel(), tuple(always)
        chosen = vocab if chosen is None else chosen
        if not int(counts.sum()):
            raise EyasError("data.path: no token is supervised, so no draft vocabulary can be chosen")
        if held_out is not None and not int(held_out.sum()):
            held_out = None
        DraftVocab.from_counts(counts, chosen, always)  # refuses an impossible size
        least = max(len(set(always)), 1)
        wanted = {size for size in (LISTED if sizes is None else sizes) if least <= size < vocab}
        return cls(counts, always, (*sorted(wanted | {chosen, vocab}),), chosen, hidden, held_out, gamma, token_text)

    @property
    def vocab(self) -> int:
        return self.counts.numel()

    @cached_property
    def sizes(self) -> tuple[Size, ...]:
        """The listed sizes, ascending."""
        return tuple(self.at(size) for size in self.listed)

    def at(self, size: int) -> Size:
        """Any size between what the special tokens need and V."""
        vocab = DraftVocab.from_counts(self.counts, size, self.always)
        held_out = None if self.held_out is None else _share(self.held_out, vocab)
        return Size(size, _share(self.counts, vocab), held_out)

    def lost(self, size: int) -> list[Lost]:
        """The most frequent tokens that a vocabulary of this size lacks, by training and held-out counts together."""
        member = DraftVocab.from_counts(self.counts, size, self.always).t2d
        left = (self.counts if self.held_out is None else self.counts + self.held_out).masked_fill(member, 0)
        most = torch.argsort(left, descending=True, stable=True)[:EXAMPLES].tolist()
        return [Lost(i, int(left[i]), self.token_text(i)) for i in most if left[i]]

    def tau_ceiling(self, size: Size) -> float:
        return 1 + sum(size.share**depth for depth in range(1, self.gamma + 1))

    def head_parameters(self, size: int) -> int:
        return size * self.hidden

    def recommend(self) -> int:
        """The smallest listed size that covers 99 % of the supervised tokens, of the held-out ones if there are any."""
        return next(size.size for size in self.sizes if size.share >= ENOUGH)

    def justify(self, chosen: int | None = None) -> str:
        """In words: what this size (None: the configured one) loses, what doubling it would add, and the rule."""
        size = self.at(self.chosen if chosen is None else chosen)
        which = "supervised training" if self.held_out is None else "held-out supervised"
        by_rule = self.at(self.recommend())
        rule = f"{by_rule.size:,} is the smallest listed size that covers {ENOUGH:.0%} of the {which} tokens"
        if size.size == self.vocab:
            if by_rule.size == self.vocab:
                return f"The full vocabulary of {self.vocab:,} tokens loses nothing; {rule}."
            return (
                f"The full vocabulary of {self.vocab:,} tokens loses nothing; {rule} ({percent(by_rule.share)}), "
                f"with {by_rule.size / self.vocab:.0%} of the head."
            )
        if size.train == size.share == 1:
            few = "" if by_rule.size == size.size else f"; {rule}"
            return f"draft_vocab_size={size.size} covers every supervised token: nothing is lost{few}."
        double = self.at(min(2 * size.size, self.vocab))
        more = self.head_parameters(double.size - size.size)
        training = "" if self.held_out is None else f" ({percent(size.train)} of the training ones)"
        cost = f" for {more / 1e6:,.1f} M more parameters of the head" if more else ""
        return (
            f"draft_vocab_size={size.size} covers {percent(size.share)} of the {which} tokens{training}: "
            f"{1000 * (1 - size.share):,.1f} of 1,000 cannot be drafted, which holds a perfect chain of {self.gamma} "
            f"to a tau of about {self.tau_ceiling(size):.2f} instead of {self.gamma + 1}. Doubling it would add "
            f"{100 * (double.share - size.share):.2f} points{cost}; {rule} ({percent(by_rule.share)})."
        )

    @property
    def columns(self) -> list[str]:
        """Headings of :meth:`cells`."""
        held_out = [] if self.held_out is None else ["held-out"]
        head = ["head, M"] if self.hidden else []
        return ["size", "training", *held_out, "lost, %", "of 1,000", "tau at most", *head, "most frequent lost"]

    def cells(self, size: Size) -> list[str]:
        """One row of the report in words; losses and tau are of the held-out tokens if there are any."""
        marks = ("*" if size.size == self.chosen else "") + ("+" if size.size == self.recommend() else "")
        return [
            f"{marks} {size.size:,}",
            percent(size.train),
            *([] if size.held_out is None else [percent(size.held_out)]),
            f"{100 * (1 - size.share):.2f}",
            f"{1000 * (1 - size.share):.1f}",
            f"{self.tau_ceiling(size):.2f}",
            *([f"{self.head_parameters(size.size) / 1e6:,.1f}"] if self.hidden else []),
            "  ".join(f"{lost.text} ({lost.occurrences:,})".replace(" ", NO_BREAK) for lost in self.lost(size.size)),
        ]

    @property
    def notes(self) -> str:
        """What the marks and numbers of :meth:`cells` mean."""
        return f"* configured; + the smallest listed size with {ENOUGH:.0%}. {EXPLANATION.format(gamma=self.gamma)}"

    def table(self, encoding: str = "utf-8") -> Table:
        """For a terminal of this encoding."""
        table = Table(title="Draft vocabulary: supervised tokens covered", caption=self.notes, caption_justify="left")
        for name in self.columns[:-1]:
            table.add_column(name.replace(" ", "\n", 1), justify="right", no_wrap=True, overflow="fold")
        table.add_column(self.columns[-1])  # gives way in narrow terminals
        for size in self.sizes:
            *cells, lost = (encodable(cell.replace(NO_BREAK, " "), encoding) for cell in self.cells(size))
            table.add_row(
                *cells, Text(lost, no_wrap=True, overflow="crop"), style="bold" if size.size == self.chosen else None
            )
        return table

    def to_json(self) -> dict[str, Any]:
        """The report for programs: one object a size, and the sizes configured and recommended."""
        sizes = [
            {
                "size": size.size,
                "train_coverage": size.train,
                "held_out_coverage": size.held_out,
                "lost_per_1000": 1000 * (1 - size.share),
                "tau_ceiling": self.tau_ceiling(size),
                "head_parameters": self.head_parameters(size.size) or None,
                "lost": [lost._asdict() for lost in self.lost(size.size)],
            }
            for size in self.sizes
        ]
        return {
            "vocab_size": self.vocab,
            "chosen": self.chosen,
            "recommended": self.recommend(),
            "justification": self.justify(),
            "gamma": self.gamma,
            "supervised_tokens": int(self.counts.sum()),
            "held_out_tokens": None if self.held_out is None else int(self.held_out.sum()),
            "sizes": sizes,
        }

    def plot(self, path: Path) -> None:
        """Write :meth:`png` to a file, atomically."""
        write_atomic(path, self.png())

    def png(self) -> bytes:
        """Coverage over size (logarithmic) as a picture: training and held-out tokens, the configured size marked."""
        from matplotlib.figure import Figure  # slow to import; draws without a display

        least = max(len(set(self.always)), self.listed[0] // 2, 1)
        grid = np.unique(np.geomspace(least, self.vocab, 32).round().astype(int)).tolist()
        points = [self.at(size) for size in sorted({*grid, *self.listed})]
        figure = Figure(figsize=(7.2, 4), layout="constrained")
        axes = figure.subplots()
        xs = [point.size for point in points]
        axes.plot(xs, [100 * point.train for point in points], label="training")
        if self.held_out is not None:
            axes.plot(xs, [100 * point.share for point in points], "--", label="held-out")
        axes.axhline(100 * ENOUGH, color="0.6", lw=0.8, ls=":", label=f"{ENOUGH:.0%}")
        axes.axvline(self.chosen, color="tab:red", lw=1, label=f"configured: {self.chosen:,}")
        axes.set_xscale("log", base=2)
        ticks = _ticks(self.listed)
        axes.set_xticks(ticks, [_short(tick) for tick in ticks])
        axes.set(xlabel="draft vocabulary, tokens", ylabel="supervised tokens covered, %")
        axes.grid(alpha=0.3)
        axes.legend(loc="lower right")
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", dpi=140, metadata={"Software": None})
        return buffer.getvalue()


def percent(share: float) -> str:
    """Two decimals, rounded down: only all is 100 %."""
    return f"{int(share * 10000 + 1e-9) / 100:.2f}%"


def _share(counts: Tensor, vocab: DraftVocab) -> float:
    return int(counts[vocab.ids].sum()) / int(counts.sum())


def _ticks(sizes: Sequence[int]) -> list[int]:
    """Sizes that do not lie on top of each other on a logarithmic axis."""
    kept: list[int] = []
    for size in sizes:
        if not kept or size > 1.4 * kept[-1]:
            kept.append(size)
    return kept


def _short(size: int) -> str:
    return (
        f"{size / 1024:g}k"
        if size >= 1024 and size % 1024 == 0
        else f"{size / 1000:.4g}k"
        if size >= 10000
        else str(size)
    )
