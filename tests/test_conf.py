"""The configuration as users meet it: recipes, overrides, mistakes, help, run directories."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig, OmegaConf

from conf import CONF_DIR, GROUPS, PRIMARY, RECIPES, folder_name
from conf.options import check_options, fits, method_of
from conf.schema import Config
from conf.validate import resolve
from conf.values import packaged
from models.drafter import Drafter
from models.errors import EyasError
from tests.commands import command, config, refusal, runs, workplace  # noqa: F401

ROOT = Path(__file__).parents[1]


# --- recipes ---


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_composes(recipe: str, tmp_path: Path) -> None:
    own = [] if recipe == "debug" or "smollm2" in recipe else ["data.path=own.json"]
    cfg = config(f"conf={recipe}", *own)
    assert cfg.name == recipe
    assert cfg.output_dir == str(tmp_path / "outputs" / recipe)
    assert issubclass(method_of(cfg.drafter), Drafter)
    assert own or Path(cfg.data.path).is_file()
    assert own or cfg.data.valid_path is None or Path(cfg.data.valid_path).is_file()
    assert (tmp_path / "outputs" / recipe / "train.log").read_text() == ""  # nothing doubtful about it


def test_recipe_values_and_their_precedence() -> None:
    llama = config("conf=eagle3_llama", "data.path=x", "optim.lr=7e-5")
    assert (llama.target.path, llama.target.dtype) == ("meta-llama/Llama-3.1-8B-Instruct", "bfloat16")
    assert (llama.train.depths, llama.train.precision, llama.optim.lr) == (7, "bf16", 7e-5)
    assert llama.drafter["draft_vocab_size"] == 32000
    qwen = config("conf=eagle3_qwen3", "data.path=x")  # inherits the Llama recipe, then overrides it
    assert (qwen.target.path, qwen.train.depths) == ("Qwen/Qwen3-8B", 7)
    assert qwen.target.template_kwargs == {"enable_thinking": False}
    assert config("drafter=eagle3_1").drafter["fc_norm"] is True
    assert config("optim=muon", "tracker=none").optim.name == "muon"


@pytest.mark.parametrize("recipe", [name for name in RECIPES if name.endswith("_smollm2")])
def test_recipes_of_one_target_share_its_data_and_store(recipe: str) -> None:
    """Only then can several methods be compared: one store, one budget, one measurement."""
    cfg, first = config(f"conf={recipe}"), config("conf=eagle3_smollm2")
    assert (cfg.target, cfg.data, cfg.store, cfg.verify) == (first.target, first.data, first.store, first.verify)
    for key in ("epochs", "steps", "bin_tokens", "bins_per_step"):
        assert getattr(cfg.train, key) == getattr(first.train, key)


def test_default_is_the_tiny_cpu_recipe() -> None:
    cfg = config()
    assert (cfg.name, cfg.target.path) == ("debug", "tiny:llama")
    assert Path(cfg.data.path) == ROOT / "data" / "debug.jsonl"


def test_every_group_file_composes() -> None:
    files = {group: sorted(path.stem for path in (CONF_DIR / group).glob("*.yaml")) for group in GROUPS[1:]}
    for i in range(max(map(len, files.values()))):  # several groups at a time: composing takes a while
        chosen = {group: names[i % len(names)] for group, names in files.items()}
        if chosen["optim"] == "muon" and chosen["strategy"].startswith("zero"):
            chosen["optim"] = "adamw"  # the one pair that is refused, see below
        assert config(*(f"{group}={name}" for group, name in chosen.items()), "data.path=x").name == "debug", chosen


# --- mistakes ---


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["optim.lrr=3"], ["optim.lrr", "no such key", "did you mean optim.lr?"]),
        (["+optim.lrr=3"], ["optim.lrr", "no such key", "did you mean optim.lr?"]),
        (["lr=3"], ["lr: there is no such key", "did you mean optim.lr?"]),
        (["+anything=3"], ["anything: there is no such key"]),
        (["drafter.fcnorm=true"], ["drafter.fcnorm", "did you mean drafter.fc_norm?"]),
        (["+drafter.depths=3"], ["drafter.depths", "no such option"]),
        (["+drafter.seed=3"], ["drafter.seed", "no such option"]),
        (["+strategy.stage=3"], ["strategy.stage", "no such key"]),
        (["strategy=zero4"], ["strategy=zero4", "none", "ddp", "zero1", "zero2", "zero3"]),
        (["strategy=zero2", "strategy.deepspeed=mine.json"], ["strategy.deepspeed=mine.json", "No such file"]),
        (["optim.lr=abc"], ["optim.lr", "'abc'", "Float"]),
        (["train.depths=4.0"], ["train.depths", "4.0", "Integer"]),
        (["train.depths=null"], ["train.depths", "must not be null"]),
        (["target.path=null"], ["target.path", "must not be null"]),
        (["target.path=???"], ["target.path", "required"]),
        (["train=3"], ["train:", "TrainConfig"]),
        (["conf=nope"], ["conf=nope", "debug", "eagle3_llama"]),
        (["target=nope"], ["target=nope", "smollm2"]),
        (["conf=3"], ["conf=3", "by name"]),
        (["=3"], ["'=3'", "key=value"]),
        (["nonsense"], ["'nonsense'", "key=value"]),
        (["data.path=a,b"], ["data.path", "data.path=[a,b]", "--multirun"]),
        (["data.path=a=b.json"], ["data.path", "'data.path=\"a=b.json\"'"]),
        (["data.path=../ü.json"], ["data.path", "'data.path=\"../ü.json\"'"]),
        (["train.depths=0"], ["train.depths=0", "at least 1"]),
        (["conf=eagle3_llama"], ["data.path=FILE", "ShareGPT"]),
    ],
)
def test_mistakes_on_the_command_line_name_the_key(
    arguments: list[str], parts: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    told = refusal(capsys, *arguments)
    assert all(part in told for part in parts), told


@cache
def debug_recipe() -> DictConfig:
    with initialize_config_dir(version_base="1.3", config_dir=str(CONF_DIR)):
        return compose(PRIMARY, ["name=debug", "output_dir=outputs/debug"])


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["train.bin_tokens=0"], ["train.bin_tokens=0", "at least 1"]),
        (["verify.gamma=0"], ["verify.gamma=0", "at least 1"]),
        (["seed=-1"], ["seed=-1", "at least 0"]),
        (["verify.prompts=nowhere.jsonl"], ["verify.prompts=nowhere.jsonl", "no such file"]),
        (["train.init_from=nowhere"], ["train.init_from=nowhere", "no such file"]),
        (["data.supervise=all"], ["data.supervise=all", "verify.prompts=FILE"]),
        (["train.depth_keep=0.5", "train.depth_weights=dpace"], ["train.depth_keep=0.5", "dpace"]),
        (["drafter.draft_vocab_size=0"], ["drafter.draft_vocab_size=0", "at least 1"]),
        (["drafter.draft_vocab_size=-1"], ["drafter.draft_vocab_size=-1", "at least 1"]),
        (["drafter.draft_vocab_size=4.0"], ["drafter.draft_vocab_size=4.0", "int or null"]),
        (["drafter.fc_norm=1"], ["drafter.fc_norm=1", "bool"]),
        (["drafter.num_key_value_heads=0"], ["drafter.num_key_value_heads=0", "at least 1"]),
        (["drafter._target_=os.system"], ["drafter._target_=os.system", "models"]),
        (["drafter._target_=models.eagle3.Nope"], ["drafter._target_=models.eagle3.Nope"]),
        (["drafter._target_=null"], ["drafter._target_"]),
        (["train.loss=mse"], ["train.loss=mse", "lk"]),
        (["optim.schedule=linear"], ["optim.schedule=linear", "wsd"]),
        (["target.dtype=fp16"], ["target.dtype=fp16", "float16"]),
        (["store.dtype=int8"], ["store.dtype=int8", "bfloat16"]),
        (["tracker.wandb=yes"], ["tracker.wandb"]),
        (["data.valid_fraction=1"], ["data.valid_fraction=1.0", "below 1"]),
        (["data.valid_fraction=-0.1"], ["data.valid_fraction=-0.1"]),
        (["optim.lr=nan"], ["optim.lr=nan"]),
        (["train.epochs=inf"], ["train.epochs=inf"]),
        (["optim.betas=[0.9]"], ["optim.betas", "two numbers"]),
        (["target.taps=[3,1]"], ["target.taps", "ascending"]),
        (["verify.temperatures=[]"], ["verify.temperatures"]),
        (["data.path=[]"], ["data.path"]),
        (["data.path=7"], ["data.path=7"]),
        (["data.path=eyas:nope.jsonl"], ["data.path=eyas:nope.jsonl", "eyas:debug.jsonl"]),
        (["name=../elsewhere"], ["name=../elsewhere"]),
        (["name=features"], ["name=features"]),
        (["train.steps=5", "train.epochs=2"], ["train.epochs=2.0", "train.steps"]),
        (["data.valid_path=a", "data.valid_fraction=0.1"], ["data.valid_fraction=0.1", "data.valid_path"]),
        (["drafter.fc_norm=true", "drafter.norm_before_fc=true"], ["drafter.fc_norm", "drafter.norm_before_fc"]),
        (["train.steps=10", "optim.warmup=10"], ["optim.warmup=10.0", "train.steps=10"]),
        (["optim.schedule=wsd", "optim.warmup=0.5", "optim.decay=0.6"], ["optim.decay=0.6", "optim.warmup=0.5"]),
    ],
)
def test_impossible_values_and_combinations_name_the_key(arguments: list[str], parts: list[str]) -> None:
    cfg = debug_recipe().copy()
    for argument in arguments:
        key, _, text = argument.partition("=")
        OmegaConf.update(cfg, key, yaml.safe_load(text.replace("nan", ".nan").replace("inf", ".inf")))
    with pytest.raises(EyasError) as refused:
        resolve(cfg, "train", arguments)
    assert all(part in str(refused.value) for part in parts), refused.value


def test_a_recipe_without_data_serves_the_verbs_that_need_none(capsys: pytest.CaptureFixture[str]) -> None:
    assert config("conf=eagle3_llama", job="export").data.path is None
    assert config("conf=eagle3_llama", "verify.prompts=eyas:debug.jsonl", job="eval").data.path is None
    assert "verify.prompts" in refusal(capsys, "conf=eagle3_llama", job="eval")


def fail(error: Exception) -> Callable[[Config], None]:
    def run(cfg: Config) -> None:
        raise error

    return run


def test_mistakes_found_later_are_told_the_same_way(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        command(fail(EyasError("data.path=x.json: row 3 has no messages")))
    assert left.value.code == 2
    assert capsys.readouterr().err == "error: data.path=x.json: row 3 has no messages\n"


def test_full_error_gives_the_stack_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    with pytest.raises(EyasError, match=r"train\.depths=0"):
        runs("train.depths=0")
    assert os.environ["HYDRA_FULL_ERROR"] == "1"


def test_bugs_keep_their_stack_trace() -> None:
    with pytest.raises(ZeroDivisionError):
        command(fail(ZeroDivisionError()))
    assert "HYDRA_FULL_ERROR" not in os.environ


# --- values ---


@pytest.mark.parametrize(
    ("argument", "path"),
    [
        ("data.path=my file.json", "my file.json"),
        ('data.path="a=b, c: [d].json"', "a=b, c: [d].json"),
        ("data.path=[a.json,b.jsonl]", ["a.json", "b.jsonl"]),
        ("data.path=org/name", "org/name"),
        ('data.path="../up/ü.json"', "../up/ü.json"),
    ],
)
def test_awkward_values_arrive_as_typed(argument: str, path: Any) -> None:
    assert config(argument).data.path == path


def test_null_switches_optional_keys_off() -> None:
    cfg = config("drafter.draft_vocab_size=null", "data.valid_path=null", "train.steps=null", "target.taps=null")
    assert cfg.drafter["draft_vocab_size"] is None
    assert (cfg.data.valid_path, cfg.train.steps, cfg.target.taps) == (None, None, None)
    assert config("data.path=x", "data.valid_fraction=0").data.valid_fraction == 0


def test_free_mappings_take_new_keys() -> None:
    cfg = config("+data.roles.Kunde=user", "+target.template_kwargs.enable_thinking=false")
    assert cfg.data.roles == {"Kunde": "user"}
    assert cfg.target.template_kwargs == {"enable_thinking": False}


def test_packaged_paths_resolve_inside_the_package() -> None:
    shipped = str(ROOT / "data" / "debug.jsonl")
    assert config("data.path=[eyas:debug.jsonl,own.json]").data.path == [shipped, "own.json"]
    assert packaged("verify.prompts", "eyas:debug.jsonl") == shipped
    with pytest.raises(EyasError, match=r"verify\.prompts=eyas:\.\./x"):
        packaged("verify.prompts", "eyas:../x.jsonl")


def test_doubtful_settings_are_noted(tmp_path: Path) -> None:
    config("optim.muon_lr=1e-2", "data.path=own.json", "data.valid_path=eyas:debug.jsonl", "verify.gamma=9")
    log = (tmp_path / "outputs/debug/train.log").read_text()
    assert "optim.muon_lr has no effect: optim.name is not muon" in log
    assert "verify.gamma=9 drafts deeper than train.depths=3" in log
    config("conf=eagle3_smollm2", "data.path=own.json")
    assert "comes from the recipe" in (tmp_path / "outputs/eagle3_smollm2/train.log").read_text()


# --- run directories ---


def test_run_directory_follows_the_name_and_the_log_the_verb(tmp_path: Path) -> None:
    assert config("name=mine").output_dir == str(tmp_path / "outputs" / "mine")
    config("name=mine", job="eval")
    assert sorted(p.name for p in (tmp_path / "outputs/mine").iterdir()) == ["eval.log", "train.log"]


def test_a_sweep_has_stable_directories_and_may_name_multirun_anywhere(tmp_path: Path) -> None:
    def swept() -> list[str]:
        found = runs("train.loss=kl", "-m", "conf=debug,eagle3_smollm2", 'data.path="a/b c.json"')
        assert [cfg.name for cfg in found] == ["debug", "eagle3_smollm2"]
        return [Path(str(cfg.output_dir)).relative_to(tmp_path / "outputs/sweeps").as_posix() for cfg in found]

    first, second = swept()
    assert first.startswith("conf=debug,data.path=")
    assert "/" not in first and " " not in first and first != second
    assert swept() == [first, second]


@pytest.mark.parametrize(
    ("text", "name"),
    [("optim.lr=0.001,seed=1", "optim.lr=0.001,seed=1"), ("", "default")],
)
def test_folder_names_are_readable(text: str, name: str) -> None:
    assert folder_name(text) == name


def test_folder_names_differ_where_texts_do() -> None:
    texts = ["a/b", "a b", "a_b", "..", ".", "x" * 300, "x" * 301, "ü", "é"]
    names = [folder_name(text) for text in texts]
    assert len(set(names)) == len(texts)
    assert all(0 < len(name) < 120 and not set(name) & set("/ \\\"'") and name.strip(".") for name in names)


# --- help and the real commands ---


def test_help_lists_recipes_and_main_keys(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        runs("--help")
    assert left.value.code == 0
    told = capsys.readouterr().out
    for expected in (
        *RECIPES,
        "strategy: ddp, none, zero1, zero2, zero3",
        "target.path",
        "data.path",
        "optim.lr",
        "depths: 3",
        "--cfg job",
        "eval conf=",
    ):
        assert expected in told
    assert "$" not in told.replace("${", "")


def test_cfg_job_prints_the_whole_configuration(capsys: pytest.CaptureFixture[str]) -> None:
    runs("--cfg", "job", "conf=eagle3_llama", "seed=5")
    printed = yaml.safe_load(capsys.readouterr().out)
    assert (printed["seed"], printed["train"]["depths"], printed["data"]["path"]) == (5, 7, "???")
    assert set(printed) == set(Config.__dataclass_fields__)


def test_command_works_from_a_folder_with_a_data_folder_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "mine.json").write_text("[]")
    typed = [sys.executable, "-c", "from train.__main__ import main; main()", "data.path=data/mine.json", "--cfg=job"]
    done = subprocess.run(
        typed, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert yaml.safe_load(done.stdout)["data"]["path"] == "data/mine.json"
    assert (Path(tmp_path) / yaml.safe_load(done.stdout)["data"]["path"]).is_file()


# --- options of the open sections ---


@pytest.mark.parametrize(
    ("value", "hint", "fitting"),
    [
        (1, int | None, True),
        (None, int | None, True),
        (True, int, False),
        (1.0, int, False),
        (1, float, True),
        (True, float, False),
        (1, bool, False),
        ("x", str, True),
        (["a"], list[str], True),
        ([1], list[str], False),
        ((1, 2), tuple[int, ...], True),
        ({"a": 1}, dict[str, Any], True),
        (object(), Any, True),
    ],
)
def test_fits(value: Any, hint: Any, fitting: bool) -> None:
    assert fits(value, hint) is fitting


def test_options_are_checked_by_name_and_type() -> None:
    check_options("drafter", {"layers": int, "mode": str | None}, {"_target_": "x", "layers": 2, "mode": None})
    with pytest.raises(EyasError, match=r"drafter\.layer: there is no such option; did you mean layers\?"):
        check_options("drafter", {"layers": int}, {"layer": 2})


def test_only_train_runs_in_several_processes(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert config("conf=debug").name == "debug"
    assert "data: runs in one process" in refusal(capsys, "conf=debug", job="data")
    assert "--multirun: a sweep runs in one process" in refusal(capsys, "--multirun", "seed=1,2")


def test_what_the_verbs_are_built_on_imports_none_of_them() -> None:
    files = [path for folder in ("conf", "models", "data") for path in (ROOT / folder).rglob("*.py")]
    upwards = re.compile(r"^\s*(?:from|import) (?:train|eval|scripts)\b", re.MULTILINE)
    assert len(files) > 100 and [path for path in files if upwards.search(path.read_text(encoding="utf-8"))] == []
