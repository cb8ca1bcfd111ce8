"""What ``drafter_path`` names: trained drafters, independent draft models, n-gram lookup, each with its tree."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor
from transformers import PretrainedConfig

from conf.schema import VerifyConfig
from conf.values import MODEL, NGRAM
from eval.drafts.draft_model import ModelSession, check_same_tokenizer, draft_vocab
from eval.drafts.drafting import DraftingProposer
from eval.drafts.dynamic_tree import DynamicTree
from eval.drafts.ngram import NgramProposer
from eval.drafts.proposers import LimitedProposer, Proposer
from eval.drafts.shapes import AdaptiveDepth, Shape, StaticTree, chain, classic, fit, read_tree
from eval.verify.sampling import Sampling
from models.drafter import Drafter, DraftSession
from models.errors import EyasError
from models.frozen import FrozenTarget
from models.load_frozen import plain_config
from models.packed import pack_linears
from models.portable import open_drafter
from models.run_folder import CONFIG, beside_run, best_checkpoint
from models.target import Target
from models.tuned import WHOLE, is_tuned_by, tuned
from models.vocab import DraftVocab

CLASSIC = ("medusa", "eagle1")

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Candidate:
    """One way to draft. name: unique in the report; path: where it comes from, None for n-grams.

    drafter: a trained one, with the frozen target tensors it reads; model: an independent one; n-grams: neither.
    tuned: what is known of a target that was trained along with the drafter (models/tuned.py), None where the drafter
    goes with the target as configured.
    shape: its draft tree, trimmed to what it can draft; n-grams always draft chains.
    """

    name: str
    kind: str  # drafter | model | ngram
    path: str | None
    shape: Shape
    drafter: Drafter | None = None
    frozen: FrozenTarget | None = None
    model: Target | None = None
    vocab: DraftVocab | None = None
    tuned: Mapping[str, Any] | None = None

    def session(self, slots: int) -> DraftSession:
        if self.model is not None:
            return ModelSession(self.model, slots, len(self.drafts))
        assert self.drafter is not None and self.frozen is not None, "n-grams have no session"
        return self.drafter.session(self.frozen, slots)

    @property
    def drafts(self) -> DraftVocab:
        """The tokens that it can draft."""
        assert self.vocab is not None, "n-grams have no vocabulary"
        return self.vocab

    def tapped(self, target: Target) -> Target:
        """The target as this candidate's training forward reads it: with the drafter's own taps."""
        return target if self.drafter is None else target.tapped(self.drafter.tap_ids)

    @property
    def max_positions(self) -> int | None:
        """Length of text that it was made for; None: any."""
        if self.model is not None:
            return context_length(self.model.config)
        return self.drafter.max_positions if self.drafter else None

    def proposer(self, target: Target, sampling: Sampling, verify: VerifyConfig, slots: int) -> Proposer:
        proposer = self._proposer(target, sampling, verify, slots)
        if not verify.adaptive and verify.off_above is None:
            return proposer
        return LimitedProposer(
            proposer, AdaptiveDepth(self.shape.levels) if verify.adaptive else None, verify.off_above
        )

    def _proposer(self, target: Target, sampling: Sampling, verify: VerifyConfig, slots: int) -> Proposer:
        if self.kind == NGRAM:
            return NgramProposer(verify.ngram_min, verify.ngram_max, verify.gamma)
        session = self.session(slots)
        if self.drafter is not None and tuple(target.tap_ids) != tuple(self.drafter.tap_ids):
            session = OfTaps(session, target, self.drafter.tap_ids)
        return DraftingProposer(session, self.drafts, self.shape, sampling, draws=verify.draws)

    def about(self) -> dict[str, Any]:
        """Its entry of ``drafters`` in report.json."""
        tree = "chain" if self.is_chain else "dynamic" if isinstance(self.shape, DynamicTree) else "static"
        sizes = {"levels": self.shape.levels, "nodes": self.shape.nodes}
        changed = None if self.tuned is None else {key: self.tuned.get(key) for key in ("kind", "perplexity")}
        known = {"draft_vocab": len(self.drafts) if self.drafter else None, "target": changed}
        return {"name": self.name, "kind": self.kind, "path": self.path, "tree": tree, **sizes, **known}

    @property
    def is_chain(self) -> bool:
        return isinstance(self.shape, StaticTree) and self.shape.nodes == self.shape.levels

    def with_shape(self, shape: Shape) -> Candidate:
        return replace(self, shape=shape)


def context_length(config: PretrainedConfig) -> int | None:
    """Longest text the positions of a model with this text config allow."""
    found = getattr(config, "max_position_embeddings", None)
    return None if found is None else int(found)


class OfTaps:
    """A session that is given the target's taps and reads some of them: drafters with other taps share one target."""

    def __init__(self, session: DraftSession, target: Target, taps: Sequence[int]) -> None:
        missing = sorted(set(taps) - set(target.tap_ids))
        if missing:
            raise EyasError(f"target.taps={list(target.tap_ids)}: the drafter reads {list(taps)}")
        width = target.hidden_size
        starts = [target.tap_ids.index(tap) * width for tap in taps]
        columns = [column for start in starts for column in range(start, start + width)]
        self.columns = torch.tensor(columns, dtype=torch.int64, device=target.device)
        self.session = session
        self.reset, self.move, self.expand = session.reset, session.move, session.expand

    def extend(
        self, slots: Sequence[int], counts: Sequence[int], taps: Tensor, final: Tensor, next_ids: Tensor
    ) -> Tensor:
        return self.session.extend(slots, counts, taps[:, self.columns], final, next_ids)


def shape_of(verify: VerifyConfig) -> Shape:
    """The tree that the ``verify`` section asks for."""
    if verify.tree == "chain":
        return chain(verify.gamma)
    if verify.tree == "dynamic":
        return DynamicTree(verify.gamma, verify.branch, verify.nodes)
    return classic(verify.tree) if verify.tree in CLASSIC else read_tree(verify.tree)


def trained(drafter: Drafter, frozen: FrozenTarget, verify: VerifyConfig, path: str | None = None) -> Candidate:
    """A trained drafter as a candidate; from here on it only drafts."""
    pack_linears(drafter.requires_grad_(False))
    shape = fit(shape_of(verify), "verify.tree", drafter.max_depth, len(drafter.vocab))
    return Candidate(drafter_name(path), "drafter", path, shape, drafter.eval(), frozen, vocab=drafter.vocab)


def independent(model: Target, target: Target, verify: VerifyConfig, path: str) -> Candidate:
    """A smaller model with the target's tokenizer as a candidate."""
    check_same_tokenizer(target, model)
    vocab = draft_vocab(target, model)
    shape = fit(shape_of(verify), "verify.tree", None, len(vocab))
    return Candidate(drafter_name(path), "model", path, shape, model=model, vocab=vocab)


def ngrams(verify: VerifyConfig) -> Candidate:
    return Candidate(NGRAM, NGRAM, None, chain(verify.gamma))


def drafter_name(path: str | None) -> str:
    """A name for tables: the run of a checkpoint or of its export, otherwise the last folder."""
    if path is None:
        return "drafter"
    parts = [part for part in Path(path.removeprefix(MODEL)).parts if part not in ("/", "..", ".")]
    while len(parts) > 1 and (parts[-1] in ("export", "checkpoints") or parts[-1].startswith("step_")):
        parts.pop()
    return parts[-1] if parts else path


def told_apart(names: Sequence[str]) -> list[str]:
    """The same with a number behind every name that is there before, or that another one has by itself."""
    found: list[str] = []
    for one in names:
        name, number = one, 1
        while name in found or (number > 1 and name in names):
            number += 1
            name = f"{one} ({number})"
        found.append(name)
    return found


def drafter_folder(path: str | None, run: Path) -> Path:
    """The checkpoint or export to measure; of a run directory its best checkpoint, or its newest."""
    source = Path(path) if path else run
    found = best_checkpoint(source)
    if found is not None:
        return found
    if path is None:
        raise EyasError(f"{run}: no checkpoint to measure; train first, or give drafter_path=FOLDER")
    return source


def load_drafter(source: Path, config: PretrainedConfig, target: str, device: str) -> Drafter:
    """A checkpoint or export of a drafter, checked against the target's (text) config. Raises EyasError."""
    try:
        drafter = open_drafter(source, target=plain_config(config, Path(target))).to(device)
    except EyasError as error:
        raise EyasError(f"drafter_path={source}: {error}; give a run, a checkpoint or an export") from error
    wanted = {"vocabulary": int(config.vocab_size), "hidden size": int(config.hidden_size)}
    found = {"vocabulary": drafter.vocab.size, "hidden size": drafter.target_hidden_size}
    for what, size in wanted.items():
        if found[what] != size:
            raise EyasError(
                f"drafter_path={source}: made for a {what} of {found[what]}, target.path={target} has {size}; "
                "it was trained for another target"
            )
    warn_of_target(source, target)
    return drafter


def warn_of_target(source: Path, target: str) -> None:
    """Say so if the run that a checkpoint or export lies in named another target: sizes alone don't tell. Not of what
    goes with a tuned target that is at hand."""
    changed = tuned(source)
    if changed and (changed["kind"] == WHOLE or is_tuned_by(Path(target), source)):
        return
    config = beside_run(source, CONFIG)
    try:
        trained_for = yaml.safe_load(config.read_text(encoding="utf-8"))["target"]["path"] if config else target
    except (OSError, ValueError, KeyError, TypeError, yaml.YAMLError):
        return
    if trained_for != target:
        log.warning(
            "drafter_path=%s: trained for target.path=%s; if %s is another model, little will be accepted",
            source, trained_for, target,
        )  # fmt: skip


def load_model(source: str, **how: Any) -> Target:
    """The independent draft model of ``model:TARGET``. Raises EyasError that names drafter_path."""
    try:
        return Target.load(source.removeprefix(MODEL), **how)
    except EyasError as error:
        raise EyasError(f"drafter_path={source}: {str(error).removeprefix('target.path=')}") from error
