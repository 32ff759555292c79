"""Packed documents equal each document alone."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from sferic.ops import lightning_attention
from sferic.ops.lightning import blocks

Recurrence = Callable[..., tuple[Tensor, Tensor]]
Error = Callable[..., float]

attention: Callable[..., Any] = lightning_attention

SLOPES = torch.tensor([0, 1e-5, 0.01, 0.917, 8, 100], dtype=torch.float64)
H, K, V = 6, 8, 5
LENGTHS = st.lists(st.integers(0, 9), min_size=1, max_size=14)


def pack(lengths: list[int], dtype: torch.dtype = torch.float64) -> tuple[list[Tensor], Tensor]:
    """q, k, v and cu_seqlens of documents."""
    T = sum(lengths)
    generator = torch.Generator().manual_seed(T)
    qkv = [torch.randn(T, H, n, generator=generator, dtype=torch.float64) for n in (K, K, V)]
    ends = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    return [x.to(dtype).requires_grad_() for x in qkv], ends


def check(
    lengths: list[int], with_state: bool, recurrence: Recurrence, error: Error, **options: Any
) -> None:
    inputs, cu_seqlens = pack(lengths)
    if with_state:
        inputs.append(torch.randn(len(lengths), H, K, V, dtype=torch.float64, requires_grad=True))
        got = attention(
            *inputs[:3],
            SLOPES,
            initial_state=inputs[3],
            return_state=True,
            cu_seqlens=cu_seqlens,
            **options,
        )
    else:
        got = [attention(*inputs, SLOPES, cu_seqlens=cu_seqlens, **options)]
    each = [
        recurrence(*(x[a:b] for x in inputs[:3]), SLOPES, inputs[3][n] if with_state else None)
        for n, (a, b) in enumerate(pairwise(cu_seqlens.tolist()))
    ]
    want = [torch.cat([o for o, _ in each])]
    if with_state:
        want.append(torch.stack([s for _, s in each]))
    for a, b, heads in zip(got, want, (-2, -3), strict=False):
        assert error(a, b, heads) < 1e-12
    if sum(lengths) == 0:
        return
    generator = torch.Generator().manual_seed(3)
    weights = [torch.randn(o.shape, generator=generator, dtype=torch.float64) for o in want]
    grads = zip(
        torch.autograd.grad(list(got), inputs, weights),
        torch.autograd.grad(want, inputs, weights),
        (-2, -2, -2, -3),
        strict=False,
    )
    for a, b, heads in grads:
        assert error(a, b, heads) < 1e-12


@given(
    lengths=LENGTHS,
    with_state=st.booleans(),
    deterministic=st.booleans(),
    block=st.sampled_from([1, 2, 3, 4, 8]),
    group=st.sampled_from([1, 2, 3, 64]),
)
@example(lengths=[0, 0, 5, 0, 1, 3, 0], with_state=False, deterministic=False, block=4, group=2)
@example(lengths=[0, 0, 5, 0, 1, 3, 0], with_state=True, deterministic=False, block=4, group=2)
@example(lengths=[4, 4, 8, 4], with_state=False, deterministic=False, block=4, group=1)
@example(lengths=[1] * 14, with_state=False, deterministic=False, block=4, group=3)
@example(lengths=[0], with_state=True, deterministic=False, block=4, group=3)
@settings(max_examples=60)
def test_documents_of_a_pack_equal_each_alone(
    lengths: list[int],
    with_state: bool,
    deterministic: bool,
    block: int,
    group: int,
    recurrence: Recurrence,
    error: Error,
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocks, "BLOCK", block)
        patch.setattr(blocks, "GROUP", group)
        check(lengths, with_state, recurrence, error, deterministic=deterministic)


@pytest.mark.parametrize("with_state", [False, True])
@pytest.mark.parametrize(
    "lengths",
    [[64, 1, 63, 0, 130], [0, 200, 0], [n % 7 + 1 for n in range(80)], [1, 1, 1], [0, 0]],
    ids=["mixed", "one", "many short", "single tokens", "empty"],
)
def test_packs_at_the_real_block_size(
    lengths: list[int], with_state: bool, recurrence: Recurrence, error: Error
) -> None:
    check(lengths, with_state, recurrence, error)


def test_an_empty_document_passes_its_state_through_unchanged() -> None:
    (q, k, v), cu_seqlens = pack([0, 3, 0, 0])
    start = torch.randn(4, H, K, V, dtype=torch.float64, requires_grad=True)
    _, state = attention(
        q, k, v, SLOPES, initial_state=start, return_state=True, cu_seqlens=cu_seqlens
    )
    empty = [0, 2, 3]
    assert torch.equal(state[empty], start[empty])
    (grad,) = torch.autograd.grad(state[empty].sum(), start)
    assert torch.equal(grad[empty], torch.ones_like(grad[empty]))


@pytest.mark.parametrize("lengths", [[0, 0], []])
def test_a_pack_without_tokens(lengths: list[int]) -> None:
    (q, k, v), cu_seqlens = pack(lengths)
    assert attention(q, k, v, SLOPES, cu_seqlens=cu_seqlens).shape == (0, H, V)
    o, state = attention(q, k, v, SLOPES, cu_seqlens=cu_seqlens, return_state=True)
    assert o.shape == (0, H, V)
    assert torch.equal(state, torch.zeros(len(lengths), H, K, V))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_deterministic_bits_do_not_depend_on_the_other_documents(dtype: torch.dtype) -> None:
    lengths = [70, 131, 1, 64]
    (q, k, v), ends = pack(lengths, dtype)
    documents = [slice(a, b) for a, b in pairwise(ends.tolist())]

    def run(order: list[int]) -> tuple[list[Tensor], Tensor]:
        qkv = [torch.cat([x[documents[n]] for n in order]) for x in (q, k, v)]
        sizes = [lengths[n] for n in order]
        cu_seqlens = torch.tensor([0, *sizes]).cumsum(0).to(torch.int32)
        o, state = attention(
            *qkv,
            SLOPES,
            cu_seqlens=cu_seqlens,
            return_state=True,
            deterministic=True,
        )
        only = attention(*qkv, SLOPES, cu_seqlens=cu_seqlens, deterministic=True)
        assert torch.equal(only, o)
        return list(o.split(sizes)), state

    alone, state = run([1])
    for order in ([0, 1, 2, 3], [3, 2, 1, 0], [1, 0], [2, 1]):
        outputs, states = run(order)
        at = order.index(1)
        assert torch.equal(outputs[at], alone[0])
        assert torch.equal(states[at], state[0])


@pytest.mark.parametrize("lengths", [[3, 5, 9], [4, 4], [9], [1, 1, 1, 1, 1]])
@pytest.mark.parametrize("block", [4, 64])
def test_blocks_carry_a_state_into_the_first_document_and_out_of_the_last(
    block: int,
    lengths: list[int],
    recurrence: Recurrence,
    error: Error,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(blocks, "BLOCK", block)
    (q, k, v), ends = pack(lengths)
    start = torch.randn(H, K, V, dtype=torch.float64)
    number = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    o, state = blocks.lightning_blocks(q[None], k[None], v[None], SLOPES, start[None], number)
    each = [
        recurrence(q[a:b], k[a:b], v[a:b], SLOPES, start if a == 0 else None)
        for a, b in pairwise(ends.tolist())
    ]
    assert error(o[0], torch.cat([x for x, _ in each])) < 1e-12
    assert error(state[0], each[-1][1], -3) < 1e-12


@given(st.permutations(range(5)))
@settings(max_examples=10)
def test_permuted_documents_give_permuted_outputs(order: list[int]) -> None:
    lengths = [9, 0, 70, 1, 30]
    (q, k, v), ends = pack(lengths)

    def run(order: list[int]) -> dict[int, Tensor]:
        rows = [torch.arange(int(ends[n]), int(ends[n + 1])) for n in order]
        index = torch.cat(rows)
        sizes = [lengths[n] for n in order]
        cu_seqlens = torch.tensor([0, *sizes]).cumsum(0).to(torch.int32)
        o = attention(q[index], k[index], v[index], SLOPES, cu_seqlens=cu_seqlens)
        return dict(zip(order, o.split(sizes), strict=True))

    want, got = run(list(range(5))), run(order)
    for n in range(5):
        torch.testing.assert_close(got[n], want[n], rtol=1e-12, atol=1e-12)


def test_not_a_bit_leaks_from_a_document_with_huge_numbers() -> None:
    (q, k, v), cu_seqlens = pack([20, 20])
    with torch.no_grad():
        want = attention(q, k, v, SLOPES, cu_seqlens=cu_seqlens)
        k[3] = 1e200
        got = attention(q, k, v, SLOPES, cu_seqlens=cu_seqlens)
    assert torch.equal(got[20:], want[20:])
