"""The benchmark compares like with like: both steps give the same loss and gradients, and its numbers are its own."""

from __future__ import annotations

import pytest
import torch

from models.batch import slots_of
from scripts.benchmark import Shape, answers, benchmark, compare, documents, eyas_step, main, padded, plain_step
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
    """Zero queries weigh every visible key alike: token 1 of 2 at depth 1 sees both depth-0 values and its own new one."""
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
    assert isinstance(seconds, dict) and isinstance(rate, dict)
    assert [len(runs) for runs in seconds.values()] == [2, 2]
    assert rate["eyas"] == pytest.approx(32 / (sum(seconds["eyas"]) / 2))
    assert report["speed_ratio"] == pytest.approx(rate["eyas"] / rate["reference"])


def test_command_measures_memory_in_fresh_processes(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [f"--{name.replace('_', '-')}={value}" for name, value in TINY.items()]
    main([*arguments, "--vocab", "20000", "--lengths", "300", "200", "--depths", "2", "--repeats", "1"])
    printed = capsys.readouterr().out
    assert "same step: loss within" in printed
    ratio = float(printed.rpartition("ratio ")[2])
    assert 0 < ratio < 0.5  # the reference holds [600, 20000] logits twice, 96 MB
