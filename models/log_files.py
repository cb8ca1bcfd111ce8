"""What a command says last, in its log file too: such lines go to stderr by themselves, where nobody may be reading."""

from __future__ import annotations

import logging


def note_in_log_files(message: str, level: int = logging.ERROR) -> None:
    """Write a line into the files that the root logger writes, and nowhere else."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler, logging.FileHandler):
            handler.handle(logging.LogRecord("eyas", level, __file__, 0, message, None, None))
