"""Commands typed in an empty folder, and what their entry points get."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from conf.cli import entry
from conf.schema import Config


@pytest.fixture(autouse=True)
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Every test types its commands in an empty folder; Hydra's log handlers are gone afterwards."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HYDRA_FULL_ERROR", raising=False)
    monkeypatch.delenv("RANK", raising=False)
    yield tmp_path
    for handler in root.handlers:
        if handler not in handlers:
            handler.close()
    root.handlers, root.level = handlers, level


def command(run: Callable[[Config], Any], *arguments: str, job: str = "train") -> None:
    """Type a command whose entry point is ``run``."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [job, *arguments])
        entry(job)(run)()


def runs(*arguments: str, job: str = "train") -> list[Config]:
    """The configurations that an entry point gets for this command line."""
    seen: list[Config] = []
    command(seen.append, *arguments, job=job)
    return seen


def config(*arguments: str, job: str = "train") -> Config:
    (cfg,) = runs(*arguments, job=job)
    return cfg


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str, job: str = "train") -> str:
    """The message of a command that must fail as a user's mistake: exit code 2, no stack trace."""
    with pytest.raises(SystemExit) as left:
        runs(*arguments, job=job)
    told = capsys.readouterr().err
    assert left.value.code == 2
    assert "Traceback" not in told and told.count("error:") == 1
    return told
