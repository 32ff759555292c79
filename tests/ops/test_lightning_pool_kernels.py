"""The kernels that work on a pool of states: prefill with checkpoints, and decode."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from lightning_matrix import CUDA, DEVICE, HOPPER
from torch import Tensor

from sferic.ops import lightning_decode, lightning_prefill

pytest.importorskip("triton")

prefill: Any = lightning_prefill
decode: Any = lightning_decode
BACKENDS = ["triton", *(["hopper"] if HOPPER else [])]
WIDTH = 128 if CUDA else 16
DTYPE = torch.bfloat16 if CUDA else torch.float32
BAR = 5e-3 if CUDA else 1e-5
H = 4 if CUDA else 2
SLOPES = torch.tensor([0.0, 1e-3, 0.917, 100.0], device=DEVICE)[-H:]
GPU = pytest.mark.skipif(not CUDA, reason="needs a GPU")


def draw(*shape: int, seed: int = 0, count: int = 3) -> list[Tensor]:
    generator = torch.Generator(DEVICE).manual_seed(seed)
    return [torch.randn(*shape, generator=generator, device=DEVICE) for _ in range(count)]


def error(got: Tensor, want: Tensor) -> float:
    if want.numel() == 0:
        return 0.0
    assert got.isfinite().all()
    return float((got.double() - want.double()).norm() / want.double().norm().clamp(min=1e-30))


def integers(*numbers: int) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32, device=DEVICE)


def check_prefill(
    lengths: list[int], marks: list[tuple[int, int]], backend: str, silu: bool = False
) -> None:
    """Prefill against float64; `marks` are the checkpoints, (sequence, length)."""
    S, T = len(lengths), sum(lengths)
    q, k, v = (x.to(DTYPE) for x in draw(T, H, WIDTH))
    (pool,) = draw(2 * S + len(marks) + 1, H, WIDTH, WIDTH, seed=1, count=1)
    order = torch.randperm(len(pool), generator=torch.Generator().manual_seed(2)).tolist()
    slots, free = order[:S], order[S:]
    known = torch.arange(S, device=DEVICE) % 2 == 0
    ends = integers(*torch.tensor([0, *lengths]).cumsum(0).tolist())
    checkpoints = None
    if marks:
        sequences, at = zip(*marks, strict=True)
        checkpoints = (integers(*sequences), integers(*at), integers(*free[: len(marks)]))
    exact, before = pool.double(), pool.clone()
    inputs = [q.double(), k.double(), v.double(), SLOPES.double(), exact]
    rest = (integers(*slots), known, ends)
    want = prefill(*inputs, *rest, checkpoints=checkpoints, silu=silu, backend="reference")
    got = prefill(q, k, v, SLOPES, pool, *rest, checkpoints=checkpoints, silu=silu, backend=backend)
    bar = BAR if not silu else 2 * BAR  # which rounds once more
    assert error(got, want) < bar
    for slot in [*slots, *free[: len(marks)]]:
        assert error(pool[slot], exact[slot]) < bar, slot
    unused = free[len(marks) :]
    assert torch.equal(pool[unused], before[unused])


LENGTHS = {
    "some": [70, 0, 64, 1, 129],
    "one long": [9000 if CUDA else 300],
    "long and short": [5000, 3, 0, 4000] if CUDA else [150, 3, 0, 90],
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", LENGTHS)
@pytest.mark.parametrize("silu", [False, True])
def test_prefill(name: str, silu: bool, backend: str) -> None:
    check_prefill(LENGTHS[name], [], backend, silu)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", LENGTHS)
def test_checkpoints_on_the_way(name: str, backend: str) -> None:
    """At the start and the end, on and off chunk borders, twice at one place, out of order."""
    marks = []
    for n, length in enumerate(LENGTHS[name]):
        places = [length, 0, length // 2, length // 3, 64, 65, length // 2, length - 1]
        marks += [(n, at) for at in places if 0 <= at <= length]
    check_prefill(LENGTHS[name], marks[::2] + marks[1::2], backend)


@settings(max_examples=30 if CUDA else 6)
@given(data=st.data())
def test_any_prefill(data: st.DataObject) -> None:
    lengths = data.draw(st.lists(st.integers(0, 300 if CUDA else 50), min_size=1, max_size=5))
    marks = []
    for n, length in enumerate(lengths):
        marks += [(n, at) for at in data.draw(st.lists(st.integers(0, length), max_size=3))]
    for backend in BACKENDS:
        if sum(lengths):
            check_prefill(lengths, data.draw(st.permutations(marks)), backend)


@pytest.mark.parametrize("K_V", [(128, 128), (64, 96), (256, 32)] if CUDA else [(16, 24)])
@pytest.mark.parametrize("silu", [False, True])
@pytest.mark.parametrize("rows", [1, 5, 200] if CUDA else [1, 5])
def test_decode(rows: int, silu: bool, K_V: tuple[int, int]) -> None:
    K, V = K_V
    q, k = (x.to(DTYPE) for x in draw(rows, H, K, count=2))
    v = draw(rows, H, V, seed=1, count=1)[0].to(DTYPE)
    (pool,) = draw(rows + 3, H, K, V, seed=2, count=1)
    exact, before = pool.double(), pool.clone()
    slots = torch.randperm(rows + 3, generator=torch.Generator().manual_seed(0))[:rows].int()
    slots = slots.to(DEVICE)
    if rows > 1:
        slots[1] = slots[-1] = -1
    doubles = [x.double() for x in (q, k, v)]
    if silu:
        doubles = [F.silu(x) for x in doubles]
    want = decode(*doubles, SLOPES.double(), exact, slots, backend="reference")
    got = decode(q, k, v, SLOPES, pool, slots, silu=silu, backend="triton")
    assert error(got, want) < BAR
    assert bool((got[slots < 0] == 0).all())
    assert error(pool, exact) < 1e-6
    live = slots[slots >= 0].tolist()
    unused = [n for n in range(len(pool)) if n not in live]
    assert torch.equal(pool[unused], before[unused])


def test_decode_of_empty_rows_alone_writes_nothing() -> None:
    q, k, v = (x.to(DTYPE) for x in draw(3, H, WIDTH))
    (pool,) = draw(2, H, WIDTH, WIDTH, count=1)
    before = pool.clone()
    out = decode(q, k, v, SLOPES, pool, integers(-1, -1, -1), backend="triton")
    assert bool((out == 0).all())
    assert torch.equal(pool, before)


def test_decode_of_strided_rows() -> None:
    qkv = draw(4, H, 3, WIDTH, count=1)[0].to(DTYPE)
    pools = [x.clone() for x in draw(4, H, WIDTH, WIDTH, count=1) for _ in range(2)]
    slots = integers(2, 0, 3, 1)
    strided = decode(*qkv.unbind(2), SLOPES, pools[0], slots, backend="triton")
    dense = [x.contiguous() for x in qkv.unbind(2)]
    assert torch.equal(strided, decode(*dense, SLOPES, pools[1], slots, backend="triton"))
    assert torch.equal(*pools)


def test_kernels_refuse_a_pool_they_would_copy() -> None:
    q, k, v = (x.to(DTYPE) for x in draw(2, H, WIDTH))
    slots = integers(0, 1)
    half = draw(2, H, WIDTH, WIDTH, count=1)[0].half()
    turned = draw(2, WIDTH, H, WIDTH, count=1)[0].transpose(1, 2)
    for pool in (half, turned):
        with pytest.raises(ValueError, match=r"the pool is .* not contiguous float32"):
            decode(q, k, v, SLOPES, pool, slots, backend="triton")


@GPU
def test_decode_in_a_graph_follows_its_slots() -> None:
    q, k, v = (x.to(DTYPE) for x in draw(3, H, WIDTH))
    (pool,) = draw(6, H, WIDTH, WIDTH, count=1)
    slots = integers(0, 1, -1)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        decode(q, k, v, SLOPES, pool.clone(), slots)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = decode(q, k, v, SLOPES, pool, slots)
    for change in ((0, 1, -1), (5, -1, 2), (4, 3, 0)):
        slots.copy_(integers(*change))
        expected = pool.clone()
        want = decode(q, k, v, SLOPES, expected, slots)
        graph.replay()
        assert torch.equal(out, want)
        assert torch.equal(pool, expected)


@GPU
@pytest.mark.parametrize("backend", BACKENDS)
def test_the_host_never_waits(backend: str) -> None:
    q, k, v = (x.to(DTYPE) for x in draw(90, H, WIDTH))
    (pool,) = draw(4, H, WIDTH, WIDTH, count=1)
    known = torch.tensor([True, False], device=DEVICE)
    rest = (integers(0, 1), known, integers(0, 50, 90))
    marks = (integers(0, 1), integers(7, 40), integers(2, 3))
    for mode in ("default", "error"):
        torch.cuda.set_sync_debug_mode(mode)
        try:
            prefill(q, k, v, SLOPES, pool, *rest, checkpoints=marks, backend=backend)
            decode(q[:2], k[:2], v[:2], SLOPES, pool, rest[0])
        finally:
            torch.cuda.set_sync_debug_mode("default")
