"""The file of answers: appended to as they come, whole after any kill, in the order of the input at the end.

While answers are missing they lie in ``OUT.part``: a first line with the settings, then one line for each row that is
answered or rejected. :meth:`Answers.finish` writes ``OUT``, ``OUT.rejects.jsonl`` and ``OUT.info`` (settings and
counts) from it and deletes it. Only byte offsets are held in memory.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from array import array
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from data.chats.rejects import RejectLog
from data.regenerate.replay import Outcome
from models.errors import EyasError
from models.files import publish, sync, write_atomic

OTHER_OUT = "give another regenerate.out, or move this file away"


def beside(out: Path, suffix: str) -> Path:
    """``answers.jsonl`` and ``.part`` -> ``answers.jsonl.part``."""
    return out.with_name(out.name + suffix)


class Answers:
    """Answers to the rows with these digests (`Asked.digest`, in order), as far as they are there.

    Raises EyasError if ``out`` or its part belongs to other settings or other rows, or another process writes it.
    ``index in answers``: that row is answered or rejected already.
    """

    def __init__(self, out: Path, settings: Mapping[str, Any], digests: array[int]) -> None:
        self.out, self.part, self.settings, self._digests = out, beside(out, ".part"), dict(settings), digests
        self._offsets: dict[int, int] = {}
        self.complete = False
        self._file: BinaryIO | None = None
        if out.is_dir():
            raise EyasError(f"regenerate.out={out}: is a folder; give a file to write")
        if out.exists() and not self.part.exists():
            self._check_finished()
            self.complete = True
            return
        out.parent.mkdir(parents=True, exist_ok=True)
        self._file = self.part.open("a+b")
        self._lock()
        self._read_part()

    def __contains__(self, index: object) -> bool:
        return index in self._offsets

    def __len__(self) -> int:
        return len(self._offsets)

    def append(self, outcome: Outcome) -> None:
        """Add one row; a kill afterwards doesn't lose it."""
        asked = outcome.asked
        self._check_asked(asked.index, asked.digest)
        entry: dict[str, Any] = {"index": asked.index, "asked": asked.digest}
        if outcome.row is not None:
            entry["row"] = outcome.row
        else:
            questions = asked.questions
            entry["reject"] = [questions.source_file, questions.row, asked.id, outcome.reason, outcome.detail]
        assert asked.index not in self._offsets
        self._offsets[asked.index] = self._write(entry)

    def finish(self, rejects: RejectLog) -> None:
        """Put ``out`` in place. rejects: writes to ``OUT.rejects.jsonl``; holds the rows rejected while reading.

        Raises EyasError, and leaves the part where it is, if no row has an answer.
        """
        assert self._file is not None and len(self) == len(self._digests)
        temporary = beside(self.out, ".tmp")
        with temporary.open("wb") as file:
            for entry in self._entries():
                if "row" in entry:
                    file.write(_line(entry["row"]))
                else:
                    rejects.add(*entry["reject"])
        sync(temporary)
        rejects.close()
        if not rejects.kept:
            temporary.unlink()
            raise EyasError(f"data.path: no row has an answer\n{rejects.table()}")
        info = {"settings": self.settings, "questions": self._questions(), **rejects.to_json()}
        write_atomic(beside(self.out, ".info"), json.dumps(info, indent=2) + "\n")
        publish(temporary, self.out)
        self.part.unlink()
        self.close()
        self.complete = True

    def close(self) -> None:
        """Let another process have the file."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _check_finished(self) -> None:
        info = beside(self.out, ".info")
        if not info.is_file():
            raise EyasError(f"regenerate.out={self.out}: exists, and {info.name} is not beside it; {OTHER_OUT}")
        try:
            made = json.loads(info.read_text(encoding="utf-8"))
            settings, questions = made["settings"], made["questions"]
        except (ValueError, KeyError, TypeError) as error:
            raise EyasError(f"{info}: damaged ({error!r}); {OTHER_OUT}") from None
        self._check_settings(settings, self.out)
        if questions != self._questions():
            raise EyasError(f"regenerate.out={self.out}: answers other rows than data.path gives now; {OTHER_OUT}")

    def _check_settings(self, made: Mapping[str, Any], where: Path) -> None:
        now = json.loads(json.dumps(self.settings))
        different = [
            f"{key} {made.get(key)!r}, now {now.get(key)!r}"
            for key in dict.fromkeys((*made, *now))
            if made.get(key) != now.get(key)
        ]
        if different:
            raise EyasError(f"{where}: was made with {'; '.join(different)}: {OTHER_OUT}")

    def _lock(self) -> None:
        assert self._file is not None
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise EyasError(f"{self.part}: another process is writing it; wait for it or stop it") from None
        except OSError:  # a filesystem without locks: go on without
            pass

    def _read_part(self) -> None:
        """Find the rows that are there; a half-written last line is cut off."""
        assert self._file is not None
        self._file.seek(0)
        offset = 0
        for number, line in enumerate(self._file, start=1):
            if not line.endswith(b"\n"):
                self._file.truncate(offset)
                break
            try:
                entry = json.loads(line)
                if number == 1:
                    self._check_settings(entry["settings"], self.part)
                else:
                    self._check_asked(entry["index"], entry["asked"])
                    self._offsets[entry["index"]] = offset
            except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError) as error:
                raise EyasError(f"{self.part}:{number}: damaged ({error!r}); {OTHER_OUT}") from None
            offset += len(line)
        if offset == 0:
            self._write({"settings": self.settings})

    def _check_asked(self, index: int, digest: int) -> None:
        if index >= len(self._digests) or self._digests[index] != digest:
            raise EyasError(f"{self.part}: row {index + 1} of data.path is not the one that was answered; {OTHER_OUT}")

    def _write(self, entry: Mapping[str, Any]) -> int:
        """Append one line, in one go, and return its offset."""
        assert self._file is not None
        offset = self._file.seek(0, os.SEEK_END)
        self._file.write(_line(entry))
        self._file.flush()
        return offset

    def _entries(self) -> Iterator[dict[str, Any]]:
        assert self._file is not None
        for index in range(len(self._digests)):
            self._file.seek(self._offsets[index])
            yield json.loads(self._file.readline())

    def _questions(self) -> str:
        """Digest of all rows that are asked."""
        return hashlib.sha256(self._digests.tobytes()).hexdigest()


def _line(value: Mapping[str, Any]) -> bytes:
    # A lone surrogate (of a file name, say) becomes its JSON escape, and so comes back as it was.
    return json.dumps(value, ensure_ascii=False).encode("utf-8", "backslashreplace") + b"\n"
