"""The target that an export brings along: tuned with the drafter, carrying its MTP modules, or both."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from conf.schema import Config
from models.checkpoint import save_drafter
from models.drafter import Drafter
from models.errors import EyasError
from models.load_frozen import load_frozen
from models.medusa import MedusaDrafter
from models.mtp import MtpDrafter
from models.portable import load_export, staged
from models.target import Target
from models.tuned import save_tuned
from models.vocab import DraftVocab
from scripts.export import run_export
from tests.drafters import randomise
from tests.tiny import tiny_target


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tiny_target(tmp_path / "target", "qwen2", hidden=32)


def checkpoint(folder: Path, target: Path, kind: type[Drafter], tuned: bool) -> Drafter:
    """A run's checkpoint: a random drafter and, if ``tuned``, every weight of the target plus 1/8."""
    drafter = randomise(kind.create(load_frozen(target), DraftVocab.full(288), ()))
    folder.mkdir(parents=True)
    save_drafter(drafter, folder)
    if tuned:
        model = Target.load(str(target)).model
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += 0.125
        save_tuned(model, folder, None, {"perplexity": {"before": 3.0, "after": 2.5}})
    return drafter


def export(tmp_path: Path, target: Path, **options: object) -> Path:
    cfg = Config(name="run", output_dir=str(tmp_path / "run"), drafter_path=str(tmp_path / "checkpoint"))
    cfg.target.path, cfg.export.dtype = str(target), "float32"
    for key, value in options.items():
        setattr(cfg.export, key, value)
    return run_export(cfg)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return dict(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict())


def digests(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}


def is_drafter(read: Drafter, drafter: Drafter) -> bool:
    state = drafter.state_dict()
    return all(torch.equal(tensor, state[name]) for name, tensor in read.state_dict().items())


def test_a_tuned_target_lies_beside_its_drafter(tmp_path: Path, target: Path) -> None:
    for name in ("tf_model.h5", "flax_model.msgpack", "pytorch_model.bin.index.json", ".gitattributes", "LICENSE"):
        (target / name).write_text("of the original")
    before = digests(target)
    drafter = checkpoint(tmp_path / "checkpoint", target, MedusaDrafter, tuned=True)
    folder = export(tmp_path, target)
    assert {path.name for path in folder.iterdir()} == {"README.md", "config.json", "model.safetensors", "target"}
    assert digests(target) == before
    for name, tensor in weights(folder / "target").items():
        torch.testing.assert_close(tensor, weights(target)[name] + 0.125, rtol=0, atol=1e-6)
    beside = {path.name for path in (folder / "target").iterdir()}
    assert {"tokenizer.json", "generation_config.json", "LICENSE"} <= beside
    assert not beside & {"tf_model.h5", "flax_model.msgpack", "pytorch_model.bin.index.json", ".gitattributes"}
    assert is_drafter(load_export(folder), drafter)
    card = (folder / "README.md").read_text()
    assert "The target was trained along with it and is another model now" in card
    assert f"vllm serve {folder / 'target'} " in card and f"| target | {target}, changed by joint training |" in card
    export(tmp_path, target)  # in place of the first
    assert (folder / "target" / "config.json").exists()


@pytest.mark.parametrize("tuned", [False, True])
def test_a_copy_of_the_target_carries_the_modules(tmp_path: Path, target: Path, tuned: bool) -> None:
    before = digests(target)
    drafter = checkpoint(tmp_path / "checkpoint", target, MtpDrafter, tuned)
    folder = export(tmp_path, target, stitch=True)
    assert {path.name for path in folder.iterdir()} == {"README.md", "config.json", "model.safetensors", "target"}
    assert digests(target) == before
    assert is_drafter(load_export(folder), drafter)
    assert is_drafter(load_export(folder / "target"), drafter)
    for name, tensor in weights(folder / "target").items():  # the model that transformers reads there is the target
        torch.testing.assert_close(tensor, weights(target)[name] + 0.125 * tuned, rtol=0, atol=1e-6)
    config = json.loads((folder / "target" / "config.json").read_text())
    assert config["num_nextn_predict_layers"] == 1 and config["model_type"] == "qwen2"
    card = (folder / "README.md").read_text()
    if tuned:
        assert "export with `export.stitch=false`" in card and "vllm serve" not in card
    else:
        assert f"""vllm serve {target} --hf-overrides '{{"num_nextn_predict_layers": 1}}' --spec""" in card
    assert ("another model now" in card) is tuned


def test_only_mtp_modules_are_carried(tmp_path: Path, target: Path) -> None:
    checkpoint(tmp_path / "checkpoint", target, MedusaDrafter, tuned=False)
    with pytest.raises(EyasError, match=r"export\.stitch=true: targets carry MTP modules; Medusa stays"):
        export(tmp_path, target, stitch=True)
    assert not (tmp_path / "run" / "export").exists()


def test_a_model_of_someone_elses_is_not_replaced(tmp_path: Path, target: Path) -> None:
    """config.json and model.safetensors are files that an export writes, too."""
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja"):
        (target / name).unlink(missing_ok=True)
    assert {path.name for path in target.iterdir()} == {"config.json", "model.safetensors"}
    with pytest.raises(EyasError, match=r"its config\.json is not of an export by Eyas"), staged(target):
        pass
    assert (target / "model.safetensors").exists()


def test_what_an_export_reads_is_never_replaced(tmp_path: Path, target: Path) -> None:
    """Neither the target nor the drafter may lie in the folder that is written anew."""
    checkpoint(tmp_path / "checkpoint", target, MedusaDrafter, tuned=False)
    before = digests(target)
    for folder, key in (
        (target, "target.path"),
        (target.parent, "target.path"),
        (tmp_path / "checkpoint", "drafter_path"),
    ):
        with pytest.raises(EyasError, match=f"^export.dir={folder}: holds .* {key} names"):
            export(tmp_path, target, dir=str(folder))
    assert digests(target) == before and (tmp_path / "checkpoint" / "model.safetensors").is_file()
