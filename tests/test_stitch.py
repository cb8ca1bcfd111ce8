"""A copy of a target with MTP modules in it: what it holds, what transformers makes of it, and what it leaves alone."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from models.errors import EyasError
from models.load_frozen import WeightFiles, load_frozen
from models.mtp import MtpDrafter
from models.mtp_serving import carried_modules, carries_mtp
from models.portable import serve
from models.stitch import stitch, stitch_drafter
from models.vocab import DraftVocab
from tests.drafters import randomise
from tests.mtp_targets import FAMILIES, VOCAB, carrying_target, module_in_files, save_target


@torch.no_grad()
def logits(folder: Path) -> Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    out: Tensor = model(torch.arange(12)[None] * 5).logits
    return out


def contents(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


def everything(folder: Path) -> dict[str, list[str]]:
    """Every tensor that any shard of a folder holds, and the shards that hold it (some engines read all)."""
    found: dict[str, list[str]] = {}
    for path in sorted(folder.glob("*.safetensors")):
        for name in load_file(path):
            found.setdefault(name, []).append(path.name)
    return found


def random_drafter(target: Path, seed: int = 1) -> MtpDrafter:
    return randomise(MtpDrafter.create(load_frozen(target), DraftVocab.full(VOCAB), (), init="random"), seed)


@pytest.mark.parametrize("shards", ["5GB", "20KB"])
@pytest.mark.parametrize("family", [*FAMILIES, "llama"])
def test_a_target_with_a_trained_drafter_in_it(tmp_path: Path, family: str, shards: str) -> None:
    target, out = save_target(tmp_path / "target", family, max_shard_size=shards), tmp_path / "out"
    before, original = contents(target), logits(target)
    drafter = random_drafter(target)
    stitch_drafter(target, serve(drafter, load_frozen(target)), out, torch.float32)
    assert contents(target) == before
    assert torch.equal(logits(out), original)
    assert carries_mtp(out)
    carried = carried_modules(out, load_frozen(out).config)
    assert carried is not None
    assert all(torch.equal(carried[name], tensor) for name, tensor in drafter.state_dict().items())
    assert (out / "chat_template.jinja").read_text() == "{{ messages }}"
    assert (out / "generation_config.json").read_bytes() == (target / "generation_config.json").read_bytes()
    changed = {"num_nextn_predict_layers", "mtp_num_hidden_layers"}
    old, new = (json.loads((folder / "config.json").read_text()) for folder in (target, out))
    assert {k: v for k, v in new.items() if k not in changed} == {k: v for k, v in old.items() if k not in changed}
    assert new["mtp_num_hidden_layers" if family == "qwen3_5_text" else "num_nextn_predict_layers"] == 1


def test_the_index_names_every_tensor_and_its_bytes(tmp_path: Path) -> None:
    target, out = save_target(tmp_path / "target", "qwen2"), tmp_path / "out"
    modules = module_in_files("qwen2")
    stitch(target, modules, {"num_nextn_predict_layers": 1}, out)
    index = json.loads((out / "model.safetensors.index.json").read_text())
    own = load_file(target / "model.safetensors")
    wanted = dict.fromkeys(own, "model-target.safetensors") | dict.fromkeys(modules, "model-mtp.safetensors")
    assert index["weight_map"] == wanted
    numbers = sum(tensor.numel() for tensor in (*own.values(), *modules.values()))
    assert index["metadata"]["total_size"] == 4 * numbers
    assert {p.name for p in out.glob("*.safetensors")} == set(wanted.values())


@pytest.mark.parametrize("shards", ["5GB", "20KB"])
@pytest.mark.parametrize("family", FAMILIES)
def test_modules_that_the_target_carried_are_replaced(tmp_path: Path, family: str, shards: str) -> None:
    target, old = carrying_target(tmp_path / "target", family, max_shard_size=shards)
    before, out = contents(target), tmp_path / "out"
    drafter = random_drafter(target)
    served = serve(drafter, load_frozen(target))
    stitch_drafter(target, served, out, torch.bfloat16)
    assert contents(target) == before
    held, own = everything(out), set(WeightFiles(target)) - set(old)
    assert set(held) == own | set(served.tensors)
    assert all(len(places) == 1 for places in held.values())
    assert all(held[name] == ["model-mtp.safetensors"] for name in served.tensors)
    for name in own:
        assert torch.equal(WeightFiles(out).read(name), WeightFiles(target).read(name))
    carried = carried_modules(out, load_frozen(out).config)
    assert carried is not None
    weight = drafter.steps[0].proj.weight
    assert torch.equal(carried["mtp.0.proj.weight"], weight.bfloat16())
    previous = carried_modules(target, load_frozen(target).config)
    assert previous is not None
    assert not torch.equal(carried["mtp.0.proj.weight"], previous["mtp.0.proj.weight"])
    assert torch.equal(logits(out), logits(target))


def test_stitched_twice(tmp_path: Path) -> None:
    target = save_target(tmp_path / "target", "qwen2")
    frozen = load_frozen(target)
    first = stitch_drafter(target, serve(random_drafter(target), frozen), tmp_path / "first", torch.float32)
    other = random_drafter(target, seed=5)
    second = stitch_drafter(first, serve(other, frozen), tmp_path / "second", torch.float32)
    carried = carried_modules(second, frozen.config)
    assert carried is not None
    assert all(torch.equal(carried[name], tensor) for name, tensor in other.state_dict().items())
    assert all(len(places) == 1 for places in everything(second).values())


def test_counts_stand_beside_the_dimensions_of_a_multimodal_config(tmp_path: Path) -> None:
    target = save_target(tmp_path / "target", "qwen3_5_text")
    inner = json.loads((target / "config.json").read_text())
    outer = {"model_type": "qwen3_5", "architectures": ["Qwen3_5ForConditionalGeneration"], "text_config": inner}
    (target / "config.json").write_text(json.dumps(outer))
    modules = module_in_files("qwen3_5_text")
    stitch(target, modules, {"mtp_num_hidden_layers": 1}, tmp_path / "out")
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert written == outer | {"text_config": inner | {"mtp_num_hidden_layers": 1}}


def test_what_can_not_be_stitched_leaves_nothing(tmp_path: Path) -> None:
    target, out = save_target(tmp_path / "target", "qwen2"), tmp_path / "out"
    modules, count = module_in_files("qwen2"), {"num_nextn_predict_layers": 1}
    with pytest.raises(EyasError, match=r"model\.norm\.weight: is a tensor of the target"):
        stitch(target, modules | {"model.norm.weight": torch.ones(32)}, count, out)
    with pytest.raises(EyasError, match=r"model\.mtp_layers\.0\.input_proj\.weight: missing"):
        stitch(target, {k: v for k, v in modules.items() if "input_proj" not in k}, count, out)
    with pytest.raises(EyasError, match="num_nextn_predict_layers=2, but the files hold 1"):
        stitch(target, modules, {"num_nextn_predict_layers": 2}, out)
    with pytest.raises(EyasError, match="target: is there already"):
        stitch(target, modules, count, target)
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "fp8"}}))
    with pytest.raises(EyasError, match="export.stitch=true: .*target is quantised"):
        stitch(target, modules, count, out)
    assert [path.name for path in tmp_path.iterdir()] == ["target"]


def test_killed_half_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What ends the process while the copy is written leaves no folder of that name, and the next run cleans up."""
    target, out = save_target(tmp_path / "target", "qwen2"), tmp_path / "out"
    modules, count = module_in_files("qwen2"), {"num_nextn_predict_layers": 1}

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("models.stitch.copy_rest", killed)
        with pytest.raises(KeyboardInterrupt):
            stitch(target, modules, count, out)
    assert not out.exists()
    (tmp_path / ".out.tmp-999999999").mkdir()  # of a process that could not clean up
    stitch(target, modules, count, out)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "target"]
