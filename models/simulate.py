"""Acceptance length predicted from per-slot acceptance, without decoding: the walk a chain verifier would take."""

from __future__ import annotations

import numpy as np
from torch import Tensor


def simulated_tau(accept: Tensor, index: Tensor, valid: Tensor) -> tuple[float, float]:
    """Expected (accepted tokens, verification passes) of chain drafting over given texts.

    accept [K, S] in 0..1: probability that the depth-k draft at slot ``index[s]`` is accepted, given that the
    shallower ones were (alpha for sampling, 0/1 agreement for greedy decoding); valid [K, S] as in ``Slots``.
    Passes start at the first slot of every answer; one that accepts j drafts at slot p is followed by one at
    slot p + 1 + j. Expectations are exact (a forward recursion over slots), and additive over documents:
    tau = 1 + sum(accepted) / sum(passes).
    """
    if index.numel() == 0:
        return 0.0, 0.0
    reach = np.cumprod(accept.double().cpu().numpy() * valid.cpu().numpy(), axis=0)  # P(at least k+1 accepted)
    depths, slots = reach.shape
    exactly = np.concatenate([np.ones((1, slots)), reach]) - np.concatenate([reach, np.zeros((1, slots))])
    token = index.cpu().numpy()
    starts = np.concatenate([[True], np.diff(token) > 1])
    gain = reach.sum(0)
    visit = np.zeros(slots + depths + 1)
    accepted = passes = 0.0
    for s in range(slots):
        if starts[s]:  # a new answer: passes never run on from the one before
            visit[s : s + depths + 1] = 0.0
            visit[s] = 1.0
        mass = visit[s]
        passes += mass
        accepted += mass * gain[s]
        visit[s + 1 : s + depths + 2] += mass * exactly[:, s]
    return float(accepted), float(passes)
