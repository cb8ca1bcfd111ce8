"""MTP: multi-token prediction modules (DeepSeek-V3, arXiv 2412.19437, section 2.2; FastMTP, arXiv 2509.18362).

A module reads a feature of slot p and the embedding of one more token: both are normed, joined and projected to the
width of the target, and pass a decoder layer of the target's own family and a norm. The target's head scores the
result, which is also the feature of the next depth. Depth 0 reads h[p] after the final norm.

One module is applied again and again, as EAGLE-3's layer is: slot p sees the depth-0 keys of slots <= p and its own
lineage, and can draft any number of levels. Of several, module k makes depth k and sees its own keys of slots <= p.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self, cast

import torch
from torch import Tensor, nn

from models.attention import Spans
from models.batch import Batch, Slots
from models.drafter import DraftSession, Serving
from models.errors import EyasError
from models.frozen import FrozenTarget
from models.layers import RMSNorm
from models.mtp_names import default_layout
from models.mtp_serving import carried_modules, carries_mtp, open_carried, read_mtp, write_mtp
from models.mtp_session import RecursiveSession, SequentialSession
from models.native import Attend, Causal, Kept, KeyValue, Lineage, NativeLayer
from models.native_drafter import NativeConfig, NativeDrafter, NativeStep
from models.recompute import Run, plainly
from models.vocab import DraftVocab
from models.weight_files import fill_module


@dataclass(frozen=True)
class MtpConfig(NativeConfig):
    """zero_first: the embedding at position 0 is read as zeros."""

    num_modules: int
    zero_first: bool = False


class MtpModule(NativeStep):
    def __init__(self, config: MtpConfig) -> None:
        super().__init__()
        hidden, eps = config.hidden_size, config.norm_eps
        self.zero_first = config.zero_first
        self.enorm, self.hnorm = RMSNorm(hidden, eps), RMSNorm(hidden, eps)
        self.proj = nn.Linear(2 * hidden, hidden, bias=False)  # columns of the embedding first
        self.block = NativeLayer(config.config)
        self.norm = RMSNorm(hidden, eps)

    def forward(self, embedding: Tensor, feature: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """embedding and feature [n, H] at positions [n] -> state [n, H], normed: for the head and the next depth."""
        if self.zero_first:
            embedding = embedding.masked_fill(positions[:, None] == 0, 0.0)
        x = self.proj(torch.cat([self.enorm(embedding), self.hnorm(feature)], -1))
        state: Tensor = self.norm(self.block(x, positions, attend))
        return state


class MtpDrafter(NativeDrafter):
    """See the module docstring; built by :meth:`create` or :meth:`from_architecture`."""

    layouts = ("deepseek", "mimo", "qwen3_next")
    depths_option = "num_modules"
    carried_by_target = True
    config_class = MtpConfig
    config: MtpConfig

    def __init__(self, config: MtpConfig, vocab: DraftVocab) -> None:
        super().__init__(config, vocab)
        self.mtp = nn.ModuleList(MtpModule(config) for _ in range(config.num_modules))

    @property
    def steps(self) -> list[MtpModule]:
        """The modules, in the order of the depths."""
        return cast("list[MtpModule]", list(self.mtp))

    # --- construction ---

    @classmethod
    def levels(cls, options: Mapping[str, Any]) -> int | None:
        return None if options.get("num_modules", 1) == 1 else super().levels(options)

    @classmethod
    def create(  # type: ignore[override]
        cls,
        frozen: FrozenTarget,
        vocab: DraftVocab,
        tap_ids: tuple[int, ...],
        *,
        num_modules: int = 1,
        init: Literal["last_layer", "random", "carried"] = "last_layer",
        init_temper: float = 0.3,
        zero_first: bool | None = None,
        seed: int = 0,
    ) -> MtpDrafter:
        """init: last_layer | random | carried (the MTP weights in the target's own folder). init_temper scales the norm
        that last_layer takes from the target, so that a fresh drafter isn't sure of itself. zero_first: the embedding
        at position 0 counts as zero (None: as engines have it for the family). What is not initialised from the target
        is random from ``seed``."""
        if zero_first is None:
            zero_first = default_layout(frozen.config.get("model_type", "")).zero_first
        drafter = cls.seeded(MtpConfig(frozen.config, num_modules, zero_first), vocab, seed)
        if init == "carried":
            drafter._carry(frozen)
        elif init == "last_layer":
            drafter._init_from(frozen, init_temper)
        return drafter

    @torch.no_grad()
    def _init_from(self, frozen: FrozenTarget, temper: float) -> None:
        """The block is the target's last decoder layer, but writes nothing yet: so the head begins with the feature and
        half as much of the embedding. On SmolLM2 (one run each) the mean alpha after 120 steps was .17, and .14 where
        the block wrote from the start what it does in the target."""
        hidden = self.config.hidden_size
        self.start_from_last_layer(frozen)
        self.start_norms(frozen, temper)
        for module in self.steps:
            module.proj.weight[:, :hidden] = 0.5 * torch.eye(hidden)
            module.proj.weight[:, hidden:] = torch.eye(hidden)

    def _carry(self, frozen: FrozenTarget) -> None:
        carried = None if frozen.folder is None else carried_modules(frozen.folder, frozen.config)
        if carried is None:
            raise EyasError(f"drafter.init=carried: the target {frozen.folder or ''} carries no MTP weights")
        own = tuple(f"mtp.{i}." for i in range(self.config.num_modules))
        found = {int(name.split(".")[1]) for name in carried}
        if len(found) < len(own):
            raise EyasError(f"drafter.num_modules={len(own)}: the target carries {len(found)} MTP modules")
        fill_module(self, {name: tensor for name, tensor in carried.items() if name.startswith(own)})

    # --- training ---

    def unroll(self, batch: Batch, slots: Slots, frozen: FrozenTarget, run: Run = plainly) -> Tensor:
        how = self._recursive if len(self.mtp) == 1 else self._sequential
        return how(batch, slots, frozen, run)

    def _ahead(self, batch: Batch, index: Tensor, depth: int, frozen: FrozenTarget) -> Tensor:
        """Embeddings of x[p+1+k] for the slots p of ``index``; behind the end of the batch, those of its last token."""
        token = batch.input_ids[(index + 1 + depth).clamp_max(batch.num_tokens - 1)]
        return frozen.embed(token).to(self.dtype)

    def _recursive(self, batch: Batch, slots: Slots, frozen: FrozenTarget, run: Run) -> Tensor:
        """Depth 0 runs for every token, whose keys are needed; deeper depths only where loss counts."""
        module, positions, index = self.steps[0], batch.positions, slots.index

        def step(k: int, tokens: Tensor, feature: Tensor, attend: Attend) -> tuple[Tensor, Tensor, Tensor]:
            """Depth k of the slots ``tokens``: their states, keys and values."""
            kept = Kept(attend)
            return module(self._ahead(batch, tokens, k, frozen), feature, positions[tokens] + k, kept), *kept.own

        every = torch.arange(batch.num_tokens, device=positions.device)
        feature, *first = run(step, 0, every, batch.final.to(self.dtype), Causal(batch.cu_seqlens))
        feature = feature[index]
        states, counts, own = [feature], slots.counts, list[KeyValue]()
        for k in range(1, slots.depths):
            if counts[k] < counts[k - 1]:
                still = slots.valid[k][slots.valid[k - 1]]
                index, feature, own = index[still], feature[still], [(key[still], value[still]) for key, value in own]
            attend = Lineage((first[0], first[1]), tuple(own), Spans.of(index, batch.cu_seqlens))
            feature, key, value = run(step, k, index, feature, attend)
            own.append((key, value))
            states.append(feature)
        return torch.cat(states)

    def _sequential(self, batch: Batch, slots: Slots, frozen: FrozenTarget, run: Run) -> Tensor:
        """Module k runs for every token: its keys are those of depth k. The last k + 1 slots of a document lack the
        token they'd read; no slot that counts sees them."""
        self.check_depths(slots.depths)
        attend, positions, feature = Causal(batch.cu_seqlens), batch.positions, batch.final.to(self.dtype)
        every = torch.arange(batch.num_tokens, device=positions.device)
        states = []
        for k, valid in enumerate(slots.valid):
            feature = run(self.steps[k], self._ahead(batch, every, k, frozen), feature, positions, attend)
            states.append(feature[slots.index[valid]])
        return torch.cat(states)

    # --- drafting and serving ---

    @property
    def max_depth(self) -> int | None:
        return None if len(self.mtp) == 1 else len(self.mtp)

    def session(self, frozen: FrozenTarget, slots: int = 1) -> DraftSession:
        return (RecursiveSession if len(self.mtp) == 1 else SequentialSession)(self, frozen, slots)

    def serving(self, frozen: FrozenTarget, layout: str | None = None) -> Serving:
        """See models/mtp_serving.py; ``layout`` None: that of the target's family."""
        weights = {name: tensor.detach() for name, tensor in self.state_dict().items()}
        return write_mtp(weights, self.architecture(), self.vocab, frozen.config, layout)

    @classmethod
    def from_serving(
        cls, tensors: dict[str, Tensor], config: dict[str, Any], target: Mapping[str, Any] | None = None
    ) -> Self:
        return cls.filled(*read_mtp(tensors, config, target))

    @classmethod
    def from_target(cls, folder: Path) -> Self | None:
        return cls.filled(*open_carried(folder)) if carries_mtp(folder) else None
