"""The contract every drafter method fulfils: what trainer, verifier and exporter may call.

A method is one file in models/ (a subclass of :class:`Drafter`) and one YAML in conf/drafter/. Nothing
outside models/ ever names a method.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from models.batch import Batch, Slots, slots_of
from models.errors import EyasError
from models.frozen import FrozenTarget
from models.objective import Objective, Score
from models.vocab import DraftVocab


class DraftSession(Protocol):
    """Incremental drafting for several sequences, on the same weights and the same index rule as ``unroll``.

    Every *slot* holds one sequence: its confirmed slots of the index rule (true features), and behind them a scratch
    tail of drafted nodes, numbered in the order of expansion.
    """

    def reset(self, slot: int, first_token: int) -> None:
        """Forget a sequence; ``first_token`` is x[0] of the one that begins."""
        ...

    def move(self, source: int, to: int) -> None:
        """Put a sequence into another slot, whose own is lost."""
        ...

    def extend(
        self, slots: Sequence[int], counts: Sequence[int], taps: Tensor, final: Tensor, next_ids: Tensor
    ) -> Tensor:
        """Confirm counts[i] more positions of the sequence in slots[i] (ascending), and drop its scratch tail.

        taps [N, A*H] and final [N, H] are the target's true states of positions p .. p+n-1 of each sequence,
        next_ids [N] the tokens x[p+1] .. x[p+n], the sequences back to back. Returns the depth-0 draft logits of
        each sequence's last position, [len(slots), Vd].
        """
        ...

    def expand(self, slots: Sequence[int], parents: Tensor, tokens: Tensor, depth: int) -> Tensor:
        """Draft one depth further: node i of the sequence in slots[i] (ascending) continues its node ``parents[i]``
        (-1 = the last confirmed position) with the drafted token ``tokens[i]``.

        All nodes of one call have the same depth: 1 in the first after ``extend``, then 2, ... Returns logits [n, Vd]
        for the token after each node.
        """
        ...


@dataclass(frozen=True)
class TrainSpec:
    """What a training forward needs besides the batch: the objective, K depths, and the seed of the slots
    that are kept at deeper depths (``Objective.depth_keep``)."""

    objective: Objective
    depths: int
    seed: int = 0
    per_slot: bool = False  # keep alpha and agreement of every slot (validation)


class Drafter(nn.Module, ABC):
    """A trainable drafter. Frozen target tensors are never its parameters or buffers: they are arguments."""

    vocab: DraftVocab
    tap_ids: tuple[int, ...]

    @classmethod
    @abstractmethod
    def create(cls, frozen: FrozenTarget, vocab: DraftVocab, tap_ids: tuple[int, ...], **options: Any) -> Drafter:
        """A fresh drafter for this target, initialised from it as ``options`` say (conf/drafter/*.yaml)."""

    @classmethod
    def check_options(cls, options: Mapping[str, Any]) -> None:
        """Raise EyasError for options of :meth:`create` that are impossible or contradict each other, before any
        work. What is named num_*, *_size or *_dim counts something."""
        for key, value in options.items():
            if isinstance(value, int) and value < 1 and (key.startswith("num_") or key.endswith(("_size", "_dim"))):
                raise EyasError(f"drafter.{key}={value}: must be at least 1")

    @abstractmethod
    def unroll(self, batch: Batch, slots: Slots, frozen: FrozenTarget) -> Tensor:
        """States [R, H] of every counted (depth, slot), in the order of ``slots.rows()``, ready for the head."""

    @abstractmethod
    def head_weight(self, frozen: FrozenTarget) -> Tensor:
        """The draft head's weight [Vd, H]."""

    @abstractmethod
    def session(self, frozen: FrozenTarget, slots: int = 1) -> DraftSession:
        """A fresh incremental drafting session for so many sequences at a time."""

    @property
    @abstractmethod
    def target_hidden_size(self) -> int:
        """Width of the target's states that it reads."""

    @property
    def max_depth(self) -> int | None:
        """Levels that a draft can have; None: any number."""
        return None

    @property
    def max_positions(self) -> int | None:
        """Length of text that the drafter's positions were made for; None: any."""
        return None

    @abstractmethod
    def architecture(self) -> dict[str, Any]:
        """JSON-able options that rebuild this module with :meth:`from_architecture` (vocabulary apart)."""

    @classmethod
    @abstractmethod
    def from_architecture(cls, architecture: dict[str, Any], vocab: DraftVocab) -> Drafter:
        """An uninitialised module of that architecture, to be filled from a state dict."""

    @abstractmethod
    def serving(self, frozen: FrozenTarget) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Tensors and config.json of the portable serving layout."""

    @classmethod
    def from_serving(
        cls, tensors: dict[str, Tensor], config: dict[str, Any], target_layers: int | None = None
    ) -> Drafter:
        """The inverse of :meth:`serving`, in float32; ``target_layers`` where the config leaves the taps open."""
        raise EyasError(f"{cls.__name__}: can't be read back from a serving folder; use a checkpoint of the run")

    def forward(self, batch: Batch, frozen: FrozenTarget, spec: TrainSpec) -> Score:
        """Unroll and score a batch: the call that DDP and DeepSpeed wrap."""
        slots = slots_of(batch, spec.depths).thinned(spec.objective.depth_keep, spec.seed)
        states = self.unroll(batch, slots, frozen)
        teacher = frozen.teacher(batch, self.vocab)
        return spec.objective(states, self.head_weight(frozen), slots, teacher, per_slot=spec.per_slot)

    def trainable_parameters(self) -> int:
        return sum(p.numel() for p in self.parameters() if p.requires_grad)

    @property
    def dtype(self) -> torch.dtype:
        return next(self.parameters()).dtype
