"""Which states of the target are tapped.

Tap ids are boundary ids: tap i is the state entering decoder layer i (HF ``hidden_states[i]``), 0 the embedding's
output; id L is the state leaving the last layer, before the final norm.
"""

from __future__ import annotations

from collections.abc import Sequence

from models.errors import EyasError


def default_taps(num_layers: int) -> tuple[int, ...]:
    """Boundary ids (2, L//2, L-3), the serving engines' default, for L >= 7.

    Shallower targets have no three distinct ids of that form. Then: (1, L//2, L-1) for L = 4..6, (0, 1, 2) for L = 2
    and 3, and the two ids there are, (0, 1), for L = 1.
    """
    if num_layers < 1:
        raise EyasError(f"target: {num_layers} decoder layers")
    if num_layers >= 7:
        return 2, num_layers // 2, num_layers - 3
    if num_layers >= 4:
        return 1, num_layers // 2, num_layers - 1
    return tuple(range(min(3, num_layers + 1)))


def check_taps(taps: Sequence[int], num_layers: int) -> tuple[int, ...]:
    """``taps`` as a tuple. Raises EyasError unless they are distinct ascending boundary ids 0..L (or none, for methods
    that read only the final state)."""
    ids = tuple(taps)
    whole = all(isinstance(i, int) and not isinstance(i, bool) for i in ids)
    if not whole or list(ids) != sorted(set(ids)) or any(not 0 <= i <= num_layers for i in ids):
        raise EyasError(
            f"target.taps={list(ids)}: give distinct ascending boundary ids within 0..{num_layers} "
            f"(i = the state entering layer i), for example {list(default_taps(num_layers))}"
        )
    return ids
