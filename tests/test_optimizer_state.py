"""The optimizer's state on disk: by parameter name, whole, in files of bounded size."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from models.errors import EyasError
from train.optimizer_state import OptimizerStates, write_states


def states(sizes: dict[str, int]) -> list[tuple[str, dict[str, torch.Tensor]]]:
    return [(name, {"exp_avg": torch.full((n,), float(n)), "step": torch.tensor(3.0)}) for name, n in sizes.items()]


def test_written_in_files_of_bounded_size_and_read_by_name(tmp_path: Path) -> None:
    """Parameters of 40, 44 and 4 bytes beside 4 of the step; a file is closed once it holds 80: two in the first."""
    write_states(tmp_path, states({"a.weight": 10, "b/odd.weight": 11, "c": 1}), file_bytes=80)
    assert [sorted(load_file(path)) for path in sorted(tmp_path.iterdir())] == [
        ["a.weight/exp_avg", "a.weight/step", "b/odd.weight/exp_avg", "b/odd.weight/step"],
        ["c/exp_avg", "c/step"],
    ]
    read = OptimizerStates(tmp_path)
    read.check_names(["a.weight", "b/odd.weight", "c", "never updated"])
    found = read.of("b/odd.weight", torch.Size([11]))
    assert found.keys() == {"exp_avg", "step"} and torch.equal(found["exp_avg"], torch.full((11,), 11.0))
    assert read.of("never updated", torch.Size([5])) == {}


def test_an_optimizer_without_a_state_has_a_file_all_the_same(tmp_path: Path) -> None:
    write_states(tmp_path, [])
    assert [path.name for path in tmp_path.iterdir()] == ["optimizer-00001.safetensors"]
    OptimizerStates(tmp_path).check_names([])


def test_a_view_is_written_alone(tmp_path: Path) -> None:
    """The state of a sharded optimizer is cut from large buffers, which must not be written with each part."""
    buffer = torch.arange(1000.0)
    write_states(tmp_path, [("a", {"exp_avg": buffer[10:12]}), ("b", {"exp_avg": buffer[12:14]})])
    assert (tmp_path / "optimizer-00001.safetensors").stat().st_size < 400
    assert OptimizerStates(tmp_path).of("b", torch.Size([2]))["exp_avg"].tolist() == [12.0, 13.0]


def test_states_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    write_states(tmp_path, states({"a": 10}))
    read = OptimizerStates(tmp_path)
    with pytest.raises(
        EyasError, match=r"optimizer-00001\.safetensors: a/exp_avg has shape \[10\], the parameter \[5, 2\]"
    ):
        read.of("a", torch.Size([5, 2]))
    with pytest.raises(EyasError, match="optimizer state of a, which this run does not train"):
        read.check_names(["b"])


def test_a_folder_without_or_with_a_broken_state_is_named(tmp_path: Path) -> None:
    with pytest.raises(EyasError, match=r"holds no optimizer state .*train\.init_from="):
        OptimizerStates(tmp_path)
    (tmp_path / "optimizer-00001.safetensors").write_bytes(b"torn")
    with pytest.raises(EyasError, match=r"optimizer-00001\.safetensors: not a readable safetensors file"):
        OptimizerStates(tmp_path)
