"""From a target and conversations to documents and their features: the stages that training, dumping and
evaluation share. Each is skipped when its output is there already, made from the same input.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from data.documents.corpus import Corpus, read_corpus
from data.features.dump import WHOLE, FeatureTarget, dump
from data.features.manifest import store_key
from data.features.store import FeatureStore
from data.masks.template import ChatTemplate, Example
from data.processes import ALONE, Job, OtherProcessFailed, Stage
from models.errors import EyasError
from models.load_frozen import config_eos_ids, fingerprint, read_config
from models.pypi import resolve
from models.quantize import computed_in
from models.taps import check_taps, default_taps
from models.target import Target, load_tokenizer, special_ids

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TargetFiles:
    """A target as its folder tells it, weights unread. tap_ids: boundary ids; special_ids: special tokens and EOS."""

    folder: Path
    tokenizer: PreTrainedTokenizerBase
    tap_ids: tuple[int, ...]
    eos_ids: frozenset[int]
    fingerprint: str

    @classmethod
    def open(
        cls,
        path: str,
        *,
        taps: Sequence[int] | None = None,
        revision: str | None = None,
        trust_remote_code: bool = False,
        chat_template: str | None = None,
    ) -> TargetFiles:
        """Find (convert, download) the target; same arguments and errors as ``Target.load``."""
        folder = Path(resolve(path, revision=revision, trust_remote_code=trust_remote_code))
        config = read_config(folder, trust_remote_code)
        layers = int(config.get_text_config(decoder=True).num_hidden_layers)
        tap_ids = default_taps(layers) if taps is None else check_taps(taps, layers)
        tokenizer = load_tokenizer(folder, trust_remote_code, chat_template)
        eos = config_eos_ids(config, folder) | ({tokenizer.eos_token_id} - {None})
        return cls(folder, tokenizer, tap_ids, frozenset(eos), fingerprint(folder))

    @property
    def special_ids(self) -> list[int]:
        return special_ids(self.tokenizer, self.eos_ids)


def open_target(target: Mapping[str, Any]) -> TargetFiles:
    """:meth:`TargetFiles.open` of the ``target`` section of the configuration."""
    keys = ("taps", "revision", "trust_remote_code", "chat_template")
    return TargetFiles.open(target["path"], **{key: target[key] for key in keys})


def chat_template(files: TargetFiles, target: Mapping[str, Any], data: Mapping[str, Any]) -> ChatTemplate:
    """The target's template as the ``target`` and ``data`` sections want it."""
    how = {key: data[key] for key in ("supervise", "tools", "too_long")}
    return ChatTemplate(files.tokenizer, None, target["template_kwargs"], eos_ids=files.eos_ids, **how)


@dataclass(frozen=True)
class Inputs:
    """What a run is fed: documents under a target's template, and how their features are made and stored.

    ``target`` and ``store`` are those sections of the configuration as plain dicts; ``job``: the processes that have
    these inputs together.
    """

    files: TargetFiles
    template: ChatTemplate
    corpus: Corpus
    target: Mapping[str, Any]
    store: Mapping[str, Any]
    job: Job = Job()

    @classmethod
    def gather(
        cls,
        files: TargetFiles,
        *,
        target: Mapping[str, Any],
        data: Mapping[str, Any],
        store: Mapping[str, Any],
        prompts: str | None = None,
        rejects_dir: Path | None = None,
        job: Job | None = None,
    ) -> Inputs:
        """Read, render and mask the conversations of the ``data`` section (see :func:`read_corpus`)."""
        template = chat_template(files, target, data)
        corpus = read_corpus(template, data, prompts=prompts, rejects_dir=rejects_dir)
        return cls(files, template, corpus, target, store, job or Job())

    def key(self, examples: Sequence[Example]) -> str:
        """Digest of all that determines these documents' features: the name of their store."""
        dtype, compute = self.store["dtype"], computed_in(self.target["dtype"], self.target.get("quantize"))
        return store_key(examples, self.files.fingerprint, self.files.tap_ids, dtype, compute_dtype=compute)

    def folder(self, examples: Sequence[Example]) -> Path:
        return Path(self.store["dir"]) / self.key(examples)

    def load_target(self, device: str) -> Target:
        target = Target.load(
            str(self.files.folder),
            dtype=self.target["dtype"],
            taps=self.files.tap_ids,
            device=device,
            trust_remote_code=self.target["trust_remote_code"],
            chat_template=self.target["chat_template"],
            quantize=self.target.get("quantize"),
        )
        log.info("target %s: %d trainable parameters", self.files.folder, target.trainable_parameters())
        return target

    def stored(
        self, examples: Sequence[Example], load_target: Callable[[], FeatureTarget], stage: Stage = ALONE
    ) -> FeatureStore:
        """The feature store of these documents; the target is loaded only if (part of) it has still to be dumped.

        ``stage``: the processes that ask for it together. Process 0 says whether the store is whole, so that one that
        is damaged is mended by all of them.
        """
        folder = self.folder(examples)
        whole, missing = WHOLE.format(folder.name), f"{folder.name}-missing"
        if stage.rank and stage.hear_one_of(whole, missing) == whole:
            return FeatureStore.open(folder, key=folder.name, tick=stage.moved, remember=False)
        if stage.rank == 0:
            if FeatureStore.is_complete(folder, folder.name):
                try:
                    store = FeatureStore.open(folder, key=folder.name, tick=stage.moved)
                    stage.tell(whole)
                    return store
                except OtherProcessFailed:
                    raise
                except EyasError as damage:
                    log.warning("%s", damage)
            stage.tell(missing)  # now, so that all load the target at the same time
        return self._dump(load_target(), examples, folder, stage)

    def _dump(self, target: FeatureTarget, examples: Sequence[Example], folder: Path, stage: Stage) -> FeatureStore:
        silent = True if stage.rank else None  # one process shows how far all are; None: if there is a terminal
        with tqdm(total=0, unit="tok", unit_scale=True, desc="features", disable=silent) as bar:

            def progress(done: int, total: int) -> None:
                bar.total = total
                bar.update(done - bar.n)

            return dump(
                target,
                examples,
                folder,
                dtype=self.store["dtype"],
                shard_bytes=self.store["shard_mib"] << 20,
                batch_tokens=self.store["batch_tokens"],
                provenance={
                    "target": self.target["path"],
                    "template": self.template.fingerprint(),
                    "template_kwargs": dict(self.target["template_kwargs"]),
                    "supervise": self.template.supervise,
                    "statistics": self.corpus.about["statistics"],
                },
                progress=progress,
                stage=stage,
            )
