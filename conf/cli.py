"""The one wrapper of every entry point: Hydra, validation, and a user's mistake told in one message.

    @entry("train")
    def main(cfg: Config) -> float | None:
        ...

The decorated function takes no arguments: it reads the command line, composes and validates the configuration
and calls the original with it. A mistake in the configuration, the data or the files ends the process with a
message that names the key and with exit code 2; set HYDRA_FULL_ERROR=1 to see the stack trace instead.
"""

from __future__ import annotations

import functools
import logging
import os
import re
import sys
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, NoReturn

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

from conf import CONF_DIR, PRIMARY
from conf.explain import MISTAKES, check_arguments, explain, of_the_disk, text_keys
from conf.rules import MEASURING, RESERVED_NAMES
from conf.schema import Config
from conf.validate import resolve
from models.errors import EyasError
from models.launch import launched, rank, world
from models.log_files import note_in_log_files
from models.signals import leaving, raising, told_of
from models.visible import visible

FULL_ERROR = "HYDRA_FULL_ERROR"
NUMBER = re.compile(r"[+-]?[\d_]*\.?[\d_]*(e[+-]?[\d_]+)?|[+-]?(nan|inf)|true|false", re.IGNORECASE)
# Hydra's flags that take what stands behind them, and those that only show help
VALUED = frozenset(("-c", "--cfg", "-p", "--package", "-i", "--info", "-cp", "--config-path", "-cn", "--config-name"))
VALUED |= {"-cd", "--config-dir", "--experimental-rerun"}
HELPING = frozenset(("-h", "--help", "--hydra-help"))
USER_MISTAKE = 2
COMPARED = "compared"  # name of a measurement of several drafters, or of one that is no run
ONE_PROCESS = "--multirun: a sweep runs in one process; start its runs one by one for several"

log = logging.getLogger(__name__)

Asked = Callable[[Sequence[str]], int]  # command line -> exit code


def entry(
    job: str, sweep: Asked | None = None, words: Mapping[str, Asked] | None = None
) -> Callable[[Callable[[Config], Any]], Callable[[], None]]:
    """Make ``run(cfg)`` the entry point of the verb ``job`` (also the name of its log).

    ``sweep`` takes the overrides of a ``--multirun`` that asks nothing special of Hydra. ``words`` are what may stand
    among the arguments to ask for something else than the job: each is given the other arguments.
    """

    def decorate(run: Callable[[Config], Any]) -> Callable[[], None]:
        @functools.wraps(run)
        def main() -> None:
            full = os.environ.get(FULL_ERROR) == "1"

            def plainly() -> AbstractContextManager[None]:
                return nullcontext() if full else told_plainly(job)

            def task(composed: DictConfig) -> Any:
                with plainly():  # here too: an exception that passes through Hydra adds lines of its own
                    return run(prepare(composed, job))

            task.__module__ = job  # Hydra names the job after the module; under ``python -m`` that is __main__
            with plainly():
                asked, arguments = without_words(sys.argv[1:], words or {})
                sys.argv[1:] = checked_arguments(with_log(as_texts(spelled_out(arguments, job))))
                if words and asked and not HELPING & set(sys.argv):
                    sys.exit(words[asked](sys.argv[1:]))
                if sweep and is_plain_sweep(sys.argv[1:]):
                    sys.exit(sweep(sys.argv[2:]))
            with plainly(), exceptions_from_hydra():
                hydra.main(version_base="1.3", config_path=str(CONF_DIR), config_name=PRIMARY)(task)()

        return main

    return decorate


def prepare(composed: DictConfig, job: str) -> Config:
    """The checked configuration of this job; what it leaves doubtful goes to the log."""
    if launched() and world() > 1:
        if job not in ("train", "eval"):
            raise EyasError(f"{job}: runs in one process; only train and eval run in several")
        if HydraConfig.get().mode == RunMode.MULTIRUN:
            raise EyasError(ONE_PROCESS)
    cfg, notes = resolve(composed, job, list(HydraConfig.get().overrides.task))
    if rank():
        logging.getLogger().setLevel(logging.WARNING)  # every process writes to the same log: one tells the story
        return cfg
    for note in notes:
        log.warning(note)
    return cfg


def spelled_out(arguments: Sequence[str], job: str) -> list[str]:
    """The short forms of ``eval`` in full: ``prompts=``, ``eval.KEY=``, and (``export`` too) ``drafter=FOLDER``.

    What is measured of another run goes to that run's folder, a comparison to one of its own, unless ``name`` is given:
    the report of the recipe's own run stays.
    """
    if job not in (*MEASURING, "export"):
        return list(arguments)
    choices = {path.stem for path in (CONF_DIR / "drafter").glob("*.yaml")}

    def long(argument: str) -> str:
        key, found, given = argument.partition("=")
        if not found:
            return argument
        if key == "drafter" and given not in choices:
            return f"drafter_path={given}"
        if job != "export" and key == "prompts":
            return f"verify.prompts={given}"
        return f"verify.{argument.removeprefix('eval.')}" if job != "export" and key.startswith("eval.") else argument

    found = [long(argument) for argument in arguments]
    keys = {argument.partition("=")[0]: argument.partition("=")[2] for argument in found}
    if job == "eval" and "drafter_path" in keys and "name" not in keys and "output_dir" not in keys:
        folder = Path(keys["drafter_path"].strip("'\""))
        run = folder.name if folder.parent == Path("outputs") and folder.name not in RESERVED_NAMES else COMPARED
        found.append(f"name={run}")
    return found


def without_words(arguments: Sequence[str], words: Container[str]) -> tuple[str | None, list[str]]:
    """The word asked with, if any, and the arguments without it. What belongs to a flag is no word."""
    behind = ("", *arguments)
    is_word = [a in words and before not in VALUED for a, before in zip(arguments, behind, strict=False)]
    asked = next((a for a, found in zip(arguments, is_word, strict=True) if found), None)
    return asked, [a for a, found in zip(arguments, is_word, strict=True) if not found]


def as_texts(arguments: Sequence[str]) -> list[str]:
    """Quotes around texts that Hydra would read as numbers: 2026_01_02 as 20260102, 1e3 as 1000.0."""
    texts = text_keys()

    def quoted(argument: str) -> str:
        key, _, given = argument.partition("=")
        return f'{key}="{given}"' if key in texts and given and NUMBER.fullmatch(given) else argument

    return [quoted(argument) for argument in arguments]


def with_log(arguments: Sequence[str]) -> list[str]:
    """Hydra's own folder, where the log lies, is that of the run."""
    given = [argument.partition("=")[2] for argument in arguments if argument.startswith("output_dir=")]
    elsewhere = any(argument.startswith(("hydra.run.dir=", "-m", "--multirun")) for argument in arguments)
    if not given or given[-1] == "null" or elsewhere:
        return list(arguments)
    home = re.sub(r"""^(["']?)~(?=/)""", lambda found: found[1] + str(Path.home()), given[-1])
    return [*arguments, f"hydra.run.dir={home}"]


def checked_arguments(arguments: Sequence[str]) -> list[str]:
    """The command line as Hydra's parser takes it: ``--multirun``, overrides, then other flags with their values."""
    multirun, overrides, flags = list[str](), list[str](), list[str]()
    for before, argument in zip(["", *arguments], arguments, strict=False):
        if argument in ("-m", "--multirun"):
            multirun.append(argument)
        else:
            (flags if argument.startswith("-") or before in VALUED else overrides).append(argument)
    check_arguments(overrides)
    return multirun + overrides + flags


def is_plain_sweep(arguments: Sequence[str]) -> bool:
    """Whether there is ``--multirun``, no other flag, and no launcher, sweeper or folder for Hydra's own sweeps."""
    hydras = ("-", "hydra/", "hydra.sweep", "hydra.launcher")
    return arguments[:1] in (["-m"], ["--multirun"]) and not any(
        argument.lstrip("+~").startswith(hydras) for argument in arguments[1:]
    )


@contextmanager
def told_plainly(job: str) -> Iterator[None]:
    """Turn a user's mistake, or a full disk, into its message and exit code 2, and SIGTERM or Ctrl-C into one line."""
    with raising():
        try:
            yield
        except MISTAKES as mistake:
            leave(explain(mistake))
        except OSError as error:
            told = of_the_disk(error)
            if told is None:
                raise
            leave(told)
        except KeyboardInterrupt as interrupt:
            if isinstance(interrupt.__context__, MISTAKES):  # a launcher ends the rest of a job that fails already
                leave(explain(interrupt.__context__))
            leaving()
            message, code = told_of(interrupt, "starts again" if job in MEASURING else "continues where it stopped")
            if not rank():
                print(message, file=sys.stderr)
                note_in_log_files(message, logging.WARNING)
            sys.exit(code)


def leave(message: str) -> NoReturn:
    leaving()
    where = f"[rank {rank()}] " if launched() else ""
    print(f"{where}error: {visible(message)}", file=sys.stderr)
    note_in_log_files(f"{where}{visible(message)}")
    sys.exit(USER_MISTAKE)


@contextmanager
def exceptions_from_hydra() -> Iterator[None]:
    """Make Hydra raise what it finds instead of printing it its own way and leaving with exit code 1."""
    before = os.environ.get(FULL_ERROR)
    os.environ[FULL_ERROR] = "1"
    try:
        yield
    finally:
        os.environ.pop(FULL_ERROR)
        if before is not None:
            os.environ[FULL_ERROR] = before
