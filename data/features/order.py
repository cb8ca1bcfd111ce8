"""Which documents make up which optimizer step: a pure function of lengths, seed and step.

Bins (the documents of one packed forward) are formed before processes are assigned, so the sequence of global
batches is the same on 1, 2 or 8 of them: rank r of W takes ``bins[r::W]``. Nothing here keeps state that a
resumed run would have to restore.
"""

from __future__ import annotations

import hashlib
import math
from bisect import bisect_left, insort
from collections.abc import Sequence

from models.errors import EyasError

WINDOW = 1024  # documents packed together: enough to fill bins tightly, few enough that bins stay random


def plan_epoch(
    lengths: Sequence[int], *, seed: int, epoch: int, bin_tokens: int, weights: Sequence[float] | None = None
) -> list[list[int]]:
    """Bins of document numbers, each of at most ``bin_tokens`` tokens, every document exactly once.

    A document longer than a bin gets one of its own. weights: how often each document comes (2.5: twice, and once
    more in half of the epochs). Raises EyasError for an empty document.
    """
    if bin_tokens < 1:
        raise EyasError(f"train.bin_tokens={bin_tokens}: must be at least 1")
    if min(lengths, default=1) < 1:
        raise EyasError(f"document {min(range(len(lengths)), key=lengths.__getitem__)} has no tokens")
    order = _permutation([1.0] * len(lengths) if weights is None else weights, seed, epoch)
    bins: list[list[int]] = []
    for start in range(0, len(order), WINDOW):
        bins += _pack(order[start : start + WINDOW], lengths, bin_tokens)
    return bins


def _permutation(weights: Sequence[float], seed: int, epoch: int) -> list[int]:
    """Documents sorted by a hash: the same in every version of Python and every library, unlike a generator's."""
    prefix = hashlib.blake2b(f"{seed}/{epoch}".encode(), digest_size=16).digest()

    def rank(document: int, copy: int) -> bytes:
        more = copy.to_bytes(4, "little") if copy else b""
        return hashlib.blake2b(prefix + document.to_bytes(8, "little") + more, digest_size=8).digest()

    places = [(rank(d, copy), d) for d, weight in enumerate(weights) for copy in range(_times(d, weight, seed, epoch))]
    return [document for _, document in sorted(places)]


def _times(document: int, weight: float, seed: int, epoch: int) -> int:
    """How often a document comes in an epoch. A fraction comes by its turn, not by chance: of two documents in a
    row with weight 0.5 one comes in every epoch, and each in every second one."""
    if weight == int(weight):
        return int(weight)
    start = (document + epoch + seed) * (weight % 1)
    return int(weight) + (math.floor(start + weight % 1) > math.floor(start))


def _pack(documents: list[int], lengths: Sequence[int], bin_tokens: int) -> list[list[int]]:
    """Best-fit decreasing. Bins come in the order of their longest document in ``documents``, which is random;
    ordering them by length would make an epoch start with the long ones."""
    ranks = range(len(documents))
    bins: list[list[int]] = []
    room: list[tuple[int, int]] = []  # (free tokens, bin), ascending
    for rank in sorted(ranks, key=lambda r: (-lengths[documents[r]], r)):
        length = lengths[documents[rank]]
        fit = bisect_left(room, (length, 0))
        if fit < len(room):
            free, chosen = room.pop(fit)
            bins[chosen].append(rank)
        else:
            free, chosen = max(bin_tokens, length), len(bins)
            bins.append([rank])
        if free > length:
            insort(room, (free - length, chosen))
    bins.sort(key=lambda members: members[0])
    return [[documents[rank] for rank in sorted(members)] for members in bins]


class StepPlan:
    """The bins of every optimizer step: ``bins_per_step`` at a time from the endless row of epochs.

    With ``epochs`` (whole or not) the last step may have fewer bins; with ``steps``, which goes before
    ``epochs``, every step is full. Raises EyasError when there is nothing to train on.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        *,
        seed: int,
        bin_tokens: int,
        bins_per_step: int = 1,
        epochs: float | None = None,
        steps: int | None = None,
        weights: Sequence[float] | None = None,
    ) -> None:
        if not lengths:
            raise EyasError("data.path: no document to train on")
        if bins_per_step < 1:
            raise EyasError(f"train.bins_per_step={bins_per_step}: must be at least 1")
        self.lengths, self.seed = list(lengths), seed
        self.weights = None if weights is None or set(weights) == {1.0} else list(weights)
        self.bin_tokens, self.bins_per_step = bin_tokens, bins_per_step
        self._first = [0]  # number of the first bin of each epoch planned so far
        self._cached: dict[int, list[list[int]]] = {}
        self.total_bins = self._total(epochs, steps)
        if not self.total_bins:
            raise EyasError("data.path: the weights are so small that an epoch holds no document")
        self.total_steps = math.ceil(self.total_bins / bins_per_step)

    def bins(self, step: int) -> list[list[int]]:
        """The bins of a step (0-based), over all processes. Raises IndexError beyond the last step."""
        if not 0 <= step < self.total_steps:
            raise IndexError(f"step {step} of {self.total_steps}")
        first = step * self.bins_per_step
        return [self._bin(number) for number in range(first, min(first + self.bins_per_step, self.total_bins))]

    def epoch(self, step: int) -> float:
        """Epochs seen before this step, e.g. 1.25 a quarter into the second one."""
        number = min(step * self.bins_per_step, self.total_bins)
        epoch = self._epoch_of(number)
        return epoch + (number - self._first[epoch]) / len(self._planned(epoch))

    def _total(self, epochs: float | None, steps: int | None) -> int:
        if steps is not None:
            if steps < 1:
                raise EyasError(f"train.steps={steps}: must be at least 1")
            return steps * self.bins_per_step
        if epochs is None or not 0 < epochs < math.inf:
            raise EyasError(f"train.epochs={epochs}: must be above 0 (or set train.steps)")
        whole = math.floor(epochs)
        while len(self._first) <= whole:
            self._planned(len(self._first) - 1)
        if epochs == whole:
            return self._first[whole]
        return self._first[whole] + math.ceil(round((epochs - whole) * len(self._planned(whole)), 6))

    def _bin(self, number: int) -> list[int]:
        epoch = self._epoch_of(number)
        return self._planned(epoch)[number - self._first[epoch]]

    def _epoch_of(self, number: int) -> int:
        while self._first[-1] <= number:
            self._planned(len(self._first) - 1)
        return bisect_left(self._first, number + 1) - 1

    def _planned(self, epoch: int) -> list[list[int]]:
        if epoch not in self._cached:
            bins = plan_epoch(
                self.lengths, seed=self.seed, epoch=epoch, bin_tokens=self.bin_tokens, weights=self.weights
            )
            while len(self._cached) >= 2:  # a step rarely spans more than two epochs
                del self._cached[next(iter(self._cached))]
            self._cached[epoch] = bins
        if epoch == len(self._first) - 1:
            self._first.append(self._first[-1] + len(self._cached[epoch]))
        return self._cached[epoch]
