"""Exports of tiny random drafters, and a way to spoil them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from models.eagle3 import Eagle3Drafter
from models.frozen import FrozenTarget
from models.vocab import DraftVocab
from scripts.card import About
from scripts.export import export
from tests.drafters import TAPS, random_frozen, random_vocab

Spoil = Callable[[dict[str, Tensor], dict[str, Any]], Any]


def make(
    draft: int = 12, taps: tuple[int, ...] = TAPS, frozen: FrozenTarget | None = None, **flags: Any
) -> tuple[Eagle3Drafter, FrozenTarget]:
    """A random drafter in which every weight matters (norms included), and its target."""
    frozen = frozen or random_frozen()
    vocab = random_vocab(frozen.vocab_size, draft) if draft < frozen.vocab_size else DraftVocab.full(draft)
    drafter = Eagle3Drafter.create(frozen, vocab, taps, init_head=False, init_fc=False, **flags)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in drafter.parameters():
            if parameter.ndim == 1:
                parameter.copy_(torch.rand(parameter.shape, generator=generator) + 0.5)
    return drafter, frozen


def exported(folder: Path, dtype: str = "float32", **options: Any) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Export such a drafter; what the two files hold."""
    drafter, frozen = make(**options)
    export(drafter, frozen, folder, About("acme/target"), dtype=dtype)
    return load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text())


def rewrite(folder: Path, spoil: Spoil) -> None:
    """Let ``spoil`` change an export's tensors and config in place."""
    tensors, config = load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text())
    tensors = {name: tensor.clone() for name, tensor in tensors.items()}
    spoil(tensors, config)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
