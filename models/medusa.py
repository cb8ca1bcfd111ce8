"""Medusa (arXiv 2401.10774): K independent heads on the target's last state, head k for the token k+2 places ahead.

Head k of slot p reads h[p] alone, after the final norm: ``num_layers`` residual blocks x + SiLU(W x + b), then a linear
layer of its own or the target's. It reads no drafted token, so all nodes of one depth get the same logits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.batch import Batch, Slots
from models.drafter import Drafter, Serving
from models.errors import EyasError
from models.frozen import FrozenTarget
from models.heads import DraftHead, SessionHead
from models.medusa_serving import medusa_serving, read_medusa
from models.recompute import Run, plainly
from models.vocab import DraftVocab


@dataclass(frozen=True)
class MedusaConfig:
    """Dimensions; everything that rebuilds the module, vocabulary apart."""

    hidden_size: int
    num_heads: int
    num_layers: int
    head: str  # own: a linear layer for each head, shared: the target's

    def __post_init__(self) -> None:
        if self.head not in ("own", "shared"):
            raise EyasError(f"drafter.head={self.head}: must be own or shared")


class ResidualBlocks(nn.Module):
    """x + SiLU(W x + b), several times; every layer is a module of its own."""

    def __init__(self, hidden_size: int, num_layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(hidden_size, hidden_size) for _ in range(num_layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + F.silu(layer(x))
        return x


class MedusaDrafter(Drafter):
    """See the module docstring; built by :meth:`create` or :meth:`from_architecture`.

    blocks: the residual blocks of each head. lm_heads [K, Vd, H]: their own linear layers, as one parameter, because
    the objective scores all depths at once; absent with the target's head.
    """

    layouts = ("vllm", "fasterdecoding")
    depths_option = "num_heads"
    config_class = MedusaConfig
    config: MedusaConfig
    tap_ids: tuple[int, ...] = ()  # it reads no taps, whatever the run stores

    def __init__(self, config: MedusaConfig, vocab: DraftVocab) -> None:
        super().__init__()
        self.config, self.vocab = config, vocab
        hidden, heads = config.hidden_size, config.num_heads
        self.blocks = nn.ModuleList(ResidualBlocks(hidden, config.num_layers) for _ in range(heads))
        if config.head == "own":
            self.lm_heads = nn.Parameter(torch.zeros(heads, len(vocab), hidden))

    # --- construction ---

    @classmethod
    def create(  # type: ignore[override]
        cls,
        frozen: FrozenTarget,
        vocab: DraftVocab,
        tap_ids: tuple[int, ...],
        *,
        num_heads: int = 4,
        num_layers: int = 1,
        head: Literal["own", "shared"] = "own",
        init_temper: float = 1.0,
    ) -> MedusaDrafter:
        """Every head begins as the target's own head on h[p], exactly: weights and biases of the blocks are zero (the
        original leaves the biases random, which only blurs that start), own linear layers the target's rows.

        head: own (better, and K linear layers to train and serve) | shared (the target's, frozen). init_temper scales
        own layers: below 1, less of the confidence in x[p+1], which no head is to predict, has to be unlearned.
        """
        config = MedusaConfig(frozen.hidden_size, num_heads, num_layers, head)
        drafter = cls(config, vocab)
        with torch.no_grad():
            for parameter in drafter.blocks.parameters():
                parameter.zero_()
            if head == "own":
                drafter.lm_heads.copy_(frozen.head[vocab.ids.to(frozen.head.device)] * (frozen.scale * init_temper))
        return drafter

    # --- training ---

    def unroll(self, batch: Batch, slots: Slots, frozen: FrozenTarget, run: Run = plainly) -> Tensor:
        self.check_depths(slots.depths)
        final = batch.final[slots.index].to(self.dtype)
        kept = (final[valid] for valid in slots.valid)  # an empty depth runs too: every head takes part in DDP's sums
        return torch.cat([run(block, x) for block, x in zip(self.blocks, kept, strict=False)])

    def head(self, frozen: FrozenTarget) -> DraftHead:
        return DraftHead(self.lm_heads) if self.config.head == "own" else frozen.draft_head(self.vocab)

    # --- drafting and serving ---

    def session(self, frozen: FrozenTarget, slots: int = 1) -> MedusaSession:
        return MedusaSession(self, frozen, slots)

    def serving(self, frozen: FrozenTarget, layout: str | None = None) -> Serving:
        """See models/medusa_serving.py; ``layout``: vllm | fasterdecoding."""
        weights = {name: tensor.detach() for name, tensor in self.state_dict().items()}
        return medusa_serving(weights, self.architecture(), self.vocab, frozen, self.check_layout(layout))

    @classmethod
    def from_serving(
        cls, tensors: dict[str, Tensor], config: dict[str, Any], target: Mapping[str, Any] | None = None
    ) -> Self:
        return cls.filled(*read_medusa(tensors, config, target))


class MedusaSession:
    """Incremental drafting (see models/drafter.py): all it keeps of a sequence is the state of its last position."""

    def __init__(self, drafter: MedusaDrafter, frozen: FrozenTarget, slots: int = 1) -> None:
        self.drafter, self.head = drafter, SessionHead(drafter.head(frozen), drafter.dtype)
        like = next(drafter.blocks.parameters())
        self.states = like.new_zeros(slots, drafter.config.hidden_size)

    def reset(self, slot: int, first_token: int) -> None:
        self.states[slot] = 0.0

    def move(self, source: int, to: int) -> None:
        self.states[to] = self.states[source]

    @torch.no_grad()
    def extend(
        self, slots: Sequence[int], counts: Sequence[int], taps: Tensor, final: Tensor, next_ids: Tensor
    ) -> Tensor:
        last = torch.tensor(counts).cumsum(0) - 1
        self.states[list(slots)] = final[last.to(final.device)].to(self.states)
        return self._logits(list(slots), 0)

    @torch.no_grad()
    def expand(self, slots: Sequence[int], parents: Tensor, tokens: Tensor, depth: int) -> Tensor:
        self.drafter.check_depths(depth + 1)
        used = sorted(set(slots))
        logits = self._logits(used, depth)
        if len(used) == len(slots):
            return logits
        row = {slot: i for i, slot in enumerate(used)}
        return logits[torch.tensor([row[slot] for slot in slots], device=logits.device)]

    def _logits(self, slots: list[int], depth: int) -> Tensor:
        """Logits [len(slots), Vd] of head ``depth``."""
        return self.head(self.drafter.blocks[depth](self.states[slots]), depth)
