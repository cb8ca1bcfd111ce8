"""A random EAGLE-1 drafter for tests."""

from __future__ import annotations

from typing import Any

from models.eagle1 import Eagle1Drafter
from models.frozen import FrozenTarget
from models.vocab import DraftVocab
from tests.drafters import TAPS, random_frozen, randomise

FULL = DraftVocab.full(40)


def make(vocab: DraftVocab = FULL, frozen: FrozenTarget | None = None, **options: Any) -> Eagle1Drafter:
    """Random throughout, in eval mode."""
    return randomise(Eagle1Drafter.create(frozen or random_frozen(), vocab, TAPS, **options)).eval()
