"""EAGLE-1 and HASS: the layer, losses and noise by hand, HASS's passes literally."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

from models.batch import Batch, Slots, slots_of
from models.drafter import TrainSpec
from models.eagle1 import Eagle1Drafter
from models.errors import EyasError
from models.frozen import FrozenTarget
from models.objective import Objective
from tests.drafters import TAPS, TINY, random_batch, random_frozen, random_vocab
from tests.eagle1 import FULL, make

# --- the layer ---


def test_depth_0_is_a_llama_layer_without_input_norm() -> None:
    """Against transformers' own layer, whose input norm is taken out."""
    frozen = random_frozen()
    drafter, batch = make(frozen=frozen), random_batch(frozen, [9], supervised=torch.ones(9, dtype=torch.bool))
    own = {k: v for k, v in TINY.items() if k not in ("model_type", "architectures")}
    config = LlamaConfig(**own, attn_implementation="eager")
    layer = LlamaDecoderLayer(config, 0)
    layer.input_layernorm = torch.nn.Identity()
    layer.load_state_dict(drafter.layers[0].state_dict())
    x = torch.cat([frozen.embedding[batch.input_ids[1:]], batch.final[:-1]], -1) @ drafter.fc.weight.T
    rope = LlamaRotaryEmbedding(config)(x, torch.arange(8)[None])
    mask = torch.full((8, 8), float("-inf")).triu(1)[None, None]
    with torch.no_grad():
        want = layer(x[None], attention_mask=mask, position_embeddings=rope)
        want = (want[0] if isinstance(want, tuple) else want)[0]
        slots = slots_of(batch, 1)  # 0 .. 6: slot 7 has no next token to predict
        torch.testing.assert_close(drafter.unroll(batch, slots, frozen), want[:7], rtol=1e-5, atol=1e-5)


def test_a_bias_of_fc_is_added() -> None:
    frozen = random_frozen()
    batch = random_batch(frozen, [9], supervised=torch.ones(9, dtype=torch.bool))
    drafter = make(frozen=frozen, fc_bias=True)
    embedding = torch.randn(3, 32)
    got = drafter.inputs(embedding, batch.final[:3])[0]
    torch.testing.assert_close(got, torch.cat([embedding, batch.final[:3]], -1) @ drafter.fc.weight.T + drafter.fc.bias)
    assert not Eagle1Drafter.create(frozen, FULL, TAPS, fc_bias=True).fc.bias.any()  # starts from none


def test_drafts_with_the_targets_head() -> None:
    """Rows of the draft vocabulary, bias, scale and soft cap: 3 * tanh(0.5 * (w . state + b) / 3)."""
    frozen = random_frozen()
    frozen.head_bias, frozen.scale, frozen.softcap = torch.linspace(-2, 2, 40), 0.5, 3.0
    vocab = random_vocab(40, 17)
    drafter, batch = make(vocab, frozen), random_batch(frozen, [9], supervised=torch.ones(9, dtype=torch.bool))
    slots = slots_of(batch, 1)
    with torch.no_grad():
        state = drafter.unroll(batch, slots, frozen)[5].double()
    drafted = drafter.session(frozen).extend([0], [6], batch.taps[:6], batch.final[:6], batch.input_ids[1:7])[0]
    want = torch.stack([frozen.head[i].double() @ state + frozen.head_bias[i] for i in vocab.ids.tolist()])
    torch.testing.assert_close(drafted.double(), 3 * (0.5 * want / 3).tanh(), rtol=1e-5, atol=1e-5)
    assert not any(p is frozen.head or p.shape[0] == 40 for p in drafter.parameters())


# --- losses ---


def test_feature_loss_by_hand() -> None:
    """Width 2, states (0.5, 3) and (-2, 1) of slot 0 at depths 0 and 1; h[1] = (0, 1), h[2] = (-1.5, 1).

    Depth 0 is apart by 0.5 and 2: 0.5 * 0.25 = 0.125 and 2 - 0.5 = 1.5, mean 0.8125.
    Depth 1 is apart by 0.5 and 0: 0.125 and 0, mean 0.0625.
    """
    frozen = random_frozen(hidden_size=2, num_attention_heads=1, num_key_value_heads=1, head_dim=2)
    batch = random_batch(frozen, [4], supervised=torch.ones(4, dtype=torch.bool))
    final = torch.tensor([[9.0, 9.0], [0.0, 1.0], [-1.5, 1.0], [7.0, 7.0]])
    batch = Batch(**{**batch.__dict__, "final": final})
    slots = Slots(torch.tensor([0]), torch.ones(2, 1, dtype=torch.bool))
    states = torch.tensor([[0.5, 3.0], [-2.0, 1.0]], requires_grad=True)
    drafter = make(frozen=frozen)
    terms = drafter.extra_terms(states, slots, batch)
    assert terms is not None
    torch.testing.assert_close(terms, torch.tensor([0.8125, 0.0625]))
    doubled = make(frozen=frozen, feature_weight=2.0).extra_terms(states, slots, batch)
    torch.testing.assert_close(doubled, torch.tensor([1.625, 0.125]))
    terms.sum().backward()
    # slope (distance, or its sign from 1 on) / width
    torch.testing.assert_close(states.grad, torch.tensor([[0.25, 0.5], [-0.25, 0.0]]))
    assert make(frozen=frozen, feature_weight=0.0).extra_terms(states, slots, batch) is None


def test_rows_meet_their_own_feature() -> None:
    """The row of slot p at depth k is compared with h[p+1+k], in every document of a batch."""
    frozen = random_frozen()
    supervised = torch.tensor([0, 0, 1, 1, 1, 1, 0, 0, 1, 1, 1, 1, 1]).bool()
    batch = random_batch(frozen, [7, 6], supervised=supervised)
    slots = slots_of(batch, 3)
    # Supervised runs 2..5 and 8..12: slots 1, 2, 3 and 7, 8, 9, 10 at depth 0, one less at each depth.
    rows = [(0, 1), (0, 2), (0, 3), (0, 7), (0, 8), (0, 9), (0, 10)]
    rows += [(1, 1), (1, 2), (1, 7), (1, 8), (1, 9), (2, 1), (2, 7), (2, 8)]
    states = torch.stack([batch.final[p + 1 + k] for k, p in rows])
    terms = make(frozen=frozen).extra_terms(states, slots, batch)
    assert terms is not None and terms.shape == (15,) and not terms.any()


@pytest.mark.parametrize("options", [{}, {"feature_weight": 0.5, "logit_weight": 2.0}])
def test_the_whole_loss(options: dict[str, float]) -> None:
    """feature_weight * SmoothL1 + logit_weight * (soft cross-entropy + top-K term), each depth times decay^k; slow."""
    frozen = random_frozen()
    vocab = random_vocab(40, 17)
    drafter, batch = make(vocab, frozen, **options), random_batch(frozen, [9, 14])
    objective = Objective(decay=0.6, top_k=3, top_k_weight=4.0, chunk=5)
    slots = slots_of(batch, 3)
    score = drafter(batch, frozen, TrainSpec(objective, depths=3))
    with torch.no_grad():
        states = drafter.unroll(batch, slots, frozen).double()
    head = frozen.head[vocab.ids].double()
    want, extra = 0.0, [0.0] * 3
    for state, k, s in zip(states, *(t.tolist() for t in slots.rows()), strict=True):
        at = int(slots.index[s]) + 1 + k
        p = (frozen.head.double() @ batch.final[at].double()).softmax(0)[vocab.ids]
        logq = (head @ state).log_softmax(0)
        best = p.argsort(descending=True)[:3]
        apart = (state - batch.final[at].double()).abs()
        smooth = torch.where(apart < 1, apart.square() / 2, apart - 0.5).mean()
        logits = -(p * logq).sum() - 4.0 * (p[best] * logq[best]).sum()
        weights = options.get("feature_weight", 1.0), options.get("logit_weight", 0.1)
        want += 0.6**k * float(weights[0] * smooth + weights[1] * logits)
        extra[k] += float(weights[0] * smooth)
    torch.testing.assert_close(score.loss_sum.double(), torch.tensor(want).double(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(score.extra, torch.tensor(extra).double(), rtol=1e-5, atol=1e-5)


# --- noise ---


def test_noise_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """noise 0.2: a document of 64 tokens gets (U - 0.5) * 0.2 * 512 / 64 = (U - 0.5) * 1.6, one of 16 four times that.
    With every U = 0.75 that is 0.4 and 1.6."""
    frozen = random_frozen()
    drafter, batch = make(frozen=frozen, noise=0.2).train(), random_batch(frozen, [64, 16])
    monkeypatch.setattr(torch, "rand_like", lambda t: torch.full_like(t, 0.75))
    added = drafter.first_feature(batch) - batch.final
    torch.testing.assert_close(added[:64], torch.full((64, 32), 0.4))
    torch.testing.assert_close(added[64:], torch.full((16, 32), 1.6))


def test_noise_is_uniform_and_only_in_training() -> None:
    frozen = random_frozen()
    drafter, batch = make(frozen=frozen, noise=0.2), random_batch(frozen, [512, 128])
    assert torch.equal(drafter.first_feature(batch), batch.final)
    torch.manual_seed(0)
    added = drafter.train().first_feature(batch) - batch.final
    for part, width in ((added[:512], 0.2), (added[512:], 0.8)):  # of the interval
        assert float(part.abs().max()) <= width / 2 + 1e-6
        assert float(part.max()) > 0.49 * width and float(part.min()) < -0.49 * width
        assert abs(float(part.mean())) < 0.01 * width
        assert float(part.std()) == pytest.approx(width / 12**0.5, rel=0.02)
    assert torch.equal(make(frozen=frozen, noise=0.0).train().first_feature(batch), batch.final)


def test_noise_reaches_keys_and_queries_but_no_goal() -> None:
    """The noised unroll is the clean unroll of noised features; what the loss compares with stays clean."""
    frozen = random_frozen()
    drafter, batch = make(frozen=frozen, noise=0.2), random_batch(frozen, [30])
    slots = slots_of(batch, 3)
    with torch.no_grad():
        torch.manual_seed(5)
        noised = drafter.train().unroll(batch, slots, frozen)
        torch.manual_seed(5)
        other = Batch(**{**batch.__dict__, "final": drafter.first_feature(batch)})
        torch.testing.assert_close(noised, drafter.eval().unroll(other, slots, frozen))
        assert not torch.allclose(noised, drafter.unroll(batch, slots, frozen), atol=1e-3)
        depth, slot = slots.rows()
        goal = batch.final[slots.index[slot] + 1 + depth]
        want = F.smooth_l1_loss(noised, goal, reduction="none").mean(-1)
        torch.testing.assert_close(drafter.train().extra_terms(noised, slots, batch), want)


# --- HASS ---


@pytest.mark.parametrize("detach", [False, True])
def test_detach_cuts_between_depths_but_not_within(detach: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With detach, a state does not hang on the output of the depth before; it still does on the embeddings of its own
    depth, on the keys of depth 0, and (depth 2) on the key that depth 1 left behind."""
    frozen = random_frozen()
    batch = random_batch(frozen, [12], supervised=torch.ones(12, dtype=torch.bool))
    slots = Slots(torch.tensor([4]), torch.ones(3, 1, dtype=torch.bool))
    drafter = make(frozen=frozen, detach=detach)
    outputs: list[Tensor] = []
    read: list[Tensor] = []  # embeddings, depth by depth
    plain = frozen.embed

    def note(state: Tensor) -> Tensor:
        outputs.append(state)
        return state

    def embed(ids: Tensor) -> Tensor:
        read.append(plain(ids).requires_grad_())
        return read[-1]

    monkeypatch.setattr(drafter, "scored", note)
    monkeypatch.setattr(frozen, "embed", embed)
    states = drafter.unroll(batch, slots, frozen)

    def hangs_on(depth: int, others: list[Tensor]) -> list[bool]:
        found = torch.autograd.grad(states[depth].sum(), others, retain_graph=True, allow_unused=True)
        return [grad is not None and bool(grad.any()) for grad in found]

    assert hangs_on(1, outputs[:1]) == [not detach] and hangs_on(2, outputs[:2]) == [not detach] * 2
    assert hangs_on(0, read) == [True, False, False]
    assert hangs_on(1, read) == [True, True, False]
    assert hangs_on(2, read) == [True, True, True]


class Passes:
    """HASS as its paper has it, slowly, in float64: n passes over one document, features shifted right between them."""

    def __init__(self, drafter: Eagle1Drafter, frozen: FrozenTarget, batch: Batch) -> None:
        self.weights = {name: p.detach().double().requires_grad_() for name, p in drafter.named_parameters()}
        self.batch, self.embedding = batch, frozen.embedding.double()
        config = LlamaConfig(**{k: v for k, v in TINY.items() if k != "model_type"})
        self.cos, self.sin = (
            t[0].double() for t in LlamaRotaryEmbedding(config)(torch.zeros(1), torch.arange(batch.num_tokens)[None])
        )

    def weight(self, name: str) -> Tensor:
        return self.weights[f"layers.0.{name}.weight"]

    def heads(self, name: str, x: Tensor, turned: bool = True) -> Tensor:
        """[T, heads, D] by token, rotated to its own place: ids and positions never move."""
        out = (x @ self.weight(f"self_attn.{name}_proj").T).unflatten(-1, (-1, 12))
        if not turned:
            return out
        half = torch.cat([-out[..., 6:], out[..., :6]], -1)
        return out * self.cos[: len(x), None] + half * self.sin[: len(x), None]

    def run(self, passes: int) -> list[Tensor]:
        """The predictions of every pass, [T - 1, H] each; gradients flow inside a pass only."""
        true, tokens = self.batch.final.double()[:-1], self.embedding[self.batch.input_ids[1:]]
        shifted: list[Tensor] = []  # the feature sequences that passes 2, 3, ... add
        outputs = []
        for _ in range(passes):
            inputs = [torch.cat([tokens, f], -1) @ self.weights["fc.weight"].T for f in (true, *shifted)]
            outputs.append(self.one(inputs))
            previous = shifted[-1] if shifted else true
            shifted.append(torch.cat([previous[:1], outputs[-1][:-1]]).detach())
        return outputs

    def one(self, inputs: list[Tensor]) -> Tensor:
        """One pass. inputs[i] [T, H]: what the layer reads of the features of pass i; the last is the query's own."""
        query, residual = self.heads("q", inputs[-1]), inputs[-1]
        keys, values = ([self.heads(name, x, name == "k") for x in inputs] for name in "kv")
        rows = []
        for t in range(len(residual)):
            # Token t - i has the feature that is i passes older than the newest, but none is older than the true one.
            which = [max(len(inputs) - 1 - (t - u), 0) for u in range(t + 1)]
            k, v = (torch.stack([seq[w][u] for u, w in enumerate(which)]) for seq in (keys, values))
            k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
            scores = torch.einsum("hd,uhd->hu", query[t], k) * 12**-0.5
            rows.append(torch.einsum("hu,uhd->hd", scores.softmax(-1), v).flatten())
        x = residual + torch.stack(rows) @ self.weight("self_attn.o_proj").T
        y = x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * self.weight("post_attention_layernorm")
        gated = F.silu(y @ self.weight("mlp.gate_proj").T) * (y @ self.weight("mlp.up_proj").T)
        return x + gated @ self.weight("mlp.down_proj").T


def test_hass_is_its_papers_shifted_passes() -> None:
    """States of slot p at depth j-1 are pass j's at token p + j - 1, and so are the gradients of the whole loss."""
    frozen = random_frozen()
    batch = random_batch(frozen, [13], supervised=torch.ones(13, dtype=torch.bool))
    drafter, slots = make(frozen=frozen, detach=True), slots_of(batch, 3)
    slow = Passes(drafter, frozen, batch)
    outputs = slow.run(3)
    depth, slot = slots.rows()
    tokens = slots.index[slot] + depth
    want = torch.stack([outputs[k][t] for k, t in zip(depth.tolist(), tokens.tolist(), strict=True)])
    states = drafter.unroll(batch, slots, frozen)
    torch.testing.assert_close(states.double(), want, rtol=1e-4, atol=1e-4)
    # The index rule decides which (pass, token) count: slot 0 and all that have a next token; token t < j - 1 has none.
    assert len(want) == sum(len(out) - 1 - k for k, out in enumerate(outputs))
    loss = slow_loss(want, batch.final.double()[tokens + 1], frozen.head.double())
    loss.backward()
    objective = Objective(decay=1.0, top_k=10, top_k_weight=10.0)
    score = drafter(batch, frozen, TrainSpec(objective, depths=3))
    torch.testing.assert_close(score.loss_sum.double(), loss.detach(), rtol=1e-5, atol=1e-4)
    score.loss_sum.backward()
    for name, parameter in drafter.named_parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(parameter.grad.double(), slow.weights[name].grad, rtol=1e-3, atol=1e-4)


def slow_loss(states: Tensor, goals: Tensor, head: Tensor) -> Tensor:
    """Of every pass 1.0 * SmoothL1 + 0.1 * soft cross-entropy + 1.0 * the ten likeliest tokens' part of it, summed."""
    p, logq = (goals @ head.T).softmax(-1), (states @ head.T).log_softmax(-1)
    apart = (states - goals).abs()
    smooth = torch.where(apart < 1, apart.square() / 2, apart - 0.5).mean(-1)
    best = p.topk(10, -1).indices
    return (smooth - 0.1 * (p * logq).sum(-1) - (p.gather(1, best) * logq.gather(1, best)).sum(-1)).sum()


# --- options ---


def test_initialisation() -> None:
    drafter = Eagle1Drafter.create(random_frozen(), FULL, TAPS, init_fc=True)
    assert drafter.tap_ids == ()  # whatever the store holds
    feature = torch.randn(5, 32)
    assert torch.equal(drafter.inputs(torch.randn(5, 32), feature)[0], feature)
    batch = random_batch(random_frozen(), [9], supervised=torch.ones(9, dtype=torch.bool))
    first = slots_of(batch, 1)
    assert torch.equal(drafter.eval().unroll(batch, first, random_frozen()), batch.final[first.index])
    one, two, other = (Eagle1Drafter.create(random_frozen(), FULL, TAPS, seed=s, init_fc=False) for s in (1, 1, 2))
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))
    assert not torch.equal(one.fc.weight, other.fc.weight) and bool(one.fc.weight[:, :32].any())


def test_impossible_options() -> None:
    for options in ({"noise": -0.1}, {"feature_weight": -1.0}, {"feature_weight": 0.0, "logit_weight": 0.0}):
        with pytest.raises(EyasError, match=r"drafter\.(noise|feature_weight)"):
            Eagle1Drafter.check_options(options)
    Eagle1Drafter.check_options({"feature_weight": 0.0, "logit_weight": 1.0, "noise": 0.0})


def test_a_new_run_says_how_to_train_on() -> None:
    """HASS from the weights of EAGLE-1: what the drafter is stays, how it is trained is the run's."""
    drafter = make(intermediate_size=20)
    drafter.take_over({"detach": True, "noise": 0.0, "intermediate_size": 64, "init_fc": True})
    assert drafter.config.detach and drafter.config.noise == 0.0 and drafter.config.intermediate_size == 20
    assert drafter.config.feature_weight == 1.0 and drafter.architecture()["detach"] is True
