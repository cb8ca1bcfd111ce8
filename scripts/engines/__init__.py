"""What a serving engine computes from an exported folder, in plain torch: an export is proven against this.

Nothing here is shared with the drafters of models/: an engine reads config.json and the tensors as vLLM does and runs
its steps (prefill of the true features, then one drafted token at a time) with dense attention. One file a method.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Protocol

from torch import Tensor

from models.frozen import FrozenTarget
from models.portable import method_of

ENGINES = {
    "eagle1": "scripts.engines.eagle1.Eagle1Engine",
    "eagle3": "scripts.engines.eagle3.Eagle3Engine",
    "medusa": "scripts.engines.medusa.MedusaEngine",
    "mtp": "scripts.engines.mtp.MtpEngine",
}


class Engine(Protocol):
    """Made as ``XEngine(folder, frozen)``: the exported folder and the target's tensors that engines share with it."""

    @property
    def draft_ids(self) -> Tensor:
        """The target's id of each draft token, [Vd] int64."""
        ...

    def draft_logits(self, next_ids: Tensor, taps: Tensor, final: Tensor, drafted: Tensor) -> Tensor:
        """Logits [1 + len(drafted), Vd]: after the prefill of slots 0..n-1, and after each drafted token.

        next_ids [n] the token behind each slot; taps [n, A*H] its tapped target states and final [n, H] the one after
        the final norm.
        """
        ...


def engine_for(folder: Path, frozen: FrozenTarget) -> Engine:
    """The engine of the method that the folder holds, on the CPU in float32."""
    module, _, name = ENGINES[method_of(folder).name].rpartition(".")
    engine: Engine = getattr(importlib.import_module(module), name)(folder, frozen)
    return engine
