"""The benchmark compares like with like: both steps give the same loss and gradients, and its numbers are its own."""

from __future__ import annotations

import pytest
import torch

from models.batch import slots_of
from scripts.benchmark import (
    Shape,
    answers,
    benchmark,
    compare,
    documents,
    eyas_step,
    main,
    padded,
    peak_memory,
    plain_step,
    read_peak,
    reset_peak,
    summary,
)
from scripts.reference_step import ahead, dense_attention

TINY = {
    "hidden": 32,
    "intermediate": 48,
    "heads": 4,
    "kv_heads": 2,
    "head_dim": 12,
    "vocab": 96,
    "draft_vocab": 40,
    "chunk": 16,
}


@pytest.mark.parametrize("lengths", [(9,), (1, 2, 3, 30, 17), (41, 40)], ids=str)
@pytest.mark.parametrize("depths", [1, 4, 7])
def test_steps_agree(lengths: tuple[int, ...], depths: int) -> None:
    shape = Shape(**TINY, depths=depths, lengths=lengths, seed=depths)
    agreement = compare(eyas_step(shape), plain_step(shape))
    assert agreement.loss < 1e-5
    assert agreement.gradient < 1e-4
    assert agreement.holds


def test_a_difference_is_noticed() -> None:
    shape = Shape(**TINY, depths=3, lengths=(20, 11))
    other = Shape(**TINY, depths=3, lengths=(20, 11), decay=0.9)
    assert not compare(eyas_step(shape), plain_step(other)).holds


def test_padding_and_shifting_by_hand() -> None:
    _, batch = documents(Shape(**TINY, lengths=(3, 2)))
    rows = padded(batch)
    assert rows.input_ids.tolist() == [batch.input_ids[:3].tolist(), [*batch.input_ids[3:].tolist(), 0]]
    assert rows.supervised[1].tolist() == [*batch.supervised[3:].tolist(), False]
    assert rows.taps.shape == (2, 3, 96)
    x = torch.tensor([[1, 2, 3, 4]])
    assert ahead(x, 1).tolist() == [[2, 3, 4, 0]]
    assert ahead(x, 6).tolist() == [[0, 0, 0, 0]]


def test_dense_mask_by_hand() -> None:
    """Zero queries weigh all visible keys alike; at depth 1 token 1 sees both depth-0 values and its own new one."""
    zero = torch.zeros(1, 1, 2, 2)
    first, second = torch.tensor([[1.0, 0.0], [2.0, 0.0]]), torch.tensor([[0.0, 3.0], [0.0, 6.0]])
    out = dense_attention(zero, [zero, zero], [first.view(1, 1, 2, 2), second.view(1, 1, 2, 2)])
    torch.testing.assert_close(out[0, 0], torch.tensor([[0.5, 1.5], [1.0, 2.0]]))


def test_answers_follow_prompts() -> None:
    assert answers(10, 0.6).tolist() == [False] * 4 + [True] * 6
    two = answers(300, 0.5)
    assert two.tolist() == ([False] * 75 + [True] * 75) * 2
    _, batch = documents(Shape(**TINY, lengths=(10,), supervised=0.6, depths=2))
    assert slots_of(batch, 2).index.tolist() == [3, 4, 5, 6, 7]  # x[p+1] and x[p+2] both in 4..9


def test_report() -> None:
    shape = Shape(**TINY, depths=2, lengths=(20, 12))
    report = benchmark(shape, repeats=2, memory=False)
    assert report["tokens"] == 32 and report["padded_tokens"] == 40
    assert report["same"] is True
    seconds, rate = report["seconds"], report["tokens_per_second"]
    assert [len(runs) for runs in seconds.values()] == [2, 2]
    assert report["cpu_ratio"] > 0
    assert rate["eyas"] == pytest.approx(32 / (sum(seconds["eyas"]) / 2))
    assert report["speed_ratio"] == pytest.approx(rate["eyas"] / rate["reference"])


def test_peak_is_that_of_what_ran_since() -> None:
    del_me = torch.ones(16, 2**20)  # 64 MiB, gone before
    del del_me
    before = reset_peak()
    torch.ones(8, 2**20)
    grown = (read_peak() - before) / 2**20
    assert 30 < grown < 40


def test_memory_is_measured_in_a_fresh_process() -> None:
    """The reference holds logits and probabilities [600, 20000] and [600, 40] at once: 92 MiB and little else."""
    grown = peak_memory("reference", Shape(**(TINY | {"vocab": 20000}), depths=1, lengths=(300, 200))) / 2**20
    assert 91 < grown < 140


def test_command_prints_ratios(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [part for name, value in TINY.items() for part in (f"--{name.replace('_', '-')}", str(value))]
    main([*arguments, "--lengths", "30", "20", "--depths", "2", "--repeats", "1", "--no-memory"])
    printed = capsys.readouterr().out
    assert "50 tokens in 2 documents (60 padded), 2 depths, 1 thread(s)" in printed
    assert "same step: loss within" in printed
    report = {
        "shape": {"lengths": [1], "depths": 1, "threads": 1},
        "tokens": 1,
        "padded_tokens": 1,
        "loss_difference": 0.0,
        "gradient_difference": 0.0,
        "tokens_per_second": {"eyas": 300.0, "reference": 100.0},
        "speed_ratio": 3.0,
        "cpu_ratio": 3.5,
        "peak_bytes": {"eyas": 2**20, "reference": 2**22},
        "memory_ratio": 0.25,
    }
    assert "eyas 300, reference 100; ratio 3.00 (by processor time 3.50)" in summary(report)
    assert "eyas 1 MiB, reference 4 MiB; ratio 0.250" in summary(report)
