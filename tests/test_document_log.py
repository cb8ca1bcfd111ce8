"""train.log_documents: each bin of each step once, through kills and other numbers of processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from models.errors import EyasError
from train.document_log import DocumentLog, read_documents, rewind

BINS = 3


def sources(step: int, number: int) -> list[str]:
    return [f"chat.jsonl:{step * 10 + number}", "Gespräch \u2028 \ud800.json:1#2"]


def run(folder: Path, steps: range, world: int) -> None:
    """``world`` processes read their bins of these steps."""
    logs = [DocumentLog(folder, rank, world) for rank in range(world)]
    for step in steps:
        for number in range(BINS):
            logs[number % world].write(step, number, sources(step, number))
    for log in logs:
        log.close()


def expected(steps: int) -> dict[int, list[tuple[int, list[str]]]]:
    return {step: [(number, sources(step, number)) for number in range(BINS)] for step in range(steps)}


def test_resumed_on_fewer_and_more_processes(tmp_path: Path) -> None:
    """4 processes killed in step 5 with a checkpoint at 3, 1 from there to 6 saved at 5, 2 to the end."""
    run(tmp_path, range(5), world=4)
    torn = tmp_path / "documents" / "rank00003.jsonl"
    torn.write_text('{"step": 5, "bin": 0, "wor')  # its first line: three bins leave the fourth process without
    rewind(tmp_path, 3)
    assert read_documents(tmp_path) == expected(3)
    run(tmp_path, range(3, 6), world=1)
    rewind(tmp_path, 5)
    run(tmp_path, range(5, 8), world=2)
    assert read_documents(tmp_path) == expected(8)
    assert torn.read_bytes() == b""
    assert sorted(path.name for path in torn.parent.iterdir()) == [f"rank{rank:05d}.jsonl" for rank in range(4)]


def test_rows_outlive_a_kill(tmp_path: Path) -> None:
    """What was written is in the file at once, without sync or close."""
    log = DocumentLog(tmp_path, 0, 1)
    log.write(0, 0, ["a:1"])
    assert read_documents(tmp_path) == {0: [(0, ["a:1"])]}
    with (tmp_path / "documents" / "rank00000.jsonl").open("a") as file:
        file.write('{"step": 0, "bin": 1')
    assert read_documents(tmp_path) == {0: [(0, ["a:1"])]}
    log.close()


def test_without_a_log(tmp_path: Path) -> None:
    rewind(tmp_path, 0)
    assert read_documents(tmp_path) == {} and list(tmp_path.iterdir()) == []


def test_doubled_and_damaged_rows_are_named(tmp_path: Path) -> None:
    run(tmp_path, range(2), world=2)
    second = tmp_path / "documents" / "rank00001.jsonl"
    whole = second.read_text()
    second.write_text(whole + '{"step": 1, "bin": 2, "world": 2, "documents": []}\n')
    with pytest.raises(EyasError, match=r"rank00001.jsonl, line 3: step 1, bin 2 was read before"):
        read_documents(tmp_path)
    second.write_text("\x00\x00\n" + whole)
    rewind(tmp_path, 1)  # does not hide it
    assert second.read_text() == "\x00\x00\n" + whole.splitlines(keepends=True)[0]
    with pytest.raises(EyasError, match=r"rank00001.jsonl, line 1: can't be read"):
        read_documents(tmp_path)
    second.write_text('{"step": 0, "bin": true, "world": 2, "documents": []}\n')
    with pytest.raises(EyasError, match=r"line 1: can't be read"):
        read_documents(tmp_path)
