"""What a drafter needs of a target, read straight from its safetensors: no model is built.

Training from a feature store needs of a 70B target only the embedding table and the output head (and, to
initialise from, the final norm and the last decoder layer). :func:`load_frozen` gives exactly what
``Target.load(folder).frozen()`` gives.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from models.errors import EyasError
from models.frozen import FrozenTarget

if TYPE_CHECKING:
    from transformers import PretrainedConfig

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
FLOATS = ("F64", "F32", "BF16", "F16")  # as safetensors names them
EMBEDDINGS = ("embed_tokens", "wte", "word_embeddings", "tok_embeddings", "embed_in")
LAYERS = ("layers", "h", "blocks")
NORMS = ("norm", "final_layernorm", "ln_f", "final_layer_norm", "final_norm")
HEAD = re.compile(r"(?:(?:\w+\.){0,2}(?:lm_head|embed_out)|output)\.weight")
OTHER_TOWER = re.compile(r"vision|visual|audio|image|encoder")
# Parts of a mixture-of-experts layer: a drafter's layer is dense, and their names differ between files and models.
EXPERTS = re.compile(r"experts?\b|block_sparse_moe|router|mlp\.gate\.")
# Families whose RMSNorm multiplies by (1 + weight). Their norm weights are given here as the multiplier itself.
PLUS_ONE_NORMS = re.compile(r"gemma[23]?|gemma3_text|recurrent_gemma|vaultgemma|qwen3_next|qwen3_5(_moe)?(_text)?")
# Where a model was saved and by which version: says nothing about what it computes.
VOLATILE = {"_name_or_path", "_model_name_or_path", "transformers_version", "dtype", "torch_dtype"}
SAMPLE = 4096  # bytes read at the start, the middle and the end of every tensor for the fingerprint


def load_frozen(folder: str | Path, *, dtype: str = "float32", device: str = "cpu") -> FrozenTarget:
    """Embedding [V, H], head [V, H], final norm [H] and last decoder layer of the target in ``folder``.

    Reads single-file or sharded safetensors, tied or untied, with or without a prefix such as ``language_model.``
    (the text part of a multimodal model). ``dtype``: float32, bfloat16 or float16. Tensors are in memory once: the
    head is the embedding's own tensor when tied. Raises EyasError for missing files, or an untied head that is missing.
    """
    folder = Path(folder)
    outer = read_config(folder)
    config = plain_config(outer, folder)
    weights = WeightFiles(folder)
    check_stored(weights, config)

    def read(name: str) -> Tensor:
        return weights.read(name).to(device, DTYPES[dtype])

    name = _embedding_name(weights)
    prefix = name.removesuffix(".weight").rpartition(".")[0]
    embedding = read(name)
    head_name = next((n for n in weights if HEAD.fullmatch(n) and not OTHER_TOWER.search(n)), None)
    if head_name is None and not is_tied(outer):
        raise EyasError(f"{folder}: holds no output head (lm_head.weight), and the config says it is not tied")
    head = embedding if head_name is None else read(head_name)
    if is_tied(outer) and torch.equal(head, embedding):
        head = embedding  # saved twice
    bias_name = (head_name or "").removesuffix("weight") + "bias"
    norm_name = next((n for kind in NORMS if (n := _join(prefix, kind, "weight")) in weights), None)
    return assemble(
        config,
        embedding,
        head,
        head_bias=read(bias_name) if bias_name in weights else None,
        final_norm=read(norm_name) if norm_name else None,
        layer={key: read(full) for key, full in _last_layer(weights, prefix, config).items()},
        folder=folder,
    )


def check_stored(weights: WeightFiles, config: Mapping[str, Any]) -> None:
    """Raise EyasError for weights that are stored as something else than their values (int8 or fp8 beside scales).

    Layers may be, where the config says how; embedding and head are read as they are.
    """
    quantised = bool(config.get("quantization_config"))
    for path in weights.files:
        for name, entry in read_header(path)[0].items():
            *_, part, kind = ("", *name.split("."))
            is_read = HEAD.fullmatch(name) or part in EMBEDDINGS
            if kind == "weight" and entry["dtype"] not in FLOATS and (is_read or not quantised):
                how = "" if quantised else ", and its config does not tell how"
                raise EyasError(
                    f"target.path={weights.folder}: {name} is stored as {entry['dtype']}, not as its values{how}; give "
                    "the unquantised model (target.quantize makes that small)"
                )


def assemble(
    config: dict[str, Any],
    embedding: Tensor,
    head: Tensor,
    *,
    head_bias: Tensor | None,
    final_norm: Tensor | None,
    layer: Mapping[str, Tensor],
    folder: Path | None = None,
) -> FrozenTarget:
    """A FrozenTarget from raw tensors: the one place that knows norm offsets, logit scale and what a layer keeps.

    Norm weights become multipliers (1 + weight where the family stores it so). Experts are left out of the layer;
    of a quantised layer nothing is kept, as its stored numbers are not the weights.
    """
    offset = 1.0 if PLUS_ONE_NORMS.fullmatch(config.get("model_type", "")) else 0.0
    kept = {} if config.get("quantization_config") else {k: v for k, v in layer.items() if not EXPERTS.search(k)}
    multiplier = {k: v + offset if offset and is_norm(k) else v for k, v in kept.items()}
    scale, softcap = logit_transform(config)
    norm = None if final_norm is None else final_norm + offset if offset else final_norm
    return FrozenTarget(embedding, head, config, head_bias, scale, softcap, norm, multiplier, folder)


def is_norm(name: str) -> bool:
    return name.endswith("norm.weight") and not name.startswith("linear_attn.")  # that one's gated norm has no offset


def logit_transform(config: Mapping[str, Any]) -> tuple[float, float | None]:
    """Logit scale and soft cap of a text config (``Target.load`` proves them on the live model)."""
    scale = 1.0
    if config.get("logit_scale") is not None:  # Cohere
        scale *= config["logit_scale"]
    if config.get("lm_head_multiplier") is not None:  # Falcon-H1
        scale *= config["lm_head_multiplier"]
    if config.get("logits_scaling") is not None:  # Granite divides by it, HyperCLOVA X multiplies
        factor = config["logits_scaling"]
        scale *= factor if config.get("model_type", "").startswith("hyperclovax") else 1.0 / factor
    return scale, config.get("final_logit_softcapping") or None


def read_config(folder: Path, trust_remote_code: bool = False) -> PretrainedConfig:
    """The model config of a folder. Raises EyasError if there is none or its architecture is unknown."""
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise EyasError(f"target.path={folder}: cannot read the model's config ({_first_line(error)})") from error


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def is_tied(config: PretrainedConfig) -> bool:
    both = (config, config.get_text_config(decoder=True))
    return any(getattr(c, "tie_word_embeddings", False) for c in both)


def plain_config(config: PretrainedConfig, folder: Path) -> dict[str, Any]:
    """The text config as plain JSON types, with ``head_dim`` always set and ``eos_token_id`` a sorted list."""
    fields = {k: v for k, v in config.get_text_config(decoder=True).to_dict().items() if k not in VOLATILE}
    if not fields.get("head_dim"):
        fields["head_dim"] = fields["hidden_size"] // fields["num_attention_heads"]
    fields["eos_token_id"] = sorted(config_eos_ids(config, folder))
    quantization = getattr(config, "quantization_config", None)
    if quantization:
        fields["quantization_config"] = quantization if isinstance(quantization, dict) else quantization.to_dict()
    plain: dict[str, Any] = json.loads(json.dumps(fields, default=str))
    return plain


def config_eos_ids(config: PretrainedConfig, folder: Path) -> set[int]:
    """EOS ids of config.json and generation_config.json (instruct models often name more of them in the latter)."""
    values = [getattr(c, "eos_token_id", None) for c in (config, config.get_text_config(decoder=True))]
    generation = folder / "generation_config.json"
    if generation.is_file():
        values.append(json.loads(generation.read_text()).get("eos_token_id"))
    found: set[int] = set()
    for value in values:
        found.update(value if isinstance(value, list) else [] if value is None else [value])
    return found


class WeightFiles:
    """The tensors of a model folder by name, without reading them: ``name in files``, ``files.read(name)``."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        index = folder / "model.safetensors.index.json"
        if index.is_file():
            self._file: dict[str, str] = json.loads(index.read_text())["weight_map"]
        else:
            single = folder / "model.safetensors"
            found = [single] if single.is_file() else sorted(folder.glob("*.safetensors"))
            if len(found) != 1:
                what = "no .safetensors file" if not found else f"{len(found)} .safetensors files and no index"
                raise EyasError(f"target.path={folder}: {what}. Eyas reads weights from safetensors only")
            self._file = dict.fromkeys(read_header(found[0])[0], found[0].name)
        missing = sorted(f for f in set(self._file.values()) if not (folder / f).is_file())
        if missing:
            raise EyasError(f"target.path={folder}: {len(missing)} weight files are missing, first {missing[0]}")

    def __contains__(self, name: str) -> bool:
        return name in self._file

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._file))

    @property
    def files(self) -> list[Path]:
        return [self.folder / name for name in sorted(set(self._file.values()))]

    def read(self, name: str) -> Tensor:
        from safetensors import safe_open

        with safe_open(self.folder / self._file[name], framework="pt") as file:
            tensor: Tensor = file.get_tensor(name)
        return tensor


def fingerprint(folder: str | Path) -> str:
    """sha256 over the config and every tensor's name, dtype, shape and sampled bytes.

    Copies and other shard sizes of the same weights agree. Three samples of 4 KiB a tensor are read, so it is fast
    for any size; a change confined to unsampled bytes of large tensors would go unseen (training changes all).
    """
    folder = Path(folder)
    config = json.loads((folder / "config.json").read_text())
    digest = hashlib.sha256(json.dumps({k: config[k] for k in config if k not in VOLATILE}, sort_keys=True).encode())
    entries: dict[str, bytes] = {}
    for path in WeightFiles(folder).files:
        header, start = read_header(path)
        with path.open("rb") as file:
            for name, entry in header.items():
                begin, end = (start + offset for offset in entry["data_offsets"])
                described = json.dumps([name, entry["dtype"], entry["shape"]]).encode()
                for at in (begin, (begin + end) // 2, max(begin, end - SAMPLE)):
                    file.seek(at)
                    described += file.read(min(SAMPLE, end - at))
                entries[name] = described
    for name in sorted(entries):
        digest.update(entries[name])
    return digest.hexdigest()


def read_header(path: Path) -> tuple[dict[str, Any], int]:
    """Header of a safetensors file (name -> dtype, shape, data_offsets) and where its data starts."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        if size > path.stat().st_size:
            raise EyasError(f"{path}: not a whole safetensors file")
        header: dict[str, Any] = json.loads(file.read(size))
    header.pop("__metadata__", None)
    return header, 8 + size


def _join(*parts: str) -> str:
    return ".".join(part for part in parts if part)


def _embedding_name(weights: WeightFiles) -> str:
    def is_embedding(name: str) -> bool:
        parts = name.split(".")
        inner = any(part in LAYERS for part in parts)  # an MTP layer may carry its own copy
        return parts[-1] == "weight" and parts[-2] in EMBEDDINGS and not inner and not OTHER_TOWER.search(name)

    found = [name for name in weights if "." in name and is_embedding(name)]
    if len(found) != 1:
        raise EyasError(f"target.path={weights.folder}: expected one token embedding, found {found or 'none'}")
    return found[0]


def _last_layer(weights: WeightFiles, prefix: str, config: Mapping[str, Any]) -> dict[str, str]:
    """Name within the last decoder layer -> name in the files."""
    starts = tuple(_join(prefix, layers, str(config["num_hidden_layers"] - 1), "") + "." for layers in LAYERS)
    return {name[len(start) :]: name for start in starts for name in weights if name.startswith(start)}
