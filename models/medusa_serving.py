"""Medusa as others read it: vLLM's layout (up to 0.32.0, the last that serves it) and FasterDecoding's own.

vllm            blocks.{h}.layers.{l}.weight|bias, lm_heads.{h}.weight, or one lm_head.weight where heads share it
fasterdecoding  {h}.{l}.linear.weight|bias, {h}.{n}.weight; heads that share the target's head ("version 2") have no
                {h}.{n}.weight

A draft vocabulary. vLLM cuts only a shared head down to ``token_map`` (int64 target ids); own heads must have a row for
every token of the target. So own heads are written with all rows: those of tokens that the drafter can't draft hold
the mean of the others, whose logit is never the largest one. ``token_map``, which engines then ignore, lets Eyas read
the smaller head back.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from models.drafter import Serving
from models.errors import EyasError
from models.frozen import FrozenTarget
from models.vocab import DraftVocab

TOKEN_MAP = "token_map"
WEIGHTS = "medusa_lm_head.safetensors"  # the file that FasterDecoding's loader asks for
FASTER = re.compile(r"(?P<head>\d+)\.(?P<layer>\d+)\.(?:(?P<block>linear)\.)?(?P<kind>weight|bias)")
BLOCK = re.compile(r"blocks\.(\d+)\.layers\.(\d+)\.(?:weight|bias)")
OWN_HEAD = re.compile(r"lm_heads\.(\d+)\.weight")

log = logging.getLogger(__name__)


# --- writing ---


def medusa_serving(
    weights: Mapping[str, Tensor], architecture: Mapping[str, Any], vocab: DraftVocab, frozen: FrozenTarget, layout: str
) -> Serving:
    """``weights``: the drafter's state dict; ``architecture``: the fields of MedusaConfig.

    Raises EyasError for a layout that isn't there, and for a shared head with a bias, which vLLM's has no place for.
    """
    if layout not in ("vllm", "fasterdecoding"):
        raise EyasError(f"export.layout={layout}: Medusa has vllm and fasterdecoding")
    shared = architecture["head"] == "shared"
    tensors = {name: tensor for name, tensor in weights.items() if name != "lm_heads"}
    if not shared:
        tensors |= {f"lm_heads.{h}.weight": _all_rows(own, vocab) for h, own in enumerate(weights["lm_heads"])}
        if not vocab.is_full:
            tensors[TOKEN_MAP] = vocab.ids
    if layout == "fasterdecoding":
        return _fasterdecoding(tensors, architecture, vocab, frozen)
    config = {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "hidden_size": architecture["hidden_size"],
        "vocab_size": vocab.size,
        "truncated_vocab_size": len(vocab) if shared else vocab.size,
        # vLLM takes any key with "num" and "heads", or "num" and "layers", for these two
        "num_heads": architecture["num_heads"],
        "num_hidden_layers": architecture["num_layers"],
        "medusa_fc_bias": True,
        "original_lm_head": shared,
    }
    if shared:
        if frozen.head_bias is not None:
            raise EyasError(
                "export.layout=vllm: the target's head has a bias, which vLLM's Medusa lacks; drafter.head=own"
            )
        tensors["lm_head.weight"] = frozen.draft_head(vocab).weight.detach()
        config["logit_scale"] = frozen.scale
        if not vocab.is_full:
            tensors[TOKEN_MAP] = vocab.ids
    return Serving(tensors, config)


def _all_rows(own: Tensor, vocab: DraftVocab) -> Tensor:
    """[Vd, H] -> [V, H]; see the module docstring."""
    if vocab.is_full:
        return own
    rows = own.float().mean(0, keepdim=True).to(own.dtype).repeat(vocab.size, 1)
    rows[vocab.ids.to(own.device)] = own
    return rows


def _fasterdecoding(
    tensors: Mapping[str, Tensor], architecture: Mapping[str, Any], vocab: DraftVocab, frozen: FrozenTarget
) -> Serving:
    layers, renamed = architecture["num_layers"], {}
    for name, tensor in tensors.items():
        parts = name.split(".")
        if parts[0] == "blocks":
            name = f"{parts[1]}.{parts[3]}.linear.{parts[4]}"
        elif parts[0] == "lm_heads":
            name = f"{parts[1]}.{layers}.weight"
        renamed[name] = tensor
    config = {
        "medusa_num_heads": architecture["num_heads"],
        "medusa_num_layers": layers,
        "base_model_name_or_path": str(frozen.folder or ""),
        # Not its own keys: with them vLLM reads own heads from this folder too.
        "hidden_size": architecture["hidden_size"],
        "vocab_size": vocab.size,
        "medusa_fc_bias": True,
    }
    if architecture["head"] == "shared":
        config["version"] = "2"
    return Serving(renamed, config, WEIGHTS)


# --- reading ---


def read_medusa(
    tensors: Mapping[str, Tensor], config: Mapping[str, Any], target: Mapping[str, Any] | None
) -> tuple[dict[str, Any], DraftVocab, dict[str, Tensor]]:
    """Fields of MedusaConfig, draft vocabulary and state dict, from either layout or a whole Medusa-2 model.

    Official configs name a wrong number of heads, so FasterDecoding's tensors are believed. Raises EyasError where
    vLLM would read its own layout otherwise than it is meant.
    """
    faster = any(FASTER.fullmatch(name) for name in tensors)
    weights = _vllm_names(tensors)
    heads, layers, hidden = _sizes(weights)
    _check_counts(config, heads, layers, faster)
    own = {name: weights.pop(name) for name in list(weights) if OWN_HEAD.fullmatch(name)}
    shared = bool(config.get("original_lm_head", faster and not own))
    token_map = weights.pop(TOKEN_MAP, None)
    vocab = _vocab(token_map, _vocab_size(config, target, None if shared else own.get("lm_heads.0.weight")), config)
    _fill_biases(weights, config, heads, layers, faster)
    if shared:
        _drop_targets_head(weights, own, vocab, hidden)
    else:
        weights["lm_heads"] = _stack(own, heads, vocab, token_map, hidden)
    kind = "shared" if shared else "own"
    return {"hidden_size": hidden, "num_heads": heads, "num_layers": layers, "head": kind}, vocab, weights


def _vllm_names(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    renamed = {}
    for name, tensor in tensors.items():
        if found := FASTER.fullmatch(name):
            head, layer, block, kind = found.group("head", "layer", "block", "kind")
            name = f"blocks.{head}.layers.{layer}.{kind}" if block else f"lm_heads.{head}.{kind}"
        if name in renamed:
            raise EyasError(f"{name}: present twice, under vLLM's and FasterDecoding's name")
        renamed[name] = tensor
    return renamed


def _sizes(weights: Mapping[str, Tensor]) -> tuple[int, int, int]:
    """Heads, residual layers of each and hidden size, as the tensors have them."""
    blocks = [tuple(map(int, found.groups())) for name in weights if (found := BLOCK.fullmatch(name))]
    first = weights.get("blocks.0.layers.0.weight")
    if first is None:
        raise EyasError("blocks.0.layers.0.weight (or 0.0.linear.weight): missing; these are no Medusa heads")
    return 1 + max(h for h, _ in blocks), 1 + max(n for _, n in blocks), int(first.shape[0])


def _check_counts(config: Mapping[str, Any], heads: int, layers: int, faster: bool) -> None:
    """vLLM's config under its own names and defaults; FasterDecoding's under theirs, as the rest is the target's."""
    for key, other, found, default in (
        ("num_heads", "medusa_num_heads", heads, 5),
        ("num_hidden_layers", "medusa_num_layers", layers, 1),
    ):
        said = int(config.get(other, found) if faster else config.get(key, config.get(other, default)))
        if said != found and not faster:
            raise EyasError(f"config.json: {key}={said}, but the tensors hold {found}; vLLM would skip or invent some")
        if said != found:
            log.warning("config.json: %s=%d, but the tensors hold %d: the tensors are believed", other, said, found)


def _vocab_size(config: Mapping[str, Any], target: Mapping[str, Any] | None, own: Tensor | None) -> int:
    size = (target or {}).get("vocab_size") or config.get("vocab_size") or (None if own is None else own.shape[0])
    if size is None:
        raise EyasError("config.json: names no vocab_size and the heads have no rows of their own; give the target")
    return int(size)


def _vocab(token_map: Tensor | None, size: int, config: Mapping[str, Any]) -> DraftVocab:
    cut = int(config.get("truncated_vocab_size") or size)
    if token_map is None:
        if cut < size and int(config.get("vocab_size") or size) == size:
            raise EyasError(f"{TOKEN_MAP}: missing; truncated_vocab_size={cut} draft tokens can't be mapped to {size}")
        return DraftVocab.full(size)
    if token_map.ndim != 1 or token_map.is_floating_point() or (cut < size and len(token_map) != cut):
        raise EyasError(f"{TOKEN_MAP}: is {token_map.dtype} {list(token_map.shape)}, must be int64 [{min(cut, size)}]")
    ids = token_map.long().sort().values
    if not len(ids) or bool((ids.diff() == 0).any()) or int(ids[0]) < 0 or int(ids[-1]) >= size:
        raise EyasError(f"{TOKEN_MAP}: must name distinct tokens within 0..{size - 1}")
    return DraftVocab(ids, size)


def _fill_biases(weights: dict[str, Tensor], config: Mapping[str, Any], heads: int, layers: int, faster: bool) -> None:
    """vLLM's blocks have biases only with medusa_fc_bias."""
    if faster or config.get("medusa_fc_bias", False):
        return
    if ignored := sorted(name for name in weights if BLOCK.fullmatch(name) and name.endswith("bias")):
        raise EyasError(f"{ignored[0]}: unexpected; without medusa_fc_bias=true in config.json vLLM ignores it")
    for h in range(heads):
        for n in range(layers):
            if (weight := weights.get(f"blocks.{h}.layers.{n}.weight")) is not None:
                weights[f"blocks.{h}.layers.{n}.bias"] = weight.new_zeros(weight.shape[0])


def _drop_targets_head(weights: dict[str, Tensor], own: dict[str, Tensor], vocab: DraftVocab, hidden: int) -> None:
    """A copy of the target's head, which vLLM needs in the folder, under either of the names it takes."""
    for name, weight in (("lm_head.weight", weights.pop("lm_head.weight", None)), *own.items()):
        if weight is not None and weight.shape not in ((len(vocab), hidden), (vocab.size, hidden)):
            raise EyasError(f"{name}: has shape {list(weight.shape)}, the target asks for {[vocab.size, hidden]}")
        if name not in ("lm_head.weight", "lm_heads.0.weight"):
            raise EyasError(f"{name}: unexpected; with original_lm_head=true all heads share lm_head.weight")


def _stack(own: dict[str, Tensor], heads: int, vocab: DraftVocab, token_map: Tensor | None, hidden: int) -> Tensor:
    """The own linear layers as one [K, Vd, H], their rows in the order of the draft vocabulary."""
    order = None if token_map is None else token_map.argsort()
    stacked = []
    for h in range(heads):
        name = f"lm_heads.{h}.weight"
        if (weight := own.pop(name, None)) is None:
            raise EyasError(f"{name}: missing; an engine would leave it random")
        if weight.shape == (vocab.size, hidden):
            weight = weight if vocab.is_full else weight[vocab.ids]
        elif order is not None and weight.shape == (len(vocab), hidden):
            weight = weight[order]
        else:
            raise EyasError(f"{name}: has shape {list(weight.shape)}, the target asks for {[vocab.size, hidden]}")
        stacked.append(weight.float())
    for name in own:
        raise EyasError(f"{name}: unexpected; there are {heads} heads with residual blocks")
    return torch.stack(stacked)
