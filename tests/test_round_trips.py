"""Every method in every serving layout: what is written reads back, engines draft from it, no tensor may be wrong."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from models.drafter import Drafter, NotServed
from models.errors import EyasError
from models.frozen import FrozenTarget
from models.load_frozen import plain_config
from models.mtp import MtpDrafter
from models.portable import check_export, load_export, method_of, serve
from models.recognise import METHODS as NAMES
from models.recognise import method_of_class
from models.vocab import DraftVocab
from scripts.card import About
from scripts.export import export
from scripts.vllm_check import METHODS as VLLM_NAMES
from scripts.vllm_check import vllm_method
from tests.drafters import random_frozen, random_vocab, randomise
from tests.methods import METHODS
from tests.mtp_targets import family_config

PARALLEL = "mtp_parallel"  # no engine drafts with parallel heads
MODULES = {"mtp": 1, "mtp_sequential": 3}
FAMILIES = {"deepseek": "deepseek_v3", "qwen3_next": "qwen3_5_text"}  # a target that MTP layouts are for, or llama


def cases() -> Iterator[tuple[str, str, int]]:
    """Name in the registry, layout and draft vocabulary (of 40)."""
    for name, build in METHODS.items():
        if name != PARALLEL:
            for layout in type(build(random_frozen(), DraftVocab.full(40))).layouts:
                yield from ((name, layout, 40), (name, layout, 12))


def make(name: str, layout: str, draft: int) -> tuple[Drafter, FrozenTarget]:
    vocab = DraftVocab.full(40) if draft == 40 else random_vocab(40, draft)
    if name not in MODULES:
        return METHODS[name](frozen := random_frozen(), vocab).eval(), frozen
    family = FAMILIES.get(layout, "llama")
    frozen = random_frozen(**plain_config(family_config(family, vocab_size=40), Path()))
    drafter = MtpDrafter.create(frozen, vocab, (), init="random", num_modules=MODULES[name])
    if layout == "qwen3_next":  # one norm and one projection for all modules
        first = dict(drafter.named_parameters())
        for key, parameter in first.items():
            if ".block." not in key:
                parameter.data = first[f"mtp.0.{key.split('.', 2)[2]}"].data
    return randomise(drafter).eval(), frozen


@pytest.mark.parametrize(("name", "layout", "draft"), list(cases()))
def test_what_is_exported_reads_back(tmp_path: Path, name: str, layout: str, draft: int) -> None:
    """In float32 bit for bit; heads that are the target's own come back with all its rows."""
    drafter, frozen = make(name, layout, draft)
    folder = export(drafter, frozen, tmp_path / "out", About("acme/target"), dtype="float32", layout=layout)
    read = load_export(folder, target=frozen.config)
    state = drafter.state_dict()
    assert type(read) is type(drafter) and set(read.state_dict()) == set(state)
    for key, tensor in read.state_dict().items():
        assert torch.equal(tensor, state[key]), key
    own_head = any("lm_head" in key for key in state)
    assert torch.equal(read.vocab.ids, drafter.vocab.ids) or (read.vocab.is_full and not own_head)
    assert (read.tap_ids, read.max_depth) == (drafter.tap_ids, drafter.max_depth)
    method = method_of_class(type(drafter))
    assert method_of(folder) is method
    note = json.loads((folder / "config.json").read_text())["eyas"]
    assert (note["method"], note["layout"]) == (method.name, layout)


@pytest.mark.parametrize(
    ("name", "layout", "draft"), [case for case in cases() if case[2] == 40 and case[0] != "mtp_sequential"]
)
def test_no_tensor_may_be_missing_misshapen_or_one_too_many(tmp_path: Path, name: str, layout: str, draft: int) -> None:
    drafter, frozen = make(name, layout, draft)
    folder = export(drafter, frozen, tmp_path / "out", About("t"), dtype="float32", layout=layout)
    served = serve(drafter, frozen, layout)
    path = folder / served.weights
    whole = load_file(path)
    for key, tensor in whole.items():
        for wrong in (None, torch.zeros(3, *tensor.shape)):
            changed = {n: t for n, t in whole.items() if n != key} | ({} if wrong is None else {key: wrong})
            save_file(changed, path)
            with pytest.raises(EyasError, match=str(tmp_path)) as caught:
                check_export(folder, served, frozen.config)
            # FasterDecoding's names are told by vLLM's
            told = (key[0], key.rpartition(".")[2]) if layout == "fasterdecoding" else key.rsplit(".", 2)[-2:]
            assert all(word in str(caught.value) for word in told), (key, str(caught.value))
    save_file(whole | {"another.weight": torch.zeros(2)}, path)
    with pytest.raises(EyasError, match=r"another\.weight"):
        check_export(folder, served, frozen.config)


def test_what_no_engine_serves_is_not_exported(tmp_path: Path) -> None:
    drafter, frozen = make(PARALLEL, "", 40)
    with pytest.raises(NotServed, match="no engine drafts with it"):
        export(drafter, frozen, tmp_path / "out", About("t"))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["eagle1", "eagle3", "medusa", "mtp"])
def test_a_layout_that_is_another_methods(tmp_path: Path, name: str) -> None:
    drafter, frozen = make(name, "", 40)
    with pytest.raises(EyasError, match=r"export\.layout=other: .* is written as \w+"):
        export(drafter, frozen, tmp_path / "out", About("t"), layout="other")
    assert list(tmp_path.iterdir()) == []


def test_a_later_export_in_another_layout_replaces_the_earlier_one(tmp_path: Path) -> None:
    drafter, frozen = make("medusa", "", 40)
    for layout, weights in (("fasterdecoding", "medusa_lm_head.safetensors"), ("vllm", "model.safetensors")):
        export(drafter, frozen, tmp_path / "out", About("acme/target"), layout=layout)
        assert {path.name for path in (tmp_path / "out").iterdir()} == {"README.md", "config.json", weights}
    assert drafter.serving(frozen, "fasterdecoding").config["base_model_name_or_path"] == ""
    export(drafter, frozen, tmp_path / "out", About("acme/target"), layout="fasterdecoding")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["base_model_name_or_path"] == "acme/target"


# --- what the card says -------------------------------------------------------------------------------------

CARDS = {
    ("eagle1", "vllm"): ('"method": "eagle"', "--speculative-algorithm EAGLE ", "# EAGLE-1 drafter for acme/target"),
    ("eagle3", "vllm"): ('"method": "eagle3"', "--speculative-algorithm EAGLE3 ", "| tapped states | entering"),
    ("medusa", "vllm"): ('"method": "medusa"', "up to 0.32", "SGLang has no Medusa", "| tokens drafted at most | 4 |"),
    ("medusa", "fasterdecoding"): ("The layout of the Medusa authors' own code", "`export.layout=vllm`"),
    ("mtp", "mimo"): ("""--hf-overrides '{"num_nextn_predict_layers": 1}'""", '"method": "mtp", "model"'),
    ("mtp", "deepseek"): ("Engines find these MTP modules in the target", "`export.stitch=true`"),
}


@pytest.mark.parametrize(("name", "layout"), CARDS)
def test_the_card_is_right_for_the_method(tmp_path: Path, name: str, layout: str) -> None:
    drafter, frozen = make(name, layout, 12)
    folder = export(drafter, frozen, tmp_path / "out", About("acme/target"), layout=layout)
    card = (folder / "README.md").read_text()
    for line in (*CARDS[name, layout], f"| layout | {layout} |", "| draft vocabulary | 12 of 40 tokens |"):
        assert line in card
    assert ("tapped states" in card) == (name == "eagle3")
    assert ("vllm serve" in card) == (layout in ("vllm", "mimo")) and ("sglang.launch" in card) == name.startswith(
        "eagle"
    )
    assert f"python -m eval conf=RECIPE drafter_path={folder}" in card
    assert ("it drafted 12 tokens only" in card) == (name in ("eagle1", "mtp"))


def test_vllm_is_told_the_method_by_the_export(tmp_path: Path) -> None:
    assert {f"{VLLM_NAMES[name]}" for name in VLLM_NAMES} == {NAMES[name].vllm for name in VLLM_NAMES}
    for name in VLLM_NAMES:
        folder = export(*make(name, "", 40), tmp_path / name, About("t"))
        assert vllm_method(str(folder), None) == NAMES[name].vllm
        assert vllm_method(str(folder), "other") == "other"
    assert (vllm_method("ngram", "x"), vllm_method("mtp", None)) == ("ngram", "mtp")
    with pytest.raises(SystemExit, match=str(tmp_path)):
        vllm_method(str(tmp_path), None)
