"""The device that a configuration's ``device`` key stands for, and its memory."""

from __future__ import annotations

import gc

import torch

from models.errors import EyasError


def pick_device(device: str) -> str:
    """The device type, cpu or cuda, that ``device`` stands for; auto is CUDA where there is one."""
    if device not in ("auto", "cpu", "cuda"):
        raise EyasError(f"device={device}: must be auto, cpu or cuda")
    if device == "cuda" and not torch.cuda.is_available():
        raise EyasError("device=cuda: this PyTorch sees no CUDA device; use device=cpu or device=auto")
    return ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device


def free_memory() -> None:
    """Give back what nobody refers to any more: models refer to themselves, and CUDA's allocator keeps what it had."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
