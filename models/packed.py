"""Faster linear layers on a CPU: frozen float32 weights in the layout that oneDNN multiplies by.

PyTorch's own float32 product reads a weight as it lies in memory. For the few rows of a decoding step that is slow, and
much slower for two to eight rows than for one, so that verifying drafts would look dear. With the weight laid out once
for oneDNN a step takes a third to a half of the time, and eight rows little more than one. Costs a second copy of the
weights; results differ from PyTorch's by rounding.
"""

from __future__ import annotations

import logging
from typing import Any

import psutil
import torch
from torch import Tensor, nn

log = logging.getLogger(__name__)


class PackedLinear(nn.Linear):
    """A linear layer whose weight is laid out for oneDNN at the first use, and again whenever it has changed."""

    packed: Tensor | None = None
    version = -1

    def forward(self, input: Tensor) -> Tensor:
        learns = torch.is_grad_enabled() and (input.requires_grad or self.weight.requires_grad)
        if learns or input.dtype != torch.float32 or input.device.type != "cpu" or torch.is_autocast_enabled("cpu"):
            return super().forward(input)
        version = 0 if self.weight.is_inference() else self.weight._version
        if self.packed is None or version != self.version:
            self.packed, self.version = torch.ops.mkldnn._reorder_linear_weight(self.weight.detach(), None), version
        out: Tensor = torch.ops.mkldnn._linear_pointwise(input, self.packed, self.bias, "none", [], "")
        return out

    def __getstate__(self) -> dict[str, Any]:
        """For copies: the layout can't be copied, and is made again."""
        return self.__dict__ | {"packed": None, "version": -1}


def pack_linears(module: nn.Module) -> bool:
    """Let the linear layers of ``module`` compute so, in place; whether they will.

    Only for float32 on a CPU, where PyTorch has oneDNN, and where both copies fit into half of the machine's memory
    (not of what is free just now: a run that goes on must compute as it began).
    """
    linears = [layer for layer in module.modules() if type(layer) is nn.Linear]
    fitting = all(layer.weight.dtype == torch.float32 and layer.weight.device.type == "cpu" for layer in linears)
    if not linears or not fitting or not available():
        return False
    needed = 2 * 4 * sum(layer.weight.numel() for layer in linears)
    if needed > psutil.virtual_memory().total / 2:
        log.info("weights are not laid out anew for oneDNN: twice would be %.1f GiB", needed / 2**30)
        return False
    for layer in linears:
        layer.__class__ = PackedLinear
    return True


def packed_linear(weight: Tensor) -> nn.Linear:
    """A linear layer of a frozen weight [out, in] that is nobody's parameter: the target's head, where it drafts."""
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    layer.weight = nn.Parameter(weight.detach(), requires_grad=False)
    pack_linears(layer)
    return layer


def unpack_linears(module: nn.Module) -> None:
    """Linear layers as they were: for weights that are trained, as fused optimizers leave the version alone."""
    for layer in module.modules():
        if type(layer) is PackedLinear:
            layer.packed, layer.version = None, -1
            layer.__class__ = nn.Linear  # type: ignore[assignment]


def lay_out_again(module: nn.Module) -> None:
    """After weights were changed behind autograd's back (``.data``), where no version tells."""
    for layer in module.modules():
        if isinstance(layer, PackedLinear):
            layer.packed, layer.version = None, -1


def available() -> bool:
    """Whether this PyTorch has the two operators (they belong to its compiler's CPU backend)."""
    return bool(
        torch.backends.mkldnn.is_available()
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
        and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
    )
