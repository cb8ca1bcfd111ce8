"""Drafters made of decoder layers of the target's own family, which read the target's last state and use its head.

Each of their :attr:`NativeDrafter.steps` is a block (models/native.py) and a norm behind it.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn

from models.draft_session import LayerSession, Rows
from models.drafter import Drafter
from models.frozen import FrozenTarget
from models.heads import DraftHead, SessionHead
from models.layers import RMSNorm
from models.native import Attend, NativeLayer
from models.vocab import DraftVocab


@dataclass(frozen=True)
class NativeConfig:
    """Everything that rebuilds the module, vocabulary apart. config: the target's text config."""

    config: dict[str, Any]

    @property
    def hidden_size(self) -> int:
        return int(self.config["hidden_size"])

    @property
    def norm_eps(self) -> float:
        return float(self.config.get("rms_norm_eps", 1e-6))


class NativeStep(nn.Module):
    """What every step has; its norm multiplies by its weight, those inside the block are the family's."""

    block: NativeLayer
    norm: RMSNorm


class NativeDrafter(Drafter):
    """A method says what its steps read, and how they are trained and drafted with."""

    config: NativeConfig
    tap_ids: tuple[int, ...] = ()  # it reads no taps, whatever the run stores

    def __init__(self, config: NativeConfig, vocab: DraftVocab) -> None:
        super().__init__()
        self.config, self.vocab = config, vocab

    @property
    @abstractmethod
    def steps(self) -> Sequence[NativeStep]:
        """The parts that make a level each, in the order of the depths."""

    @classmethod
    def seeded(cls, config: NativeConfig, vocab: DraftVocab, seed: int) -> Self:
        """A module whose weights the family's own initialisation draws from ``seed``."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return cls(config, vocab)

    def start_from_last_layer(self, frozen: FrozenTarget) -> None:
        """Every block is the target's last decoder layer, but writes nothing yet."""
        for step in self.steps:
            step.block.init_from(frozen.last_layer, "drafter.init=last_layer")
            step.block.pass_through()

    @torch.no_grad()
    def start_norms(self, frozen: FrozenTarget, temper: float) -> None:
        """Every norm is the target's final one, scaled."""
        if frozen.final_norm is not None:
            for step in self.steps:
                step.norm.weight.copy_(frozen.final_norm * temper)

    def head(self, frozen: FrozenTarget) -> DraftHead:
        return frozen.draft_head(self.vocab)

    @property
    def max_positions(self) -> int | None:
        return self.config.config.get("max_position_embeddings")


class NativeSession(LayerSession):
    """Incremental drafting with the first ``layers`` steps, each with keys and values of its own. The states of a place
    are those of all of them, side by side: [layers * H]."""

    def __init__(self, drafter: NativeDrafter, frozen: FrozenTarget, slots: int, layers: int) -> None:
        first, self.hidden = drafter.steps[0], drafter.config.hidden_size
        heads, width = first.block.kv_shape()
        super().__init__(first.norm.weight, slots, layers * self.hidden, heads, width, layers)
        self.frozen, self.head, self.dtype = frozen, SessionHead(drafter.head(frozen), drafter.dtype), drafter.dtype

    def feature(self, taps: Tensor, final: Tensor) -> Tensor:
        return final.to(self.dtype)

    def next_feature(self, states: Tensor) -> Tensor:
        return states


def cached(rows: Rows, layer: int = 0, skip: int = 0) -> Attend:
    """Attention to the stored keys and values of a layer, from place ``skip`` on, after storing those of the tokens."""

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        rows.write(key, value, layer)
        return rows.attend(query, layer, skip).to(query.dtype)

    return attend
