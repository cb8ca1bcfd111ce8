"""The contract every drafter method fulfils: what trainer, verifier and exporter may call.

A method is one file in models/ (a subclass of :class:`Drafter`) and one YAML in conf/drafter/. Trainer and verifier
never name a method; what engines make of each is told in scripts/ (engines/, starting.py), by its name.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol, Self

import torch
from torch import Tensor, nn

from models.batch import Batch, Slots, slots_of
from models.errors import EyasError
from models.frozen import FrozenTarget
from models.heads import DraftHead
from models.objective import Objective, Score
from models.recognise import title_of
from models.recompute import Run, again, plainly
from models.vocab import DraftVocab
from models.weight_files import fill_module


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
    # Joint training: weights of the sums of the target's own term and of the drafter's (0 and 1: the target is frozen).
    lm_weight: float = 0.0
    draft_weight: float = 1.0
    recompute: bool = False  # make activations again in the backward pass

    @property
    def run(self) -> Run:
        """How a forward calls its parts."""
        return again if self.recompute and torch.is_grad_enabled() else plainly


@dataclass(frozen=True)
class Serving:
    """A drafter in one serving layout: tensors by the names that engines read, config.json (its dtype apart, which the
    writer of the folder adds), and the name of the weight file."""

    tensors: dict[str, Tensor]
    config: dict[str, Any]
    weights: str = "model.safetensors"


class NotServed(EyasError):
    """No engine can draft with it: it can be trained and measured, and not exported."""


class Drafter(nn.Module, ABC):
    """A trainable drafter. Frozen target tensors are never its parameters or buffers: they are arguments."""

    layouts: ClassVar[tuple[str, ...]] = ()  # the serving layouts it can be written in, the default first
    recursive: ClassVar[bool] = False  # repeats what one depth was trained for (EAGLE-1): it may draft deeper than that
    depths_option: ClassVar[str] = ""  # the option that counts its parts, where each makes one level: num_heads
    carried_by_target: ClassVar[bool] = False  # a target's own checkpoint can hold it, and engines look for it there
    config_class: ClassVar[type[Any]]  # the dataclass of ``config``
    config: Any  # all that rebuilds the module, vocabulary apart; its width is ``hidden_size``
    vocab: DraftVocab
    tap_ids: tuple[int, ...]

    @classmethod
    @abstractmethod
    def create(cls, frozen: FrozenTarget, vocab: DraftVocab, tap_ids: tuple[int, ...], **options: Any) -> Drafter:
        """A fresh drafter for this target, initialised from it as ``options`` say (conf/drafter/*.yaml)."""

    @classmethod
    def check_options(cls, options: Mapping[str, Any]) -> None:
        """Raise EyasError for options of :meth:`create` that are impossible or contradict each other, before any
        work. What is named num_*, *_size or *_dim counts something, *_temper is a factor."""
        for key, value in options.items():
            if isinstance(value, int) and value < 1 and (key.startswith("num_") or key.endswith(("_size", "_dim"))):
                raise EyasError(f"drafter.{key}={value}: must be at least 1")
            if key.endswith("_temper") and value <= 0:
                raise EyasError(f"drafter.{key}={value}: must be above 0")

    @classmethod
    def levels(cls, options: Mapping[str, Any]) -> int | None:
        """:attr:`max_depth` of what :meth:`create` makes of these options: mistakes are told before any work."""
        return options.get(cls.depths_option)

    @abstractmethod
    def unroll(self, batch: Batch, slots: Slots, frozen: FrozenTarget, run: Run = plainly) -> Tensor:
        """States [R, H] of every counted (depth, slot), in the order of ``slots.rows()``, ready for the head.

        ``run`` calls its parts, of which each makes one depth (models/recompute.py)."""

    @abstractmethod
    def head(self, frozen: FrozenTarget) -> DraftHead:
        """The draft head that scores the states of :meth:`unroll`."""

    def extra_terms(self, states: Tensor, slots: Slots, batch: Batch) -> Tensor | None:
        """What the method adds to the objective: for every row of ``slots.rows()`` a number [R], differentiable, to be
        weighted by depth and summed. None: nothing."""
        return None

    @property
    def logit_weight(self) -> float:
        """Weight of the objective beside :meth:`extra_terms`."""
        return 1.0

    @abstractmethod
    def session(self, frozen: FrozenTarget, slots: int = 1) -> DraftSession:
        """A fresh incremental drafting session for so many sequences at a time."""

    @property
    def target_hidden_size(self) -> int:
        """Width of the target's states that it reads."""
        return int(self.config.hidden_size)

    @property
    def max_depth(self) -> int | None:
        """Levels that a draft can have; None: any number."""
        return getattr(self.config, self.depths_option) if self.depths_option else None

    def check_depths(self, depths: int) -> None:
        """Raise EyasError for more levels than a draft can have."""
        if self.max_depth is not None and depths > self.max_depth:
            parts = self.depths_option.removeprefix("num_")
            raise EyasError(
                f"{depths} levels of drafts: this {title_of(type(self))} drafter has {self.max_depth} {parts}, one for "
                f"each level (drafter.{self.depths_option}, train.depths, verify.gamma)"
            )

    @property
    def max_positions(self) -> int | None:
        """Length of text that the drafter's positions were made for; None: any."""
        return None

    def take_over(self, options: Mapping[str, Any]) -> None:
        """Go on training with those of these options that say how to train, not what the drafter is."""
        return

    def architecture(self) -> dict[str, Any]:
        """JSON-able options that rebuild this module with :meth:`from_architecture` (vocabulary apart)."""
        return asdict(self.config)

    @classmethod
    def from_architecture(cls, architecture: dict[str, Any], vocab: DraftVocab) -> Self:
        """An uninitialised module of that architecture, to be filled from a state dict."""
        return cls(cls.config_class(**architecture), vocab)

    @classmethod
    def filled(cls, architecture: dict[str, Any], vocab: DraftVocab, weights: Mapping[str, Tensor]) -> Self:
        """The module of that architecture with this state dict. Raises EyasError as :meth:`from_serving` does."""
        drafter = cls.from_architecture(architecture, vocab)
        fill_module(drafter, weights)
        return drafter

    @abstractmethod
    def serving(self, frozen: FrozenTarget, layout: str | None = None) -> Serving:
        """Tensors and config.json of a serving layout, one of :attr:`layouts`; None: the one that suits best.

        A config may carry a note ``eyas`` for reading it back, which engines ignore; :func:`models.portable.serve` adds
        method and layout to it.
        """

    @classmethod
    def from_serving(
        cls, tensors: dict[str, Tensor], config: dict[str, Any], target: Mapping[str, Any] | None = None
    ) -> Self:
        """The inverse of :meth:`serving` for all its layouts, in float32, and for the checkpoints of other trainers of
        the method. ``target``: the target's text config, for what ``config`` leaves open.

        Raises EyasError that names the tensor which is missing, unexpected or misshapen.
        """
        raise EyasError(f"{cls.__name__}: can't be read back from a serving folder; use a checkpoint of the run")

    @classmethod
    def from_target(cls, folder: Path) -> Self | None:
        """The drafter that a target's own folder carries; None if it is no target's, or carries none."""
        return None

    @classmethod
    def check_layout(cls, layout: str | None) -> str:
        """The serving layout of that name, None: the first. Raises EyasError for one that it can't be written in, and
        NotServed if there is none."""
        if not cls.layouts:
            raise NotServed(f"{title_of(cls)} has no serving layout: no engine drafts with it")
        if layout is not None and layout not in cls.layouts:
            raise EyasError(f"export.layout={layout}: {title_of(cls)} is written as {' or '.join(cls.layouts)}")
        return layout or cls.layouts[0]

    def forward(self, batch: Batch, frozen: FrozenTarget, spec: TrainSpec) -> Score:
        """Unroll and score a batch: the call that DDP and DeepSpeed wrap."""
        slots = slots_of(batch, spec.depths).thinned(spec.objective.depth_keep, spec.seed)
        states = self.unroll(batch, slots, frozen, spec.run)
        teacher, objective = frozen.teacher(batch, self.vocab), spec.objective
        score = objective(states, self.head(frozen), slots, teacher, per_slot=spec.per_slot)
        score.loss_sum = self.logit_weight * score.loss_sum
        if (terms := self.extra_terms(states, slots, batch)) is not None:
            depth = slots.rows()[0]
            added = (terms.float() * objective.fixed_weights(depth)).sum()
            score.loss_sum = score.loss_sum + added
            sums = terms.new_zeros(slots.depths, dtype=torch.float64)
            score.extra = sums.index_add_(0, depth, terms.detach().double())
        return score

    def read_whole(self) -> list[nn.Parameter]:
        """Parameters that a forward reads outside the layers that own them: where layers get their weights only while
        they run (DeepSpeed's ZeRO-3), these must be there during all of a forward and all of its backward. A drafter is
        small, and runs its layers many times."""
        return list(self.parameters())

    def trainable_parameters(self) -> int:
        return sum(p.numel() for p in self.parameters() if p.requires_grad)

    @property
    def dtype(self) -> torch.dtype:
        return next(self.parameters()).dtype
