"""Learning rate, parameter groups and the Muon optimizer against values worked out by hand or in float64."""

from typing import Any

import pytest
import torch
from torch import nn

from conf.schema import OptimConfig
from models.errors import EyasError
from models.vocab import DraftVocab
from tests.linear_drafter import LinearDrafter
from train.optim import Muon, build_optimizer, lr_factor, orthogonalise, set_lr
from train.optimizer_state import OptimizerStates, write_states
from train.replicated import Replicated
from train.strategy import build_accelerator


def test_warmup_and_cosine_by_hand() -> None:
    """10 steps, 2 of warm-up, floor 0.1: halfway through the other 8 the cosine is at (1 + 0.1) / 2."""
    optim = OptimConfig(warmup=2, schedule="cosine", min_lr=0.1)
    factors = [lr_factor(step, 10, optim) for step in range(10)]
    assert factors[:2] == [0.5, 1.0]
    assert factors[5] == pytest.approx(0.55)
    assert factors[3] == pytest.approx(0.1 + 0.9 * (0.5 + 0.5 * 0.5**0.5))  # a quarter of the way: cos 45 degrees
    assert factors[9] == pytest.approx(0.1)


def test_wsd_by_hand() -> None:
    """Warm-up 10% of 10 steps, flat, then the last 40% go down in equal strides to 0.2."""
    optim = OptimConfig(warmup=0.1, schedule="wsd", min_lr=0.2, decay=0.4)
    factors = [lr_factor(step, 10, optim) for step in range(10)]
    assert factors == pytest.approx([1.0] * 6 + [0.8, 0.6, 0.4, 0.2])


@pytest.mark.parametrize("schedule", ["cosine", "wsd", "constant"])
@pytest.mark.parametrize("total", [1, 2, 7])
def test_every_factor_of_a_short_run_is_usable(schedule: str, total: int) -> None:
    for warmup in (0.0, 0.5, 1, 3, 100):
        factors = [lr_factor(s, total, OptimConfig(warmup=warmup, schedule=schedule, decay=1.0)) for s in range(total)]
        assert all(0 < factor <= 1 for factor in factors)


def test_unknown_names_are_refused() -> None:
    with pytest.raises(EyasError, match="optim.schedule=linear"):
        lr_factor(5, 10, OptimConfig(schedule="linear"))
    with pytest.raises(EyasError, match="optim.name=sgd"):
        build_optimizer(tiny_drafter(), OptimConfig(name="sgd"))


def tiny_drafter() -> LinearDrafter:
    """Matrices mix [4, 12] and next [4, 8], vector norm [4], lm_head [5, 4], and one that is not trained."""
    torch.manual_seed(0)
    return LinearDrafter(12, 4, DraftVocab(torch.arange(5), 11), (1, 2, 3))


def groups_of(optim: OptimConfig) -> list[tuple[set[str], Any, Any, Any]]:
    drafter = tiny_drafter()
    names = {parameter: name for name, parameter in drafter.named_parameters()}
    return [
        ({names[p] for p in group["params"]}, group["lr"], group["weight_decay"], group.get("muon"))
        for group in build_optimizer(drafter, optim).param_groups
    ]


def test_groups() -> None:
    """Decay on matrices only; Muon takes inner matrices only; what is not trained is in no group."""
    matrices, head, norm = {"mix.weight", "next.weight"}, {"lm_head.weight"}, {"norm.weight"}
    adam = groups_of(OptimConfig(lr=1e-3, weight_decay=0.1))
    assert adam == [(matrices | head, 1e-3, 0.1, None), (norm, 1e-3, 0.0, None)]
    muon = groups_of(OptimConfig(name="muon", lr=1e-3, muon_lr=2e-2, weight_decay=0.1))
    assert muon == [(head, 1e-3, 0.1, False), (norm, 1e-3, 0.0, False), (matrices, 2e-2, 0.1, True)]


class Wide(LinearDrafter):
    """With a head for each of 3 depths [3, 5, 4] and 2 experts [2, 6, 4] beside."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.heads = nn.Parameter(torch.ones(3, 5, 4))
        self.experts = nn.Parameter(torch.ones(2, 6, 4))


def test_groups_of_stacked_parameters() -> None:
    """Heads of the depths are tables, which Muon leaves alone; experts are matrices."""
    drafter = Wide(12, 4, DraftVocab(torch.arange(5), 11), (1, 2, 3))
    groups = build_optimizer(drafter, OptimConfig(name="muon", weight_decay=0.1)).param_groups
    muon = [group["params"] for group in groups if group["muon"]]
    assert [sorted(p.ndim for p in params) for params in muon] == [[2, 2, 3]]
    assert any(p is drafter.experts for p in muon[0]) and not any(p is drafter.heads for p in muon[0])
    assert any(p is drafter.heads for p in groups[0]["params"]) and groups[0]["weight_decay"] == 0.1


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_a_backbone_has_a_learning_rate_of_its_own_and_is_never_muons(name: str) -> None:
    """A matrix, a vector and a frozen matrix of a target; what the drafter's groups hold stays the same."""
    optim = OptimConfig(name=name, lr=2e-3, muon_lr=2e-2, weight_decay=0.1)
    target = nn.Linear(6, 6), nn.Linear(6, 6).requires_grad_(False)
    given = [p for layer in target for p in layer.parameters()]
    alone = build_optimizer(tiny_drafter(), optim).param_groups
    both = build_optimizer(tiny_drafter(), optim, backbone=iter(given), backbone_lr=5e-4).param_groups
    own, added = both[: len(alone)], both[len(alone) :]
    assert [len(g["params"]) for g in own] == [len(g["params"]) for g in alone]
    assert [(g["peak_lr"], g["weight_decay"]) for g in own] == [(g["peak_lr"], g["weight_decay"]) for g in alone]
    assert [[id(p) for p in g["params"]] for g in added] == [[id(target[0].weight)], [id(target[0].bias)]]
    assert [(g["lr"], g["peak_lr"], g["weight_decay"]) for g in added] == [(5e-4, 5e-4, 0.1), (5e-4, 5e-4, 0.0)]
    assert not any(g.get("muon") for g in added)


def test_a_backbone_moves_by_its_own_rate() -> None:
    """AdamW's first step is the learning rate in size, whatever the gradient: 4 times as far for the drafter."""
    drafter, weight = tiny_drafter(), nn.Parameter(torch.zeros(3, 3))
    optim = OptimConfig(lr=2e-3)
    optimizer = build_optimizer(drafter, optim, backbone=[weight], backbone_lr=5e-4)
    before = drafter.mix.weight.detach().clone()
    for parameter in (weight, drafter.mix.weight):
        parameter.grad = torch.full_like(parameter, 0.3)
    set_lr(optimizer.param_groups, 0.5, 0.5)
    optimizer.step()
    torch.testing.assert_close(weight.detach(), torch.full((3, 3), -2.5e-4), rtol=1e-5, atol=0)
    torch.testing.assert_close(drafter.mix.weight.detach(), before - 1e-3, rtol=1e-5, atol=1e-7)


def strategy_of(drafter: LinearDrafter, optimizer: Any) -> Replicated:
    return Replicated(build_accelerator("cpu"), drafter, optimizer, dtype=None, max_norm=1.0, unused=False)


def test_a_group_at_rate_zero_is_passed_over() -> None:
    """Three steps without a learning rate and with gradients of zero, then one with both: as if it were the first."""
    late, first = (nn.Parameter(torch.zeros(3)) for _ in range(2))
    optimizers = [
        build_optimizer(tiny_drafter(), OptimConfig(weight_decay=0.1), backbone=[p], backbone_lr=1e-2)
        for p in (late, first)
    ]
    for _ in range(3):
        late.grad = torch.zeros(3)
        set_lr(optimizers[0].param_groups, 1.0, 0.0)
        optimizers[0].step()
    assert not optimizers[0].state.get(late)
    for parameter, optimizer in zip((late, first), optimizers, strict=True):
        parameter.grad = torch.tensor([0.5, -2.0, 1e-3])
        set_lr(optimizer.param_groups, 1.0, 1.0)
        optimizer.step()
    assert torch.equal(late, first) and late.abs().min() > 9e-3
    assert len(optimizers[0].param_groups) == len(optimizers[1].param_groups)


def test_set_lr_scales_each_peak() -> None:
    optimizer = build_optimizer(tiny_drafter(), OptimConfig(name="muon", lr=1e-3, muon_lr=2e-2))
    set_lr(optimizer.param_groups, 0.5, 1.0)
    assert [group["lr"] for group in optimizer.param_groups] == [5e-4, 5e-4, 1e-2]
    set_lr(optimizer.param_groups, 1.0, 1.0)
    assert optimizer.param_groups[2]["lr"] == 2e-2


@pytest.mark.parametrize("shape", [(6, 6), (4, 9), (9, 4)])
def test_orthogonalise_keeps_singular_vectors(shape: tuple[int, int]) -> None:
    """Against an SVD in float64: same singular vectors, all singular values near 1."""
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(1)).double()
    u, _, vh = torch.linalg.svd(matrix, full_matrices=False)
    values = u.mT @ orthogonalise(matrix.float()).double() @ vh.mT
    torch.testing.assert_close(values, torch.diag(values.diagonal()), atol=1e-4, rtol=0)
    assert values.diagonal().min() > 0.6 and values.diagonal().max() < 1.3
    assert not orthogonalise(torch.zeros(shape)).any()


def test_muon_first_step_by_hand() -> None:
    """Gradient c * I, from zero momentum: the update is a multiple s * I of the identity with s in 0.6..1.3,
    times 0.2 sqrt(max(m, n)), after a decay of lr * weight_decay."""
    weight = nn.Parameter(torch.eye(4))
    optimizer = Muon([{"params": [weight], "lr": 0.1, "weight_decay": 0.5, "muon": True}])
    weight.grad = 3.0 * torch.eye(4)
    optimizer.step()
    expected = 0.95 * torch.eye(4) - 0.1 * 0.2 * 2.0 * orthogonalise(torch.eye(4))
    torch.testing.assert_close(weight.detach(), expected)


def test_muon_takes_each_expert_for_itself() -> None:
    """A stack [2, 4, 9] moves as its two matrices do one by one, however much larger one gradient is."""
    generator = torch.Generator().manual_seed(2)
    stack = nn.Parameter(torch.randn(2, 4, 9, generator=generator))
    single = [nn.Parameter(matrix.clone()) for matrix in stack.detach()]
    optimizers = [
        Muon([{"params": params, "lr": 0.1, "weight_decay": 0.5, "muon": True}]) for params in ([stack], single)
    ]
    for _ in range(3):
        stack.grad = torch.randn(2, 4, 9, generator=generator) * torch.tensor([1.0, 1e3])[:, None, None]
        for parameter, gradient in zip(single, stack.grad, strict=True):
            parameter.grad = gradient.clone()
        for optimizer in optimizers:
            optimizer.step()
    torch.testing.assert_close(stack.detach(), torch.stack([p.detach() for p in single]), rtol=1e-4, atol=1e-6)


def test_muons_adamw_is_adamw() -> None:
    """Five steps of the vector group equal torch.optim.AdamW."""
    mine, theirs = nn.Parameter(torch.linspace(-1, 1, 7)), nn.Parameter(torch.linspace(-1, 1, 7))
    ours = Muon([{"params": [mine], "lr": 0.05, "weight_decay": 0.1}], betas=(0.9, 0.95))
    reference = torch.optim.AdamW([theirs], lr=0.05, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    for step in range(5):
        gradient = torch.sin(torch.arange(7.0) + step)
        mine.grad, theirs.grad = gradient.clone(), gradient.clone()
        ours.step()
        reference.step()
    torch.testing.assert_close(mine, theirs, atol=1e-6, rtol=1e-6)


def test_muon_state_survives_saving(tmp_path: Any) -> None:
    """State written by torch.save loads with weights_only and continues bit for bit."""

    def fresh() -> tuple[LinearDrafter, Any]:
        drafter = tiny_drafter()
        return drafter, build_optimizer(drafter, OptimConfig(name="muon"))

    def step(drafter: LinearDrafter, optimizer: Any, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for parameter in drafter.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator) if parameter.requires_grad else None
        optimizer.step()

    whole, optimizer = fresh()
    for seed in range(4):
        step(whole, optimizer, seed)
        if seed == 1:
            write_states(tmp_path, strategy_of(whole, optimizer).optimizer_states())
            weights = {name: tensor.clone() for name, tensor in whole.state_dict().items()}
    broken, optimizer = fresh()
    broken.load_state_dict(weights)
    strategy_of(broken, optimizer).load_optimizer(OptimizerStates(tmp_path))
    for seed in (2, 3):
        step(broken, optimizer, seed)
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), broken.parameters(), strict=True))
