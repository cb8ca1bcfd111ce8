"""What every method must do in training: exact gradients, a signal to learn from, runs that go on as if unbroken."""

from __future__ import annotations

import multiprocessing
import random
import signal
import time
from collections.abc import Callable, Iterator
from functools import cache
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load, load_file
from torch import Tensor

from models.batch import Batch
from models.drafter import Drafter, TrainSpec
from models.frozen import FrozenTarget
from models.objective import LOSSES, Objective
from models.target import Target
from models.vocab import DraftVocab
from tests.drafters import random_batch, random_frozen, random_vocab
from tests.methods import METHODS, depths_of, fresh
from tests.naive_loss import in_float64, naive_loss, target_logits
from tests.resume_worker import STEPS, train_until_killed, trainer_of
from tests.tiny import tiny_target
from train.tracking import CLOCKED, METRICS, read_metrics

each_method = pytest.mark.parametrize("name", METHODS)


# --- the objective --------------------------------------------------------------------------------------------

OBJECTIVES = {loss: Objective(loss, decay=0.7, chunk=7) for loss in LOSSES}
OBJECTIVES["ce + top 3"] = Objective("ce", decay=0.7, chunk=7, top_k=3, top_k_weight=0.5)


def target_tensors(frozen: FrozenTarget) -> list[Tensor]:
    found = [frozen.embedding, frozen.head, frozen.head_bias, frozen.final_norm, *frozen.last_layer.values()]
    return [tensor for tensor in found if tensor is not None]


@pytest.mark.parametrize("objective", OBJECTIVES)
@each_method
def test_loss_and_gradients_are_those_of_float64(name: str, objective: str) -> None:
    frozen = random_frozen(1)
    if objective == "lk":  # a target whose logits have a bias, a scale and a soft cap
        frozen.head_bias = torch.randn(40, generator=torch.Generator().manual_seed(5))
        frozen.scale, frozen.softcap = 0.5, 3.0
    drafter = METHODS[name](frozen, random_vocab(40, 17)).eval()
    depths, batch = depths_of(drafter, 4), random_batch(frozen, [9, 1, 23], seed=5)
    batch.lse.copy_(target_logits(batch, frozen).logsumexp(-1))
    exact, wide, exact_frozen = in_float64(drafter, batch, frozen)
    want = naive_loss(exact, wide, exact_frozen, OBJECTIVES[objective], depths)
    want.backward()
    score = drafter(batch, frozen, TrainSpec(OBJECTIVES[objective], depths))
    score.loss_sum.backward()
    torch.testing.assert_close(score.loss_sum.double(), want, rtol=1e-5, atol=1e-5)
    trained = 0
    for (key, mine), theirs in zip(drafter.named_parameters(), exact.parameters(), strict=True):
        if not mine.requires_grad:
            assert mine.grad is None, key
            continue
        assert mine.grad is not None and theirs.grad is not None, f"{key} is trained but has no gradient"
        assert bool(theirs.grad.any()), f"the gradient of {key} is zero"
        allowed = 1e-4 * float(theirs.grad.abs().max())
        torch.testing.assert_close(mine.grad.double(), theirs.grad, rtol=1e-3, atol=allowed, msg=f"{key}: {{}}".format)
        trained += 1
    assert trained > 0
    assert not any(tensor.requires_grad or tensor.grad is not None for tensor in target_tensors(frozen))


@each_method
def test_the_target_is_no_part_of_the_drafter(name: str) -> None:
    """Neither its tensors nor copies of them are parameters, buffers or in the state dict of a random drafter."""
    frozen = random_frozen()
    drafter = METHODS[name](frozen, random_vocab(40, 17))
    theirs = target_tensors(frozen) + [frozen.rows(drafter.vocab)[0]]
    for key, own in [*drafter.state_dict().items(), *drafter.named_parameters(), *drafter.named_buffers()]:
        for tensor in theirs:
            assert own.untyped_storage().data_ptr() != tensor.untyped_storage().data_ptr(), key
            assert own.shape != tensor.shape or not torch.equal(own, tensor), key


# --- a signal to learn from -----------------------------------------------------------------------------------

TALKS = {
    "Capital of Peru?": "Lima, of course.",
    "A prime above 20?": "23 is one.",
    "Hello in French?": "Bonjour!",
    "Legs of an ant?": "It has six.",
    "What do trees breathe?": "Carbon dioxide",
    "Who wrote Faust?": "J. W. Goethe",
    "When does water boil?": "100 degrees",
    "Not early?": "Late, I think.",
}


@pytest.fixture(scope="module")
def talks(tmp_path_factory: pytest.TempPathFactory) -> tuple[FrozenTarget, Batch]:
    """Eight short conversations as a tiny target reads them."""
    folder = tiny_target(tmp_path_factory.mktemp("target"), layers=4, hidden=96, vocab=264, initializer_range=0.4)
    target = Target.load(str(folder))
    rows, supervised = [], []
    for question, answer in TALKS.items():
        chat = [{"role": "user", "content": question}]
        text = target.tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        prompt, reply = (target.tokenizer(t, add_special_tokens=False)["input_ids"] for t in (text, answer))
        rows.append(torch.tensor([*prompt, *reply, 2]))
        supervised.append(torch.arange(len(rows[-1])) >= len(prompt))
    found = [torch.cat(column) for column in zip(*target.features(rows), strict=True)]
    cu = torch.tensor([0, *map(len, rows)]).cumsum(0).int()
    return target.frozen(), Batch(torch.cat(rows), torch.cat(supervised), cu, *found)


@each_method
def test_eight_conversations_are_learned_by_heart(name: str, talks: tuple[FrozenTarget, Batch]) -> None:
    frozen, batch = talks
    drafter = fresh(name, frozen, DraftVocab.full(frozen.vocab_size)).eval()  # no noise: that is made against this
    spec, steps = TrainSpec(Objective(), depths_of(drafter, 2)), 160
    optimizer = torch.optim.AdamW(drafter.parameters(), weight_decay=0.0)
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = 1e-2 * (1 - step / steps)
        score = drafter(batch, frozen, spec)
        accuracy = float(score.match[0] / score.count[0])
        assert step or accuracy < 0.5, "it knows them already"
        if accuracy > 0.98:
            break
        (score.loss_sum / score.count[0]).backward()
        torch.nn.utils.clip_grad_norm_(drafter.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        score = drafter(batch, frozen, spec)
    assert float(score.count[0]) == sum(map(len, TALKS.values()))  # a byte is a token, and an end follows
    assert float(score.match[0] / score.count[0]) > 0.95, f"{accuracy:.3f} in the last step"


# --- killed and run again -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def processes() -> Iterator[ForkServerContext]:
    """New processes that have already imported what training needs."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.resume_worker"])
    yield context


def kill_at(processes: ForkServerContext, name: str, run: Path, step: int) -> None:
    """SIGKILL as soon as the row of a step at or after ``step`` is written."""
    process = processes.Process(target=train_until_killed, args=(name, run), daemon=True)
    process.start()
    metrics = run / METRICS
    while process.is_alive() and not (metrics.exists() and any(r["step"] >= step for r in read_metrics(metrics))):
        time.sleep(0.001)
    process.kill()
    process.join()
    assert process.exitcode == -signal.SIGKILL, "it ended on its own"


class Stop(Exception):
    pass


def break_off(trainer: Any, step: int) -> None:
    """Raise in front of an optimizer step."""
    plain = trainer._train_step

    def stopping(number: int) -> None:
        if number == step:
            raise Stop
        plain(number)

    trainer._train_step = stopping
    with pytest.raises(Stop):
        trainer.fit()


def outcome(run: Path) -> dict[str, Any]:
    """Weights, optimizer state and logged rows at the end of a run."""
    last = run / f"checkpoints/step_{STEPS:08d}"
    optimizer = load_file(last / "optimizer-00001.safetensors")
    rows = [{k: v for k, v in row.items() if k not in CLOCKED} for row in read_metrics(run / METRICS)]
    assert optimizer
    return {"weights": (last / "model.safetensors").read_bytes(), "rows": rows, **optimizer}


def assert_same(found: dict[str, Any], want: dict[str, Any]) -> None:
    assert found.keys() == want.keys()
    for key, value in want.items():
        same = torch.equal(found[key], value) if isinstance(value, Tensor) else found[key] == value
        assert same, f"{key} differs from an unbroken run's"


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[str, Any]]:
    """The outcome of an unbroken run of a method."""

    @cache
    def run(name: str) -> dict[str, Any]:
        folder = tmp_path_factory.mktemp(name)
        trainer_of(name, folder).fit()
        return outcome(folder)

    return run


@each_method
def test_killed_and_resumed_equals_unbroken(
    name: str, tmp_path: Path, processes: ForkServerContext, unbroken: Callable[[str], dict[str, Any]]
) -> None:
    """SIGKILL at a random step, then run to the end: bit-equal weights and optimizer state."""
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    kill_at(processes, name, tmp_path, random.Random(seed).randrange(1, STEPS - 1))
    assert not (tmp_path / f"checkpoints/step_{STEPS:08d}").exists()
    trainer_of(name, tmp_path).fit()
    assert_same(outcome(tmp_path), unbroken(name))


@each_method
def test_broken_off_and_resumed_equals_unbroken(
    name: str, tmp_path: Path, unbroken: Callable[[str], dict[str, Any]]
) -> None:
    """Before the first checkpoint, right behind one, and inside a window of logged steps."""
    for step in (1, 3, 7):
        break_off(trainer_of(name, tmp_path), step)
    trainer_of(name, tmp_path).fit()
    assert_same(outcome(tmp_path), unbroken(name))


@each_method
def test_training_moves_every_trainable_tensor(name: str, unbroken: Callable[[str], dict[str, Any]]) -> None:
    trained = load(unbroken(name)["weights"])
    before: Drafter = METHODS[name](random_frozen(), random_vocab(40, 17))
    for key, old in before.named_parameters():
        assert torch.equal(old, trained[key]) != old.requires_grad, key
