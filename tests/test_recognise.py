"""Folders of other trainers, as they are published: which method they hold, in which files, and what is wrong."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from models.drafter import Drafter
from models.eagle1 import Eagle1Drafter
from models.eagle3 import Eagle3Drafter
from models.errors import EyasError
from models.medusa import MedusaDrafter
from models.portable import load_export, method_of, open_drafter
from models.recognise import METHODS, recognise
from models.vocab import DraftVocab
from models.weight_files import DrafterWeights, find_weights
from tests.drafters import TINY, random_frozen, random_vocab, randomise
from tests.mtp_targets import carrying_target

Tensors = dict[str, Tensor]
FROZEN = random_frozen()
# The keys that official EAGLE configs have: an ordinary Llama config. Nothing says how wide a head is (32 / 4 = 8).
OFFICIAL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 1,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "vocab_size": 40,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
}


def write(folder: Path, config: dict[str, Any], tensors: Tensors, weights: str = "pytorch_model.bin") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if weights.endswith(".safetensors"):
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / weights)
    else:
        torch.save(tensors, folder / weights)
    return folder


def shard(folder: Path, config: dict[str, Any], tensors: Tensors, end: str) -> Path:
    """The same in two shards and an index."""
    names = sorted(tensors)
    parts = {f"part-{i}.{end}": names[i::2] for i in range(2)}
    for file, own in parts.items():
        write(folder, config, {name: tensors[name] for name in own}, file)
    stem = "model.safetensors" if end == "safetensors" else "pytorch_model.bin"
    index = {"weight_map": {name: file for file, own in parts.items() for name in own}}
    (folder / f"{stem}.index.json").write_text(json.dumps(index))
    return folder


def eagle3(draft: int = 12) -> Eagle3Drafter:
    frozen = random_frozen(head_dim=8)
    vocab = random_vocab(40, draft) if draft < 40 else DraftVocab.full(40)
    return randomise(Eagle3Drafter.create(frozen, vocab, (2, 3, 5)))


def eagle3_tensors(drafter: Eagle3Drafter) -> Tensors:
    """What the official trainer saves: the layer as ``midlayer``, both maps, float16."""
    halves = {name: tensor.half() for name, tensor in drafter.state_dict().items()}
    return halves | {"d2t": drafter.vocab.ids - torch.arange(len(drafter.vocab)), "t2d": drafter.vocab.t2d}


def same(read: Drafter, drafter: Drafter) -> None:
    """Every weight of ``drafter``, rounded to float16, in float32."""
    state = drafter.state_dict()
    assert type(read) is type(drafter) and set(read.state_dict()) == set(state)
    for name, tensor in read.state_dict().items():
        assert torch.equal(tensor, state[name].half().float()), name


@pytest.mark.parametrize("files", ["pytorch_model.bin", "model.safetensors", "sharded bin", "sharded safetensors"])
def test_official_eagle3(tmp_path: Path, files: str) -> None:
    """A config that names the base model's class and counts its layers; which taps there are hangs on the target."""
    drafter, config = eagle3(), OFFICIAL | {"num_hidden_layers": 40, "draft_vocab_size": 12}
    if files.startswith("sharded"):
        shard(tmp_path, config, eagle3_tensors(drafter), files.split()[1])
    else:
        write(tmp_path, config, eagle3_tensors(drafter), files)
    assert method_of(tmp_path) is METHODS["eagle3"]
    with pytest.raises(EyasError, match="names no tapped layers"):
        open_drafter(tmp_path)
    read = open_drafter(tmp_path, target={"num_hidden_layers": 12})
    assert isinstance(read, Eagle3Drafter) and read.tap_ids == (2, 6, 9)
    assert torch.equal(read.vocab.ids, drafter.vocab.ids)
    assert read.config.rope_parameters == {"rope_type": "default", "rope_theta": 10000.0}
    same(read, drafter)


def test_what_others_save_besides(tmp_path: Path) -> None:
    """layers.0, a prefix, the target's embedding, rotary tables, a map that maps nothing."""
    drafter = eagle3(draft=40)
    tensors = {name.replace("midlayer.", "layers.0."): t for name, t in eagle3_tensors(drafter).items()}
    tensors |= {"embed_tokens.weight": torch.ones(40, 32), "layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    tensors = {f"model.{name}": t for name, t in tensors.items()}
    config = OFFICIAL | {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 4]}}
    read = load_export(write(tmp_path, config, tensors))
    assert read.vocab.is_full and read.tap_ids == (2, 3, 5)
    same(read, drafter)


def test_speculators_eagle3(tmp_path: Path) -> None:
    tensors = {name.replace("midlayer.", "layers.0."): t for name, t in eagle3_tensors(eagle3()).items()}
    tensors["embed_tokens.weight"] = torch.ones(40, 32)
    config: dict[str, Any] = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "transformer_layer_config": {key: OFFICIAL[key] for key in OFFICIAL if key != "architectures"},
        "draft_vocab_size": 12,
        "eagle_aux_hidden_state_layer_ids": [2, 3, 5],
        "norm_before_residual": False,
    }
    same(load_export(write(tmp_path, config, tensors, "model.safetensors")), eagle3())
    del config["norm_before_residual"]  # vLLM takes it for true then, which is another computation
    with pytest.raises(EyasError, match="norm_before_residual=True is not supported"):
        load_export(write(tmp_path, config, tensors, "model.safetensors"))


@pytest.mark.parametrize("weights", ["pytorch_model.bin", "model.safetensors"])
def test_official_eagle1(tmp_path: Path, weights: str) -> None:
    drafter = randomise(Eagle1Drafter.create(random_frozen(head_dim=8), DraftVocab.full(40), ()))
    tensors = {name: tensor.half() for name, tensor in drafter.state_dict().items()}
    tensors |= {"embed_tokens.weight": torch.ones(40, 32).half(), "fc.bias": torch.zeros(32).half()}
    folder = write(tmp_path, OFFICIAL, tensors, weights)
    assert method_of(folder) is METHODS["eagle1"]
    same(load_export(folder), drafter)


def medusa(head: Literal["own", "shared"] = "own") -> MedusaDrafter:
    return randomise(MedusaDrafter.create(FROZEN, DraftVocab.full(40), (), num_heads=3, num_layers=1, head=head))


def medusa_tensors(drafter: MedusaDrafter) -> Tensors:
    """FasterDecoding's names: {head}.0.linear.* and, of heads of their own, {head}.1.weight."""
    found = {}
    for head, block in enumerate(drafter.state_dict()[f"blocks.{h}.layers.0.weight"] for h in range(3)):
        found[f"{head}.0.linear.weight"] = block.half()
        found[f"{head}.0.linear.bias"] = drafter.state_dict()[f"blocks.{head}.layers.0.bias"].half()
        if drafter.config.head == "own":
            found[f"{head}.1.weight"] = drafter.state_dict()["lm_heads"][head].half()
    return found


MEDUSA = {"medusa_num_heads": 2, "medusa_num_layers": 1, "base_model_name_or_path": "lmsys/vicuna-7b-v1.3"}


@pytest.mark.parametrize("weights", ["medusa_lm_head.pt", "medusa_lm_head.safetensors"])
@pytest.mark.parametrize("head", ["own", "shared"])
def test_official_medusa(tmp_path: Path, head: Literal["own", "shared"], weights: str) -> None:
    """ "Version 2" has no heads of its own; the config's number of heads is wrong in both."""
    drafter = medusa(head)
    folder = write(tmp_path, MEDUSA | {"version": "2"}, medusa_tensors(drafter), weights)
    assert method_of(folder) is METHODS["medusa"]
    same(load_export(folder, target=TINY), drafter)


@pytest.mark.parametrize("beside", [True, False])
def test_medusa_2_models(tmp_path: Path, beside: bool) -> None:
    """A whole model whose heads are among its tensors, or in a file of their own beside its shards."""
    drafter = medusa()
    model = {"model.layers.0.self_attn.q_proj.weight": torch.ones(8, 8), "lm_head.weight": torch.ones(40, 32)}
    heads = medusa_tensors(drafter)
    inside = {} if beside else {f"medusa_head.{name}": tensor for name, tensor in heads.items()}
    folder = shard(tmp_path, OFFICIAL | MEDUSA | {"num_hidden_layers": 6}, model | inside, "safetensors")
    if beside:
        torch.save(heads, folder / "medusa_lm_head.pt")
    same(load_export(folder, target=TINY), drafter)


@pytest.mark.parametrize("family", ["deepseek_v3", "qwen2", "qwen3_5_text"])
def test_targets_that_carry_modules(tmp_path: Path, family: str) -> None:
    folder, files = carrying_target(tmp_path, family, max_shard_size="20KB")
    names = DrafterWeights(folder).names
    config = json.loads((folder / "config.json").read_text())
    found = recognise(config, names)
    assert found.method is METHODS["mtp"] and set(found.names) == set(files) < set(names)
    assert type(load_export(folder)).__name__ == "MtpDrafter"


# --- what is wrong ------------------------------------------------------------------------------------------


def test_a_folder_without_a_drafter_says_what_it_holds(tmp_path: Path) -> None:
    write(tmp_path, OFFICIAL, {f"model.layers.{i}.mlp.up_proj.weight": torch.ones(2, 2) for i in range(9)})
    with pytest.raises(EyasError) as caught:
        load_export(tmp_path)
    for part in (
        str(tmp_path),
        "LlamaForCausalLM",
        "9 tensors",
        "model.layers.0.mlp.up_proj.weight",
        "fc.weight",
        "MTP",
    ):
        assert part in str(caught.value)
    with pytest.raises(EyasError, match="architectures=5 is no list"):
        recognise({"architectures": 5}, [])
    with pytest.raises(EyasError, match=r"fc\.weight: present twice"):
        recognise(OFFICIAL, ["fc.weight", "model.fc.weight", "layers.0.self_attn.q_proj.weight"])


class Trap:
    """Unpickled, it would leave a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:100])


BREAK: dict[str, tuple[Callable[[Path], Any], str]] = {
    "code": (lambda folder: torch.save({"fc.weight": Trap(folder / "ran")}, folder / "pytorch_model.bin"), "readable"),
    "list": (lambda folder: torch.save([torch.ones(1)], folder / "pytorch_model.bin"), "list that is no table"),
    "number": (lambda folder: torch.save({"epoch": 3}, folder / "pytorch_model.bin"), "dict that is no table"),
    "cut": (lambda folder: truncate(folder / "pytorch_model.bin"), "readable"),
    "gone": (lambda folder: (folder / "pytorch_model.bin").unlink(), "holds no weights"),
    "index": (lambda folder: (folder / "model.safetensors.index.json").write_text("{}"), "index.json: not a readable"),
    "shard": (
        lambda folder: (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "b.safetensors"}}'),
        "index.json: names b.safetensors, which is missing",
    ),
}


@pytest.mark.parametrize("how", BREAK)
def test_broken_weight_files(tmp_path: Path, how: str) -> None:
    folder = write(tmp_path / "out", OFFICIAL, eagle3_tensors(eagle3()))
    spoil, message = BREAK[how]
    spoil(folder)
    with pytest.raises(EyasError, match=message) as caught:
        load_export(folder, target=TINY)
    assert ("not a readable weight file" in str(caught.value)) == ("readable" in message)  # one message, not in another
    assert not (folder / "ran").exists()


def test_several_files_and_no_index(tmp_path: Path) -> None:
    for name in ("a.bin", "b.bin"):
        write(tmp_path, OFFICIAL, {"fc.weight": torch.ones(1)}, name)
    with pytest.raises(EyasError, match=r"holds 2 \*\.bin files and no index"):
        find_weights(tmp_path)
    write(tmp_path, OFFICIAL, {"fc.weight": torch.ones(1)}, "own.safetensors")
    assert find_weights(tmp_path).name == "own.safetensors"


def test_a_shard_outside_the_folder_is_not_read(tmp_path: Path) -> None:
    write(tmp_path, OFFICIAL, {"fc.weight": torch.ones(1)}, "elsewhere.safetensors")
    (tmp_path / "out").mkdir()
    index = {"weight_map": {"fc.weight": "../elsewhere.safetensors"}}
    (tmp_path / "out" / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(EyasError, match=r"names \.\./elsewhere\.safetensors, which is missing"):
        DrafterWeights(tmp_path / "out")


@pytest.mark.parametrize(
    ("drop", "put", "message"),
    [
        ("fc.weight", {}, r"fc\.weight: missing"),
        ("norm.weight", {"norm.weight": torch.ones(31)}, r"norm\.weight: has shape \[31\], .* \[32\]"),
        ("d2t", {}, "d2t: missing; 12 draft tokens"),
        (None, {"midlayer.self_attn.q_norm.weight": torch.ones(8)}, r"midlayer\.self_attn\.q_norm\.weight: unexpected"),
        (
            None,
            {"layers.1.mlp.up_proj.weight": torch.ones(8)},
            r"layers\.1\.mlp\.up_proj\.weight: a drafter of several",
        ),
        (None, {"layers.0.mlp.up_proj.weight": torch.ones(48, 32)}, r"midlayer\.mlp\.up_proj\.weight: present twice"),
        (None, {"t2d": torch.ones(40).bool()}, "t2d: does not mark"),
        (None, {"norm.weight": torch.full((32,), float("nan"))}, r"norm\.weight: 32 of 32 values are NaN"),
    ],
)
def test_what_does_not_fit_is_named(tmp_path: Path, drop: str | None, put: Tensors, message: str) -> None:
    tensors = {name: tensor for name, tensor in eagle3_tensors(eagle3()).items() if name != drop} | put
    write(tmp_path, OFFICIAL | {"draft_vocab_size": 12}, tensors)
    with pytest.raises(EyasError, match=f"{tmp_path}: {message}"):
        load_export(tmp_path, target={"num_hidden_layers": 12})
