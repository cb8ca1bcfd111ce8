"""The ``data`` section to documents: read, render and mask once, keep in a folder named by what determines them.

The order of the policies that look at more than one row: kept rows are counted against ``data.max_documents`` after
duplicates and (``data.decontaminate=drop``) conversations that hold an evaluation prompt are gone.
"""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
from collections.abc import Iterable, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data.chats.dialects import Dialect
from data.chats.policy import OF_THE_TEMPLATE
from data.chats.rejects import RejectLog
from data.chats.rows import Source, inputs_of, read_source, sources_of
from data.documents.decontaminate import EvaluationPrompts
from data.documents.document_set import MANIFEST, REJECTS_FILE, DocumentSet, DocumentWriter
from data.documents.encode import Encoder, Outcome, outcomes, pick_workers
from data.documents.held_out import SHOWN, evaluation_prompts, split_held_out, warn_of_prompts
from data.look.statistics import describe
from data.masks.template import ChatTemplate
from models.errors import EyasError
from models.files import out_of_space, publish, sync, turn, write_atomic
from models.visible import visible

FORMAT, VERSION = "eyas-documents", 1
HOPELESS = 1000  # conversations that the template has all rejected
ROW_BITS = 40  # of a place: the number of the row; the rest is the number of the file

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Documents:
    """The documents of one key of the configuration, and the manifest of their folder."""

    documents: DocumentSet
    manifest: dict[str, Any]
    folder: Path

    @property
    def log(self) -> RejectLog:
        return RejectLog.from_json(self.manifest["statistics"])

    def summary(self) -> str:
        """A few lines for the log, first how much is supervised."""
        found = self.manifest["statistics"]
        head = (
            f"SUPERVISED: {found['supervised_tokens']:,} of {found['tokens']:,} tokens "
            f"({found['supervised_share']:.1%}) in {found['documents']:,} documents"
        )
        return f"{head}\n{self.log.table()}"


@dataclass(frozen=True)
class Corpus:
    """Documents to train on and documents held out (perhaps none).

    weights: how often each training document is seen in an epoch. about: facts for manifests and reports.
    """

    train: DocumentSet
    valid: DocumentSet
    weights: list[float]
    about: Mapping[str, Any]

    def prompts(self) -> list[list[int]]:
        """What comes before the first answer of every held-out document: what a verifier may be given."""
        return [e.input_ids[: e.supervised.index(True)] for e in self.valid if True in e.supervised[1:]]


def read_corpus(
    template: ChatTemplate,
    data: Mapping[str, Any],
    *,
    prompts: str | None = None,
    rejects_dir: Path | None = None,
) -> Corpus:
    """Documents of the ``data`` section (as a dict), split into those to train on and those held out.

    prompts: ``verify.prompts``, which the training data should not hold. Rejected rows are copied to
    ``rejects_dir``/rejects.jsonl (rejects_valid.jsonl). Raises EyasError if nothing is usable.
    """
    evaluation = evaluation_prompts(data, prompts) if data["decontaminate"] != "keep" else None

    def read(key: str, name: str, evaluation: EvaluationPrompts | None) -> Documents:
        copy = rejects_dir / name if rejects_dir is not None else None
        return read_documents(template, data, key, evaluation=evaluation, rejects_copy=copy)

    found = read("data.path", "rejects.jsonl", evaluation)
    given = [item.weight for item in inputs_of(data["path"])]
    if data["valid_path"] is None:
        train, valid = split_held_out(found.documents, data["valid_fraction"], data["decontaminate"])
    else:
        train, valid = found.documents, read("data.valid_path", "rejects_valid.jsonl", None).documents
    split = {"training": len(train), "held_out": len(valid), "weights": given}
    return Corpus(train, valid, [given[i] for i in train.inputs], found.manifest | {"split": split})


def read_documents(
    template: ChatTemplate,
    data: Mapping[str, Any],
    key: str = "data.path",
    *,
    evaluation: EvaluationPrompts | None = None,
    rejects_copy: Path | None = None,
) -> Documents:
    """Documents of ``data.path`` or ``data.valid_path``: made now, or found in ``data.cache_dir``.

    Several processes may ask for the same: one makes them, the others wait. Raises EyasError, with a table of the
    reasons, if no row is usable.
    """
    job = _Job.of(template, data, key, evaluation)
    folder = Path(data["cache_dir"]) / job.name
    found = _open(folder)
    if found is None:
        lock = folder.parent / f".{job.name}.lock"
        with turn(lock):
            found = _open(folder)  # perhaps another process has just made it
            if found is None:
                job.build(folder, rejects_copy)
                found = _open(folder)
                assert found is not None
                lock.unlink(missing_ok=True)  # who waits for it finds the folder
    if rejects_copy is not None:
        _copy(folder / REJECTS_FILE, rejects_copy)
    listed = f"\n  every rejected row: {rejects_copy or folder / REJECTS_FILE}" if found.log.rejected else ""
    log.info("%s: %s%s", key, found.summary(), listed)
    if data["decontaminate"] == "warn":
        warn_of_prompts(found.manifest["evaluation"]["conversations"], found.manifest["evaluation"]["first"])
    return found


def _open(folder: Path) -> Documents | None:
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        if (manifest["format"], manifest["version"], manifest["key"]) != (FORMAT, VERSION, folder.name):
            return None
        return Documents(DocumentSet.open(folder), manifest, folder)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as damage:
        log.warning("%s: damaged (%s); reading the data again", folder, damage)
        return None


@dataclass(frozen=True)
class _Job:
    """What determines the documents of one key, and how they are made."""

    name: str
    key: str
    sources: list[Source]
    fingerprints: list[str]
    encoder: Encoder
    settings: Mapping[str, Any]
    workers: int | None  # changes nothing but the time it takes

    @classmethod
    def of(
        cls, template: ChatTemplate, data: Mapping[str, Any], key: str, evaluation: EvaluationPrompts | None
    ) -> _Job:
        names = ("split", "roles", "columns", "max_length", "duplicates", "clean_html")
        settings = {name: data[name] for name in names}
        settings |= {"supervise": template.supervise, "tools": template.tools, "too_long": template.too_long}
        settings["max_documents"] = data["max_documents"] if key == "data.path" else None
        settings["drop_evaluation"] = data["decontaminate"] == "drop"
        sources = sources_of(data[key.removeprefix("data.")], key)
        fingerprints = [source.fingerprint() for source in sources]
        dialect = Dialect.of_section(data)
        encoder = Encoder(template, dialect, data["max_length"], evaluation)
        made_from = [
            FORMAT,
            VERSION,
            template.fingerprint(),
            settings,
            [[fingerprint, source.input] for fingerprint, source in zip(fingerprints, sources, strict=True)],
            evaluation.fingerprint() if evaluation else None,
        ]
        name = hashlib.blake2b(json.dumps(made_from, sort_keys=True).encode(), digest_size=16).hexdigest()
        return cls(name, key, sources, fingerprints, encoder, settings, data["workers"])

    def build(self, folder: Path, rejects_copy: Path | None) -> None:
        """Write the folder under another name, then give it its own. Whatever happens, the rejects are copied."""
        part = folder.with_name(f".{folder.name}.part")
        for left in (part, folder):
            shutil.rmtree(left, ignore_errors=True)
        with out_of_space(folder.parent, "Free some space, or set data.cache_dir to a larger disk"):
            self._build(part, folder, rejects_copy)

    def _build(self, part: Path, folder: Path, rejects_copy: Path | None) -> None:
        rejects, writer = RejectLog(part / REJECTS_FILE), DocumentWriter(part)
        try:
            try:
                facts = self._write(rejects, writer)
            finally:
                writer.close()
                rejects.close()
                if rejects_copy is not None:
                    _copy(part / REJECTS_FILE, rejects_copy)
            write_atomic(part / MANIFEST, json.dumps(self._manifest(part, rejects, writer, facts), indent=1) + "\n")
            publish(part, folder)
        finally:
            shutil.rmtree(part, ignore_errors=True)

    def _write(self, rejects: RejectLog, writer: DocumentWriter) -> dict[str, Any]:
        rows = (row for s in self.sources for row in read_source(s, split=self.settings["split"], key=self.key))
        with closing(outcomes(self.encoder, rows, pick_workers(self.workers, self.sources))) as results:
            facts = self._take(results, rejects, writer)
        if not writer.conversations:
            early = "; reading stopped here, since the template rejects them all" if _hopeless(rejects) else ""
            raise EyasError(f"{self.key}: {rejects.table()}{early}")
        writer.finish()
        return facts

    def _take(self, results: Iterable[Outcome], rejects: RejectLog, writer: DocumentWriter) -> dict[str, Any]:
        """Count, filter and write; returns what the manifest says of conversations that hold evaluation prompts."""
        seen: dict[int, int] = {}  # digest -> place, both small: there may be millions
        files: dict[str, int] = {}
        contaminated, shown = 0, list[str]()
        most = self.settings["max_documents"]
        for outcome in results:
            rejects.rows += 1
            reason, detail = outcome.reason, outcome.detail
            if not reason and self.settings["duplicates"] == "drop":
                first = seen.get(outcome.digest)
                if first is None:
                    seen[outcome.digest] = files.setdefault(outcome.file, len(files)) << ROW_BITS | outcome.row
                else:
                    file = list(files)[first >> ROW_BITS]
                    reason, detail = "duplicate", f"of {file}, row {first & (1 << ROW_BITS) - 1}"
            if not reason and outcome.evaluation:
                contaminated += 1
                if len(shown) < SHOWN:
                    shown.append(visible(f"{outcome.file}, row {outcome.row} holds {outcome.evaluation}"))
                if self.settings["drop_evaluation"]:
                    reason, detail = "holds_evaluation_prompt", outcome.evaluation
            if reason:
                rejects.add(outcome.file, outcome.row, outcome.id, reason, detail)
                if not writer.conversations and _hopeless(rejects):
                    break  # not a matter of odd rows: nothing is written, and the table says why
                continue
            for repair in outcome.repairs:
                rejects.repair(repair)
            writer.add(outcome.documents, outcome.input, outcome.opening)
            if writer.conversations == most:
                break
        return {"conversations": contaminated, "first": shown}

    def _manifest(
        self, part: Path, rejects: RejectLog, writer: DocumentWriter, contaminated: Mapping[str, Any]
    ) -> dict[str, Any]:
        documents = DocumentSet.open(part)
        return {
            "format": FORMAT,
            "version": VERSION,
            "key": self.name,
            "sources": [
                {"path": source.name, "input": source.input, "fingerprint": fingerprint}
                for source, fingerprint in zip(self.sources, self.fingerprints, strict=True)
            ],
            "template": self.encoder.template.fingerprint(),
            "settings": dict(self.settings),
            "statistics": describe(documents.lengths, documents.supervised, rejects, writer.conversations),
            "evaluation": dict(contaminated),
        }


def _hopeless(rejects: RejectLog) -> bool:
    return sum(rejects.reasons[name] for name in OF_THE_TEMPLATE) >= HOPELESS


def _copy(source: Path, copy: Path) -> None:
    if source.exists():
        copy.parent.mkdir(parents=True, exist_ok=True)
        temporary = copy.with_name(f".{copy.name}.tmp")
        shutil.copyfile(source, temporary)
        sync(temporary)
        publish(temporary, copy)
