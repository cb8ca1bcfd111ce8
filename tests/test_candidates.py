"""What drafter_path names, and how several of them share one target."""

from __future__ import annotations

import copy
import random
from collections import deque
from pathlib import Path

import pytest
import torch

from conf.schema import VerifyConfig
from eval.candidates import (
    Candidate,
    drafter_name,
    independent,
    load_drafter,
    load_model,
    told_apart,
    trained,
)
from eval.verify.sampling import Sampling
from eval.verify.speculate import Decoder, Generation, Limits, Request, generate_all
from models.checkpoint import save_drafter
from models.eagle3 import Eagle3Drafter
from models.errors import EyasError
from models.target import Target
from models.vocab import DraftVocab
from tests.tiny import tiny_target

VERIFY = VerifyConfig(gamma=3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_target(tmp_path_factory.mktemp("target"), layers=4, hidden=32, vocab=270)


def drafter_of(target: Target, taps: tuple[int, ...], seed: int = 0) -> Eagle3Drafter:
    return Eagle3Drafter.create(target.frozen(), DraftVocab.full(target.vocab_size), taps, seed=seed)


def drafted(target: Target, candidate: Candidate, sampling: Sampling, slots: int) -> list[Generation]:
    found: dict[int, Generation] = {}
    asked = deque(Request([1, 40 + i, 50], random.Random(i).random, i) for i in range(3))
    decoder = Decoder(target, sampling, Limits(16))
    proposer = candidate.proposer(target, sampling, VERIFY, slots)
    generate_all(decoder, proposer, asked, slots, done=lambda r, out: found.update({r.about: out}))
    return [found[i] for i in range(3)]


@pytest.mark.parametrize("taps", [(1, 2, 3), (0, 3), (4,)])
def test_drafters_with_other_taps_share_a_target(folder: Path, taps: tuple[int, ...]) -> None:
    """Under a target with all taps a drafter drafts what it drafts under a target with its own."""
    everything, own = Target.load(str(folder), taps=(0, 1, 2, 3, 4)), Target.load(str(folder), taps=taps)
    drafter, sampling = drafter_of(own, taps), Sampling(1.0)
    shared, alone = (
        drafted(target, trained(drafter, target.frozen(), VERIFY), sampling, 2) for target in (everything, own)
    )
    assert [out.tokens for out in shared] == [out.tokens for out in alone]
    assert [out.rounds for out in shared] == [out.rounds for out in alone]
    assert sum(r.accepted for out in alone for r in out.rounds) > 0


def test_a_target_without_the_drafters_taps_is_refused(folder: Path) -> None:
    target = Target.load(str(folder), taps=(1, 2, 3))
    candidate = trained(drafter_of(target, (0, 2, 3)), target.frozen(), VERIFY)
    with pytest.raises(EyasError, match=r"target.taps=\[1, 2, 3\]: the drafter reads \[0, 2, 3\]"):
        candidate.proposer(target, Sampling(0.0), VERIFY, 1)


def test_a_draft_model_that_is_the_target_is_always_right(folder: Path) -> None:
    target = Target.load(str(folder))
    candidate = independent(Target.load(str(folder)), target, VERIFY, f"model:{folder}")
    assert candidate.about() | {"name": "x"} == {
        "target": None, "draft_vocab": None,
        "name": "x", "kind": "model", "path": f"model:{folder}", "tree": "chain", "levels": 3, "nodes": 3,
    }  # fmt: skip
    for out in drafted(target, candidate, Sampling(0.0), 2):
        assert all(r.accepted == 3 for r in out.rounds)


def test_trees_are_trimmed_to_the_draft_vocabulary(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    target = Target.load(str(folder))
    few = Eagle3Drafter.create(target.frozen(), DraftVocab(torch.tensor([3, 7]), target.vocab_size), target.tap_ids)
    (tmp_path / "tree.json").write_text("[[0], [1], [2], [0, 0], [0, 2]]")
    verify = VerifyConfig(tree=str(tmp_path / "tree.json"))
    candidate = trained(few, target.frozen(), verify)
    assert candidate.about() | {"path": None} == {
        "target": None, "draft_vocab": 2,
        "name": "drafter", "kind": "drafter", "path": None, "tree": "static", "levels": 2, "nodes": 3,
    }  # fmt: skip
    assert "2 nodes are left out" in caplog.text
    assert len(drafted(target, candidate, Sampling(0.0), 1)) == 3


def test_names_are_short_and_told_apart() -> None:
    assert drafter_name("outputs/mine/checkpoints/step_00000200") == "mine"
    assert drafter_name("outputs/mine/export") == "mine"
    assert drafter_name("model:/hub/SmolLM2-135M/") == "SmolLM2-135M"
    assert drafter_name("export") == "export" and drafter_name(None) == "drafter"
    assert told_apart(["ngram", "ngram", "ngram"]) == ["ngram", "ngram (2)", "ngram (3)"]
    assert told_apart(["x", "x (2)", "x", "x (2)"]) == ["x", "x (2)", "x (3)", "x (2) (2)"]


def test_a_drafter_for_another_target_is_refused(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    target = Target.load(str(folder))
    save_drafter(drafter_of(target, (1, 2, 3)), tmp_path)
    assert load_drafter(tmp_path, target.config, "mine", "cpu").vocab.size == 270
    for key, size, what in (("hidden_size", 64, "hidden size of 32"), ("vocab_size", 300, "vocabulary of 270")):
        config = copy.deepcopy(target.config)
        setattr(config, key, size)
        with pytest.raises(EyasError, match=f"drafter_path=.*: made for a {what}, target.path=mine has {size}"):
            load_drafter(tmp_path, config, "mine", "cpu")
    with pytest.raises(EyasError, match="drafter_path=.*nothing.*give a run, a checkpoint or an export"):
        load_drafter(tmp_path / "nothing", target.config, "mine", "cpu")
    assert "trained for" not in caplog.text
    (tmp_path / "config.yaml").write_text("target: {path: other}")
    load_drafter(tmp_path, target.config, "mine", "cpu")
    assert "trained for target.path=other; if mine is another model" in caplog.text
    with pytest.raises(EyasError, match="drafter_path=model:/nowhere"):
        load_model("model:/nowhere", dtype="float32")
