"""The draft head: logits by hand, rows by depth, and the slopes it hands back."""

from __future__ import annotations

import math

import pytest
import torch

from models.heads import DraftHead, cap_logits

STATES = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])


def test_logits_by_hand() -> None:
    """Two tokens with rows (1, 2) and (3, 4); bias (10, 20); then scale one half and a cap of 4."""
    weight, bias = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([10.0, 20.0])
    assert DraftHead(weight).logits(STATES, [3]).tolist() == [[1, 3], [2, 4], [3, 7]]
    assert DraftHead(weight, bias).logits(STATES, [3]).tolist() == [[11, 23], [12, 24], [13, 27]]
    capped = DraftHead(weight, bias, 0.5, 4.0).logits(STATES[:1], [1])[0].tolist()
    assert capped == pytest.approx([4 * math.tanh(5.5 / 4), 4 * math.tanh(11.5 / 4)])


def test_each_depth_has_its_rows_and_its_head() -> None:
    """One row of depth 0, none of depth 1, two of depth 2; a fourth head that no row uses."""
    weight = torch.tensor([[[1.0, 0.0]], [[10.0, 0.0]], [[100.0, 1000.0]], [[7.0, 7.0]]])
    head = DraftHead(weight)
    assert head.per_depth and torch.equal(head.of(2), weight[2]) and not DraftHead(weight[0]).per_depth
    assert head.logits(STATES, [1, 0, 2]).tolist() == [[1], [1000], [1100]]
    assert head.logits(STATES, [1, 0, 2], 2 * weight).tolist() == [[2], [2000], [2200]]
    with pytest.raises(ValueError):
        head.logits(STATES, [1, 0, 1, 0, 1])  # a depth without a head


def test_slopes_by_hand() -> None:
    """Of a product, so rows of the states' slope are combinations of head rows, and the head's of states."""
    slopes = torch.tensor([[1.0, 0.0], [0.0, 1.0], [2.0, 1.0]])
    weight = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    into = torch.ones(2, 2)
    assert DraftHead(weight).backward(slopes, STATES, [3], weight, into).tolist() == [[1, 2], [3, 4], [5, 8]]
    assert into.tolist() == [[4, 3], [2, 3]]  # added to what was there: 1 + (1 + 2, 2) and 1 + (1, 1 + 1)
    both = torch.stack([weight, 10 * weight])
    into = torch.zeros(2, 2, 2)
    got = DraftHead(both).backward(slopes, STATES, [1, 2], both, into)
    assert got.tolist() == [[1, 2], [30, 40], [50, 80]]
    assert into.tolist() == [[[1, 0], [0, 0]], [[2, 2], [1, 2]]]
    assert torch.equal(DraftHead(both).backward(slopes, STATES, [1, 2], both, None), got)


def test_logits_take_the_states_precision() -> None:
    head = DraftHead(torch.ones(3, 2), torch.ones(3))
    assert head.logits(STATES.bfloat16(), [3]).dtype == torch.bfloat16
    assert DraftHead(torch.ones(3, 2, dtype=torch.bfloat16)).logits(STATES, [3]).dtype == torch.float32


def test_cap_logits_leaves_alone_what_has_no_transform() -> None:
    logits = torch.tensor([-3.0, 0.5])
    assert cap_logits(logits) is logits
    assert cap_logits(logits, 2.0).tolist() == [-6.0, 1.0]
    assert cap_logits(logits, 1.0, 2.0).tolist() == pytest.approx([2 * math.tanh(-1.5), 2 * math.tanh(0.25)])
