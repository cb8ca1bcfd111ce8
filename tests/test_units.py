"""Bytes and seconds as people read them."""

from __future__ import annotations

import pytest

from models.units import format_bytes, format_seconds


@pytest.mark.parametrize(
    ("seconds", "told"),
    [(0.4, "0 s"), (119.4, "119 s"), (120, "2 min"), (7169, "119 min"), (7200, "2 h 00 min"), (11100, "3 h 05 min")]
    + [(3600 * 52, "2 d 04 h")],
)
def test_seconds(seconds: float, told: str) -> None:
    assert format_seconds(seconds) == told


@pytest.mark.parametrize(
    ("count", "told"),
    [
        (17, "17 B"),
        (1023, "1023 B"),
        (1536, "1.5 KiB"),
        (3 << 30, "3.0 GiB"),
        (5 << 50, "5120.0 TiB"),
        (-1536, "-1.5 KiB"),
    ],
)
def test_bytes(count: float, told: str) -> None:
    assert format_bytes(count) == told
