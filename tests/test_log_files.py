"""Lines that go to stderr by themselves stand in the log file too, and flags may stand anywhere."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from conf.cli import checked_arguments
from models.log_files import note_in_log_files


@pytest.fixture
def log_file(tmp_path: Path) -> Iterator[Path]:
    handler = logging.FileHandler(tmp_path / "train.log")
    handler.setFormatter(logging.Formatter("%(levelname)s %(message)s"))
    logging.getLogger().addHandler(handler)
    yield tmp_path / "train.log"
    logging.getLogger().removeHandler(handler)
    handler.close()


def test_a_last_word_is_in_the_file_alone(log_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    note_in_log_files("SIGTERM: step 59 is saved", logging.WARNING)
    note_in_log_files("rank 1 has 100% ended")
    assert log_file.read_text() == "WARNING SIGTERM: step 59 is saved\nERROR rank 1 has 100% ended\n"
    assert capsys.readouterr() == ("", "")


def test_flags_may_stand_before_overrides() -> None:
    typed = ["--cfg", "job", "conf=debug", "--multirun", "train.steps=3", "--resolve"]
    assert checked_arguments(typed) == ["--multirun", "conf=debug", "train.steps=3", "--cfg", "job", "--resolve"]
