"""What the launcher tells, and what only looks like it."""

from __future__ import annotations

import pytest

from models.errors import EyasError
from models.launch import rank, world


def test_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert (rank(), world()) == (0, 1)


def test_among_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "8")
    assert (rank(), world()) == (3, 8)


def test_what_no_launcher_sets_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(EyasError, match="WORLD_SIZE=2 is set in the environment, but not RANK"):
        world()
    monkeypatch.setenv("WORLD_SIZE", "two")
    with pytest.raises(EyasError, match="WORLD_SIZE=two in the environment: must be a number"):
        world()
