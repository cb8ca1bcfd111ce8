"""Activations that are made again in the backward pass: the same numbers, and layers that really run again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.nn.parallel import DistributedDataParallel

from models.batch import Batch
from models.drafter import Drafter, TrainSpec
from models.frozen import FrozenTarget
from models.joint import JointModel
from models.objective import Objective
from models.target import Target
from models.vocab import DraftVocab
from tests.drafters import random_batch, random_frozen, random_vocab
from tests.methods import METHODS, depths_of
from tests.tiny import tiny_target

LENGTHS = [9, 31, 2, 17]
DEPTHS = 4
LORA: dict[str, Any] = {"rank": 3, "alpha": 6, "dropout": 0.5}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_target(tmp_path_factory.mktemp("recompute") / "target", layers=3)


def joint(folder: Path, method: str, lora: dict[str, Any] | None) -> tuple[JointModel, FrozenTarget]:
    torch.manual_seed(0)
    target = Target.load(str(folder))
    frozen = target.frozen()
    vocab = DraftVocab(torch.arange(0, target.vocab_size, 3), target.vocab_size)
    model = JointModel(target, METHODS[method](frozen, vocab), lora=lora)
    for parameter in model.trained_backbone():
        parameter.data.add_(0.05 * torch.randn(parameter.shape))  # fresh adapters would do nothing
    return model.train(), frozen


def tokens(supervised: bool = True) -> Batch:
    """Documents without features."""
    total = sum(LENGTHS)
    generator = torch.Generator().manual_seed(1)
    mask = torch.rand(total, generator=generator) < 0.9 if supervised else torch.zeros(total, dtype=torch.bool)
    bounds, zeros = torch.tensor([0, *LENGTHS]).cumsum(0).int(), torch.zeros(total)
    ids = torch.randint(5, 280, (total,), generator=generator)
    return Batch(ids, mask, bounds, zeros[:, None][:, :0], zeros[:, None][:, :0], zeros, zeros.long())


def spec_for(drafter: Drafter, **options: Any) -> TrainSpec:
    return TrainSpec(Objective(chunk=7, depth_keep=0.8), depths_of(drafter, DEPTHS), seed=3, **options)


@contextmanager
def calls(module: nn.Module) -> Iterator[list[str]]:
    """The names of the linear layers of ``module``, in the order of their calls."""
    found: list[str] = []

    def note(name: str) -> Any:
        return lambda *_: found.append(name)

    hooks = [m.register_forward_pre_hook(note(n)) for n, m in module.named_modules() if isinstance(m, nn.Linear)]
    yield found
    for hook in hooks:
        hook.remove()


def step(module: nn.Module, batch: Batch, frozen: FrozenTarget, spec: TrainSpec) -> tuple[dict[str, Tensor], int]:
    """Loss and gradients by name; and how many linear layers ran in the backward pass."""
    module.zero_grad()
    torch.manual_seed(4)  # noise and dropout
    with calls(module) as found:
        loss = module(batch, frozen, spec).loss_sum
        before = len(found)
        loss.backward()
        return {"loss": loss.detach()} | {
            name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None
        }, len(found) - before


def assert_same(one: dict[str, Tensor], two: dict[str, Tensor]) -> None:
    assert one.keys() == two.keys() and len(one) > 1
    for name, value in one.items():
        assert torch.equal(value, two[name]), name


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("method", sorted(METHODS))
def test_every_method_learns_the_same(method: str, bf16: bool) -> None:
    """Noise, thinned depths and products in bfloat16 included."""
    frozen = random_frozen()
    drafter, batch = METHODS[method](frozen, random_vocab(40, 17)).train(), random_batch(frozen, LENGTHS)
    with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        kept, none = step(drafter, batch, frozen, spec_for(drafter))
        made, again = step(drafter, batch, frozen, spec_for(drafter, recompute=True))
    assert_same(kept, made)
    assert none == 0 and again >= depths_of(drafter, DEPTHS)  # a layer for each depth, at least


@pytest.mark.parametrize("lora", [None, LORA], ids=["full", "lora"])
@pytest.mark.parametrize("method", ["eagle3", "mtp_sequential"])
def test_so_does_a_target_that_is_trained_along(folder: Path, method: str, lora: dict[str, Any] | None) -> None:
    """The taps are those of the forward, dropout falls on the same numbers again."""
    model, frozen = joint(folder, method, lora)
    options = {"lm_weight": 0.1, "draft_weight": 0.5}
    kept, none = step(model, tokens(), frozen, spec_for(model.drafter, **options))
    with calls(model.backbone) as found:
        made, _ = step(model, tokens(), frozen, spec_for(model.drafter, recompute=True, **options))
    assert_same(kept, made)
    assert none == 0
    assert all(found.count(name) == 2 for name in set(found))  # the layers' own, forward and backward
    other = step(model, tokens(), frozen, spec_for(model.drafter, **options))[0]
    assert_same(kept, other)  # and nothing of it is left in the target
    assert not any("forward" in vars(layer) for layer in model.target.model.modules())


def test_nothing_is_kept_to_be_made_again_without_gradient(folder: Path) -> None:
    model, frozen = joint(folder, "eagle3", None)
    with torch.no_grad(), calls(model) as found:
        first = model(tokens(), frozen, spec_for(model.drafter, recompute=True)).loss_sum
        ran = len(found)
        assert torch.equal(first, model(tokens(), frozen, spec_for(model.drafter)).loss_sum)
    assert ran and len(found) == 2 * ran


def test_less_is_held_for_the_backward_pass() -> None:
    """By the numbers that autograd saves outside the parts: those of the inside go."""
    frozen = random_frozen()
    drafter, batch = METHODS["eagle3"](frozen, random_vocab(40, 17)), random_batch(frozen, [200])
    held = {}
    for recompute in (False, True):
        kept: dict[int, int] = {}

        def note(tensor: Tensor, kept: dict[int, int] = kept) -> Tensor:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            drafter(batch, frozen, TrainSpec(Objective(), 4, recompute=recompute))
        held[recompute] = sum(kept.values())
    assert held[True] < held[False] / 2


def test_ddp_finds_its_gradients(folder: Path) -> None:
    """One process is enough: DDP walks the same graph for unused parameters, and waits for the same gradients."""
    model, frozen = joint(folder, "medusa", None)
    spec = spec_for(model.drafter, lm_weight=0.1, recompute=True)
    plain = step(model, tokens(), frozen, spec)[0]
    torch.distributed.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        wrapped = DistributedDataParallel(model, find_unused_parameters=True)
        found = step(wrapped, tokens(), frozen, spec)[0]
    finally:
        torch.distributed.destroy_process_group()
    assert_same(plain, {name.removeprefix("module."): value for name, value in found.items()})


# --- weights that are there only while their layer runs (ZeRO-3) --------------------------------------------


@contextmanager
def there_while_running(model: nn.Module, always: list[nn.Parameter]) -> Iterator[None]:
    """Every layer's weights are empty but while it runs; those of ``always`` stay."""
    stays = {id(p) for p in always}
    hooks = []
    for layer in model.modules():
        own = {p: p.data for p in layer.parameters(recurse=False) if id(p) not in stays}

        def fetch(*_: Any, own: dict[nn.Parameter, Tensor] = own) -> None:
            for parameter, data in own.items():
                parameter.data = data

        def release(*_: Any, own: dict[nn.Parameter, Tensor] = own) -> None:
            for parameter in own:
                parameter.data = torch.empty(0)

        if own:
            hooks += [layer.register_forward_pre_hook(fetch), layer.register_forward_hook(release)]
            release()
    yield
    for hook in hooks:
        hook.remove()


@pytest.mark.parametrize("lora", [None, LORA | {"dropout": 0.0}], ids=["full", "lora"])
@pytest.mark.parametrize("method", sorted(METHODS))
def test_nothing_else_is_read_outside_its_layer(folder: Path, method: str, lora: dict[str, Any] | None) -> None:
    model, frozen = joint(folder, method, lora)
    model.eval()
    frozen = frozen.to("cpu", torch.float64).to("cpu", torch.float32)  # no memory of the target's
    spec = spec_for(model.drafter, lm_weight=0.1)
    with torch.no_grad():
        want = model(tokens(), frozen, spec).loss_sum
        with there_while_running(model, model.read_whole()):
            assert torch.equal(model(tokens(), frozen, spec).loss_sum, want)


@pytest.mark.parametrize("lora", [None, LORA], ids=["full", "lora"])
@pytest.mark.parametrize("method", sorted(METHODS))
def test_layers_run_equally_often_whatever_counts(folder: Path, method: str, lora: dict[str, Any] | None) -> None:
    """Processes that share out weights gather them together: one without a supervised token makes the same calls, and
    every weight has a gradient there too, in the same order."""
    model, frozen = joint(folder, method, lora)
    spec = spec_for(model.drafter, lm_weight=0.1, recompute=True)
    seen = []
    for batch in (tokens(), tokens(supervised=False)):
        order: list[str] = []

        def arrived(name: str, order: list[str] = order) -> Any:
            return lambda _: order.append(name)

        handles = [
            p.register_post_accumulate_grad_hook(arrived(n)) for n, p in model.named_parameters() if p.requires_grad
        ]
        model.zero_grad()
        with calls(model) as found:
            model(batch, frozen, spec).loss_sum.backward()
        for handle in handles:
            handle.remove()
        seen.append((found, order))
    assert seen[0] == seen[1]
    assert seen[0][0] and seen[0][1]
