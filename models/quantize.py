"""``target.quantize``: a frozen target whose layers are kept in 8 or 4 bits, by bitsandbytes.

Embedding, norms and output head stay as they are, so the teacher is still exact for the quantised model's own states.
A drafter made for those states fits that model; the full one's differ a little.
"""

from __future__ import annotations

import logging
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch

from models.errors import EyasError

if TYPE_CHECKING:
    from torch import nn
    from transformers import PretrainedConfig

KINDS = ("8bit", "4bit")
log = logging.getLogger(__name__)


def loading_options(quantize: str | None, dtype: torch.dtype, device: str, config: PretrainedConfig) -> dict[str, Any]:
    """What ``from_pretrained`` is told: 8bit is LLM.int8 (arXiv 2208.07339), 4bit is QLoRA's NF4 with double
    quantisation (arXiv 2305.14314). ``config``: the model's, as its folder has it.

    Raises EyasError naming target.quantize for another kind, without bitsandbytes, or for a folder that is quantised.
    """
    if quantize is None:
        return {}
    if quantize not in KINDS:
        raise EyasError(f"target.quantize={quantize}: must be null, 8bit or 4bit")
    if getattr(config, "quantization_config", None):
        raise EyasError(f"target.quantize={quantize}: the target's files are quantised already; leave it null")
    if find_spec("bitsandbytes") is None:
        raise EyasError(
            f"target.quantize={quantize}: needs bitsandbytes: pip install 'eyas[quantize]' (or bitsandbytes)"
        )
    # Only there: importing this without bitsandbytes must work.
    from transformers import BitsAndBytesConfig

    if quantize == "8bit":
        # It says with every product that it rounds its input to float16.
        logging.getLogger("bitsandbytes.autograd._functions").setLevel(logging.ERROR)
        log.warning(
            "target.quantize=8bit: which columns are left unrounded depends on all tokens computed together, so states "
            "differ a little between batches, and a text written with drafts may differ from one without"
        )
        how = BitsAndBytesConfig(load_in_8bit=True)
    else:
        how = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_compute_dtype=dtype,
            bnb_4bit_use_double_quant=True,
        )
    # Weights are quantised where they will lie; they can't be moved afterwards.
    return {"quantization_config": how, "device_map": {"": torch.device(device)}}


def check_head(head: nn.Module, quantize: str | None) -> None:
    """Raise EyasError if the output head was quantised too: no exact teacher could be formed from it."""
    weight = getattr(head, "weight", None)
    if quantize and not (isinstance(weight, torch.Tensor) and weight.is_floating_point()):
        raise EyasError(f"target.quantize={quantize}: the output head ({type(head).__name__}) was quantised too")


def computed_in(dtype: str, quantize: str | None) -> str:
    """How the target computes, in words: part of what names a feature store."""
    return dtype if quantize is None else f"{dtype}, {quantize} weights"
