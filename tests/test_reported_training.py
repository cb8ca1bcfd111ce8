"""Training that went wrong for other tools, from public reports, each with the right outcome: loop, targets, memory.

What is typed as a command is in tests/test_reported_runs.py, what takes several processes in
tests/test_reported_processes.py. These inputs and outcomes are held elsewhere already:

    Automodel PR#2260: draft_vocab_size of 0, -1, 4.0     test_conf.py, impossible_values_and_combinations_name_the_key
    Automodel PR#2260: an export without its d2t          test_portable.py, a_wrong_folder_is_named (below too)
    Automodel PR#3079: states of a mixture of experts     test_target.py, mixture_of_experts
    AngelSlim#173, EAGLE#138: one file, tied              test_target.py, frozen_tensors_read_from_files_equal_...
    AngelSlim#173, EAGLE#138: shards, untied              test_target.py, sharded_files
    EAGLE#139: prefix language_model.model.               test_target.py, text_part_of_a_multimodal_gemma
    speculators PR#184: no head, not tied                 test_target.py, missing_weights_are_refused
    vllm#9534: 8- and 4-bit layers, head left alone       test_quantize.py, features_are_the_quantised_models_own
    vllm#9534: a head that bitsandbytes quantised         test_quantize.py, a_quantised_head_is_refused
"""

from __future__ import annotations

import json
import math
from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from conf.options import check_drafter
from conf.schema import Config, JointConfig, OptimConfig
from data.chats.rows import inputs_of
from data.features.dump import dump
from data.features.manifest import Documents
from data.masks.examples import Example
from models.batch import Batch
from models.checkpoint import VOCAB_IDS
from models.drafter import TrainSpec
from models.eagle3 import Eagle3Drafter
from models.errors import EyasError
from models.load_frozen import load_frozen
from models.objective import Objective
from models.portable import load_export
from models.run_folder import file_digest
from models.target import Target
from models.tuned import WEIGHTS
from models.vocab import DraftVocab
from tests import test_joint_training as joint_training
from tests.drafters import random_batch, random_frozen, random_vocab
from tests.exports import exported, rewrite
from tests.methods import METHODS
from tests.test_trainer import InMemory, Stop, config, fit, make, weights
from tests.tiny import tiny_target
from train.tracking import read_metrics
from train.trainer import Trainer

# --- SafeAILab/EAGLE#340: rows with long prompts or padding weigh less ----------------------------------------

SHORT = 9  # tokens, of which the first three are the prompt: slots p = 2 .. 6


def row(mask: Tensor, own: slice) -> Batch:
    """A document whose features and tokens in ``own`` are always the same, and noise elsewhere."""
    frozen = random_frozen()
    batch, content = random_batch(frozen, [len(mask)], 5, mask), random_batch(frozen, [SHORT], 1)
    for name in ("input_ids", "taps", "final", "lse", "top1"):
        getattr(batch, name)[own] = getattr(content, name)
    return batch


def gradients(name: str, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss a slot and its gradient."""
    frozen = random_frozen()
    drafter = METHODS[name](frozen, random_vocab(40, 17)).eval()
    score = drafter(batch, frozen, TrainSpec(Objective(), 2))
    assert score.count.tolist() == [5, 4]
    loss = score.loss_sum / score.count[0]
    loss.backward()
    return loss.detach(), {n: p.grad for n, p in drafter.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(("name", "front"), [("eagle3", 0), ("mtp", 0), ("medusa", 0), ("medusa", 27)])
def test_padding_changes_no_loss(name: str, front: int) -> None:
    """The same row alone, and padded to four times its length: behind it, or before it where nothing is attended to."""
    own, mask = slice(front, front + SHORT), torch.zeros(4 * SHORT, dtype=torch.bool)
    mask[own] = torch.arange(SHORT) >= 3
    loss, wanted = gradients(name, row(mask[own], slice(0, SHORT)))
    padded, found = gradients(name, row(mask, own))
    torch.testing.assert_close(padded, loss, rtol=1e-6, atol=0)
    assert found.keys() == wanted.keys()
    for key, gradient in wanted.items():
        torch.testing.assert_close(found[key], gradient, rtol=1e-4, atol=1e-6, msg=f"{key}: {{}}".format)
    # What a step is divided by: x[p+1] and x[p+2] supervised, wherever that is in the document.
    examples = [Example([0] * len(m), m.tolist(), "memory") for m in (mask[own], mask)]
    assert Documents.of(examples).slots == [5, 5]


class Padded(InMemory):
    """Each document with three times its length behind it that is not supervised."""

    def batch(self, documents: Any, dtype: torch.dtype | None = None) -> Batch:
        found = super().batch(documents, dtype)
        sizes = found.cu_seqlens.diff().tolist()
        columns = {}
        for name in ("input_ids", "supervised", "taps", "final", "lse", "top1"):
            parts = getattr(found, name).split(sizes)
            columns[name] = torch.cat([torch.cat([p, torch.zeros(3, *p.shape).flatten(0, 1).to(p)]) for p in parts])
        return Batch(**columns, cu_seqlens=4 * found.cu_seqlens)


def test_padding_changes_no_step(tmp_path: Path) -> None:
    """Rows of 5, 9 and 20 tokens in one step, bare and padded: the same loss, gradient norm and weights."""
    found = {}
    for kind in (InMemory, Padded):
        source = kind(random_frozen(), [5, 9, 20])
        trainer = make_on(tmp_path / kind.__name__, config(steps=1, bin_tokens=1000, bins_per_step=1), source)
        fitted = trainer.fit()
        (told,) = read_metrics(trainer.run_dir / "metrics.jsonl", "train")
        assert told["slots"][0] == 1 + 5 + 16
        found[kind] = (told["loss"], told["grad_norm"], weights(fitted))
    (loss, norm, want), (padded_loss, padded_norm, have) = found.values()
    assert (padded_loss, padded_norm) == (pytest.approx(loss, rel=1e-6), pytest.approx(norm, rel=1e-5))
    for name, tensor in want.items():
        torch.testing.assert_close(have[name], tensor, rtol=1e-5, atol=1e-6)


def make_on(run: Path, cfg: Config, source: InMemory) -> Trainer:
    """A trainer of a linear drafter on these documents, with nothing held out."""
    plain = make(run, cfg)
    return Trainer(
        cfg, run, plain.accelerator, plain.drafter, plain.frozen, train=source, valid=None, content={"features": "a"}
    )


# --- transformers PR#8624, kohya-ss PR#2425: optimizer steps and micro-batches mixed up ------------------------


class Watched(InMemory):
    """Notes the documents in the order they are read."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.read: list[int] = []

    def batch(self, documents: Any, dtype: torch.dtype | None = None) -> Batch:
        self.read += documents
        return super().batch(documents, dtype)


HUNDRED: dict[str, Any] = {"steps": None, "epochs": 2, "bin_tokens": 6, "bins_per_step": 4, "save_every": 10}


def reads(run: Path, stop_at: int | None = None, count: int = 100, **train: Any) -> list[int]:
    """The documents that a run reads, one a micro-batch, until it is broken off in front of an optimizer step."""
    cfg = config(**(HUNDRED | {"eval_every": 10} | train))
    source = Watched(random_frozen(), [6] * count)
    fit_until(make_on(run, cfg, source), stop_at)
    return source.read


def fit_until(trainer: Any, stop_at: int | None) -> None:
    """Train to the end, or break off in front of an optimizer step."""
    plain = trainer._train_step

    def step(number: int) -> None:
        if number == stop_at:
            raise Stop
        plain(number)

    trainer._train_step = step
    with nullcontext() if stop_at is None else pytest.raises(Stop):
        trainer.fit()


def test_a_resumed_run_reads_on_where_it_stopped(tmp_path: Path) -> None:
    """100 micro-batches an epoch by four: step 30 begins with micro-batch 20 of the second epoch."""
    whole = reads(tmp_path / "whole")
    assert len(whole) == 200 and Counter(whole[:100]) == Counter(whole[100:]) == Counter(range(100))
    assert whole[:100] != whole[100:]
    before = reads(tmp_path / "run", stop_at=30)
    after = reads(tmp_path / "run")
    assert len(before) == 120 and before + after == whole
    epochs = {row["step"]: row["epoch"] for row in read_metrics(tmp_path / "run/metrics.jsonl", "train")}
    assert list(epochs) == list(range(1, 51))  # 50 steps in all, 20 of them after the break
    assert (epochs[30], epochs[31], epochs[50]) == pytest.approx((1.2, 1.24, 2.0))


def test_another_accumulation_is_not_gone_on_with(tmp_path: Path) -> None:
    """By three instead of by four the steps would be other ones (the command names the key: test_reported_runs.py)."""
    reads(tmp_path, stop_at=30)
    with pytest.raises(EyasError, match=r"begun with other input, number of steps \(50, now 67\)"):
        reads(tmp_path, bins_per_step=3)


@pytest.mark.parametrize(("epochs", "bins"), [(1, [5]), (2, [8, 2]), (0.5, [3])])
def test_a_window_that_the_data_does_not_fill_is_a_step(epochs: float, bins: list[int], tmp_path: Path) -> None:
    """By eight with five batches: what there is makes the step, averaged over what there is. Half of five is three."""
    read = reads(tmp_path, count=5, bins_per_step=8, epochs=epochs)
    rows = read_metrics(tmp_path / "metrics.jsonl", "train")
    assert len(read) == sum(bins) and set(read[:5]) <= set(range(5))
    assert [row["slots"][0] for row in rows] == [2 * n for n in bins]  # two of each document of six tokens
    if bins == [5]:  # as one bin of all five
        reads(tmp_path / "one", count=5, bins_per_step=1, bin_tokens=30, epochs=1)
        ours, one = (
            load_file(run / "checkpoints/step_00000001/model.safetensors") for run in (tmp_path, tmp_path / "one")
        )
        assert all(torch.allclose(ours[name].double(), one[name].double(), atol=1e-5) for name in one)


@pytest.mark.parametrize("weight", [1e9, 1e-9])
def test_weights_that_no_epoch_could_be_planned_with(weight: float) -> None:
    """A billion copies of each row fill the memory; with a billionth the first row comes after a billion epochs."""
    assert [found.weight for found in inputs_of([{"path": "a", "weight": 1000}, {"path": "b", "weight": 1e-3}])] == [
        1000,
        1e-3,
    ]
    with pytest.raises(EyasError, match=r"^data\.path=.*a weight must be a number above 0, from 0.001 to 1000"):
        inputs_of({"path": "a", "weight": weight})


# --- Automodel PR#2260, verl-SpeCo PR#66: draft vocabularies that make no sense, or are guessed ----------------


@pytest.mark.parametrize("size", [0, -1, 4.0, True, "4", math.nan])
def test_a_draft_vocabulary_is_a_number_of_tokens(size: Any) -> None:
    check_drafter({"_target_": "models.eagle3.Eagle3Drafter", "draft_vocab_size": 4})
    with pytest.raises(EyasError, match=r"^drafter\.draft_vocab_size="):
        check_drafter({"_target_": "models.eagle3.Eagle3Drafter", "draft_vocab_size": size})


def test_a_missing_token_map_is_never_guessed(tmp_path: Path) -> None:
    """Deleted before the run goes on, and in a served folder; without it "the first 17 ids" would look just as good."""
    cfg = config(steps=4, save_every=2, eval_every=2, keep_last=1)
    last = fit(tmp_path / "run", cfg).checkpoint.parent / "step_00000004"
    file, state = last / "model.safetensors", json.loads((last / "state.json").read_text())
    tensors = load_file(file)
    assert torch.equal(tensors.pop(VOCAB_IDS), random_vocab(40, 17).ids)
    save_file(tensors, file)
    (last / "state.json").write_text(json.dumps(state | {"files": state["files"] | {file.name: file_digest(file)}}))
    with pytest.raises(EyasError, match=rf"step_00000004/model\.safetensors: has no tensor {VOCAB_IDS}"):
        fit(tmp_path / "run", cfg)
    exported(tmp_path / "export")
    rewrite(tmp_path / "export", lambda tensors, about: [tensors.pop(name) for name in ("d2t", "t2d")])
    with pytest.raises(EyasError, match="d2t: missing; 12 draft tokens can't be mapped to the target's 40"):
        load_export(tmp_path / "export")


def test_the_share_of_the_target_that_can_not_be_drafted_is_reported(tmp_path: Path) -> None:
    """mass: the target's probability inside the draft vocabulary, a mean over slots; what it lacks of 1 is outside."""
    trainer = make(tmp_path, config(steps=1, bin_tokens=1000, bins_per_step=1, depths=1))
    trainer.fit()
    shares = []
    for batch in trainer.train_source.documents:  # type: ignore[attr-defined]
        p = torch.arange(2, max(2, batch.num_tokens - 2))  # the teacher is the target at p + 1
        full = (batch.final[p + 1].double() @ trainer.frozen.head.double().T).softmax(-1)
        shares += full[:, random_vocab(40, 17).ids].sum(-1).tolist()
    (told,) = read_metrics(tmp_path / "metrics.jsonl", "train")
    assert told["mass"] == pytest.approx([sum(shares) / len(shares)], rel=1e-5)
    assert 0.2 < told["mass"][0] < 0.8


# --- Medusa#74, #85: heads that are not warmed up first, one learning rate for all ------------------------------


@pytest.mark.parametrize("warmup", [0, 5])
def test_heads_first_then_both_at_rates_of_their_own(warmup: int, tmp_path: Path) -> None:
    """Eight steps, broken off on both sides of the border between the stages; the heads' rate is four times the
    base's."""
    folder = tiny_target(tmp_path / "target", layers=3)
    cfg = joint_training.config(
        JointConfig(backbone="full", warmup=warmup, lr=1e-3), steps=8, save_every=1, eval_every=8, keep_last=9
    )
    cfg.optim = OptimConfig(lr=4e-3, warmup=0, schedule="constant")
    run = tmp_path / "run"
    for stop in (4, 6, None):
        fit_until(joint_training.make(folder, run, cfg), stop)
    base = load_file(folder / "model.safetensors")
    for number in range(1, 9):
        found = load_file(run / f"checkpoints/step_{number:08d}" / WEIGHTS)
        assert {torch.equal(found[name], base[name]) for name in base} == {number <= warmup}, number
    rows = read_metrics(run / "metrics.jsonl", "train")
    assert [row["lr"] for row in rows] == pytest.approx([4e-3] * 8)
    assert [row["lr_target"] for row in rows] == pytest.approx([0.0] * warmup + [1e-3] * (8 - warmup))


# --- AngelSlim#173: targets in other files -----------------------------------------------------------------------


def test_pickled_weights_of_a_target_are_refused_at_once(tmp_path: Path) -> None:
    """Nothing is unpickled: the first look into the folder says so, before any data is read."""
    folder = tiny_target(tmp_path)
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    with pytest.raises(EyasError, match=r"^target\.path=.*no \.safetensors file\. Eyas reads weights from safetensors"):
        load_frozen(folder)


# --- vllm#9534, speculators PR#337, sglang PR#27883: quantised heads and states beyond fp16 ----------------------


def test_a_head_of_stored_numbers_and_scales_is_refused(tmp_path: Path) -> None:
    """int8 with a scale a row, as quantisers leave it: numbers up to 127 are not the head."""
    folder = tiny_target(tmp_path)
    tensors = load_file(folder / "model.safetensors")
    head = tensors["lm_head.weight"]
    scale = head.abs().amax(1, keepdim=True) / 127
    tensors |= {"lm_head.weight": (head / scale).round().to(torch.int8), "lm_head.weight_scale": scale}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    for read in (load_frozen, lambda folder: Target.load(str(folder))):
        with pytest.raises(EyasError, match=r"target\.path=.*lm_head\.weight.*(I8|int8)"):
            read(folder)


def loud(folder: Path) -> Path:
    """A target whose states, and so the tapped ones, reach about 1e5; its final norm brings them down."""
    tiny_target(folder)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.embed_tokens.weight"] *= 1e5 / tensors["model.embed_tokens.weight"].abs().max()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_loud_states_train_or_are_told(tmp_path: Path) -> None:
    """In float32, kept in bfloat16: a finite loss. In float16, which ends at 65504: the document by name, no store."""
    folder, examples = loud(tmp_path / "target"), [Example(list(range(3, 15)), [i > 3 for i in range(12)], "row 7")]
    target = Target.load(str(folder))
    store = dump(target, examples, tmp_path / "store", dtype="bfloat16")
    found = store.read(0)
    (own,) = target.features([torch.tensor(examples[0].input_ids)])
    assert float(found.taps.abs().max()) > 65504 and torch.equal(found.taps, own.taps.bfloat16())
    teacher = own.final.double() @ target.frozen().head.double().T
    torch.testing.assert_close(found.lse.double(), teacher.logsumexp(-1), rtol=1e-5, atol=1e-5)
    columns = [found.taps.float(), found.final.float(), found.lse, found.top1.long()]
    bounds = torch.tensor([0, 12], dtype=torch.int32)
    batch = Batch(found.input_ids.long(), found.supervised, bounds, *columns)
    for dtype in (torch.float32, torch.bfloat16):
        drafter = Eagle3Drafter.create(target.frozen(), DraftVocab.full(288), target.tap_ids)
        with torch.autocast("cpu", dtype, enabled=dtype == torch.bfloat16):
            loss = drafter(batch, target.frozen(), TrainSpec(Objective(), 3)).loss_sum
        loss.backward()
        trained = [p for p in drafter.parameters() if p.requires_grad]
        assert math.isfinite(float(loss.detach())) and all(
            bool(p.grad.isfinite().all()) for p in trained if p.grad is not None
        )
    half = Target.load(str(folder), dtype="float16")
    with pytest.raises(EyasError, match=r"row 7.*NaN or infinite"):
        dump(half, examples, tmp_path / "half", dtype="bfloat16")
    assert not list((tmp_path / "half").glob("*.safetensors"))


# --- Model-Optimizer#593, Automodel PR#2285, #2310, #2326: the target among what is trained and saved ------------


@pytest.mark.parametrize("name", ["eagle1", "eagle3"])
def test_only_the_drafter_is_trained_saved_and_has_a_state(name: str, tmp_path: Path) -> None:
    """Also with weight decay, which would shrink a frozen embedding: that is bit-equal afterwards."""
    cfg = config(steps=2, depths=2, save_every=2, eval_every=2)
    cfg.optim = OptimConfig(lr=1e-2, warmup=0, weight_decay=0.5)
    plain = make(tmp_path, cfg)
    frozen = plain.frozen
    before = [t.clone() for t in (frozen.embedding, frozen.head)]
    drafter = METHODS[name](frozen, random_vocab(40, 17))
    fixed = {n: p.detach().clone() for n, p in drafter.named_parameters() if not p.requires_grad}
    trained = {n for n, p in drafter.named_parameters() if p.requires_grad}
    given: dict[str, Any] = {"train": plain.train_source, "valid": None, "content": {"features": "a"}}
    folder = Trainer(cfg, tmp_path, plain.accelerator, drafter, frozen, **given).fit().checkpoint
    saved = load_file(folder / "model.safetensors")
    assert set(saved) == {*drafter.state_dict(), VOCAB_IDS} and trained <= set(saved)
    assert not any(
        t.shape in ((40, 32), (32, 40)) for t in saved.values()
    )  # a row or column for each token of the target
    assert all(torch.equal(saved[n], tensor) for n, tensor in fixed.items())
    values = sum(t.numel() * t.element_size() for t in saved.values())
    assert (folder / "model.safetensors").stat().st_size < values + 4096  # the header beside
    states = [load_file(file) for file in folder.glob("optimizer-*.safetensors")]
    assert {key.rpartition("/")[0] for state in states for key in state} == trained
    assert all(torch.equal(old, now) for old, now in zip(before, (frozen.embedding, frozen.head), strict=True))
    assert not frozen.embedding.requires_grad and not frozen.head.requires_grad
