"""Commands that went wrong with other tools, from public reports, each with the right outcome: paths, methods, shapes.

See tests/test_reported_training.py. These inputs and outcomes are held elsewhere already:

    hydra#2414: data.path below a folder of the user's own   test_conf.py, command_works_from_a_folder_with_a_data_...
    hydra#922: an unknown key behind a plus                  test_conf.py, mistakes_on_the_command_line_name_the_key
    Automodel PR#2326: '' and None for a path                test_mistakes.py, an_empty_text_is_no_path (below too)
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig

from models.checkpoint import load_drafter
from models.portable import load_export
from models.run_folder import best_checkpoint
from tests.commands import command, config, refusal, workplace  # noqa: F401
from tests.tiny import tiny_config, tiny_model, tiny_target, tiny_tokenizer
from train.stages import walk
from train.tracking import read_metrics

SHORT = (
    *("train.steps=4", "train.bin_tokens=128", "train.depths=2", "train.log_every=1", "train.eval_every=2"),
    *("train.keep_last=9", "data.valid_fraction=0.2", "device=cpu", "threads=1", "tracker=none", "preview=0"),
    *("verify.max_prompts=1", "verify.max_new_tokens=4", "verify.gamma=2", "verify.temperatures=[0.0]"),
    *("verify.baseline=false", "verify.costs=false"),
)


def rows(path: Path, count: int = 6) -> Path:
    chats = [[("user", f"{i} times 7?"), ("assistant", f"It is {i * 7}.")] for i in range(count)]
    lines = [{"id": f"r{i}", "messages": [{"role": r, "content": c} for r, c in chat]} for i, chat in enumerate(chats)]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(lines))
    return path


def typed(verb: str, *arguments: str) -> None:
    """The command itself, in this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [verb, *arguments])
        importlib.import_module("scripts.export" if verb == "export" else f"{verb}.__main__").main()


# --- Model-Optimizer PR#1370: a method that misses a branch -----------------------------------------------------

METHODS = ("eagle1", "eagle3", "eagle3_1", "hass", "medusa", "mtp", "mtp_parallel")
UNSERVED = ("mtp_parallel",)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target, six rows, and the stores and documents that all methods share."""
    folder = tmp_path_factory.mktemp("shared")
    tiny_target(folder / "target")
    return rows(folder / "rows.json").parent


@pytest.mark.parametrize("method", METHODS)
def test_every_method_goes_through_every_verb(
    method: str,
    shared: Path,
    workplace: Path,  # noqa: F811
    capsys: pytest.CaptureFixture[str],
) -> None:
    """data, train, train again from the middle, eval and export, on six rows."""
    own = (f"drafter={method}", f"target.path={shared}/target", f"data.path={shared}/rows.json")
    place = (f"store.dir={shared}/features", f"data.cache_dir={shared}/documents", "name=run", "conf=debug")
    line = (*SHORT, *own, *place)
    typed("data", *line)
    run = workplace / "outputs/run"
    assert len([store for store in (shared / "features").iterdir() if store.is_dir()]) == 2  # train and held out
    typed("train", *line)
    last = run / "checkpoints/step_00000004"
    whole = (last / "model.safetensors").read_bytes()
    trained = [row["step"] for row in read_metrics(run / "metrics.jsonl", "train")]
    last.rename(run / "checkpoints/.tmp-step_00000004")  # as if broken off while it was written
    begun = {path: path.stat().st_mtime_ns for path in (run / "checkpoints/step_00000002").iterdir()}
    typed("train", *line)
    assert (last / "model.safetensors").read_bytes() == whole and not list(run.rglob(".tmp-*"))
    assert [row["step"] for row in read_metrics(run / "metrics.jsonl", "train")] == trained == [1, 2, 3, 4]
    assert begun == {path: path.stat().st_mtime_ns for path in begun}
    (run / "report.json").unlink()
    typed("eval", *line)
    best = best_checkpoint(run)
    told = json.loads((run / "report.json").read_text())
    assert best is not None and [Path(d["path"]) for d in told["drafters"]] == [best.resolve()]
    assert told["runs"][0]["acceptance"]["tau"] >= 1
    export: Callable[[], None] = lambda: typed("export", *line, "export.dir=served")  # noqa: E731
    if method in UNSERVED:
        assert "there will be no export: " in (run / "train.log").read_text()
        with pytest.raises(SystemExit) as left:
            export()
        assert left.value.code == 2 and "error: " in capsys.readouterr().err
    else:
        export()
        assert type(load_export("served", target=json.loads((shared / "target/config.json").read_text()))) is type(
            load_drafter(best)
        )


@pytest.mark.parametrize(("given", "means"), [("null", None), ("None", "refused"), ("", "refused"), ("''", "refused")])
def test_only_null_is_no_value(given: str, means: str | None, capsys: pytest.CaptureFixture[str]) -> None:
    if means is None:
        assert config(f"data.valid_path={given}").data.valid_path is None
    else:
        told = refusal(capsys, f"data.valid_path={given}")
        assert "data.valid_path=" in told and "none is written null" in told


# --- hydra#2414, #922, #1822, #1022: run directories, resumed configurations, awkward paths ---------------------


def steps_of(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "checkpoints").iterdir())


def test_paths_and_outputs_belong_to_the_folder_where_a_command_is_typed(
    workplace: Path,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The same line in two folders reads and writes there; in a third it goes on with the run of the first."""
    for folder, count in (("a", 6), ("b", 9)):
        rows(workplace / folder / "rows.json", count)
        monkeypatch.chdir(workplace / folder)
        command(walk, *SHORT, "data.path=rows.json", "name=run", "train.bins_per_step=4")
        assert sorted(path.name for path in Path().iterdir()) == ["outputs", "rows.json"]
        assert sorted(path.name for path in Path("outputs").iterdir()) == ["documents", "features", "run"]
        usable = [json.loads(about.read_text()) for about in Path("outputs/documents").glob("*/*.json")]
        assert f'"rows": {count}' in json.dumps(usable)
    run = workplace / "a/outputs/run"
    stored, checkpoints = (run / "config.yaml").read_bytes(), steps_of(run)
    (workplace / "c").mkdir()
    monkeypatch.chdir(workplace / "c")
    again = (
        *SHORT,
        "data.path=../a/rows.json",
        "output_dir=../a/outputs/run",
        "name=run",
        "store.dir=../a/outputs/features",
    )
    command(walk, *again, "data.cache_dir=../a/outputs/documents", "train.bins_per_step=4", "train.log_every=2")
    log = (run / "train.log").read_text()
    assert "this run is finished: 4 of 4 steps done" in log
    for change in ("data.path: rows.json -> ../a/rows.json", "train.log_every: 1 -> 2"):
        assert f"config.yaml: {change}" in log
    assert (run / "config.yaml").read_bytes() == stored and steps_of(run) == checkpoints
    assert not list(Path().iterdir())
    # Accumulation by three instead of by four, and an unknown key: refused by name, with nothing written.
    with pytest.raises(SystemExit) as left:
        command(walk, *again, "train.bins_per_step=3")
    assert left.value.code == 2 and "train.bins_per_step: 4 -> 3" in capsys.readouterr().err
    assert "optim.lr" in refusal(capsys, *again, "+optim.lr=1e-4")
    assert (run / "config.yaml").read_bytes() == stored and steps_of(run) == checkpoints


def test_paths_of_awkward_letters_are_read_and_written(workplace: Path) -> None:  # noqa: F811
    folder = rows(workplace / "2026-01-02/rows a=b, c.json").parent
    line = ('data.path="2026-01-02/rows a=b, c.json"', 'output_dir="out = 1, 2/2026-01-02"', "name=run")
    command(walk, *SHORT, *line, f'store.dir="{folder}/f=1, 2"', 'export.dir="2026-01-02/e x"')
    assert steps_of(Path("out = 1, 2/2026-01-02")) == ["step_00000002", "step_00000004"]
    assert len(list(Path("2026-01-02/f=1, 2").iterdir())) == 2 and Path("2026-01-02/e x/config.json").is_file()
    assert sorted(path.name for path in Path("outputs").iterdir()) == ["documents"]


@pytest.mark.parametrize("date", ["2026-01-02", "2026_01_02", "1e3"])
def test_a_name_that_looks_like_a_number_stays_as_typed(date: str) -> None:
    """To Hydra 2026_01_02 is the number 20260102, whose folder is another one."""
    cfg = config(f"name={date}", f"data.path={date}", f"store.dir={date}")
    assert (cfg.name, cfg.data.path, cfg.store.dir) == (date, date, date)


# --- SafeAILab/EAGLE#223, #315, speculators PR#134, PR#636: heads that do not fill the hidden size ---------------


def trained(target: Path, method: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors and config of the export of a run on a target; what reads them back agrees with the checkpoint."""
    rows(Path("rows.json"))
    command(walk, *SHORT, f"target.path={target}", f"drafter={method}", "data.path=rows.json", "name=run")
    best, about = best_checkpoint(Path("outputs/run")), json.loads(Path("outputs/run/export/config.json").read_text())
    assert best is not None
    served, kept = (
        load_export("outputs/run/export", target=AutoConfig.from_pretrained(target).to_dict()),
        load_drafter(best),
    )
    shapes = {name: tensor.shape for name, tensor in served.state_dict().items()}
    assert shapes == {name: tensor.shape for name, tensor in kept.state_dict().items()}
    return load_file("outputs/run/export/model.safetensors"), about


@pytest.mark.parametrize("method", ["eagle3", "eagle1"])
@pytest.mark.parametrize("kv_heads", [2, None])
def test_heads_wider_than_the_hidden_size(method: str, kv_heads: int | None, workplace: Path) -> None:  # noqa: F811
    """Hidden 96 with 4 heads of 32; without the key for kv heads there are as many as heads."""
    target = tiny_target(workplace / "target", hidden=96, head_dim=32, kv_heads=kv_heads or 4)
    if kv_heads is None:
        told = json.loads((target / "config.json").read_text())
        del told["num_key_value_heads"]
        (target / "config.json").write_text(json.dumps(told))
    tensors, about = trained(target, method)
    shapes = {name.rpartition("self_attn.")[2]: list(t.shape) for name, t in tensors.items() if "self_attn." in name}
    reads = 192 if method == "eagle3" else 96  # EAGLE-3 attends over embedding and feature side by side
    assert shapes["q_proj.weight"] == [128, reads] and shapes["o_proj.weight"] == [96, 128]
    assert shapes["k_proj.weight"] == shapes["v_proj.weight"] == [32 * (kv_heads or 4), reads]
    assert (about["head_dim"], about["num_attention_heads"], about["num_key_value_heads"]) == (32, 4, kv_heads or 4)


# --- Automodel PR#3079, SafeAILab/EAGLE#71, SpecForge PR#58: mixtures of experts ----------------------------------

EXPERTS: dict[str, dict[str, Any]] = {
    "mixtral": {"intermediate_size": 32, "num_local_experts": 4},  # an expert's width, under the name of a dense one
    "qwen3_moe": {"intermediate_size": 160, "moe_intermediate_size": 32, "num_experts": 4, "decoder_sparse_step": 1},
}


@pytest.mark.parametrize(("family", "width"), [("mixtral", 3 * 64), ("qwen3_moe", 160)])
def test_a_drafter_of_a_mixture_is_dense(
    family: str,
    width: int,
    workplace: Path,  # noqa: F811
) -> None:
    """Hidden 64, four experts of 32, two at a time. As wide as the config's dense width, or three times the hidden size
    where that is narrower than the stream it reads; what is trained is told before."""
    plain = {k: v for k, v in tiny_config("llama").to_dict().items() if k not in ("model_type", "architectures")}
    model = tiny_model(AutoConfig.for_model(family, **(plain | EXPERTS[family]), num_experts_per_tok=2))
    model.save_pretrained(workplace / "target")
    tiny_tokenizer().save_pretrained(workplace / "target")
    tensors, about = trained(workplace / "target", "eagle3")
    assert about["intermediate_size"] == width and about["architectures"] == ["LlamaForCausalLMEagle3"]
    mlp = {name.rpartition("mlp.")[2]: list(t.shape) for name, t in tensors.items() if "mlp." in name}
    up, down = [width, 64], [64, width]
    assert mlp == {"gate_proj.weight": up, "up_proj.weight": up, "down_proj.weight": down}
    count = 3 * 64 * 64 + 64 * 128 * 2 + 32 * 128 * 2 + 64 * 64 - 64 * 128 + 3 * 64 * width + 4 * 64 + 128 * 64
    assert f"trainable, drafter  {count:,} parameters" in Path("outputs/run/train.log").read_text()
    assert not any("expert" in name or "router" in name for name in tensors)
