"""Taps, scores, cached steps and frozen tensors of the target, against transformers' own outputs and float64."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, Gemma3Config

from models import target as target_module
from models.blocks import Block, States
from models.errors import EyasError
from models.frozen import FrozenTarget
from models.load_frozen import fingerprint, load_frozen
from models.target import Features, Target, special_ids
from tests.tiny import tiny_config, tiny_model, tiny_target, tiny_tokenizer

VARIANTS: dict[str, dict[str, Any]] = {
    "llama": {"family": "llama"},
    "llama-wide-heads": {"family": "llama", "head_dim": 32, "tied": True},
    "qwen2": {"family": "qwen2"},
    "qwen3": {"family": "qwen3", "head_dim": 32, "tied": True},
    "gemma3": {"family": "gemma3", "head_dim": 32, "tied": True, "final_logit_softcapping": 2.0},
    "mistral": {"family": "mistral", "sliding_window": 6},
}
TAPS = (0, 1, 3, 4)  # the embedding's output, two inner boundaries, and the state leaving the last of 4 layers


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("targets")
    return {name: tiny_target(root / name, **options) for name, options in VARIANTS.items()}


@pytest.fixture(scope="module", params=list(VARIANTS))
def target(request: pytest.FixtureRequest, folders: dict[str, Path]) -> Iterator[Target]:
    yield Target.load(str(folders[request.param]), taps=TAPS)


def random_rows(lengths: list[int], seed: int = 0, vocab: int = 288) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(vocab, (n,), generator=generator) for n in lengths]


def reference(target: Target, row: Tensor) -> tuple[list[Tensor], Tensor, Tensor]:
    """hidden_states, post-norm state and float64 logits of one row, from a model loaded anew."""
    model = AutoModelForCausalLM.from_pretrained(target.folder, dtype=torch.float32).eval()
    with torch.no_grad():
        out = model(row[None], output_hidden_states=True)
        double = model.double()(row[None]).logits[0]
    return [h[0] for h in out.hidden_states], out.hidden_states[-1][0], double


def close(a: Tensor, b: Tensor, tolerance: float = 1e-5) -> bool:
    return a.shape == b.shape and torch.allclose(a.double(), b.double(), rtol=tolerance, atol=tolerance)


def same(a: Features, b: Features, tolerance: float = 3e-5) -> bool:
    return all(close(x, y, tolerance) for x, y in zip(a, b, strict=True))


def test_features_are_the_hidden_states_and_scores_of_transformers(target: Target) -> None:
    (row,) = random_rows([23])
    hidden, normed, logits = reference(target, row)
    (found,) = target.features([row])
    tapped = found.taps.split(target.hidden_size, -1)
    for boundary, state in zip(TAPS[:-1], tapped, strict=False):
        assert close(state, hidden[boundary]), boundary
    norm = target.model.get_decoder().norm  # id L: before the final norm
    assert close(norm(tapped[-1]), normed) and not close(tapped[-1], normed, 1e-2)
    assert close(found.final, normed)
    assert found.lse.dtype == torch.float32 and found.top1.dtype == torch.int64
    assert close(found.lse, logits.logsumexp(-1))
    assert torch.equal(found.top1, logits.argmax(-1))
    assert target.trainable_parameters() == 0 and not found.taps.requires_grad


def test_features_do_not_depend_on_the_batch(target: Target) -> None:
    rows = random_rows([1, 17, 2, 30, 9, 9, 1])
    alone = [target.features([row])[0] for row in rows]
    assert target.features([]) == []
    for order in ([0, 1, 2, 3, 4, 5, 6], [3, 0, 6, 1], [5, 4], [6, 5, 4, 3, 2, 1, 0], [0, 6]):
        together = target.features([rows[i] for i in order])
        assert [f.final.shape[0] for f in together] == [rows[i].numel() for i in order]
        assert all(same(f, alone[i]) for f, i in zip(together, order, strict=True))


def test_scores_do_not_depend_on_the_chunk(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = random_rows([11, 6])
    whole = target.features(rows)
    monkeypatch.setattr(target_module, "LOGITS_AT_ONCE", 288 * 4)
    assert all(same(a, b) for a, b in zip(target.features(rows), whole, strict=True))


def states(features: Features | States, *index: Any) -> States:
    return States(features.taps[index], features.final[index])


def same_states(a: States, b: States) -> bool:
    return close(a.taps, b.taps, 3e-5) and close(a.final, b.final, 3e-5)


def test_steps_and_rollback_equal_a_fresh_forward(target: Target) -> None:
    (row,) = random_rows([26])
    _, _, logits = reference(target, row)
    (whole,) = target.features([row])
    cache = target.new_cache()
    last, seen = target.step([Block(row[:12])], cache, last_only=True)
    cache.keep(0, range(12))
    assert close(last, logits[11:12]) and same_states(seen, states(whole, slice(12)))
    for start, stop in ((12, 13), (13, 18), (18, 26)):
        target.step([Block((row[start : start + 5] + 1) % 288)], cache)  # a rejected block
        cache.keep(0, [])
        got, seen = target.step([Block(row[start:stop])], cache)
        assert close(got, logits[start:stop]) and same_states(seen, states(whole, slice(start, stop)))
        cache.keep(0, range(stop - start))
    assert cache.lengths == [26] and cache.pending == [0]


def tree_block(tokens: Tensor, parents: Sequence[int]) -> tuple[Block, list[list[int]]]:
    """A block of drafted nodes and the path of each."""
    paths: list[list[int]] = []
    for node, parent in enumerate(parents):
        paths.append([*(paths[parent] if parent >= 0 else []), node])
    seen = torch.zeros(len(parents), len(parents), dtype=torch.bool)
    for node, path in enumerate(paths):
        seen[node, path] = True
    return Block(tokens, [len(path) - 1 for path in paths], seen), paths


def test_tree_step_equals_each_path_and_keeps_the_accepted_one(target: Target) -> None:
    (prefix,) = random_rows([11])
    tokens = random_rows([6], seed=1)[0]
    block, paths = tree_block(tokens, [-1, -1, 0, 0, 1, 3])  # node 5's path is 0, 3, 5
    cache = target.new_cache()
    target.step([Block(prefix)], cache)
    cache.keep(0, range(11))
    logits, seen = target.step([block], cache)
    for node, path in enumerate(paths):
        (fresh,) = target.features([torch.cat([prefix, tokens[path]])])
        assert same_states(states(seen, node), states(fresh, -1))
        assert close(logits[node].logsumexp(-1), fresh.lse[-1])
    cache.keep(0, [0, 3, 5])
    after = random_rows([3], seed=2)[0]
    got, _ = target.step([Block(after)], cache)
    _, _, expected = reference(target, torch.cat([prefix, tokens[[0, 3, 5]], after]))
    assert close(got, expected[-3:])


def test_sequences_of_different_lengths_do_not_see_each_other(target: Target) -> None:
    """Slots with texts of their own, chains, trees and single tokens in one forward, slots moved: as each alone."""
    prompts = random_rows([3, 31, 9, 300])
    cache = target.new_cache(slots=4)
    for slot, prompt in enumerate(prompts):
        last, _ = target.step([Block(prompt)], cache, first=slot, last_only=True)
        assert close(last, reference(target, prompt)[2][-1:])
        cache.keep(slot, range(prompt.numel()))
    tree, paths = tree_block(random_rows([5], seed=3)[0], [-1, -1, 1, 1, 3])
    blocks = [tree, Block(random_rows([7], seed=4)[0]), Block(random_rows([1], seed=5)[0]), tree]
    logits, seen = target.step(blocks, cache)
    kept = [[1, 3], [0, 1, 2], [], [0]]
    for slot, (rows, block) in enumerate(zip(logits.split([5, 7, 1, 5]), blocks, strict=True)):
        for node in range(block.tokens.numel()):
            path = paths[node] if block is tree else list(range(node + 1))
            assert close(rows[node], reference(target, torch.cat([prompts[slot], block.tokens[path]]))[2][-1])
        cache.keep(slot, kept[slot])
    texts = [torch.cat([p, b.tokens[k]]) for p, b, k in zip(prompts, blocks, kept, strict=True)]
    cache.move(3, 0)
    texts[0] = texts.pop()
    ends = random_rows([2, 4], seed=6)
    logits, seen = target.step([Block(end) for end in ends], cache, first=1)
    whole = [reference(target, torch.cat([texts[slot + 1], end]))[2] for slot, end in enumerate(ends)]
    assert close(logits, torch.cat([whole[0][-2:], whole[1][-4:]]))
    logits, seen = target.step([Block(ends[0])], cache)
    assert close(logits, reference(target, torch.cat([texts[0], ends[0]]))[2][-2:])
    (fresh,) = target.features([torch.cat([texts[0], ends[0]])])
    assert same_states(seen, states(fresh, slice(-2, None)))


def test_pending_tokens_can_be_read_in_several_blocks(target: Target) -> None:
    """What a draft model does: nodes level by level, each seeing its ancestors among those read before."""
    (prefix,), tokens = random_rows([5]), random_rows([4], seed=1)[0]
    cache = target.new_cache()
    target.step([Block(prefix)], cache)
    cache.keep(0, range(5))
    target.step([Block(tokens[:2], [0, 0], torch.eye(2, dtype=torch.bool))], cache)
    seen = torch.tensor([[1, 0, 1, 0], [0, 1, 0, 1]], dtype=torch.bool)
    logits, _ = target.step([Block(tokens[2:], [1, 1], seen)], cache)
    for i in (0, 1):
        assert close(logits[i], reference(target, torch.cat([prefix, tokens[[i, i + 2]]]))[2][-1])
    with pytest.raises(ValueError, match="seen"):
        target.step([Block(tokens[:1], [0], torch.ones(1, 2, dtype=torch.bool))], cache)
    with pytest.raises(ValueError, match="slot 0"):
        cache.keep(0, [1, 0])


def equal_frozen(a: FrozenTarget, b: FrozenTarget) -> bool:
    pairs = [(a.embedding, b.embedding), (a.head, b.head), (a.head_bias, b.head_bias), (a.final_norm, b.final_norm)]
    tensors = all((x is None) == (y is None) and (x is None or torch.equal(x, y)) for x, y in pairs)  # type: ignore[arg-type]
    layers = a.last_layer.keys() == b.last_layer.keys()
    values = layers and all(torch.equal(a.last_layer[k], b.last_layer[k]) for k in a.last_layer)
    tied = (a.head is a.embedding) == (b.head is b.embedding)
    return tensors and values and tied and (a.config, a.scale, a.softcap) == (b.config, b.scale, b.softcap)


def test_frozen_tensors_read_from_files_equal_the_live_ones(target: Target) -> None:
    live, read = target.frozen(), load_frozen(target.folder)
    assert equal_frozen(live, read)
    assert live.embedding.data_ptr() == target.model.get_input_embeddings().weight.data_ptr()
    assert not any(t.requires_grad for t in (live.embedding, live.head, *live.last_layer.values()))
    assert "self_attn.q_proj.weight" in live.last_layer and live.config["head_dim"] in (16, 32)
    (row,) = random_rows([9])
    (found,) = target.features([row])
    softcap = live.softcap or 1e9
    logits = found.final.double() @ live.head.double().T
    assert close((softcap * torch.tanh(logits / softcap)).logsumexp(-1), found.lse)
    assert live.final_norm is not None  # the multiplier itself, whatever the family stores
    state = found.taps[:, -target.hidden_size :].double()
    expected = state * torch.rsqrt(state.pow(2).mean(-1, keepdim=True) + 1e-6) * live.final_norm.double()
    assert close(expected, found.final, 1e-4)


def test_frozen_dtype(folders: dict[str, Path]) -> None:
    half = load_frozen(folders["qwen2"], dtype="bfloat16")
    assert torch.equal(half.head, load_frozen(folders["qwen2"]).head.bfloat16())


def test_sharded_files(tmp_path: Path) -> None:
    whole = tiny_target(tmp_path / "whole")
    shards = tiny_target(tmp_path / "shards", max_shard_size="60KB")
    assert len(list(shards.glob("*.safetensors"))) > 5
    assert equal_frozen(load_frozen(shards), load_frozen(whole))
    assert equal_frozen(load_frozen(shards), Target.load(str(shards)).frozen())
    assert fingerprint(shards) == fingerprint(whole)
    next(shards.glob("*00002-of*")).unlink()
    with pytest.raises(EyasError, match="1 weight files are missing"):
        load_frozen(shards)


def test_mixture_of_experts(tmp_path: Path) -> None:
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "decoder_sparse_step": 1}
    dense = tiny_config("qwen3").to_dict()
    fields = {k: v for k, v in dense.items() if k not in ("model_type", "architectures", "layer_types")}
    model = tiny_model(AutoConfig.for_model("qwen3_moe", **(fields | experts)))
    model.save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    target = Target.load(str(tmp_path), taps=TAPS)
    assert equal_frozen(target.frozen(), load_frozen(tmp_path))
    assert not any("expert" in name or "gate" in name for name in target.frozen().last_layer)
    rows = random_rows([7, 12, 1])
    for row, found in zip(rows, target.features(rows), strict=True):
        with torch.no_grad():
            out = model(row[None], output_hidden_states=True)
        assert close(found.taps[:, 64:128], out.hidden_states[1][0]) and close(found.final, out.hidden_states[4][0])
        assert close(found.lse, out.logits[0].logsumexp(-1))


def test_text_part_of_a_multimodal_gemma(tmp_path: Path) -> None:
    text = tiny_config("gemma3", tied=True).to_dict()
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1}
    config = Gemma3Config(text_config=text, vision_config=vision | {"image_size": 28, "patch_size": 14})
    model = tiny_model(config)
    model.save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    target = Target.load(str(tmp_path), taps=TAPS)
    assert (target.num_layers, target.hidden_size, target.vocab_size) == (4, 64, 288)
    assert equal_frozen(target.frozen(), load_frozen(tmp_path))
    rows = random_rows([14, 5])
    for row, found in zip(rows, target.features(rows), strict=True):
        with torch.no_grad():
            out = model(row[None], output_hidden_states=True)
        assert close(found.taps[:, 128:192], out.hidden_states[3][0]) and close(found.final, out.hidden_states[4][0])
        assert close(found.lse, out.logits[0].logsumexp(-1))


@pytest.mark.parametrize(
    ("family", "extra", "scale"),
    [("granite", {"logits_scaling": 4.0}, 0.25), ("cohere", {"logit_scale": 0.5, "tie_word_embeddings": True}, 0.5)],
)
def test_logit_scale(tmp_path: Path, family: str, extra: dict[str, Any], scale: float) -> None:
    fields = tiny_config("llama").to_dict()
    kept = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    config = AutoConfig.for_model(family, **{k: fields[k] for k in kept}, pad_token_id=0, eos_token_id=2, **extra)
    tiny_model(config).save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    target = Target.load(str(tmp_path))
    (row,) = random_rows([8])
    _, _, logits = reference(target, row)
    assert target.frozen().scale == load_frozen(tmp_path).scale == scale
    assert close(target.features([row])[0].lse, logits.logsumexp(-1))


def test_an_unknown_logit_transform_is_refused(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(target_module, "logit_transform", lambda config: (0.9, None))
    with pytest.raises(EyasError, match="not a linear head"):
        Target.load(str(folders["llama"]))


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_rope_that_depends_on_the_length(tmp_path: Path, kind: str) -> None:
    extra: dict[str, Any] = {"factor": 4.0, "original_max_position_embeddings": 16}
    if kind == "longrope":
        extra |= {"short_factor": [1.0] * 8, "long_factor": [1.0 + i for i in range(8)]}
    rope = {"rope_type": kind, "rope_theta": 1e4} | extra
    tiny_target(tmp_path, max_position_embeddings=16 if kind == "dynamic" else 64, rope_parameters=rope)
    target = Target.load(str(tmp_path))
    rows = random_rows([40, 25, 8, 30])  # 25 right after 40: the longer row's frequencies must not stick
    for row, found in zip(rows, target.features(rows), strict=True):
        assert close(found.final, reference(target, row)[1])


def test_eos_and_special_ids(folders: dict[str, Path]) -> None:
    target = Target.load(str(folders["llama"]))
    assert target.eos_ids == {0, 2}
    assert special_ids(target.tokenizer, target.eos_ids | {7}) == [0, 1, 2, 7]
    assert load_frozen(target.folder).config["eos_token_id"] == [0, 2]
    assert len(target.tokenizer) == 259 != target.vocab_size


def test_chat_template_file(folders: dict[str, Path], tmp_path: Path) -> None:
    template = tmp_path / "own.jinja"
    template.write_text("{{ messages[0]['content'] }}!")
    tokenizer = Target.load(str(folders["llama"]), chat_template=str(template)).tokenizer
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "hi!"
    with pytest.raises(EyasError, match=r"target\.chat_template"):
        Target.load(str(folders["llama"]), chat_template=str(tmp_path / "none.jinja"))


def test_dtype(folders: dict[str, Path]) -> None:
    target = Target.load(str(folders["llama"]), dtype="bfloat16")
    (found,) = target.features(random_rows([5]))
    assert found.taps.dtype == found.final.dtype == torch.bfloat16 and found.lse.dtype == torch.float32
    with pytest.raises(EyasError, match=r"target\.dtype=int8"):
        Target.load(str(folders["llama"]), dtype="int8")


def test_fingerprint(folders: dict[str, Path], tmp_path: Path) -> None:
    print_of = Target.load(str(folders["llama"])).fingerprint()
    copy = tiny_target(tmp_path / "copy")
    assert fingerprint(copy) == print_of
    assert fingerprint(tiny_target(tmp_path / "seed", seed=1)) != print_of
    assert fingerprint(tiny_target(tmp_path / "config", rms_norm_eps=1e-5)) != print_of
    tensors = load_file(copy / "model.safetensors")
    tensors["model.norm.weight"][3] += 1
    save_file(tensors, copy / "model.safetensors")
    assert fingerprint(copy) != print_of


def edit_weights(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def test_missing_weights_are_refused(tmp_path: Path) -> None:
    folder = tiny_target(tmp_path)
    edit_weights(folder, lambda w: w.pop("lm_head.weight"))
    with pytest.raises(EyasError, match="no output head"):
        load_frozen(folder)
    with pytest.raises(EyasError, match=r"1 weights are missing, first lm_head\.weight"):
        Target.load(str(folder))


def test_a_tied_head_saved_twice_is_one_tensor(tmp_path: Path) -> None:
    folder = tiny_target(tmp_path, tied=True)
    edit_weights(folder, lambda w: w.update({"lm_head.weight": w["model.embed_tokens.weight"].clone()}))
    read = load_frozen(folder)
    assert read.head is read.embedding


def test_unusable_folders(tmp_path: Path) -> None:
    with pytest.raises(EyasError, match=r"target\.path=.*config"):
        Target.load(str(tmp_path))
    folder = tiny_target(tmp_path / "cut")
    content = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(content[:100])
    with pytest.raises(EyasError, match="not a whole safetensors file"):
        load_frozen(folder)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(EyasError, match=r"no \.safetensors file"):
        load_frozen(folder)
    with pytest.raises(EyasError, match="cannot load the model"):
        Target.load(str(folder))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "nonesuch"}))
    with pytest.raises(EyasError, match="nonesuch"):
        Target.load(str(folder))


def test_ids_outside_the_vocabulary(folders: dict[str, Path]) -> None:
    target = Target.load(str(folders["llama"]))
    with pytest.raises(EyasError, match="id 288"):
        target.features([torch.tensor([1, 288])])
    with pytest.raises(ValueError, match="non-empty"):
        target.features([torch.tensor([], dtype=torch.int64)])
