"""Simulated acceptance length, by hand."""

import torch

from models.simulate import simulated_tau


def test_greedy_walk_by_hand() -> None:
    # six slots of one answer, chain of 2. agreement per slot: [1,0], [1,1], [0,1], [1,1], [0,0], [1,-]
    accept = torch.tensor([[1.0, 1, 0, 1, 0, 1], [0, 1, 1, 1, 0, 0]])
    valid = torch.tensor([[True] * 6, [True] * 5 + [False]])
    # slot 0: accepts 1 -> slot 2: accepts 0 -> slot 3: accepts 2 -> slot 6: beyond the answer. 3 passes, 3 accepted.
    assert simulated_tau(accept, torch.arange(4, 10), valid) == (3.0, 3.0)


def test_answers_are_walked_apart() -> None:
    # two answers; in the first the only pass accepts 1 and would land on the second's first slot if it ran on.
    accept = torch.tensor([[1.0, 0.0, 1.0]])
    index, valid = torch.tensor([3, 9, 10]), torch.ones(1, 3, dtype=torch.bool)
    # answer 1: slot 3 (accepts 1). answer 2: slot 9 (0), slot 10 (1). 3 passes, 2 accepted.
    assert simulated_tau(accept, index, valid) == (2.0, 3.0)


def test_expected_walk_equals_the_mean_of_random_walks() -> None:
    generator = torch.Generator().manual_seed(0)
    accept = torch.rand(3, 12, generator=generator)
    valid = torch.arange(3)[:, None] + torch.arange(12)[None] < 12
    accepted, passes = simulated_tau(accept, torch.arange(12), valid)
    trials, total, rounds = 20000, 0, 0
    coins = torch.rand(trials, 3, 12, generator=generator) < accept
    hits = coins & valid
    for t in range(trials):
        p = 0
        while p < 12:
            run = 0
            while run < 3 and hits[t, run, p]:
                run += 1
            total, rounds, p = total + run, rounds + 1, p + 1 + run
    # standard error of either mean is below 0.02 here; five of them: false alarm below 1e-6
    assert abs(total / trials - accepted) < 0.1 and abs(rounds / trials - passes) < 0.1


def test_no_slots() -> None:
    assert simulated_tau(torch.zeros(2, 0), torch.zeros(0, dtype=torch.long), torch.zeros(2, 0).bool()) == (0.0, 0.0)
