"""Targets from installed wheels (a tiny GGUF written here), folders and hub names."""

from __future__ import annotations

import base64
import hashlib
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import gguf
import huggingface_hub.constants
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from models import pypi
from models.errors import EyasError
from models.pypi import resolve
from models.target import Target
from tests.tiny import CHATML, tiny_config, tiny_model, tiny_tokenizer

VOCAB = 260  # the tiny tokenizer's 259 and one merged token
LAYER_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def gguf_name(name: str) -> str:
    outer = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}
    if name in outer:
        return outer[name]
    _, _, layer, rest = name.split(".", 3)
    return f"blk.{layer}.{LAYER_NAMES[rest.removesuffix('.weight')]}.weight"


def pair_rows(weight: np.ndarray, heads: int) -> np.ndarray:
    """GGUF keeps the two rows of a rotary pair next to each other, HF half a head apart."""
    head_dim = weight.shape[0] // heads
    pairs = [(h * head_dim + i, h * head_dim + i + head_dim // 2) for h in range(heads) for i in range(head_dim // 2)]
    return weight[[row for pair in pairs for row in pair]]


def write_gguf(file: Path, model: PreTrainedModel) -> None:
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_block_count(2)
    writer.add_context_length(512)
    writer.add_embedding_length(64)
    writer.add_feed_forward_length(128)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(16)
    writer.add_vocab_size(VOCAB)
    vocab = tiny_tokenizer().get_vocab()
    tokens = [*sorted(vocab, key=lambda token: vocab[token]), "he"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if i < 3 else 1 for i in range(VOCAB)])
    writer.add_token_merges(["h e"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(0)
    writer.add_chat_template(CHATML)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight":
            continue  # tied
        array = tensor.numpy()
        if "q_proj" in name or "k_proj" in name:
            array = pair_rows(array, 4 if "q_proj" in name else 2)
        writer.add_tensor(gguf_name(name), np.ascontiguousarray(array))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(scope="module")
def original() -> PreTrainedModel:
    return tiny_model(tiny_config("llama", layers=2, vocab=VOCAB, tied=True, max_position_embeddings=512))


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, original: PreTrainedModel) -> Path:
    """An installed distribution tiny-wheel 1.0 on sys.path. Importing it would fail, and nothing should."""
    site = tmp_path / "site"
    package, info = site / "tiny_wheel", site / "tiny_wheel-1.0.dist-info"
    package.mkdir(parents=True)
    info.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('imported')\n")
    write_gguf(package / "tiny.gguf", original)
    sha256 = hashlib.sha256((package / "tiny.gguf").read_bytes()).digest()
    digest = base64.urlsafe_b64encode(sha256).rstrip(b"=").decode()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: tiny-wheel\nVersion: 1.0\nLicense: MIT\n")
    (info / "RECORD").write_text(f"tiny_wheel/__init__.py,,\ntiny_wheel/tiny.gguf,sha256={digest},\n")
    monkeypatch.syspath_prepend(str(site))
    return package / "tiny.gguf"


def test_a_wheel_becomes_an_ordinary_model_folder(wheel: Path, tmp_path: Path, original: PreTrainedModel) -> None:
    cache = tmp_path / "cache"
    folder = Path(resolve("pypi:tiny-wheel", cache))
    assert folder.parent == cache and [p.name for p in cache.iterdir() if not p.name.startswith(".")] == [folder.name]
    assert "quantization_config" not in json.loads((folder / "config.json").read_text())
    model = AutoModelForCausalLM.from_pretrained(folder)
    for name, tensor in original.state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor), name
    assert model.config.tie_word_embeddings and model.generation_config.eos_token_id == 2
    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = tokenizer.apply_chat_template([{"role": "user", "content": "he said"}], tokenize=False)
    assert text == "<|im_start|>user\nhe said<|im_end|>\n" and 259 in tokenizer(text).input_ids
    assert tokenizer.decode(tokenizer(text).input_ids) == text
    assert json.loads((folder / "source.json").read_text())["licence"] == "MIT"
    target = Target.load(str(folder))
    assert target.eos_ids == {2} and target.vocab_size == VOCAB

    stamp = (folder / "config.json").stat().st_mtime_ns
    assert resolve("pypi:tiny-wheel==1.0", cache) == str(folder)
    assert (folder / "config.json").stat().st_mtime_ns == stamp


def test_the_cache_follows_the_environment(wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EYAS_CACHE", str(tmp_path / "elsewhere"))
    assert Path(resolve("pypi:tiny-wheel")).parent == tmp_path / "elsewhere"


def test_a_failed_conversion_leaves_nothing(wheel: Path, tmp_path: Path) -> None:
    wheel.write_bytes(wheel.read_bytes()[:-8])
    with pytest.raises(EyasError, match="damaged"):
        resolve("pypi:tiny-wheel", tmp_path / "cache")
    assert not [p for p in (tmp_path / "cache").iterdir() if p.is_dir()]


def test_two_at_a_time_convert_once(wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each caller opens the lock file by itself, as separate processes do."""
    convert = pypi._convert
    calls: list[Path] = []

    def counted(wheel: pypi._Wheel, folder: Path) -> None:
        calls.append(folder)
        convert(wheel, folder)

    monkeypatch.setattr(pypi, "_convert", counted)
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(lambda _: resolve("pypi:tiny-wheel", tmp_path / "cache"), range(2))
    assert first == second and len(calls) == 1
    assert [p.name for p in (tmp_path / "cache").iterdir() if p.is_dir()] == [Path(first).name]


def test_wheels_that_cannot_be_used(wheel: Path, tmp_path: Path) -> None:
    with pytest.raises(EyasError, match="pip install --no-deps surely-not-installed"):
        resolve("pypi:surely-not-installed", tmp_path)
    with pytest.raises(EyasError, match=r"version 1\.0 is installed.*tiny-wheel==2\.0"):
        resolve("pypi:tiny-wheel==2.0", tmp_path)
    with pytest.raises(EyasError, match=r"holds 0 \.gguf files"):
        resolve("pypi:pytest", tmp_path)
    wheel.unlink()
    with pytest.raises(EyasError, match="is missing"):
        resolve("pypi:tiny-wheel", tmp_path)


def test_tiny_targets_are_made_once(tmp_path: Path) -> None:
    folder = resolve("tiny:qwen2", tmp_path)
    stamp = (Path(folder) / "model.safetensors").stat().st_mtime_ns
    assert Target.load(folder).config.model_type == "qwen2" and resolve("tiny:qwen2", tmp_path) == folder
    assert (Path(folder) / "model.safetensors").stat().st_mtime_ns == stamp
    with pytest.raises(EyasError, match="tiny:nonesuch.*tiny:llama"):
        resolve("tiny:nonesuch", tmp_path)


def test_folders_and_hub_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve(str(tmp_path)) == str(tmp_path)
    for path in (str(tmp_path / "none"), "./none", "a/b/c", "~/surely/none"):
        with pytest.raises(EyasError, match=r"target\.path=.*not a folder"):
            resolve(path)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    with pytest.raises(EyasError, match=r"target\.path=someone/some-model: no such folder.*download the model"):
        resolve("someone/some-model")
