"""TTT attention against a dense float64 reference that builds every score."""

import itertools

import pytest
import torch
from torch import Tensor

from models.attention import Spans, ttt_attention

LENGTHS = [1, 2, 7, 300]


def dense(q: Tensor, k: Tensor, v: Tensor, dk: list[Tensor], dv: list[Tensor], index: Tensor, cu: list[int]) -> Tensor:
    """One softmax over [depth-0 keys of own document <= slot, own diagonal keys], head by head."""
    group = q.shape[1] // k.shape[1]
    document = torch.repeat_interleave(torch.arange(len(cu) - 1), torch.tensor(cu).diff())
    token = torch.arange(k.shape[0])
    allowed = (document[index][:, None] == document[None]) & (token[None] <= index[:, None])
    outs = []
    for h in range(q.shape[1]):
        kv = h // group
        scores = (q[:, h] @ k[:, kv].T).masked_fill(~allowed, float("-inf"))
        diag = [(q[:, h] * key[:, kv]).sum(-1, keepdim=True) for key in dk]
        probs = torch.softmax(torch.cat([scores, *diag], 1) * q.shape[-1] ** -0.5, 1)
        out = probs[:, : k.shape[0]] @ v[:, kv]
        for i, value in enumerate(dv):
            out = out + probs[:, k.shape[0] + i, None] * value[:, kv]
        outs.append(out)
    return torch.stack(outs, 1)


@pytest.mark.parametrize(
    ("depth", "sparse", "double"), list(itertools.product([0, 1, 6], [False, True], [False, True]))
)
def test_outputs_and_all_gradients(depth: int, sparse: bool, double: bool) -> None:
    generator = torch.Generator().manual_seed(depth)
    cu = [0, *itertools.accumulate(LENGTHS)]
    total = cu[-1]
    index = torch.arange(total)
    if sparse:  # only some slots carry loss; one document has none
        index = index[(torch.rand(total, generator=generator) < 0.4) & ((index < 1) | (index > 2))]
    shapes = [(len(index), 6, 8), (total, 2, 8), (total, 2, 8)] + [(len(index), 2, 8)] * (2 * depth)
    exact = [torch.randn(s, generator=generator, dtype=torch.float64).requires_grad_() for s in shapes]
    kind = torch.float64 if double else torch.float32
    ours = [t.detach().to(kind).requires_grad_() for t in exact]
    spans = Spans.of(index, torch.tensor(cu, dtype=torch.int32))

    (q, k, v), (dk, dv) = exact[:3], (exact[3 : 3 + depth], exact[3 + depth :])
    want = dense(q, k, v, dk, dv, index, cu)
    (q, k, v), (dk, dv) = ours[:3], (ours[3 : 3 + depth], ours[3 + depth :])
    got = ttt_attention(q, k, v, dk, dv, spans)
    upstream = torch.randn(want.shape, generator=generator, dtype=torch.float64)
    want.backward(upstream)
    got.backward(upstream.to(kind))
    tolerance = 2e-5  # log-sum-exps are float32 throughout
    torch.testing.assert_close(got.double(), want, rtol=tolerance, atol=tolerance)
    for mine, theirs in zip(ours, exact, strict=True):
        assert mine.grad is not None and theirs.grad is not None
        torch.testing.assert_close(mine.grad.double(), theirs.grad, rtol=10 * tolerance, atol=10 * tolerance)


def test_spans_stop_behind_the_last_query() -> None:
    spans = Spans.of(torch.tensor([0, 4, 5]), torch.tensor([0, 3, 4, 9], dtype=torch.int32))
    assert spans.documents == ((0, 1), (4, 6))
