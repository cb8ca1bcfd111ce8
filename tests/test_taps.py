"""Which boundary ids are tapped, and which are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from models.errors import EyasError
from models.taps import check_taps, default_taps
from models.target import Target
from tests.tiny import tiny_target


def test_default_taps() -> None:
    assert {n: default_taps(n) for n in (1, 2, 3, 4, 5, 6, 7, 8, 30, 32, 80)} == {
        1: (0, 1),
        2: (0, 1, 2),
        3: (0, 1, 2),
        4: (1, 2, 3),
        5: (1, 2, 4),
        6: (1, 3, 5),
        7: (2, 3, 4),
        8: (2, 4, 5),
        30: (2, 15, 27),
        32: (2, 16, 29),
        80: (2, 40, 77),
    }
    for layers in range(1, 130):
        taps = default_taps(layers)
        assert check_taps(taps, layers) == taps and len(taps) == min(3, layers + 1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_target(tmp_path_factory.mktemp("target"))


@pytest.mark.parametrize("taps", [[1, 1, 2], [3, 2], [-1, 2], [1, 5], [1, 2.0], [True, 2]])
def test_bad_taps(taps: list[Any], folder: Path) -> None:
    with pytest.raises(EyasError, match=r"target\.taps"):
        check_taps(taps, 4)
    with pytest.raises(EyasError, match=r"target\.taps"):
        Target.load(str(folder), taps=taps)


def test_none_at_all() -> None:
    """For methods that read the final state alone."""
    assert check_taps([], 4) == ()
