"""From conversations to features and drafter: what is held out, what is fed, what is skipped."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

from conf.schema import (
    Config,
    DataConfig,
    ExportConfig,
    JointConfig,
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
from models.tuned import as_model
from tests.tiny import tiny_target
from train.drift import settle_config
from train.stages import check_start, evaluate, export, feature_sources, file_digests, fit, gather, once, walk
from train.strategy import build_accelerator
from train.trainer import Fitted
from train.watchdog import Watchdog

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
    accelerator = build_accelerator(cfg.device)
    run_dir.mkdir(parents=True, exist_ok=True)
    watchdog = Watchdog(accelerator, 60.0)
    return fit(cfg, accelerator, run_dir, gather(cfg, accelerator, run_dir), watchdog)


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
    accelerator = build_accelerator("cpu")
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
    for changes, told in (({"fc_norm": True}, "fc_norm=True"), ({"draft_vocab_size": 64}, "draft_vocab_size=64")):
        with pytest.raises(EyasError, match=f"is another drafter .*: drafter.{told}, there it is"):
            run(replace(cfg, drafter=cfg.drafter | changes), tmp_path / "fourth")


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


def test_an_export_is_made_again_unless_it_is_all_there(
    target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights that are gone, damaged or another run's; the card is the reader's, and a file beside is none of ours."""
    there = ExportConfig(dir=str(tmp_path / "export"))
    cfg = config(target, tmp_path, output_dir=str(tmp_path / "run"), export=there)
    fitted = run(cfg, tmp_path / "run")
    made = list[Path]()
    folder = tmp_path / "export"

    def exported(content: bytes) -> Callable[[Config], None]:
        def run_export(cfg: Config) -> None:
            made.append(folder)
            (folder / "target").mkdir(parents=True, exist_ok=True)
            for name in ("config.json", "README.md"):
                (folder / name).write_text("{}")
            for name in ("model.safetensors", "target/model.safetensors"):
                (folder / name).write_bytes(content)

        return run_export

    def times() -> int:
        export(cfg, tmp_path / "run", fitted)
        return len(made)

    monkeypatch.setattr("scripts.export.run_export", exported(b"ours"))
    assert (times(), times()) == (1, 1)
    (folder / "model.safetensors").unlink()
    assert times() == 2
    shutil.rmtree(folder / "target")
    assert times() == 3
    (folder / "target/model.safetensors").write_bytes(b"cut")
    assert times() == 4
    exported(b"another run's")(cfg)
    assert times() == 6 and (folder / "model.safetensors").read_bytes() == b"ours"
    (folder / "README.md").write_text("a better card")
    (folder / "notes.txt").write_text("mine")
    assert times() == 6


def test_what_a_product_is_made_from(target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Evaluation and export are done again for another drafter, tuned target, machine or name on the card."""
    cfg = config(target, tmp_path, output_dir=str(tmp_path / "run"))
    accelerator = build_accelerator(cfg.device)
    inputs = gather(cfg, accelerator, tmp_path / "run")
    keys: dict[str, str] = {}
    monkeypatch.setattr("train.stages.once", lambda run_dir, stage, key, *_: keys.update({stage: key}))
    files = {"model.safetensors": "a", "target.safetensors": "b", "optimizer-00001.safetensors": "c"}

    def of(cfg: Config, files: dict[str, str]) -> dict[str, str]:
        (tmp_path / "state.json").write_text(json.dumps({"files": files}))
        fitted = Fitted(tmp_path, None, 1)
        evaluate(cfg, tmp_path / "run", inputs, fitted)
        export(cfg, tmp_path / "run", fitted)
        return dict(keys)

    def changed(cfg: Config, files: dict[str, str] = files) -> set[str]:
        now = of(cfg, files)
        return {stage for stage in now if now[stage] != before[stage]}

    before, both = of(cfg, files), {"evaluation", "export"}
    assert changed(cfg) == changed(cfg, files | {"optimizer-00001.safetensors": "x"}) == set()
    assert changed(cfg, files | {"model.safetensors": "x"}) == changed(cfg, files | {"target.safetensors": "x"}) == both
    assert changed(replace(cfg, target=replace(cfg.target, path="x"))) == both
    assert changed(replace(cfg, data=replace(cfg.data, path="x"))) == {"export"}
    assert changed(replace(cfg, threads=2)) == {"evaluation"}
    for name, other in (("eval.look.table.VERSION", 0), ("train.stages.pick_device", lambda device: "another")):
        with monkeypatch.context() as patch:
            patch.setattr(name, other)
            assert changed(cfg) == {"evaluation"}
    assert changed(cfg) == set()


# --- told before the training, not after it ---


@pytest.mark.parametrize(
    ("drafter", "wanted", "words"),
    [
        ({"_target_": "models.medusa.MedusaDrafter", "num_heads": 2}, {"stitch": True}, "export.stitch=true: "),
        ({"_target_": "models.mtp.MtpDrafter"}, {"layout": "qwen3_next"}, "export.layout=qwen3_next: engines read"),
        (DRAFTER, {"dir": "."}, "holds data.jsonl, which no export writes"),
    ],
)
def test_what_can_not_be_exported_is_refused_before_training(
    target: str, tmp_path: Path, drafter: dict[str, Any], wanted: dict[str, Any], words: str
) -> None:
    wanted = wanted | ({"dir": str(tmp_path)} if "dir" in wanted else {})
    cfg = config(target, tmp_path, drafter=drafter, export=ExportConfig(**wanted))
    with pytest.raises(EyasError, match=words):
        run(cfg, tmp_path / "run")
    assert not (tmp_path / "run/checkpoints").exists()


@pytest.mark.parametrize(
    ("drafter", "words"),
    [
        ({"_target_": "models.parallel_heads.ParallelHeadsDrafter", "num_heads": 2}, "no engine drafts with it"),
        ({"_target_": "models.eagle1.Eagle1Drafter", "fc_bias": True}, "drafter.fc_bias=false to export"),
    ],
)
def test_what_no_engine_drafts_with_is_told_and_trained(
    target: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, drafter: dict[str, Any], words: str
) -> None:
    cfg = config(target, tmp_path, drafter=drafter)
    cfg.train.steps = 1
    assert run(cfg, tmp_path / "run").steps == 1
    (told,) = [record.message for record in caplog.records if record.message.startswith("there will be no export")]
    assert words in told


def test_a_drafter_of_a_tuned_target_starts_with_that_target(tmp_path: Path) -> None:
    """From the run, and from its export; with another target the message names the right one."""
    checkpoint, exported = tmp_path / "joint/checkpoints/step_00000001", tmp_path / "joint/export"
    for folder in (checkpoint, exported / "target"):
        folder.mkdir(parents=True)
    (checkpoint / "state.json").write_text('{"files": {}}')
    (checkpoint / "target.safetensors").write_bytes(b"adapters")
    about = {"format": 1, "kind": "lora", "lora": {"rank": 2, "alpha": 4.0, "dropout": 0.0}, "perplexity": {}}
    (checkpoint / "target.json").write_text(json.dumps(about))
    (exported / "target/target.json").write_text(json.dumps(as_model(checkpoint)))
    (exported / "config.json").write_text(json.dumps({"eyas": {"target": as_model(checkpoint)}}))
    for start in (tmp_path / "joint", checkpoint, exported):
        cfg = Config(name="next", target=TargetConfig(path="tiny:llama"), train=TrainConfig(init_from=str(start)))
        with pytest.raises(EyasError, match=f"train.init_from={start}: .* give target.path={exported}/target"):
            check_start(cfg)
        check_start(replace(cfg, target=TargetConfig(path=str(exported / "target"))))
    plain = tmp_path / "plain/checkpoints/step_00000001"
    plain.mkdir(parents=True)
    check_start(Config(name="x", target=TargetConfig(path="tiny:llama"), train=TrainConfig(init_from=str(plain))))


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


def test_a_key_of_a_later_version_was_its_default(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A run begun before there was such a key goes on with the default, and with nothing else."""
    cfg = Config(name="run", target=TargetConfig(path="t"), drafter=DRAFTER)
    settle_config(cfg, tmp_path, begun=False, write=True)
    path = tmp_path / "config.yaml"
    stored = yaml.safe_load(path.read_text())
    for section, key in (("joint", None), ("target", "quantize"), ("train", "top_k"), ("optim", "max_grad_norm")):
        del (stored[section] if key else stored)[key or section]
    path.write_text(yaml.safe_dump(stored))
    settle_config(cfg, tmp_path, begun=True, write=True)
    assert not caplog.records
    changed = replace(cfg, joint=JointConfig(backbone="lora"), train=replace(cfg.train, top_k=10))
    changed.target = replace(cfg.target, quantize="8bit")
    with pytest.raises(EyasError) as refused:
        settle_config(changed, tmp_path, begun=True, write=True)
    for line in ("joint.backbone: none -> lora", "train.top_k: 0 -> 10", "target.quantize: None -> 8bit"):
        assert line in str(refused.value)
