"""The forms of serving, which write states into a pool of slots."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sferic.ops import lightning_decode, lightning_prefill

Recurrence = Callable[..., tuple[Tensor, Tensor]]
Error = Callable[..., float]

prefill: Callable[..., Tensor] = lightning_prefill
decode: Callable[..., Tensor] = lightning_decode

SLOPES = torch.tensor([0, 1e-5, 0.01, 0.917, 8, 100], dtype=torch.float64)
H, K, V = 6, 8, 5
NAN = float("nan")


def draw(T: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    shapes = [(T, H, K), (T, H, K), (T, H, V)]
    return tuple(torch.randn(s, generator=generator).to(dtype) for s in shapes)


def poisoned_pool(slots: int, live: list[int], dtype: torch.dtype = torch.float64) -> Tensor:
    """A pool with numbers in live slots and NaN in all others."""
    pool = torch.full((slots, H, K, V), NAN, dtype=dtype)
    pool[live] = torch.randn(len(live), H, K, V, dtype=dtype)
    return pool


def assert_same_bits(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


def offsets(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


@pytest.mark.parametrize("silu", [False, True])
def test_prefill_equals_the_recurrence_and_writes_only_its_slots(
    silu: bool, recurrence: Recurrence, error: Error
) -> None:
    lengths, slots = [5, 0, 130, 1, 0, 64], [4, 2, 7, 0, 8, 5]
    known = [True, True, False, False, False, True]
    q, k, v = draw(sum(lengths))
    live = [s for s, has in zip(slots, known, strict=True) if has]
    pool = poisoned_pool(10, live)
    before = pool.clone()
    o = prefill(
        q, k, v, SLOPES, pool, torch.tensor(slots), torch.tensor(known), offsets(lengths), silu=silu
    )
    if silu:
        q, k, v = F.silu(q), F.silu(k), F.silu(v)
    for n, (a, b) in enumerate(pairwise(offsets(lengths).tolist())):
        start = before[slots[n]] if known[n] else None
        want, state = recurrence(q[a:b], k[a:b], v[a:b], SLOPES, start)
        assert error(o[a:b], want) < 1e-12
        if b > a:
            assert error(pool[slots[n]], state, -3) < 1e-12
        else:
            assert torch.equal(pool[slots[n]], state)
    others = [1, 3, 6, 9]
    assert_same_bits(pool[others], before[others])


@given(cuts=st.lists(st.integers(0, 90), max_size=4))
@settings(max_examples=20)
def test_chunks_through_the_pool_equal_one_prefill(cuts: list[int], error: Error) -> None:
    T = 90
    q, k, v = draw(T)

    def run(edges: list[int]) -> tuple[Tensor, Tensor]:
        pool = poisoned_pool(3, [])
        outputs = []
        for i, (a, b) in enumerate(pairwise(edges)):
            outputs.append(
                prefill(
                    q[a:b],
                    k[a:b],
                    v[a:b],
                    SLOPES,
                    pool,
                    torch.tensor([1]),
                    torch.tensor([i > 0]),
                    offsets([b - a]),
                )
            )
        return torch.cat(outputs), pool[1]

    (o, state), (want, final) = run([0, *sorted(cuts), T]), run([0, T])
    assert error(o, want) < 1e-12
    assert error(state, final, -3) < 1e-12


def test_checkpoints_are_the_states_of_prefixes(recurrence: Recurrence, error: Error) -> None:
    lengths = [70, 3]
    q, k, v = draw(sum(lengths))
    pool = poisoned_pool(9, [1])
    before = pool.clone()
    wanted = [(0, 64, 3), (1, 3, 4), (0, 0, 5), (0, 1, 6), (1, 0, 7), (0, 70, 8)]
    checkpoints = tuple(torch.tensor(column) for column in zip(*wanted, strict=True))
    o = prefill(
        q,
        k,
        v,
        SLOPES,
        pool,
        torch.tensor([1, 2]),
        torch.tensor([True, False]),
        offsets(lengths),
        checkpoints=checkpoints,
    )
    starts, first = [before[1], None], [0, 70]
    for n in range(2):
        rows = slice(first[n], first[n] + lengths[n])
        want, state = recurrence(q[rows], k[rows], v[rows], SLOPES, starts[n])
        assert error(o[rows], want) < 1e-12
        assert error(pool[n + 1], state, -3) < 1e-12
    for n, length, slot in wanted:
        rows = slice(first[n], first[n] + length)
        _, state = recurrence(q[rows], k[rows], v[rows], SLOPES, starts[n])
        assert error(pool[slot], state, -3) < 1e-12
    assert_same_bits(pool[0], before[0])


@pytest.mark.parametrize("length", [-1, 4])
def test_a_checkpoint_outside_its_sequence_is_refused(length: int) -> None:
    q, k, v = draw(5)
    with pytest.raises(ValueError, match=f"sequence 1 at {length} tokens: it has 3 here"):
        prefill(
            q,
            k,
            v,
            SLOPES,
            poisoned_pool(3, []),
            torch.tensor([0, 1]),
            torch.tensor([False, False]),
            offsets([2, 3]),
            checkpoints=(torch.tensor([1]), torch.tensor([length]), torch.tensor([2])),
        )


@pytest.mark.parametrize("silu", [False, True])
@pytest.mark.parametrize("slots", [[5, 0, 3], [2, 3, 4], [4, 5, 6], [0, 1, 2], [3, 2, 1]], ids=str)
@pytest.mark.parametrize("inference", [False, True])
def test_decode_equals_the_recurrence_and_writes_only_its_slots(
    silu: bool, slots: list[int], inference: bool, recurrence: Recurrence, error: Error
) -> None:
    steps = 4
    q, k, v = draw(3 * steps)
    pool = poisoned_pool(7, slots)
    before = pool.clone()
    with torch.inference_mode(inference):
        outputs = [
            decode(q[r], k[r], v[r], SLOPES, pool, torch.tensor(slots), silu=silu)
            for r in torch.arange(3 * steps).view(steps, 3)
        ]
    if silu:
        q, k, v = F.silu(q), F.silu(k), F.silu(v)
    for n, slot in enumerate(slots):
        want, state = recurrence(q[n::3], k[n::3], v[n::3], SLOPES, before[slot])
        assert error(torch.stack([o[n] for o in outputs]), want) < 1e-12
        assert error(pool[slot], state, -3) < 1e-12
    untouched = [s for s in range(7) if s not in slots]
    assert_same_bits(pool[untouched], before[untouched])


@pytest.mark.parametrize("slots", [[5, 6, 7], [6, 7, 8]], ids=str)
def test_a_slot_beyond_the_pool_is_refused(slots: list[int]) -> None:
    q, k, v = draw(3)
    with torch.inference_mode(), pytest.raises(IndexError):
        decode(q, k, v, SLOPES, poisoned_pool(7, [5, 6]), torch.tensor(slots))


@pytest.mark.parametrize(
    "slots",
    [[-1, 0, -1, 3], [0, -1], [-1, -1, 0], [3, -1, -1, 2], [-1, -1], [-1]],
    ids=lambda slots: ",".join(map(str, slots)),
)
@pytest.mark.parametrize("garbage", [0.0, NAN])
def test_empty_rows_give_zeros_and_write_nothing(
    slots: list[int], garbage: float, recurrence: Recurrence, error: Error
) -> None:
    live = [s for s in slots if s >= 0]
    pool = poisoned_pool(5, sorted({0, *live}))
    before = pool.clone()
    q, k, v = draw(len(slots))
    for n, slot in enumerate(slots):
        if slot < 0:
            q[n], k[n], v[n] = garbage, garbage, garbage
    o = decode(q, k, v, SLOPES, pool, torch.tensor(slots))
    for n, slot in enumerate(slots):
        if slot < 0:
            assert torch.equal(o[n], torch.zeros(H, V))
        else:
            row = slice(n, n + 1)
            want, state = recurrence(q[row], k[row], v[row], SLOPES, before[slot])
            assert error(o[row], want) < 1e-12
            assert error(pool[slot], state, -3) < 1e-12
    untouched = [s for s in range(5) if s not in live]
    assert_same_bits(pool[untouched], before[untouched])


def test_decode_follows_prefill(recurrence: Recurrence, error: Error) -> None:
    q, k, v = draw(70)
    pool = poisoned_pool(2, [])
    slots = torch.tensor([1])
    prefill(q[:67], k[:67], v[:67], SLOPES, pool, slots, torch.tensor([False]), offsets([67]))
    want, state = recurrence(q, k, v, SLOPES)
    for t in range(67, 70):
        row = slice(t, t + 1)
        o = decode(q[row], k[row], v[row], SLOPES, pool, slots)
        assert error(o, want[row]) < 1e-12
    assert error(pool[1], state, -3) < 1e-12


@pytest.mark.parametrize("form", ["prefill", "decode"])
def test_products_of_bf16_inputs_are_summed_in_float32(
    form: str, recurrence: Recurrence, error: Error
) -> None:
    q, k, v = draw(40, torch.bfloat16)
    pool = torch.zeros(1, H, K, V)
    slots = torch.tensor([0])
    if form == "prefill":
        o = prefill(q, k, v, SLOPES, pool, slots, torch.tensor([False]), offsets([len(q)]))
    else:
        rows = [slice(t, t + 1) for t in range(len(q))]
        steps = [decode(q[r], k[r], v[r], SLOPES, pool, slots) for r in rows]
        o = torch.cat(steps)
    want, state = recurrence(q, k, v, SLOPES)
    assert o.dtype == torch.bfloat16
    assert error(o, want) < 2**-8
    assert error(pool[0], state, -3) < 1e-5


def test_decode_reads_strided_rows() -> None:
    qkv = torch.randn(4, H, 3, K, dtype=torch.float64)
    pools = [torch.ones(4, H, K, K, dtype=torch.float64) for _ in range(2)]
    slots = torch.arange(4)
    o = decode(*qkv.unbind(2), SLOPES, pools[0], slots)
    want = decode(*(x.contiguous() for x in qkv.unbind(2)), SLOPES, pools[1], slots)
    torch.testing.assert_close(o, want, rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(pools[0], pools[1], rtol=1e-13, atol=1e-13)


def test_decode_never_waits_for_the_host(no_host_sync: Callable[[], Any]) -> None:
    q, k, v = draw(3, torch.float32)
    pool, slots = torch.zeros(5, H, K, V), torch.tensor([0, -1, 4])
    with no_host_sync() as fake:
        tensors = [fake(x) for x in (q, k, v, SLOPES, pool, slots)]
        assert decode(*tensors, silu=True).shape == (3, H, V)
    with no_host_sync() as fake, pytest.raises(Exception, match="local_scalar_dense"):
        fake(slots).tolist()  # what the check above would see


def test_decode_of_no_rows() -> None:
    q, k, v = draw(0)
    pool = torch.ones(2, H, K, V)
    assert decode(q, k, v, SLOPES, pool, torch.zeros(0, dtype=torch.int64)).shape == (0, H, V)
    assert torch.equal(pool, torch.ones(2, H, K, V))
