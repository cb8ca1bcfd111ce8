"""Every drafter method, for the tests that each must pass (tests/test_methods*.py).

A builder makes a drafter for any target and draft vocabulary, with every weight random
(:func:`tests.drafters.randomise`), so that no path is hidden by a neutral value. One entry a line, alphabetical.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal
from unittest.mock import patch

from models.drafter import Drafter
from models.eagle1 import Eagle1Drafter
from models.eagle3 import Eagle3Drafter
from models.frozen import FrozenTarget
from models.medusa import MedusaDrafter
from models.mtp import MtpDrafter
from models.parallel_heads import ParallelHeadsDrafter
from models.taps import default_taps
from models.vocab import DraftVocab
from tests.drafters import randomise


def taps(frozen: FrozenTarget) -> tuple[int, ...]:
    """Three taps, or as many as the target has."""
    return default_taps(frozen.config["num_hidden_layers"])


def start(frozen: FrozenTarget) -> Literal["last_layer", "random"]:
    return "last_layer" if frozen.last_layer else "random"


METHODS: dict[str, Callable[[FrozenTarget, DraftVocab], Drafter]] = {
    "eagle1": lambda f, v: randomise(Eagle1Drafter.create(f, v, taps(f))),
    "eagle3": lambda frozen, vocab: randomise(Eagle3Drafter.create(frozen, vocab, taps(frozen))),
    "eagle3_1": lambda f, v: randomise(Eagle3Drafter.create(f, v, taps(f), fc_norm=True, norm_output=True)),
    "hass": lambda f, v: randomise(Eagle1Drafter.create(f, v, taps(f), detach=True)),
    "medusa": lambda f, v: randomise(MedusaDrafter.create(f, v, taps(f), num_layers=2)),
    "medusa_shared": lambda f, v: randomise(MedusaDrafter.create(f, v, taps(f), head="shared")),
    "mtp": lambda f, v: randomise(MtpDrafter.create(f, v, taps(f), init=start(f), zero_first=False)),
    "mtp_parallel": lambda f, v: randomise(ParallelHeadsDrafter.create(f, v, taps(f), init=start(f))),
    "mtp_sequential": lambda f, v: randomise(MtpDrafter.create(f, v, taps(f), num_modules=3, init=start(f))),
}

# What a state may hang on, where that is less than the index rule allows.
NO_TOKENS: frozenset[str] = frozenset({"medusa", "medusa_shared", "mtp_parallel"})  # on features alone
NO_ATTENTION: frozenset[str] = frozenset({"medusa", "medusa_shared"})  # on its own slot alone
ZERO_FIRST: frozenset[str] = frozenset({"mtp_sequential"})  # the first slot of a text reads zeros for tokens


def fresh(name: str, frozen: FrozenTarget, vocab: DraftVocab) -> Drafter:
    """The drafter as training begins with it: initialised from the target, not random throughout."""
    with patch("tests.methods.randomise", lambda drafter: drafter):
        return METHODS[name](frozen, vocab)


def depths_of(drafter: Drafter, most: int) -> int:
    """So many depths, or as many as the method has."""
    return min(most, drafter.max_depth or most)
