"""Serving folders: every way in which one can be wrong, how one replaces another, and those of other trainers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from models.checkpoint import save_drafter
from models.errors import EyasError
from models.portable import check_export, load_export, open_drafter, serve, write_export
from scripts.card import About
from scripts.export import export
from tests.drafters import random_frozen
from tests.exports import Spoil, exported, make, rewrite

# --- folders that are wrong ---------------------------------------------------------------------------------


def drop(name: str) -> Spoil:
    return lambda tensors, config: tensors.pop(name)


def put(name: str, value: Tensor) -> Spoil:
    return lambda tensors, config: tensors.update({name: value})


def edit(name: str, change: Callable[[Tensor], Any]) -> Spoil:
    return lambda tensors, config: change(tensors[name])


def configure(**values: Any) -> Spoil:
    return lambda tensors, config: config.update(values)


@pytest.mark.parametrize(
    ("spoil", "names"),
    [
        (drop("midlayer.hidden_norm.weight"), "midlayer.hidden_norm.weight: missing"),
        (drop("d2t"), "d2t: missing; 12 draft tokens"),
        (drop("t2d"), "t2d: missing"),
        (put("embed_tokens.weight", torch.zeros(40, 32)), "embed_tokens.weight: not a name of this layout"),
        (put("fc.bias", torch.zeros(32)), "fc.bias: unexpected"),
        (put("fc.weight", torch.zeros(32, 64)), r"fc.weight: has shape \[32, 64\], config.json asks for \[32, 96\]"),
        (put("norm.weight", torch.ones(32, dtype=torch.float16)), "norm.weight: is torch.float16"),
        (lambda tensors, config: tensors.update(d2t=tensors["d2t"].int()), "d2t: is torch.int32"),
        (edit("norm.weight", lambda t: t[3].fill_(float("nan"))), "norm.weight: 1 of 32 values are NaN"),
        (edit("lm_head.weight", lambda t: t[3, 4].fill_(float("inf"))), "lm_head.weight: 1 of 384"),
        (edit("d2t", lambda t: t[11].fill_(29)), r"d2t: its target ids .* within 0\.\.39"),
        (edit("d2t", lambda t: t[0].fill_(-1)), r"d2t: its target ids .* within 0\.\.39"),
        (edit("d2t", lambda t: t[5].fill_(-4)), "d2t: its target ids .* ascend"),
        (edit("t2d", lambda t: t.fill_(True)), "t2d: does not mark"),
        (configure(torch_dtype="bfloat16"), "dtype=float32 and torch_dtype=bfloat16"),
        (configure(fc_norm=True), "fc_norm.0.weight: missing"),
        (configure(bias=True), "bias=True is not supported"),
        (configure(norm_before_residual=True), "norm_before_residual=True is not supported"),
        (configure(num_hidden_layers=32), "num_hidden_layers=32 is not what was to be written, 1"),
        (configure(num_aux_hidden_states=4), "num_aux_hidden_states=4"),
        (configure(architectures=["LlamaForCausalLM"]), "architectures=.*LlamaForCausalLM"),
        (configure(draft_vocab_size=40), r"d2t: is torch.int64 \[12\], draft_vocab_size=40 asks for int64 \[40\]"),
        (configure(eos_token_id=9), "eos_token_id=9 is not what was to be written, None"),
        (edit("fc.weight", lambda t: t[3, 4].add_(1)), "fc.weight: its values are not"),
        (configure(head_dim=8), "midlayer.self_attn.q_proj.weight: has shape"),
    ],
)
def test_a_wrong_folder_is_named(tmp_path: Path, spoil: Spoil, names: str) -> None:
    exported(tmp_path / "out")
    rewrite(tmp_path / "out", spoil)
    with pytest.raises(EyasError, match=names):
        check_export(tmp_path / "out", serve(*make()))


def test_no_folder_and_no_json(tmp_path: Path) -> None:
    with pytest.raises(EyasError, match="not a serving folder"):
        load_export(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(EyasError, match="not a serving folder"):
        load_export(tmp_path)


def test_values_no_dtype_can_hold(tmp_path: Path) -> None:
    drafter, frozen = make()
    with torch.no_grad():
        drafter.fc.weight[0, 0] = 1e5
    with pytest.raises(EyasError, match=r"fc.weight: 1e\+05 overflows float16"):
        export(drafter, frozen, tmp_path / "out", About("t"), dtype="float16")
    with torch.no_grad():
        drafter.fc.weight[0, 0] = float("nan")
    with pytest.raises(EyasError, match="fc.weight: 1 of 3072 values"):
        export(drafter, frozen, tmp_path / "out", About("t"))
    with pytest.raises(EyasError, match=r"export\.dtype=int8"):
        export(make()[0], frozen, tmp_path / "out", About("t"), dtype="int8")
    assert list(tmp_path.iterdir()) == []


# --- replacing an export ------------------------------------------------------------------------------------


def test_a_failed_export_leaves_the_earlier_one(tmp_path: Path) -> None:
    exported(tmp_path / "out")
    before = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    drafter, frozen = make()
    with torch.no_grad():
        drafter.norm.weight.fill_(float("inf"))
    with pytest.raises(EyasError):
        export(drafter, frozen, tmp_path / "out", About("t"))
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == before
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_whoever_may_read_the_config_may_read_the_weights(tmp_path: Path) -> None:
    exported(tmp_path / "out")
    modes = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "out").iterdir()}
    assert modes["model.safetensors"] == modes["config.json"] == modes["README.md"]


def test_a_later_export_replaces_the_earlier_one(tmp_path: Path) -> None:
    exported(tmp_path / "out")
    _, config = exported(tmp_path / "out", draft=20)
    assert config["draft_vocab_size"] == 20
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_killed_between_the_two_renames(tmp_path: Path) -> None:
    exported(tmp_path / "out")
    (tmp_path / "out").rename(tmp_path / ".out.old")
    drafter, frozen = make()
    served = serve(drafter, frozen)
    with pytest.raises(EyasError):
        write_export(replace(served, tensors=served.tensors | {"extra": torch.zeros(1)}), tmp_path / "out", "float32")
    check_export(tmp_path / "out", served)  # the earlier export is back


def test_other_files_are_never_deleted(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("x")
    drafter, frozen = make()
    with pytest.raises(EyasError, match="thesis.tex"):
        export(drafter, frozen, tmp_path, About("t"))
    with pytest.raises(EyasError, match="is a file"):
        export(drafter, frozen, tmp_path / "thesis.tex", About("t"))
    assert (tmp_path / "thesis.tex").read_text() == "x"


# --- reading folders of other trainers ----------------------------------------------------------------------


def test_other_names_and_older_configs(tmp_path: Path) -> None:
    """layers.0 and a model. prefix, Transformers-4 rope keys, no head_dim, no own note."""
    drafter, frozen = make(frozen=random_frozen(head_dim=8, num_hidden_layers=12), taps=(2, 6, 9))
    write_export(serve(drafter, frozen), tmp_path / "out", "float32")

    def foreign(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
        renamed = {"model." + n.replace("midlayer.", "layers.0."): t for n, t in tensors.items() if "2" not in n}
        kept = {name: tensors[name] for name in ("d2t", "t2d")}
        tensors.clear()
        tensors |= renamed | kept
        for key in ("eyas", "rope_parameters", "head_dim", "dtype", "num_aux_hidden_states"):
            del config[key]

    rewrite(tmp_path / "out", foreign)
    with pytest.raises(EyasError, match="names no tapped layers"):
        load_export(tmp_path / "out")
    read = open_drafter(tmp_path / "out", target={"num_hidden_layers": 12})
    assert read.tap_ids == (2, 6, 9)
    assert read.architecture() == drafter.architecture()
    assert all(torch.equal(t, drafter.state_dict()[n]) for n, t in read.state_dict().items())


def test_layer_ids_of_either_convention_are_read(tmp_path: Path) -> None:
    exported(tmp_path / "out")
    rewrite(tmp_path / "out", lambda tensors, config: config.pop("eyas"))
    assert load_export(tmp_path / "out").tap_ids == (2, 3, 5)
    rewrite(tmp_path / "out", lambda tensors, config: config.pop("eagle_aux_hidden_state_layer_ids"))
    assert load_export(tmp_path / "out").tap_ids == (2, 3, 5)


def test_a_link_to_a_folder_stays_one(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    link = tmp_path / "link"
    link.symlink_to("real")
    for _ in range(2):
        exported(link)
        assert link.is_symlink() and (tmp_path / "real" / "model.safetensors").is_file()
        assert {path.name for path in tmp_path.iterdir()} == {"real", "link"}


def test_the_current_folder_is_never_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    for folder in (".", ".."):
        with pytest.raises(EyasError, match="current folder"):
            exported(Path(folder))
    assert here.is_dir() and not list(here.iterdir())


@pytest.mark.parametrize("content", [b"", b"."])
def test_a_download_that_broke_off(tmp_path: Path, content: bytes) -> None:
    """Pickled weights of no or one byte: whatever reading them raises is told with the file's name."""
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "pytorch_model.bin").write_bytes(content)
    with pytest.raises(EyasError, match=r"pytorch_model\.bin"):
        open_drafter(tmp_path)


def test_a_checkpoint_of_no_numbers(tmp_path: Path) -> None:
    drafter, _ = make()
    save_drafter(drafter, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["fc.weight"][0, 0] = float("inf")
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(EyasError, match=r"fc\.weight holds NaN or infinite"):
        open_drafter(tmp_path)
