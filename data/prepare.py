"""From a target and conversations to documents and their features: the stages that training, dumping and
evaluation share. Each is skipped when its output is there already, made from the same input.
"""

from __future__ import annotations

import hashlib
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from tqdm import tqdm

from data.dump import FeatureTarget, dump
from data.encode import load_examples
from data.manifest import store_key
from data.store import FeatureStore
from data.template import ChatTemplate, Example
from models.errors import EyasError
from models.load_frozen import config_eos_ids, fingerprint, read_config
from models.pypi import resolve
from models.target import Target, check_taps, default_taps, load_tokenizer, special_ids

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


@dataclass(frozen=True)
class Corpus:
    """Documents to train on and documents held out (perhaps none)."""

    train: list[Example]
    valid: list[Example]

    def prompts(self) -> list[list[int]]:
        """What comes before the first answer of every held-out document: what a verifier may be given."""
        return [e.input_ids[: e.supervised.index(True)] for e in self.valid if True in e.supervised[1:]]


def read_corpus(
    template: ChatTemplate,
    *,
    path: str | list[str],
    valid_path: str | list[str] | None,
    valid_fraction: float,
    max_length: int,
    max_documents: int | None = None,
    roles: dict[str, str] | None = None,
    split: str = "train",
    rejects_dir: Path | None = None,
) -> Corpus:
    """Read, render and mask the conversations of the ``data`` section; rejected rows go to
    ``rejects_dir``/rejects.jsonl (rejects_valid.jsonl). Raises EyasError if nothing is usable.
    """

    def read(key: str, source: str | list[str], limit: int | None, name: str) -> list[Example]:
        rejects = rejects_dir / name if rejects_dir is not None else None
        encoded = load_examples(
            source,
            template,
            max_length=max_length,
            max_documents=limit,
            roles=roles,
            split=split,
            rejects_path=rejects,
            key=key,
        )
        where = f"; rejected rows are listed in {rejects}" if rejects is not None and encoded.rejects.rejected else ""
        log.info("%s: %s%s", source, encoded.summary, where)
        return encoded.examples

    examples = read("data.path", path, max_documents, "rejects.jsonl")
    if valid_path is None:
        return split_held_out(examples, valid_fraction)
    corpus = Corpus(examples, read("data.valid_path", valid_path, None, "rejects_valid.jsonl"))
    seen = {_content(example) for example in corpus.train}
    shared = sum(_content(example) in seen for example in corpus.valid)
    if shared:
        log.warning("%d of %d held-out documents are in the training data too", shared, len(corpus.valid))
    return corpus


def split_held_out(examples: Sequence[Example], fraction: float) -> Corpus:
    """Hold out ``fraction`` of the conversations (at least one of two), evenly spaced; does not depend on any seed.

    All documents of one conversation, and conversations with the same tokens, stay on one side.
    """
    if not 0 <= fraction < 1:
        raise EyasError(f"data.valid_fraction={fraction}: must be 0 or more and below 1")
    groups: dict[str, list[Example]] = {}
    for example in examples:  # a conversation's further documents are named source#1, source#2 ...
        groups.setdefault(re.sub(r"#\d+$", "", example.source), []).append(example)
    conversations = list(groups.values())
    count = min(len(conversations) - 1, max(1, round(fraction * len(conversations)))) if fraction else 0
    chosen = {(2 * i + 1) * len(conversations) // (2 * count) for i in range(count)}
    valid = [e for i, group in enumerate(conversations) if i in chosen for e in group]
    held = {_content(example) for example in valid}
    train = [e for i, group in enumerate(conversations) if i not in chosen for e in group if _content(e) not in held]
    if not train:
        raise EyasError("data.path: nothing is left to train on beside the held-out conversations; give more of them")
    return Corpus(train, valid)


def token_counts(examples: Sequence[Example], vocab_size: int) -> Tensor:
    """Occurrences of each token among supervised tokens, [V] int64: what a draft vocabulary is chosen by."""
    counts = torch.zeros(vocab_size, dtype=torch.int64)
    for example in examples:
        ids = torch.tensor(example.input_ids)[torch.tensor(example.supervised, dtype=torch.bool)]
        counts += torch.bincount(ids, minlength=vocab_size)
    return counts


@dataclass(frozen=True)
class Inputs:
    """What a run is fed: documents under a target's template, and how their features are made and stored.

    ``target`` and ``store`` are those sections of the configuration as plain dicts.
    """

    files: TargetFiles
    template: ChatTemplate
    corpus: Corpus
    target: Mapping[str, Any]
    store: Mapping[str, Any]

    @classmethod
    def gather(
        cls,
        files: TargetFiles,
        *,
        target: Mapping[str, Any],
        data: Mapping[str, Any],
        store: Mapping[str, Any],
        rejects_dir: Path | None = None,
    ) -> Inputs:
        """Read, render and mask the conversations of the ``data`` section (see :func:`read_corpus`)."""
        kwargs, supervise = target["template_kwargs"], data["supervise"]
        template = ChatTemplate(files.tokenizer, None, kwargs, supervise, eos_ids=files.eos_ids)
        keys = ("path", "valid_path", "valid_fraction", "max_length", "max_documents", "roles", "split")
        corpus = read_corpus(template, **{key: data[key] for key in keys}, rejects_dir=rejects_dir)
        return cls(files, template, corpus, target, store)

    def key(self, examples: Sequence[Example]) -> str:
        """Digest of all that determines these documents' features: the name of their store."""
        dtype, compute = self.store["dtype"], self.target["dtype"]
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
        )
        log.info("target %s: %d trainable parameters", self.files.folder, target.trainable_parameters())
        return target

    def stored(self, examples: Sequence[Example], load_target: Callable[[], FeatureTarget]) -> FeatureStore:
        """The feature store of these documents; the target is loaded only if (part of) it has still to be dumped."""
        folder = self.folder(examples)
        if FeatureStore.is_complete(folder, folder.name):
            try:
                return FeatureStore.open(folder, key=folder.name)
            except EyasError as damage:
                log.warning("%s", damage)
        target = load_target()
        with tqdm(total=0, unit="tok", unit_scale=True, desc="features", disable=None) as bar:

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
                provenance={"target": self.target["path"], "template": self.template.fingerprint()},
                progress=progress,
            )


def _content(example: Example) -> bytes:
    return hashlib.blake2b(repr(example.input_ids).encode(), digest_size=16).digest()
