"""Mistakes with files and folders, as every verb tells them: the key or the file by name, and exit code 2."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from conf.cli import told_plainly
from conf.explain import check_arguments, unknown
from conf.rules import PATHS
from conf.schema import Config, DataConfig, TargetConfig
from conf.validate import check_late_inputs, check_outputs, check_texts, validate
from conf.values import expand, value
from data.chats.rows import read_rows
from data.documents.corpus import read_corpus
from data.masks.template import ChatTemplate
from models.checkpoint import load_drafter, save_drafter
from models.errors import EyasError
from models.files import lock
from models.portable import load_export, staged
from tests.chat_templates import CHATML, byte_tokenizer
from tests.exports import exported, make, rewrite

EAGLE3 = {"_target_": "models.eagle3.Eagle3Drafter"}


def whole(**changes: Any) -> Config:
    """A configuration without an open key; ``changes`` are written a__b for a.b."""
    cfg = Config(name="x", target=TargetConfig(path="tiny:llama"), data=DataConfig(path="d.json"))
    for key, given in changes.items():
        section, _, name = key.rpartition("__")
        setattr(value(cfg, section) if section else cfg, name, given)
    return cfg


# --- configuration ---


@pytest.mark.parametrize(
    "key",
    ["target.path", "target.chat_template", "store.dir", "output_dir", "export.dir", "verify.prompts", "drafter_path"],
)
@pytest.mark.parametrize("text", ["", " ", "None"])
def test_an_empty_text_is_no_path(key: str, text: str) -> None:
    check_texts(whole())
    with pytest.raises(EyasError, match=f"{key}={text}: must not be empty; none is written null"):
        check_texts(whole(**{key.replace(".", "__"): text}))


@pytest.mark.parametrize("below", ["", "/deeper/still"])
def test_a_file_where_a_folder_is_to_be_written_is_refused_before_any_work(tmp_path: Path, below: str) -> None:
    (tmp_path / "file").write_text("x")
    for key in ("output_dir", "store.dir", "export.dir"):
        cfg = whole(**{key.replace(".", "__"): f"{tmp_path}/file{below}"})
        with pytest.raises(EyasError, match=f"{key}={tmp_path}/file{below}: {tmp_path}/file is a file"):
            check_outputs(cfg, "train")
    check_outputs(whole(store__dir=f"{tmp_path}/file"), "eval")  # which writes no features
    check_outputs(whole(store__dir=f"{tmp_path}/file", joint__backbone="lora"), "train")  # which keeps none
    check_outputs(whole(output_dir=f"{tmp_path}/new/one"), "train")
    assert not (tmp_path / "new").exists()


def test_a_home_folder_is_expanded_wherever_a_path_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    cfg = whole(**{key.replace(".", "__"): "~/x" for key in PATHS})
    for key in PATHS:
        expand(cfg, key)
        assert value(cfg, key) == f"{tmp_path}/x"
    cfg = whole()
    expand(cfg, "export.dir")
    assert cfg.export.dir is None


@pytest.mark.parametrize("key", ["seed", "threads", "store.shard_mib"])
def test_numbers_that_fit_no_machine_are_refused(key: str) -> None:
    validate(whole(drafter=EAGLE3))
    with pytest.raises(EyasError, match=f"{key}={10**23}: must be at most"):
        validate(whole(drafter=EAGLE3, **{key.replace(".", "__"): 10**23}))


@pytest.mark.parametrize("job", ["eval", "export"])
def test_a_drafter_that_is_not_there_names_the_key(job: str) -> None:
    with pytest.raises(EyasError, match="drafter_path=nowhere: no such file or folder"):
        check_late_inputs(whole(drafter_path="nowhere"), job)


@pytest.mark.parametrize("choice", ["null", "NULL", "", "3", "true", "{}", "{a: 1}", "[]", "[a,b]"])
def test_a_group_is_chosen_by_name(choice: str) -> None:
    check_arguments(["drafter=eagle3", "optim=adamw,muon", "~optim", "drafter.fc_norm=true"])
    with pytest.raises(EyasError, match="drafter=.*: choose by name"):
        check_arguments([f"drafter={choice}"])


def test_a_new_key_of_a_free_mapping_wants_its_plus() -> None:
    assert (
        unknown("data.roles.Kunde", [])
        == "data.roles.Kunde: a new key here is added with a plus: +data.roles.Kunde=VALUE"
    )
    assert "no such key; did you mean data.path?" in unknown("data.pth", ["path"])


# --- what other processes do, or did ---


def test_a_folder_is_written_by_one_process_at_a_time(tmp_path: Path) -> None:
    with lock(tmp_path / "run", "training this run"):
        with pytest.raises(EyasError, match=f"{tmp_path}/run: another process is training this run"):
            lock(tmp_path / "run", "training this run")
        lock(tmp_path / "other", "training this run").close()
    lock(tmp_path / "run", "training this run").close()


def test_what_a_killed_export_left_is_cleared_away(tmp_path: Path) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    names = [f".export.tmp-{gone.pid}", f".export.tmp-{os.getppid()}", ".export.tmp-x", ".export2.tmp-1"]
    for name in names:
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_text("half")
    with staged(tmp_path / "export") as temporary:
        (temporary / "config.json").write_text("{}")
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted([*names[1:], "export"])


# --- the machine ---


def test_a_full_disk_is_told_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left, told_plainly("train"):
        raise OSError(errno.ENOSPC, "No space left on device", "outputs/x/optimizer.pt")
    assert left.value.code == 2
    assert capsys.readouterr().err == "error: outputs/x/optimizer.pt: No space left on device\n"


def test_a_file_that_should_be_there_keeps_its_stack_trace(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), told_plainly("train"):
        (tmp_path / "absent").read_text()


# --- data ---


def test_mistakes_name_the_key_that_gave_the_path(tmp_path: Path) -> None:
    template = ChatTemplate(byte_tokenizer(), CHATML)
    good, empty = tmp_path / "good.jsonl", tmp_path / "empty.jsonl"
    turns = '[{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]'
    good.write_text(f'{{"messages": {turns}}}\n')
    empty.write_text("")
    (tmp_path / "folder").mkdir()

    def told(path: str, valid_path: str) -> str:
        with pytest.raises(EyasError) as caught:
            read_corpus(
                template,
                asdict(DataConfig(path=path, valid_path=valid_path, cache_dir=f"{tmp_path}/cache")),
            )
        return str(caught.value)

    assert told(str(good), f"{tmp_path}/no.jsonl").startswith(f"data.valid_path={tmp_path}/no.jsonl: no such file")
    assert told(str(good), f"{tmp_path}/folder").startswith(f"data.valid_path={tmp_path}/folder: the folder holds no")
    assert told(str(good), str(empty)).startswith("data.valid_path: 0 of 1 rows usable")
    assert told(str(empty), str(good)).startswith("data.path: 0 of 1 rows usable")
    with pytest.raises(EyasError, match=r"verify\.prompts=.*: the folder holds no"):
        list(read_rows(str(tmp_path / "folder"), key="verify.prompts"))


@pytest.mark.parametrize(
    ("key", "given"),
    [
        ("hidden_size", "abc"),
        ("hidden_size", 63),
        ("num_attention_heads", 0),
        ("vocab_size", None),
        ("rope_theta", "x"),
        ("draft_vocab_size", -1),
        ("rms_norm_eps", "x"),
        ("architectures", 5),
    ],
)
def test_an_export_edited_by_hand_names_its_folder(key: str, given: Any, tmp_path: Path) -> None:
    exported(tmp_path / "out")
    rewrite(tmp_path / "out", lambda _, config: config.update({key: given}))
    with pytest.raises(EyasError) as caught:
        load_export(tmp_path / "out")
    assert str(caught.value).startswith(f"{tmp_path}/out"), caught.value


@pytest.mark.parametrize(("key", "given"), [("architecture", "x"), ("architecture", {}), ("vocab_size", "x")])
def test_a_checkpoint_edited_by_hand_names_its_file(key: str, given: Any, tmp_path: Path) -> None:
    save_drafter(make()[0], tmp_path)
    path = tmp_path / "drafter.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {key: given}))
    with pytest.raises(EyasError, match=f"{path}: describes no drafter"):
        load_drafter(tmp_path)
