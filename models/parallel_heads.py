"""Parallel multi-token prediction (Gloeckle et al. 2024, arXiv 2404.19737): head k for the token k+2 places ahead.

Every head is a decoder layer of the target's own family over the target's last states (after the final norm), causal in
each document, then a norm and the target's own head. Head k of slot p reads h[0] .. h[p] and no token, so all nodes of
one depth get the same logits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from models.batch import Batch, Slots
from models.draft_session import LayerSession, Rows
from models.drafter import Drafter, Serving
from models.errors import EyasError
from models.frozen import FrozenTarget
from models.heads import DraftHead, SessionHead
from models.layers import RMSNorm
from models.mtp_session import cached
from models.native import Attend, Causal, NativeLayer
from models.vocab import DraftVocab

INITS = ("last_layer", "random")


@dataclass(frozen=True)
class ParallelConfig:
    """Everything that rebuilds the module, vocabulary apart. config: the target's text config."""

    num_heads: int
    config: dict[str, Any]

    @property
    def hidden_size(self) -> int:
        return int(self.config["hidden_size"])


class ParallelHead(nn.Module):
    def __init__(self, config: ParallelConfig) -> None:
        super().__init__()
        self.block = NativeLayer(config.config)
        self.norm = RMSNorm(config.hidden_size, config.config.get("rms_norm_eps", 1e-6))

    def forward(self, final: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """final [n, H] at positions [n] -> states [n, H], ready for the head."""
        out: Tensor = self.norm(self.block(final, positions, attend))
        return out


class ParallelHeadsDrafter(Drafter):
    """See the module docstring; built by :meth:`create` or :meth:`from_architecture`. No engine serves it."""

    tap_ids: tuple[int, ...] = ()  # it reads no taps, whatever the run stores

    def __init__(self, config: ParallelConfig, vocab: DraftVocab) -> None:
        super().__init__()
        self.config, self.vocab = config, vocab
        self.heads = nn.ModuleList(ParallelHead(config) for _ in range(config.num_heads))

    @property
    def steps(self) -> list[ParallelHead]:
        """The heads, in the order of the depths."""
        return cast("list[ParallelHead]", list(self.heads))

    # --- construction ---

    @classmethod
    def check_options(cls, options: Mapping[str, Any]) -> None:
        super().check_options(options)
        if options.get("init", INITS[0]) not in INITS:
            raise EyasError(f"drafter.init={options['init']}: must be one of {', '.join(INITS)}")
        if float(options.get("init_temper", 1.0)) <= 0:
            raise EyasError(f"drafter.init_temper={options['init_temper']}: must be above 0")

    @classmethod
    def levels(cls, options: Mapping[str, Any]) -> int | None:
        return options.get("num_heads")

    @classmethod
    def create(  # type: ignore[override]
        cls,
        frozen: FrozenTarget,
        vocab: DraftVocab,
        tap_ids: tuple[int, ...],
        *,
        num_heads: int = 4,
        init: Literal["last_layer", "random"] = "last_layer",
        init_temper: float = 0.3,
        seed: int = 0,
    ) -> ParallelHeadsDrafter:
        """init: last_layer (every block is the target's last decoder layer, but writes nothing yet) | random.
        init_temper scales the norms, so that a fresh drafter isn't sure of itself. What is not initialised from the
        target is random from ``seed``."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            drafter = cls(ParallelConfig(num_heads, frozen.config), vocab)
        if init == "last_layer":
            for head in drafter.steps:
                head.block.init_from(frozen.last_layer, "drafter.init=last_layer")
                head.block.pass_through()
        if frozen.final_norm is not None:
            with torch.no_grad():
                for head in drafter.steps:
                    head.norm.weight.copy_(frozen.final_norm * init_temper)
        return drafter

    def architecture(self) -> dict[str, Any]:
        return asdict(self.config)

    @classmethod
    def from_architecture(cls, architecture: dict[str, Any], vocab: DraftVocab) -> ParallelHeadsDrafter:
        return cls(ParallelConfig(**architecture), vocab)

    # --- training ---

    def unroll(self, batch: Batch, slots: Slots, frozen: FrozenTarget) -> Tensor:
        self.check_depths(slots.depths)
        final, positions, attend = batch.final.to(self.dtype), batch.positions, Causal(batch.cu_seqlens)
        heads = zip(self.steps, slots.valid, strict=False)
        return torch.cat([head(final, positions, attend)[slots.index[valid]] for head, valid in heads])

    def head(self, frozen: FrozenTarget) -> DraftHead:
        return frozen.draft_head(self.vocab)

    def check_depths(self, depths: int) -> None:
        if depths > self.max_depth:
            raise EyasError(
                f"{depths} levels of drafts: this drafter has {self.max_depth} parallel heads, one for each level "
                "(drafter.num_heads, train.depths, verify.gamma)"
            )

    # --- drafting and serving ---

    @property
    def target_hidden_size(self) -> int:
        return self.config.hidden_size

    @property
    def max_depth(self) -> int:
        return self.config.num_heads

    @property
    def max_positions(self) -> int | None:
        return self.config.config.get("max_position_embeddings")

    def session(self, frozen: FrozenTarget, slots: int = 1) -> ParallelSession:
        return ParallelSession(self, frozen, slots)

    def serving(self, frozen: FrozenTarget, layout: str | None = None) -> Serving:
        raise EyasError("parallel MTP heads have no serving layout: no engine drafts with them (eval does)")


class ParallelSession(LayerSession):
    """Incremental drafting (see models/drafter.py): the heads run where positions are confirmed, and drafting only
    scores what they made of the last one. The states of a position are those of all heads, side by side: [K * H]."""

    def __init__(self, drafter: ParallelHeadsDrafter, frozen: FrozenTarget, slots: int = 1) -> None:
        self.hidden, first = drafter.config.hidden_size, drafter.steps[0]
        (heads, width), depths = first.block.kv_shape(), drafter.max_depth
        super().__init__(first.norm.weight, slots, depths * self.hidden, heads, width, depths)
        self.drafter, self.draft_head = drafter, SessionHead(drafter.head(frozen), drafter.dtype)

    def feature(self, taps: Tensor, final: Tensor) -> Tensor:
        return final.to(self.drafter.dtype)

    def next_feature(self, states: Tensor) -> Tensor:
        raise NotImplementedError("drafting runs no layer")

    def read(self, feature: Tensor, tokens: Tensor, rows: Rows) -> Tensor:
        heads = enumerate(self.drafter.steps)
        return torch.cat([head(feature, rows.positions, cached(rows, k))[rows.asked] for k, head in heads], -1)

    @torch.no_grad()
    def expand(self, slots: Sequence[int], parents: Tensor, tokens: Tensor, depth: int) -> Tensor:
        self.drafter.check_depths(depth + 1)
        return self.logits(self.states[list(slots), 0], depth)

    def logits(self, states: Tensor, depth: int = 0) -> Tensor:
        return self.draft_head(states[:, depth * self.hidden : (depth + 1) * self.hidden])
