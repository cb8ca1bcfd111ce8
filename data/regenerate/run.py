"""The target answers the questions of any conversations: what ``python -m data.regenerate`` does.

A drafter learns best from what its own target says. Input in any dialect; output is ShareGPT rows with their
provenance, in the order of the input. Killed at any moment, the same command answers only what is missing.
"""

from __future__ import annotations

import logging
import math
import time
from array import array
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from conf.schema import Config
from data.chats.dialects import Dialect
from data.chats.prompts import read_questions
from data.chats.rejects import RejectLog
from data.regenerate.answers import Answers, beside
from data.regenerate.replay import Asked, Engine, Outcome, Sampling, ask
from models.errors import EyasError
from models.files import out_of_space

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SAID_EVERY = 60.0  # seconds between two lines of progress where there is no terminal

log = logging.getLogger(__name__)


def regenerate(cfg: Config) -> Path:
    """Answer what is missing and return the finished file. Raises EyasError; the same call then continues."""
    out = _out(cfg)
    read = _reader(cfg)
    first = RejectLog()
    digests = array("Q", (asked.digest for asked in read(first)))
    if not digests:
        raise EyasError(f"data.path={cfg.data.path}: no row holds a question\n{first.table()}")
    engine = _engine(cfg)
    answers = Answers(out, engine.settings, digests)
    if answers.complete:
        log.info("%s: complete, nothing to do", out)
        return out
    if answers:
        log.info("%s: %d of %d rows are there, going on", answers.part, len(answers), len(digests))
    progress = _Progress(len(digests), len(answers))
    rejects = RejectLog(beside(out, ".rejects.jsonl"))

    def emit(outcome: Outcome) -> None:
        answers.append(outcome)
        progress.row()

    try:
        with out_of_space(out.parent, "Free some space and run the same command again: it goes on where it stopped"):
            engine.answer(read(rejects), answers, emit, progress.tokens)
            answers.finish(rejects)
    except KeyboardInterrupt:
        log.warning("%d of %d rows are answered and kept in %s", len(answers), len(digests), answers.part)
        raise
    finally:
        progress.close()
        answers.close()
    log.info("%s: %s", out, rejects.table())
    return out


def _out(cfg: Config) -> Path:
    if cfg.regenerate.out is not None:
        return Path(cfg.regenerate.out)
    if cfg.output_dir is None:
        raise EyasError("regenerate.out: required without an output_dir; give regenerate.out=FILE.jsonl")
    return Path(cfg.output_dir) / "regenerated.jsonl"


def _reader(cfg: Config) -> Callable[[RejectLog], Iterator[Asked]]:
    """Reads the input anew; every row is yielded or rejected by name, the same each time."""
    data = cfg.data
    dialect = Dialect.of(roles=data.roles, columns=data.columns, clean_html=data.clean_html)

    def read(rejects: RejectLog) -> Iterator[Asked]:
        questions = read_questions(data.path, dialect=dialect, rejects=rejects, key="data.path", split=data.split)
        return ask(questions, data.max_documents)

    return read


def _engine(cfg: Config) -> Engine:
    """The server if one is given, else the target with transformers."""
    return _server_engine(cfg) if cfg.regenerate.server is not None else _local_engine(cfg)


def _sampling(cfg: Config) -> Sampling:
    regenerate = cfg.regenerate
    return Sampling(regenerate.temperature, regenerate.top_p, regenerate.max_new_tokens, cfg.seed)


def _server_engine(cfg: Config) -> Engine:
    from data.regenerate.server import ServerEngine

    if cfg.target.chat_template is not None:
        raise EyasError("target.chat_template: a server uses its own; start it with this template and leave it out")
    kwargs = {key: given for key, given in cfg.target.template_kwargs.items() if key != "today"}
    if kwargs != cfg.target.template_kwargs:
        log.warning("target.template_kwargs.today has no effect on a server, which has its own clock")
    regenerate = cfg.regenerate
    return ServerEngine(
        str(regenerate.server),
        regenerate.model,
        _sampling(cfg),
        key_env=regenerate.api_key_env,
        cut=regenerate.cut,
        template_kwargs=kwargs,
        concurrency=regenerate.concurrency,
        retries=regenerate.retries,
        timeout=regenerate.timeout,
    )


def _local_engine(cfg: Config) -> Engine:
    import torch  # slow, as what follows: not needed with a server

    from data.masks.template import ChatTemplate
    from data.prepare import open_target
    from data.regenerate.engine import LocalEngine
    from models.device import pick_device
    from models.target import Target

    if cfg.threads:
        torch.set_num_threads(cfg.threads)
    device = pick_device(cfg.device)
    target = asdict(cfg.target)
    files = open_target(target)
    template = ChatTemplate(files.tokenizer, None, target["template_kwargs"], eos_ids=files.eos_ids)

    def load() -> PreTrainedModel:
        loaded = Target.load(
            str(files.folder),
            dtype=target["dtype"],
            device=device,
            trust_remote_code=target["trust_remote_code"],
            chat_template=target["chat_template"],
        )
        return loaded.model

    sampling = _sampling(cfg)
    settings: dict[str, Any] = {
        "target": _name(cfg.target.path),
        "target_fingerprint": files.fingerprint[:16],
        "engine": "transformers",
        "dtype": cfg.target.dtype,
        **sampling.settings(),
        "cut": cfg.regenerate.cut,
        "template_kwargs": target["template_kwargs"],
        "template": template.fingerprint()[:16],
    }
    cut, batch_size = cfg.regenerate.cut, cfg.regenerate.batch_size
    return LocalEngine(load, template, files.eos_ids, sampling, settings, cut=cut, batch_size=batch_size)


def _name(path: str) -> str:
    """The target's name in the rows: where its folder lies is nobody's business."""
    folder = Path(path).expanduser()
    return folder.resolve().name if folder.is_dir() else path


class _Progress:
    """Rows, tokens a second and the time left: a bar on a terminal, else a line in the log now and then."""

    def __init__(self, rows: int, done: int) -> None:
        self._bar = tqdm(total=rows, initial=done, unit="row", desc="answers", disable=None, smoothing=0.05)
        self._rows, self._before, self._done, self._tokens = rows, done, done, 0
        self._started = self._said = time.monotonic()

    def tokens(self, count: int) -> None:
        self._tokens += count
        self._bar.set_postfix_str(f"{self._rate():.0f} tok/s", refresh=False)
        if self._bar.disable and time.monotonic() - self._said >= SAID_EVERY:
            self._said = time.monotonic()
            log.info("%d of %d rows, %.0f tok/s%s", self._done, self._rows, self._rate(), self._left())

    def row(self) -> None:
        self._done += 1
        self._bar.update()

    def close(self) -> None:
        self._bar.close()

    def _left(self) -> str:
        new = self._done - self._before
        seconds = (time.monotonic() - self._started) / new * (self._rows - self._done) if new else 0.0
        return f", about {math.ceil(seconds / 60)} minutes left" if new else ""

    def _rate(self) -> float:
        return self._tokens / max(1e-9, time.monotonic() - self._started)
