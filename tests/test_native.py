"""The target's own decoder layers as draft blocks, against the families' own attention in transformers."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from models.attention import Spans
from models.errors import EyasError
from models.native import Causal, Kept, KeyValue, Lineage, NativeLayer
from models.tiny_target import tiny_config
from tests.families import DEEPSEEK, FAMILIES, GEMMA3, QWEN3_NEXT

ROPES: dict[str, dict[str, Any]] = {
    "yarn": DEEPSEEK
    | {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1000.0,
            "factor": 4.0,
            "mscale": 1.0,
            "mscale_all_dim": 0.7,
            "beta_fast": 32,
            "beta_slow": 1,
            "original_max_position_embeddings": 128,
        }
    }
}
LENGTHS = [1, 9, 14]


def random_layer(config: dict[str, Any]) -> NativeLayer:
    """Biases and norms too, so that leaving one out shows."""
    block = NativeLayer(config)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in block.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return block


def own_layer(config: dict[str, Any], block: NativeLayer) -> tuple[Any, nn.Module, int]:
    """The family's model with plain attention, its last layer filled with the block's weights: model, layer, number."""
    fields = {k: v for k, v in config.items() if k != "model_type"}
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(config["model_type"], **fields), attn_implementation="eager"
    )
    kinds = getattr(model.config, "layer_types", None) or ["full_attention"] * config["num_hidden_layers"]
    number = max(i for i, kind in enumerate(kinds) if kind == "full_attention")
    layer = model.model.layers[number]
    layer.load_state_dict(block.state_dict())
    return model.model, layer, number


def alone(model: Any, layer: nn.Module, number: int, x: Tensor, start: int = 0) -> Tensor:
    """What the family's own layer makes of one document [n, H], with its eager attention and a causal mask."""
    positions = torch.arange(start, start + len(x))[None]
    kinds = getattr(model.config, "layer_types", None)
    args = (kinds[number],) if type(model).__name__.startswith("Gemma3") and kinds else ()
    mask = torch.full((len(x), len(x)), float("-inf")).triu(1)[None, None]
    out = layer(
        x[None],
        attention_mask=mask,
        position_ids=positions,
        position_embeddings=model.rotary_emb(x[None], positions, *args),
    )
    return (out[0] if isinstance(out, tuple) else out)[0]


@pytest.mark.parametrize("family", [*FAMILIES, *ROPES])
def test_packed_documents_equal_the_familys_own_layer_on_each_alone(family: str) -> None:
    config = (FAMILIES | ROPES)[family]
    block = random_layer(config)
    model, layer, number = own_layer(config, block)
    x = torch.randn(sum(LENGTHS), config["hidden_size"], generator=torch.Generator().manual_seed(0))
    positions = torch.cat([torch.arange(n) for n in LENGTHS])
    cu = torch.tensor([0, 1, 10, 24], dtype=torch.int32)
    got = block(x.requires_grad_(), positions, Causal(cu))
    parts = [alone(model, layer, number, part) for part in x.split(LENGTHS)]
    want = torch.cat(parts)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    upstream = torch.randn(want.shape, generator=torch.Generator().manual_seed(1))
    (mine,) = torch.autograd.grad(got, x, upstream)
    (theirs,) = torch.autograd.grad(want, x, upstream)
    torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_lineage_attends_to_true_slots_and_to_itself(family: str) -> None:
    """Depth k of slot p = the family's own layer on the text of slots 0 .. p and then the slot's own k inputs."""
    config = FAMILIES[family]
    block = random_layer(config)
    model, layer, number = own_layer(config, block)
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(15, config["hidden_size"], generator=generator)  # documents of 6 and 9 tokens
    positions, cu = torch.cat([torch.arange(6), torch.arange(9)]), torch.tensor([0, 6, 15], dtype=torch.int32)
    slots = [torch.tensor([1, 3, 6, 11]), torch.tensor([1, 6, 11]), torch.tensor([11])]
    more = [torch.randn(len(index), config["hidden_size"], generator=generator) for index in slots]
    true = Kept(Causal(cu))
    with torch.no_grad():
        block(x, positions, true)
        before = list[KeyValue]()
        lineages: dict[int, list[Tensor]] = {int(p): [] for p in slots[0]}
        last = slots[0]
        for k, (index, inputs) in enumerate(zip(slots, more, strict=True), 1):
            still = torch.isin(last, index)
            before = [(key[still], value[still]) for key, value in before]
            attend = Kept(Lineage(true.own, before, Spans.of(index, cu)))
            got = block(inputs, positions[index] + k, attend)
            for p, own, out in zip(index.tolist(), inputs, got, strict=True):
                lineages[p].append(own)
                first = 0 if p < 6 else 6
                text = torch.cat([x[first : p + 1], torch.stack(lineages[p])])
                torch.testing.assert_close(out, alone(model, layer, number, text)[-1], rtol=1e-4, atol=1e-5)
            before, last = [*before, attend.own], index


def test_names_are_those_of_transformers_and_all_weights_are_set() -> None:
    names = set(NativeLayer(DEEPSEEK).state_dict())
    assert {"self_attn.kv_a_proj_with_mqa.weight", "self_attn.q_b_proj.weight", "mlp.gate.weight"} <= names
    assert {"mlp.experts.gate_up_proj", "mlp.shared_experts.up_proj.weight"} <= names
    assert not any(name.startswith(("_layer", "rotary")) for name in names)
    assert "self_attn.q_norm.weight" in NativeLayer(QWEN3_NEXT).state_dict()  # attention, not the linear layers
    assert "pre_feedforward_layernorm.weight" in NativeLayer(GEMMA3).state_dict()
    for config in FAMILIES.values():
        torch.manual_seed(3)
        one = NativeLayer(config).state_dict()
        torch.manual_seed(3)
        two = NativeLayer(config).state_dict()
        for name, tensor in one.items():
            assert torch.equal(tensor, two[name]), name
            assert tensor.isfinite().all(), name
            assert tensor.abs().max() < 5 * 0.15 + 1e-6 or "norm" in name, name  # initializer_range of the tiny configs


def test_kv_shape() -> None:
    assert NativeLayer(FAMILIES["llama"]).kv_shape() == (2, 16)
    assert NativeLayer(DEEPSEEK).kv_shape() == (4, 24)  # latent attention: a key for each head, 16 + 8 wide


def test_the_last_layer_of_the_target_is_the_start() -> None:
    config = GEMMA3
    block = NativeLayer(config)
    weights = {name: torch.rand(t.shape) for name, t in block.state_dict().items()}
    multipliers = {n: w + 1 if n.endswith("norm.weight") else w for n, w in weights.items()}  # as FrozenTarget has them
    block.init_from(multipliers, "drafter.init=last_layer")
    for name, tensor in block.state_dict().items():
        torch.testing.assert_close(tensor, weights[name], rtol=0, atol=1e-6)
    with pytest.raises(EyasError, match=r"drafter\.init=last_layer: mlp\.up_proj\.weight of .* missing"):
        block.init_from({k: v for k, v in multipliers.items() if k != "mlp.up_proj.weight"}, "drafter.init=last_layer")
    with pytest.raises(EyasError, match=r"self_attn\.q_proj\.weight .* of shape \[3\], the block's \[64, 64\]"):
        block.init_from(multipliers | {"self_attn.q_proj.weight": torch.zeros(3)}, "drafter.init=last_layer")


@pytest.mark.parametrize("family", [*FAMILIES, "olmo2", "glm4"])
def test_a_layer_that_passes_its_input_through_and_learns(family: str) -> None:
    config = FAMILIES.get(family, FAMILIES["llama"] | {"model_type": family})
    block = random_layer(config)
    block.pass_through()
    x = torch.randn(6, config["hidden_size"], generator=torch.Generator().manual_seed(0))
    out = block(x, torch.arange(6), Causal(torch.tensor([0, 6])))
    assert torch.equal(out, x)
    out.square().sum().backward()
    slopes = [p.grad.abs().max() for p in block.parameters() if p.grad is not None]
    assert 0 < max(slopes) < 1000  # a norm of zeros would multiply them


def test_experts_stay_random_where_the_last_layer_has_none() -> None:
    torch.manual_seed(0)
    block = NativeLayer(DEEPSEEK)
    before = {name: tensor.clone() for name, tensor in block.state_dict().items()}
    layer = {name: torch.rand(t.shape) for name, t in before.items() if "expert" not in name and "mlp.gate" not in name}
    block.init_from(layer, "drafter.init=last_layer")
    for name, tensor in block.state_dict().items():
        assert torch.equal(tensor, layer.get(name, before[name])), name


def test_families_that_cannot_be_draft_blocks() -> None:
    with pytest.raises(EyasError, match="model_type='no_such'"):
        NativeLayer({"model_type": "no_such", "hidden_size": 8})
    with pytest.raises(EyasError, match="gpt2"):
        NativeLayer({"model_type": "gpt2", "n_embd": 16, "n_head": 2, "n_layer": 2, "vocab_size": 32})
    capped = tiny_config("gemma3", layers=2).to_dict() | {"model_type": "gemma2"}
    capped = {k: v for k, v in capped.items() if not k.startswith("rope")} | {"attn_logit_softcapping": 50.0}
    with pytest.raises(EyasError, match="soft cap"):
        NativeLayer(capped).kv_shape()
