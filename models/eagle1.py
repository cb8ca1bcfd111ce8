"""EAGLE-1 (arXiv 2401.15077) and HASS (arXiv 2408.15766): the target's own features, guessed one after another.

The layer reads fc(embedding of x[p+1] || feature), has no input norm and no norm behind it, and its output is a guess
of the target's next feature (the state after the final norm): the target's frozen head turns it into logits, and it is
the feature of the next depth. EAGLE-2 and EAGLE-1 share weights; they differ in the draft tree.

Beside 0.1 x the soft cross-entropy the loss has SmoothL1(state, h[p+1+k]). Noise on the true input features makes up
for the guesses that take their place while drafting: U(-0.5, 0.5) * noise * 512 / L for a document of L tokens.

EAGLE-1 is trained with train.depths=1. The one place where the original differs from the index rule: it leaves out the
first slot of an answer (the prompt's last feature with the answer's first token), from which every draft begins here.

HASS trains with n passes. Pass j lets token t read the guess that pass j-1 made at t-1, and keeps t's other inputs: the
true features up to t-(j-1) and, for the tokens between, the guesses of the passes before. In the index rule this is
slot p = t-(j-1) at depth j-1: it stands at position p+(j-1) = t with the token x[t+1] = x[p+1+(j-1)], reads its own
state of the depth before, attends to the depth-0 keys of slots <= p and to its own lineage, and its target is h[t+1] =
h[p+1+(j-1)]. So HASS is the unroll with train.depths=n, train.decay=1 (passes are not weighted), ``detach`` (a guess is
a constant to the pass that reads it; keys of the lineage are still made with weights that learn) and the top-K loss.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.batch import Batch, Slots
from models.drafter import Serving
from models.eagle1_serving import eagle1_config, read_eagle1, serving_tensors
from models.errors import EyasError
from models.frozen import FrozenTarget
from models.heads import DraftHead
from models.layers import MLP, Attention, RMSNorm
from models.recurrent import DraftLayer, LayerConfig, RecurrentDrafter
from models.vocab import DraftVocab

NOISE_LENGTH = 512  # tokens of the document at which ``noise`` is the width of the noise's interval
TRAINING = ("feature_weight", "logit_weight", "noise", "detach")  # fields that say nothing about what is drafted


@dataclass(frozen=True)
class Eagle1Config(LayerConfig):
    """Dimensions, and how the drafter is trained; everything that rebuilds the module, vocabulary apart."""

    fc_bias: bool = False  # heads by the original's trainer have one; vLLM drops it
    feature_weight: float = 1.0  # of SmoothL1(state, the target's feature)
    logit_weight: float = 0.1  # of the objective
    noise: float = 0.2
    detach: bool = False  # HASS: no gradient from one depth to the one before


class Eagle1Layer(DraftLayer):
    """Llama's decoder layer without its input norm."""

    def __init__(self, config: Eagle1Config) -> None:
        super().__init__()
        hidden = config.hidden_size
        self.self_attn = Attention(
            hidden, hidden, config.num_attention_heads, config.num_key_value_heads, config.head_dim
        )
        self.mlp = MLP(hidden, config.intermediate_size)
        self.post_attention_layernorm = RMSNorm(hidden, config.rms_norm_eps)


class Eagle1Drafter(RecurrentDrafter):
    """See the module docstring; built by :meth:`create` or :meth:`from_architecture`."""

    layouts = ("vllm",)
    recursive = True
    config_class = Eagle1Config
    config: Eagle1Config
    tap_ids: tuple[int, ...] = ()  # it reads the final state alone

    def __init__(self, config: Eagle1Config, vocab: DraftVocab) -> None:
        super().__init__()
        self.config, self.vocab = config, vocab
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=config.fc_bias)
        self.layers = nn.ModuleList([Eagle1Layer(config)])
        self.rotary = config.rotary()

    # --- construction ---

    @classmethod
    def check_options(cls, options: Mapping[str, Any]) -> None:
        super().check_options(options)
        weights = {key: options[key] for key in ("feature_weight", "logit_weight", "noise") if key in options}
        for key, value in weights.items():
            if value < 0:
                raise EyasError(f"drafter.{key}={value}: must be 0 or more")
        if weights.get("feature_weight") == 0 and weights.get("logit_weight") == 0:
            raise EyasError("drafter.feature_weight and drafter.logit_weight are both 0: nothing is left to learn from")

    @classmethod
    def create(  # type: ignore[override]
        cls,
        frozen: FrozenTarget,
        vocab: DraftVocab,
        tap_ids: tuple[int, ...],
        *,
        feature_weight: float = 1.0,
        logit_weight: float = 0.1,
        noise: float = 0.2,
        detach: bool = False,
        fc_bias: bool = False,
        intermediate_size: int | None = None,
        num_attention_heads: int | None = None,
        num_key_value_heads: int | None = None,
        head_dim: int | None = None,
        init_fc: bool = True,
        seed: int = 0,
    ) -> Eagle1Drafter:
        """init_fc: the drafter begins by passing the feature through, as what the layer adds is zero; otherwise all is
        random, from ``seed``. It does not begin with the target's last layer: without that one's input norm it starts
        far off and stays there."""
        config = Eagle1Config.like_target(
            frozen.config,
            intermediate_size=intermediate_size,
            num_attention_heads=num_attention_heads,
            num_key_value_heads=num_key_value_heads,
            head_dim=head_dim,
            fc_bias=fc_bias,
            feature_weight=feature_weight,
            logit_weight=logit_weight,
            noise=noise,
            detach=detach,
        )
        drafter = cls(config, vocab)
        drafter.start(seed, pass_on=init_fc)
        if init_fc:
            nn.init.zeros_(drafter.layer.self_attn.o_proj.weight)
            nn.init.zeros_(drafter.layer.mlp.down_proj.weight)
        return drafter

    def take_over(self, options: Mapping[str, Any]) -> None:
        self.config = replace(self.config, **{key: options[key] for key in TRAINING if key in options})

    # --- one step of the layer ---

    @property
    def layer(self) -> Eagle1Layer:
        layer = self.layers[0]
        assert isinstance(layer, Eagle1Layer)
        return layer

    def feature(self, taps: Tensor, final: Tensor) -> Tensor:
        return final.to(self.dtype)

    def first_feature(self, batch: Batch) -> Tensor:
        feature = self.feature(batch.taps, batch.final)
        if not (self.training and self.config.noise):
            return feature
        lengths = batch.cu_seqlens.long().diff()
        lengths = torch.repeat_interleave(lengths, lengths, output_size=batch.num_tokens)
        width = self.config.noise * NOISE_LENGTH / lengths.to(feature.dtype)
        return feature + (torch.rand_like(feature) - 0.5) * width[:, None]

    def inputs(self, embedding: Tensor, feature: Tensor) -> tuple[Tensor, Tensor]:
        mixed = self.fc(torch.cat([embedding, feature], -1)).to(self.dtype)
        return mixed, mixed

    def scored(self, state: Tensor) -> Tensor:
        return state

    def next_feature(self, state: Tensor) -> Tensor:
        return state.detach() if self.config.detach else state

    # --- loss ---

    def head(self, frozen: FrozenTarget) -> DraftHead:
        return frozen.draft_head(self.vocab)

    @property
    def logit_weight(self) -> float:
        return self.config.logit_weight

    def extra_terms(self, states: Tensor, slots: Slots, batch: Batch) -> Tensor | None:
        """SmoothL1 (slope 1 from a distance of 1 on) to the target's feature h[p+1+k], averaged over its width."""
        if not self.config.feature_weight:
            return None
        depth, slot = slots.rows()
        goal = batch.final[slots.index[slot] + 1 + depth].detach()  # of a target that is trained along, too
        apart = F.smooth_l1_loss(states.float(), goal.float(), reduction="none")
        return self.config.feature_weight * apart.mean(-1)

    # --- serving ---

    def serving(self, frozen: FrozenTarget, layout: str | None = None) -> Serving:
        """Engines draft with the target's head over its whole vocabulary, whatever the drafter was trained on."""
        self.check_layout(layout)
        tensors = {name: tensor.detach() for name, tensor in self.state_dict().items()}
        return Serving(serving_tensors(tensors, frozen), eagle1_config(self.architecture(), frozen))

    @classmethod
    def from_serving(
        cls, tensors: dict[str, Tensor], config: dict[str, Any], target: Mapping[str, Any] | None = None
    ) -> Self:
        return cls.filled(*read_eagle1(tensors, config))
