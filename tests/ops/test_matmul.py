"""Products and their gradients, whichever library computes them."""

import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from sferic.ops import matmul
from sferic.ops.matmul import linear

EPS = 2**-23
sizes = st.integers(1, 40)


@pytest.fixture(scope="module", params=[0, matmul.SMALL], autouse=True)
def smallest_for_onednn(request: pytest.FixtureRequest) -> Iterator[int]:
    """Every test by oneDNN, and again where it leaves small products to the library."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(matmul, "SMALL", request.param)
        yield request.param


def inputs(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(s, generator=generator).to(dtype).requires_grad_() for s in shapes]


def near(a: Tensor, exact: Tensor, terms: int) -> None:
    """Within the rounding of a sum of so many float32 products."""
    assert a.dtype == torch.float32
    assert torch.allclose(a.double(), exact, rtol=0, atol=4 * EPS * terms)


@given(T=sizes, K=sizes, N=sizes, transposed=st.booleans(), batched=st.booleans())
def test_linear_and_its_gradients(T: int, K: int, N: int, transposed: bool, batched: bool) -> None:
    x, w, dy = inputs((2, T, K) if batched else (T, K), (K, N) if transposed else (N, K), (N,))
    weight = w.T if transposed else w
    y = linear(x, weight)
    (y * dy).sum().backward()
    x64, w64 = x.detach().double().requires_grad_(), w.detach().double().requires_grad_()
    y64 = x64 @ (w64 if transposed else w64.T)
    (y64 * dy.double()).sum().backward()
    assert x.grad is not None and w.grad is not None  # noqa: PT018
    near(y.detach(), y64.detach(), 4 * K)
    near(x.grad, x64.grad, 4 * N)  # type: ignore[arg-type]
    near(w.grad, w64.grad, 8 * T)  # type: ignore[arg-type]


@given(T=sizes, a=st.integers(0, 5), b=st.integers(1, 5))
def test_views_are_read_as_they_lie(T: int, a: int, b: int) -> None:
    (big,) = inputs((T + a, 3, 16))
    x, w = big.detach()[a:, 1], torch.randn(9, 16)[::b]
    near(linear(x, w), x.double() @ w.double().T, 64)


def test_a_weight_with_gaps_costs_no_more_than_its_copy() -> None:
    """oneDNN itself would take it to a loop hundreds of times slower."""
    x, big = torch.randn(256, 512), torch.randn(256, 1024)
    w = big[:128, :512]
    dense = w.contiguous()

    def seconds(weight: Tensor) -> float:
        times = []
        for _ in range(3):
            begin = time.perf_counter()
            linear(x, weight)
            linear(x, weight.T.contiguous().T)
            times.append(time.perf_counter() - begin)
        return min(times)

    assert torch.equal(linear(x, w), linear(x, dense))
    assert seconds(w) < 20 * seconds(dense)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_dtype_stays(dtype: torch.dtype) -> None:
    x, w = inputs((5, 8), (3, 8), dtype=dtype)
    assert linear(x, w).dtype == dtype


def test_what_onednn_does_not_take_goes_to_the_library() -> None:
    x, w = inputs((5, 8), (3, 8))
    linear(x[0], w).sum().backward()
    linear(x, w[:0]).sum().backward()
    with torch.autocast("cpu", torch.bfloat16):
        assert linear(x, w).dtype == torch.bfloat16
    for wrong in (w[:, :7], w[None], w.double()):
        with pytest.raises(RuntimeError):
            linear(x, wrong)


def test_no_rows() -> None:
    x, w = inputs((0, 8), (3, 8))
    y = linear(x, w)
    assert y.shape == (0, 3)
    y.sum().backward()
    assert torch.equal(w.grad, torch.zeros(3, 8))  # type: ignore[arg-type]


def test_second_derivatives() -> None:
    x, w = inputs((5, 8), (3, 8))
    found = []
    for double in (False, True):
        a, b = (t.detach().to(torch.float64 if double else torch.float32) for t in (x, w))
        a, b = a.requires_grad_(), b.requires_grad_()
        (grad,) = torch.autograd.grad((linear(a, b) ** 3).sum(), a, create_graph=True)
        found.append(torch.autograd.grad(grad.square().sum(), [a, b]))
    for got, exact in zip(*found, strict=True):
        assert exact.abs().max() > 1
        assert torch.allclose(got.double(), exact, rtol=1e-4, atol=1e-3 * float(exact.abs().max()))


def test_only_needed_gradients_are_formed() -> None:
    x, w = inputs((5, 8), (3, 8))
    linear(x.detach(), w).sum().backward()
    assert x.grad is None
    linear(x, w.detach()).sum().backward()
    assert x.grad is not None


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this build has no oneDNN")
def test_float32_on_the_cpu_goes_to_onednn(operators: Any, smallest_for_onednn: int) -> None:
    x, w = inputs((5, 8), (3, 8))
    with operators() as seen:
        linear(x, w).sum().backward()
    expected = 0 if smallest_for_onednn else 3
    assert seen.names.count("mkldnn._linear_pointwise.default") == expected
    with operators() as seen:
        linear(x.double(), w.double())
    assert not [name for name in seen.names if "mkldnn" in name]
