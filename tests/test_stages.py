"""From conversations to features and drafter: what is held out, what is fed, what is skipped."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from conf.schema import (
    Config,
    DataConfig,
    ExportConfig,
    OptimConfig,
    StoreConfig,
    TargetConfig,
    TrackerConfig,
    TrainConfig,
)
from data.prepare import Inputs, open_target
from models.checkpoint import load_drafter
from models.errors import EyasError
from models.portable import read_export
from tests.tiny import tiny_target
from train.drift import settle_config
from train.stages import export, feature_sources, file_digests, fit, gather, once, walk
from train.strategy import build_accelerator
from train.trainer import Fitted

DRAFTER = {"_target_": "models.eagle3.Eagle3Drafter", "draft_vocab_size": 100}


# --- fitting ---


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_target(tmp_path_factory.mktemp("target"), "llama"))


def config(target: str, cwd: Path, **changes: Any) -> Config:
    """Eight one-line conversations, two of them held out."""
    rows = [
        {"messages": [{"role": "user", "content": f"{i}?"}, {"role": "assistant", "content": f"It is {i * 7}."}]}
        for i in range(8)
    ]
    data = cwd / "data.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    base = Config(
        name="run",
        device="cpu",
        target=TargetConfig(path=target),
        drafter=DRAFTER,
        data=DataConfig(path=str(data), valid_fraction=0.25, max_length=256, cache_dir=str(cwd / "documents")),
        store=StoreConfig(dir=str(cwd / "features"), dtype="float32"),
        optim=OptimConfig(lr=1e-3),
        train=TrainConfig(steps=3, bin_tokens=128, depths=2),
        tracker=TrackerConfig(tensorboard=False, wandb="disabled"),
    )
    return replace(base, **changes)


def run(cfg: Config, run_dir: Path) -> Fitted:
    accelerator = build_accelerator(cfg.strategy, device=cfg.device)
    run_dir.mkdir(parents=True, exist_ok=True)
    return fit(cfg, accelerator, run_dir, gather(cfg, accelerator, run_dir))


def test_online_features_train_like_stored_ones(target: str, tmp_path: Path) -> None:
    stored = run(config(target, tmp_path), tmp_path / "stored")
    online = run(config(target, tmp_path, features="online"), tmp_path / "online")
    one, two = (load_file(fitted.checkpoint / "model.safetensors") for fitted in (stored, online))
    for name, tensor in one.items():
        torch.testing.assert_close(two[name], tensor, rtol=1e-3, atol=1e-4)
    folders = list((tmp_path / "features").iterdir())
    assert len(folders) == 2  # training and held-out documents, both by the stored run


def test_a_whole_store_is_used_without_the_target(target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cfg = config(target, tmp_path)
    run(cfg, tmp_path / "first")
    monkeypatch.setattr(Inputs, "load_target", lambda *_: pytest.fail("the target was loaded again"))
    run(cfg, tmp_path / "second")
    accelerator = build_accelerator({}, device="cpu")
    changed = replace(cfg, data=replace(cfg.data, max_length=29))
    with pytest.raises(pytest.fail.Exception):  # cut documents are other documents
        feature_sources(changed, accelerator, gather(changed, accelerator, tmp_path))


def test_draft_vocabulary_holds_specials_and_the_answers_bytes(target: str, tmp_path: Path) -> None:
    fitted = run(config(target, tmp_path), tmp_path / "run")
    vocab = load_drafter(fitted.checkpoint).vocab
    tokenizer = open_target(vars(TargetConfig(path=target))).tokenizer
    answer = tokenizer.encode("It is .012345679", add_special_tokens=False)
    assert len(vocab) == 100 and vocab.size == 288
    assert {0, 1, 2, *answer} <= set(vocab.ids.tolist())


def test_init_from_a_run(target: str, tmp_path: Path) -> None:
    """The first step starts from the other run's best weights: with no learning rate they stay as they are."""
    first = run(config(target, tmp_path), tmp_path / "first")
    cfg = config(target, tmp_path, optim=OptimConfig(lr=1e-30))
    cfg.train = replace(cfg.train, init_from=str(tmp_path / "first"), steps=1)
    second = run(cfg, tmp_path / "second")
    one, two = (load_file(fitted.checkpoint / "model.safetensors") for fitted in (first, second))
    assert all(torch.equal(one[name], two[name]) for name in one)
    wrong = replace(cfg, target=replace(cfg.target, taps=[0, 1, 2]))
    with pytest.raises(EyasError, match=r"train.init_from=.*: does not fit this run: taps \(1, 2, 3\) instead of"):
        run(wrong, tmp_path / "third")


def test_other_data_under_the_same_name_is_refused(target: str, tmp_path: Path) -> None:
    cfg = config(target, tmp_path)
    run(cfg, tmp_path / "run")
    changed = replace(cfg, data=replace(cfg.data, max_documents=7))
    with pytest.raises(EyasError, match="begun with other input, training features"):
        run(changed, tmp_path / "run")


# --- skipping and drift ---


def test_once(tmp_path: Path) -> None:
    """Done again only if the key changed or the product is gone; a failure is not taken for done."""
    done: list[str] = []
    product = tmp_path / "product"

    def work(name: str) -> None:
        done.append(name)
        product.write_text(name)

    once(tmp_path, "stage", "k1", product, lambda: work("a"))
    once(tmp_path, "stage", "k1", product, lambda: work("b"))
    once(tmp_path, "stage", "k2", product, lambda: work("c"))
    product.unlink()
    once(tmp_path, "stage", "k2", product, lambda: work("d"))
    with pytest.raises(ZeroDivisionError):
        once(tmp_path, "stage", "k3", product, lambda: 1 / 0)
    once(tmp_path, "stage", "k3", product, lambda: work("e"))
    assert done == ["a", "c", "d", "e"]


def test_export_follows_its_settings(target: str, tmp_path: Path) -> None:
    """Another dtype or folder is another export; the same settings are done once."""
    cfg = config(target, tmp_path, output_dir=str(tmp_path / "run"))
    fitted = run(cfg, tmp_path / "run")
    wishes: list[dict[str, Any]] = [{}, {"dtype": "float32"}, {"dir": str(tmp_path / "elsewhere")}]
    for changes in wishes:
        export(replace(cfg, export=ExportConfig(**changes)), tmp_path / "run", fitted)
    assert read_export(tmp_path / "run/export")[1]["dtype"] == "float32"
    assert read_export(tmp_path / "elsewhere")[1]["dtype"] == "bfloat16"
    card = tmp_path / "elsewhere" / "README.md"
    card.unlink()
    export(replace(cfg, export=ExportConfig(dir=str(tmp_path / "elsewhere"))), tmp_path / "run", fitted)
    assert not card.exists()


def test_without_anything_held_out_the_run_goes_on_to_its_export(
    target: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cfg = config(target, tmp_path, output_dir=str(tmp_path / "run"))
    cfg.data.valid_fraction = 0.0
    walk(cfg)
    assert "evaluation: skipped" in caplog.text
    assert not (tmp_path / "run/report.json").exists()
    assert (tmp_path / "run/export/config.json").exists()


def test_edited_prompts_are_noticed(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text("a")
    before = file_digests(path)
    assert file_digests(tmp_path) == before
    path.write_text("b")
    assert file_digests(path) != before


def test_drift(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Before the first checkpoint the configuration may change; then harmless keys are shown and others refused."""
    cfg = Config(name="run", target=TargetConfig(path="t"), drafter=DRAFTER)
    path = tmp_path / "config.yaml"
    settle_config(replace(cfg, seed=5), tmp_path, begun=False, write=True)
    settle_config(cfg, tmp_path, begun=False, write=True)
    stored = path.read_text()
    settle_config(cfg, tmp_path, begun=True, write=True)
    assert not caplog.records
    with caplog.at_level(logging.WARNING):
        settle_config(replace(cfg, threads=3), tmp_path, begun=True, write=True)
    assert "threads: 0 -> 3" in caplog.text
    changed = replace(cfg, seed=1, optim=OptimConfig(betas=(0.9, 0.99)), drafter=DRAFTER | {"fc_norm": True})
    with pytest.raises(EyasError) as refused:
        settle_config(changed, tmp_path, begun=True, write=True)
    for line in ("seed: 0 -> 1", "optim.betas: [0.9, 0.95] -> [0.9, 0.99]", "drafter.fc_norm: not set -> True"):
        assert line in str(refused.value)
    assert path.read_text() == stored


@pytest.mark.parametrize("content", ["a: [1", "", "[1]", "\0"])
def test_a_damaged_configuration_is_named(content: str, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(content)
    with pytest.raises(EyasError, match=f"{tmp_path}/config.yaml: not the configuration"):
        settle_config(Config(name="a"), tmp_path, begun=True, write=True)


@pytest.mark.parametrize("content", ["x", "", "[1]", "3"])
def test_damaged_notes_on_stages_do_them_again(content: str, tmp_path: Path) -> None:
    product, made = tmp_path / "product", list[int]()
    product.write_text("")
    once(tmp_path, "s", "k", product, lambda: made.append(1))
    (tmp_path / "stages.json").write_text(content)
    for _ in range(2):
        once(tmp_path, "s", "k", product, lambda: made.append(2))
    assert made == [1, 2]


def test_a_key_of_a_later_version_is_no_drift(tmp_path: Path) -> None:
    cfg = Config(name="run", target=TargetConfig(path="t"), drafter=DRAFTER)
    settle_config(cfg, tmp_path, begun=False, write=True)
    path = tmp_path / "config.yaml"
    path.write_text(path.read_text().replace("  max_grad_norm: 0.5\n", ""))
    settle_config(cfg, tmp_path, begun=True, write=True)
