"""Medusa as vLLM (up to 0.32.0) computes it; FasterDecoding's folders alike, whose tensors vLLM renames."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from models.frozen import FrozenTarget


class MedusaEngine:
    """See scripts/engines/__init__.py. A folder without any head ("version 2") uses the target's."""

    def __init__(self, folder: Path, frozen: FrozenTarget) -> None:
        self.config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        (path,) = folder.glob("*.safetensors")
        self.tensors = {_name(n): t.float() if t.is_floating_point() else t for n, t in load_file(path).items()}
        self.frozen = frozen
        self.map: Tensor | None = self.tensors.get("token_map")

    @property
    def draft_ids(self) -> Tensor:
        return torch.arange(self.frozen.vocab_size) if self.map is None else self.map

    def draft_logits(self, next_ids: Tensor, taps: Tensor, final: Tensor, drafted: Tensor) -> Tensor:
        """Every head reads the last true state, whatever has been drafted since."""
        outputs = [self._logits(h, self._blocks(h, final[-1].float())) for h in range(1 + len(drafted))]
        return torch.stack(outputs)

    def _blocks(self, head: int, x: Tensor) -> Tensor:
        layers = self.config.get("num_hidden_layers", self.config.get("medusa_num_layers"))
        for n in range(layers):
            name = f"blocks.{head}.layers.{n}"
            z = self.tensors[f"{name}.weight"] @ x
            if self.config.get("medusa_fc_bias"):
                z = z + self.tensors[f"{name}.bias"]
            x = x + z * torch.sigmoid(z)
        return x

    def _logits(self, head: int, x: Tensor) -> Tensor:
        """Logits of the draft tokens. vLLM takes the largest of all rows: it must be one of theirs."""
        if (shared := self.tensors.get("lm_head.weight")) is not None:
            return self.config.get("logit_scale", 1.0) * (shared @ x)
        own = self.tensors.get(f"lm_heads.{head}.weight")
        if own is None:
            whole = self.frozen.head.float() @ x
            return whole * self.frozen.scale if self.frozen.head_bias is None else whole + self.frozen.head_bias
        logits = own @ x
        if self.map is None:
            return logits
        if int(logits.argmax()) not in self.map.tolist():
            raise ValueError(f"head {head} would draft token {int(logits.argmax())}, which is not in its vocabulary")
        return logits[self.map]


def _name(name: str) -> str:
    """{h}.{l}.linear.* -> blocks.{h}.layers.{l}.*, {h}.{n}.weight -> lm_heads.{h}.weight."""
    parts = name.split(".")
    if not parts[0].isdigit():
        return name
    return f"blocks.{parts[0]}.layers.{parts[1]}.{parts[3]}" if parts[2] == "linear" else f"lm_heads.{parts[0]}.weight"
