"""Quantised targets: the wiring around bitsandbytes, with layers that keep int8 weights in its place."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from data.features.dump import compute_dtype, dump, key_of
from data.masks.template import Example
from models import quantize as module
from models.errors import EyasError
from models.load_frozen import load_frozen, read_config
from models.packed import PackedLinear, available
from models.quantize import check_head, computed_in, loading_options
from models.target import Target
from tests.tiny import tiny_config, tiny_model, tiny_target


class Int8Linear(nn.Linear):
    """As bitsandbytes' layers: a linear layer by class, whose weight is no matrix of numbers to multiply with."""

    def __init__(self, source: nn.Linear) -> None:
        super().__init__(source.in_features, source.out_features, bias=source.bias is not None)
        self.row_scale = nn.Buffer(source.weight.detach().abs().amax(1, keepdim=True) / 127)
        stored = (source.weight.detach() / self.row_scale).round().to(torch.int8)
        self.weight = nn.Parameter(stored, requires_grad=False)
        self.bias = source.bias

    def forward(self, input: Tensor) -> Tensor:
        return F.linear(input, (self.weight * self.row_scale).to(input.dtype), self.bias)


def quantised(model: PreTrainedModel) -> PreTrainedModel:
    for parent in list(model.model.layers.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear:
                setattr(parent, name, Int8Linear(child))
    return model


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[dict[str, Any]]]:
    """What ``from_pretrained`` was asked for; it gives int8 layers instead of bitsandbytes'."""
    plain, asked = AutoModelForCausalLM.from_pretrained, []

    def from_pretrained(folder: Path, **options: Any) -> Any:
        asked.append(dict(options))
        config = options.pop("quantization_config", None)
        options.pop("device_map", None)
        model, info = plain(folder, **options)
        if config is not None:
            quantised(model).config.quantization_config = config
        return model, info

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", from_pretrained)
    monkeypatch.setattr(module, "find_spec", lambda name: object())
    yield asked


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_target(tmp_path_factory.mktemp("target"), "llama")


# --- what is asked for ---


def test_options(loads: list[dict[str, Any]], folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = read_config(folder)
    assert loading_options(None, torch.float32, "cpu", config) == {}
    eight = loading_options("8bit", torch.float32, "cpu", config)
    assert eight["quantization_config"].load_in_8bit and eight["device_map"] == {"": torch.device("cpu")}
    assert "states differ a little between batches" in caplog.text
    four = loading_options("4bit", torch.bfloat16, "cuda:1", config)
    how = four["quantization_config"]
    assert how.load_in_4bit and how.bnb_4bit_quant_type == "nf4" and how.bnb_4bit_use_double_quant
    assert how.bnb_4bit_compute_dtype == torch.bfloat16 and four["device_map"] == {"": torch.device("cuda:1")}
    with pytest.raises(EyasError, match="target.quantize=2bit: must be null, 8bit or 4bit"):
        Target.load(str(folder), quantize="2bit")
    config.quantization_config = {"quant_method": "gptq"}
    with pytest.raises(EyasError, match="target.quantize=4bit: the target's files are quantised already"):
        loading_options("4bit", torch.float32, "cpu", config)


def test_without_bitsandbytes(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    with pytest.raises(EyasError, match=r"target\.quantize=8bit: needs bitsandbytes: pip install 'eyas\[quantize\]'"):
        Target.load(str(folder), quantize="8bit")


def test_a_quantised_head_is_refused() -> None:
    head = nn.Linear(8, 4)
    check_head(head, "8bit")
    check_head(Int8Linear(head), None)
    with pytest.raises(EyasError, match=r"target\.quantize=8bit: the output head \(Int8Linear\)"):
        check_head(Int8Linear(head), "8bit")


# --- the target that comes of it ---


def test_features_are_the_quantised_models_own(loads: list[dict[str, Any]], folder: Path) -> None:
    target, full = Target.load(str(folder), quantize="8bit"), Target.load(str(folder))
    assert "quantization_config" in loads[0] and "quantization_config" not in loads[1]
    assert (target.quantize, full.quantize) == ("8bit", None)
    ids = torch.randint(target.vocab_size, (9,), generator=torch.Generator().manual_seed(0))
    other = torch.randint(target.vocab_size, (5,), generator=torch.Generator().manual_seed(1))
    found = target.features([ids, other])[0]
    reference = quantised(AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)[0]).eval()
    with torch.no_grad():
        out = reference(input_ids=ids[None], output_hidden_states=True)
    expected = torch.cat([out.hidden_states[i][0] for i in target.tap_ids], -1)
    torch.testing.assert_close(found.taps, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found.final, out.hidden_states[-1][0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found.lse, out.logits[0].logsumexp(-1), rtol=1e-5, atol=1e-5)
    assert torch.equal(found.top1, out.logits[0].argmax(-1))
    assert not torch.allclose(found.final, full.features([ids])[0].final, atol=1e-4)


def test_nothing_takes_stored_numbers_for_weights(loads: list[dict[str, Any]], folder: Path) -> None:
    target = Target.load(str(folder), quantize="4bit")
    layers = [m for m in target.model.model.layers.modules() if isinstance(m, nn.Linear)]
    assert len(layers) >= 7 and all(type(layer) is Int8Linear for layer in layers)  # not laid out anew
    assert type(target.head) is (PackedLinear if available() else nn.Linear)
    frozen, files = target.frozen(), load_frozen(folder)
    assert frozen.last_layer == {} and set(files.last_layer) > {"mlp.up_proj.weight"}
    assert torch.equal(frozen.head, files.head) and torch.equal(frozen.embedding, files.embedding)
    assert frozen.head.dtype == torch.float32 and target.trainable_parameters() == 0


def test_a_store_of_its_own(loads: list[dict[str, Any]], folder: Path, tmp_path: Path) -> None:
    assert computed_in("bfloat16", None) == "bfloat16" and computed_in("bfloat16", "4bit") != "bfloat16"
    targets = [Target.load(str(folder), quantize=kind) for kind in (None, "8bit", "4bit")]
    example = Example(list(range(3, 15)), [True] * 12, "test")
    assert len({key_of(target, [example], "float32") for target in targets}) == 3
    assert compute_dtype(targets[1]) == "float32, 8bit weights"
    stores = [dump(t, [example], tmp_path / str(t.quantize), dtype="float32") for t in targets[:2]]
    full, eight = (store.read(0).final for store in stores)
    torch.testing.assert_close(eight, targets[1].features([torch.tensor(example.input_ids)])[0].final)
    assert not torch.allclose(full, eight, atol=1e-4)


def test_the_stand_in_is_close_to_what_it_stands_for() -> None:
    layer = tiny_model(tiny_config("llama")).model.layers[0].mlp.up_proj
    x = torch.randn(4, layer.in_features, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        difference = (Int8Linear(layer)(x) - layer(x)).abs().max()
        assert 0 < float(difference) < 0.02 * float(layer(x).abs().max())
