"""Softmax attention and rotary positions against loops over queries."""

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sferic.ops.attention import (
    attention_piece,
    attention_quadratic,
    decode_attention,
    merge,
    packed_attention,
    prefill_attention,
    rope,
)

H, G, K = 8, 2, 16
SCALE = 0.3
LENGTHS = [5, 0, 1, 33, 1, 0, 7, 0]


def draw(T: int, G: int = G, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(T)
    shapes = [(T, H, K), (T, G, K), (T, G, K)]
    q, k, v = (torch.randn(s, generator=generator, dtype=torch.float64).to(dtype) for s in shapes)
    return q, k, v


def offsets(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


def one_query(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """q [H, K] over all of k, v [m, G, K], head by head: o [H, K], log-sum-exp [H]."""
    outputs, sums = [], []
    for h in range(H):
        g = h // (H // k.shape[1])
        weights = torch.exp(SCALE * (k[:, g] @ q[h]))
        outputs.append((weights[:, None] * v[:, g]).sum(0) / weights.sum())
        sums.append(weights.sum().log())
    return torch.stack(outputs), torch.stack(sums)


def by_loops(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
    rows = [
        one_query(q[t], k[a : t + 1], v[a : t + 1])
        for a, b in pairwise(cu_seqlens.tolist())
        for t in range(a, b)
    ]
    return torch.stack([o for o, _ in rows]), torch.stack([lse for _, lse in rows])


def close(got: Tensor, want: Tensor, tolerance: float = 1e-12) -> None:
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("form", ["packed", "quadratic"])
@pytest.mark.parametrize("kv_heads", [1, 2, 8])
def test_packs_equal_loops_over_queries(form: str, kv_heads: int) -> None:
    inputs = [x.requires_grad_() for x in draw(sum(LENGTHS), kv_heads)]
    cu_seqlens = offsets(LENGTHS)
    if form == "packed":
        o, lse = packed_attention(*inputs, cu_seqlens, max(LENGTHS), SCALE)  # type: ignore[misc]
    else:
        o, lse = attention_quadratic(*inputs, cu_seqlens, SCALE)  # type: ignore[misc]
    want, want_lse = by_loops(*inputs, cu_seqlens)  # type: ignore[misc]
    close(o, want)
    close(lse, want_lse)
    weights = torch.randn(o.shape, dtype=torch.float64)
    got_grads = torch.autograd.grad(o, inputs, weights)
    want_grads = torch.autograd.grad(want, inputs, weights)
    for got, expected in zip(got_grads, want_grads, strict=True):
        close(got, expected)


@given(st.lists(st.integers(0, 20), min_size=1, max_size=8))
def test_packed_equals_quadratic(lengths: list[int]) -> None:
    q, k, v = draw(sum(lengths))
    cu_seqlens = offsets(lengths)
    o, lse = packed_attention(q, k, v, cu_seqlens, max(lengths), SCALE)
    if sum(lengths) == 0:
        assert (o.shape, lse.shape) == ((0, H, K), (0, H))
        return
    want, want_lse = attention_quadratic(q, k, v, cu_seqlens, SCALE)
    close(o, want)
    close(lse, want_lse)


@pytest.mark.parametrize(
    ("dtype", "tolerance", "sums"),
    [(torch.float32, 1e-5, 1e-5), (torch.bfloat16, 2**-7, 1e-4)],  # a quick exp on the CPU
)
def test_smaller_dtypes_keep_float32_sums(
    dtype: torch.dtype, tolerance: float, sums: float
) -> None:
    q, k, v = draw(sum(LENGTHS), dtype=dtype)
    cu_seqlens = offsets(LENGTHS)
    want, want_lse = by_loops(q.double(), k.double(), v.double(), cu_seqlens)
    for o, lse in (
        packed_attention(q, k, v, cu_seqlens, max(LENGTHS), SCALE),
        attention_quadratic(q, k, v, cu_seqlens, SCALE),
    ):
        assert (o.dtype, lse.dtype) == (dtype, torch.float32)
        close(o.double(), want, tolerance * float(want.abs().max()))
        close(lse.double(), want_lse, sums)


@pytest.mark.parametrize("cut", [1, 20, 39])
def test_merge_of_two_sets_of_keys_equals_one(cut: int) -> None:
    q, k, v = draw(40)
    parts = [
        attention_piece(q, k[rows], v[rows], SCALE, causal=False)
        for rows in (slice(0, cut), slice(cut, None))
    ]
    o, lse = merge(*parts[0], *parts[1])
    want = [one_query(row, k, v) for row in q]
    close(o, torch.stack([w[0] for w in want]))
    close(lse, torch.stack([w[1] for w in want]))


def test_merge_does_not_overflow_and_may_be_one_sided() -> None:
    o1, o2 = torch.ones(1, 1, 4), torch.zeros(1, 1, 4)
    o, lse = merge(o1, torch.tensor([[1000.0]]), o2, torch.tensor([[-1000.0]]))
    assert torch.equal(o, o1)
    assert lse == 1000
    o, _ = merge(o1, torch.tensor([[5.0]]), o2, torch.tensor([[-math.inf]]))
    assert torch.equal(o, o1)


def test_causal_needs_as_many_queries_as_keys() -> None:
    q, k, v = draw(4)
    with pytest.raises(ValueError, match="got 3 and 4"):
        attention_piece(q[:3], k, v, SCALE, causal=True)


@given(cached=st.lists(st.integers(0, 20), min_size=8, max_size=8))
@settings(max_examples=10)
def test_prefill_sees_its_cached_prefix(cached: list[int]) -> None:
    q, k, v = draw(sum(LENGTHS))
    past = [draw(n + 1)[1:] for n in cached]
    past = [(pk[:n], pv[:n]) for (pk, pv), n in zip(past, cached, strict=True)]
    o = prefill_attention(q, k, v, offsets(LENGTHS), past, SCALE)
    for (a, b), (past_k, past_v) in zip(pairwise(offsets(LENGTHS).tolist()), past, strict=True):
        for t in range(a, b):
            keys, values = torch.cat([past_k, k[a : t + 1]]), torch.cat([past_v, v[a : t + 1]])
            close(o[t], one_query(q[t], keys, values)[0])


def test_prefill_without_tokens() -> None:
    q, k, v = draw(0)
    assert prefill_attention(q, k, v, offsets([0]), [(k, v)], SCALE).shape == (0, H, K)


def test_decode_reads_each_row_up_to_its_length() -> None:
    lengths = [1, 17, 9]
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(3, H, K, generator=generator, dtype=torch.float64)
    k, v = (torch.randn(3, 17, G, K, generator=generator, dtype=torch.float64) for _ in range(2))
    for row, n in enumerate(lengths):
        k[row, n:], v[row, n:] = 1e3, 1e3
    o = decode_attention(q, k, v, torch.tensor(lengths), SCALE)
    for row, n in enumerate(lengths):
        close(o[row], one_query(q[row], k[row, :n], v[row, :n])[0])


def test_decode_never_waits_for_the_host(no_host_sync: Callable[[], Any]) -> None:
    q, k = torch.zeros(3, H, K), torch.zeros(3, 17, G, K)
    with no_host_sync() as fake:
        o = decode_attention(fake(q), fake(k), fake(k), fake(torch.ones(3)), SCALE)
        assert o.shape == (3, H, K)


def test_rope_turns_pairs_of_the_first_half_by_hand() -> None:
    x = torch.arange(1.0, 9.0, dtype=torch.float64).view(1, 1, 8)
    got = rope(x, torch.tensor([3]), 4, 100.0)[0, 0]
    turned = []
    for i, angle in ((0, 3.0), (1, 3.0 / 10)):  # pairs (0, 2) and (1, 3), 100^(-2i/4)
        turned.append(
            complex(x[0, 0, i], x[0, 0, i + 2]) * complex(math.cos(angle), math.sin(angle))
        )
    want = [z.real for z in turned] + [z.imag for z in turned] + [5.0, 6.0, 7.0, 8.0]
    close(got, torch.tensor(want, dtype=torch.float64))


@pytest.mark.parametrize("rope_dim", [2, 8, 16])
def test_rope_leaves_the_other_dims_and_position_zero(rope_dim: int) -> None:
    x = torch.randn(9, H, K, dtype=torch.float64)
    y = rope(x, torch.arange(9), rope_dim, 1e4)
    assert torch.equal(y[..., rope_dim:], x[..., rope_dim:])
    close(y[0], x[0])
    assert ((y - x)[1:, :, :rope_dim].abs().amax((0, 1)) > 1e-6).all()
    close(y.norm(dim=-1), x.norm(dim=-1))


@given(st.integers(0, 1000), st.integers(0, 1000), st.integers(0, 1000))
def test_scores_depend_on_the_distance_alone(i: int, j: int, shift: int) -> None:
    q, k, _ = draw(2, G=H)

    def score(i: int, j: int) -> Tensor:
        a = rope(q[:1], torch.tensor([i]), 8, 1e4)
        return (a * rope(k[:1], torch.tensor([j]), 8, 1e4)).sum(-1)

    close(score(i, j), score(i + shift, j + shift), 1e-10)


def test_rope_of_bf16_has_float32_angles() -> None:
    x = torch.randn(64, 2, 16).to(torch.bfloat16)
    positions = torch.arange(4000, 4064)
    y = rope(x, positions, 16, 1e4)
    assert y.dtype == torch.bfloat16
    want = rope(x.double(), positions, 16, 1e4)
    close(y.double(), want, 2**-7)
