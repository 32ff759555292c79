"""Products with copies of weights in the library's own layout."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from sferic.nn.layers import Linear, joint
from sferic.ops import matmul
from sferic.ops.blocked import MAX_ROWS, BlockedWeights
from sferic.ops.matmul import linear
from sferic.ops.moe import mix_experts, top_k_gates

pytestmark = pytest.mark.skipif(
    not torch.backends.mkldnn.is_available(), reason="this build has no oneDNN"
)


@pytest.fixture(scope="module", autouse=True)
def every_size_by_onednn() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(matmul, "SMALL", 0)
        yield


def parameter(*shape: int) -> Tensor:
    return torch.nn.Parameter(torch.randn(shape, generator=torch.Generator().manual_seed(1)))


def close(got: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5 * float(want.abs().max()))


@given(T=st.integers(1, MAX_ROWS + 2), K=st.integers(1, 70), N=st.integers(1, 70))
def test_a_copy_multiplies_as_its_weight(T: int, K: int, N: int) -> None:
    x, w = torch.randn(T, K), parameter(N, K)
    weights = BlockedWeights()
    with torch.no_grad(), weights.used():
        for rows in (x, x[:1], torch.cat([x, x])):  # the copy was made for another number of rows
            close(linear(rows, w), rows.double() @ w.double().T)
    assert weights.bytes == w.nbytes


def test_a_copy_is_made_once_and_again_after_a_change(operators: Any) -> None:
    x, w = torch.randn(4, 8), parameter(5, 8)
    weights = BlockedWeights()

    def copies() -> int:
        with torch.inference_mode(), weights.used(), operators() as seen:
            close(linear(x, w), x.double() @ w.double().T)
        return seen.names.count("mkldnn._reorder_linear_weight.default")

    assert [copies(), copies()] == [1, 0]
    with torch.no_grad():
        w.mul_(2)
    assert [copies(), copies()] == [1, 0]
    assert weights.bytes == w.nbytes


def test_no_more_copies_than_there_is_room_for() -> None:
    x, first, second = torch.randn(4, 8), parameter(5, 8), parameter(6, 8)
    weights = BlockedWeights(max_bytes=first.nbytes + second.nbytes - 1)
    with torch.no_grad(), weights.used():
        for w in (first, second, first):
            close(linear(x, w), x.double() @ w.double().T)
    assert weights.bytes == first.nbytes


@pytest.mark.parametrize(
    "case", ["outside", "gradient", "many rows", "float64", "inference", "computed"]
)
def test_where_no_copy_is_made(case: str) -> None:
    x, w = torch.randn(MAX_ROWS + 1 if case == "many rows" else 4, 8), parameter(5, 8)
    weights = BlockedWeights()
    if case == "outside":
        with torch.no_grad():
            linear(x, w)
    elif case == "gradient":
        with weights.used():
            linear(x, w).sum().backward()
        assert w.grad is not None
    elif case == "inference":  # such a tensor doesn't count its changes
        with torch.inference_mode(), weights.used():
            linear(x, torch.nn.Parameter(w.clone()))
    elif case == "computed":
        with torch.no_grad(), weights.used():
            linear(x, 2 * w)
    else:
        dtype = torch.float64 if case == "float64" else torch.float32
        with torch.no_grad(), weights.used():
            linear(x.to(dtype), w.to(dtype))
    assert weights.bytes == 0


@pytest.mark.parametrize(("T", "E", "k"), [(1, 2, 2), (8, 8, 2), (5, 8, 1), (8, 4, 2), (9, 4, 2)])
def test_few_tokens_through_all_experts(
    T: int, E: int, k: int, operators: Callable[[], Any]
) -> None:
    x, probs = torch.randn(T, 16), torch.randn(T, E).softmax(-1)
    w13, w2 = parameter(E, 16, 2, 24), parameter(E, 24, 16)
    gates, indices = top_k_gates(probs, k)
    want = mix_experts(
        x.double(), gates.double(), indices, None, w13.detach().double(), w2.detach().double()
    )
    weights = BlockedWeights()
    with torch.inference_mode(), weights.used(), operators() as seen:
        close(mix_experts(x, gates, indices, None, w13, w2), want)
    together = E <= T * k <= 4 * E
    assert (seen.names.count("mkldnn._linear_pointwise.default") == 2) == together
    assert (weights.bytes == w13.nbytes + w2.nbytes) == together


@pytest.mark.parametrize("watched", [False, True])
def test_maps_of_one_input_go_together_unless_one_is_watched(
    watched: bool, operators: Callable[[], Any]
) -> None:
    maps = [Linear(8, n) for n in (5, 6, 7)]
    for m in maps:
        torch.nn.init.normal_(m.weight)
    calls: list[int] = []
    if watched:
        maps[1].register_forward_hook(lambda *_: calls.append(1))
    x = torch.randn(4, 8)
    weights = BlockedWeights()
    with torch.inference_mode(), weights.used(), operators() as seen:
        got = joint(x, *maps)
    for y, m in zip(got, maps, strict=True):
        close(y, x.double() @ m.weight.double().T)
    assert len(calls) == watched
    assert seen.names.count("mkldnn._linear_pointwise.default") == (3 if watched else 1)
    with torch.no_grad():
        for y, z in zip(joint(x, *maps), got, strict=True):
            torch.testing.assert_close(y, z)
