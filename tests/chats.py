"""Small chat files and what comes of them, for tests of the data section."""

from __future__ import annotations

import gzip
import json
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import Any

from conf.schema import DataConfig
from data.masks.template import ChatTemplate, Example, decode
from tests.chat_templates import CHATML, byte_tokenizer

TOKENIZER = byte_tokenizer()
TEMPLATE = ChatTemplate(TOKENIZER, CHATML)


def section(tmp_path: Path, path: Any, **changes: Any) -> dict[str, Any]:
    return asdict(DataConfig(path=path, cache_dir=str(tmp_path / "cache"), max_length=2000)) | changes


def sharegpt(*texts: str, id: str = "") -> dict[str, Any]:
    roles = ("human", "gpt") * len(texts)
    return {"id": id, "conversations": [{"from": r, "value": t} for r, t in zip(roles, texts, strict=False)]}


def rows_file(path: Path, *rows: Any) -> str:
    data = "".join(json.dumps(row) + "\n" for row in rows).encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return str(path)


def runs(example: Example) -> list[str]:
    pairs = zip(example.input_ids, example.supervised, strict=True)
    return [decode(TOKENIZER, [t for t, _ in run]) for on, run in groupby(pairs, key=lambda pair: pair[1]) if on]


def listed(path: Path) -> list[tuple[int, str]]:
    return [(row["row"], row["reason"]) for row in map(json.loads, path.read_text().splitlines())]
