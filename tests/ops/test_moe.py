"""Routing, capacity, balance and the experts' arithmetic against plain Python."""

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any, Literal

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from sferic.ops.moe import (
    auxiliary_loss,
    expert_counts,
    grouped_swiglu,
    keep_within_capacity,
    mix_experts,
    top_k_gates,
)

D, F = 8, 12


def close(got: Any, want: Any, tolerance: float = 1e-12) -> None:
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)


def experts(E: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(E)
    w13 = torch.randn(E, D, 2, F, generator=generator, dtype=torch.float64)
    w2 = torch.randn(E, F, D, generator=generator, dtype=torch.float64)
    return w13.to(dtype).requires_grad_(), w2.to(dtype).requires_grad_()


def route(T: int, E: int, k: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Gates and indices of random tokens."""
    generator = torch.Generator().manual_seed(seed)
    gates = torch.rand(T, k, generator=generator, dtype=torch.float64)
    order = torch.rand(T, E, generator=generator).argsort(-1)
    return gates.requires_grad_(), order[:, :k]


def swiglu(x: Tensor, w13: Tensor, w2: Tensor) -> Tensor:
    """One row, one expert."""
    gate, up = x @ w13[:, 0], x @ w13[:, 1]
    return (gate / (1 + torch.exp(-gate)) * up) @ w2


def mix_by_loop(
    x: Tensor, gates: Tensor, indices: Tensor, kept: Tensor | None, w13: Tensor, w2: Tensor
) -> Tensor:
    rows = []
    for t in range(len(x)):
        y = 0 * x[t]
        for j, e in enumerate(indices[t].tolist()):
            if kept is None or kept[t, j]:
                y = y + gates[t, j] * swiglu(x[t], w13[e], w2[e])
        rows.append(y)
    return torch.stack(rows)


def capacity_by_loop(
    indices: list[list[int]], valid: list[bool], E: int, factor: str
) -> list[list[bool]]:
    k = len(indices[0])
    capacity = math.ceil(Fraction(factor) * k * sum(valid) / E)
    used = [0] * E
    kept = [[False] * k for _ in indices]
    for j in range(k):
        for t, row in enumerate(indices):
            if valid[t] and used[row[j]] < capacity:
                used[row[j]] += 1
                kept[t][j] = True
    return kept


def test_gates_are_the_softmax_over_the_chosen_logits() -> None:
    logits = torch.randn(50, 8, dtype=torch.float64) * 3
    gates, indices = top_k_gates(logits.softmax(-1), 2)
    top, want = logits.sort(-1, descending=True)
    assert torch.equal(indices, want[:, :2])
    close(gates, top[:, :2].softmax(-1))


def test_an_earlier_choice_is_repeated_with_new_gates() -> None:
    probs = torch.randn(50, 8, dtype=torch.float64).softmax(-1).requires_grad_()
    chosen = torch.tensor([[7, 3]]).expand(50, 2)
    gates, indices = top_k_gates(probs, 2, chosen)
    assert torch.equal(indices, chosen)
    want = probs[:, [7, 3]] / probs[:, [7, 3]].sum(-1, keepdim=True)
    close(gates, want)
    weights = torch.randn(50, 2, dtype=torch.float64)
    close(torch.autograd.grad(gates, probs, weights), torch.autograd.grad(want, probs, weights))


def test_gates_take_a_gradient_through_their_sum() -> None:
    logits = torch.randn(20, 6, dtype=torch.float64, requires_grad=True)
    gates, indices = top_k_gates(logits.softmax(-1), 2)
    weights = torch.randn(20, 2, dtype=torch.float64)
    (got,) = torch.autograd.grad(gates, logits, weights)
    (want,) = torch.autograd.grad(logits.gather(1, indices).softmax(-1), logits, weights)
    close(got, want)


@given(
    k=st.integers(1, 3),
    E=st.integers(3, 6),
    factor=st.sampled_from(["0.25", "1", "1.1", "1.25", "2", "6"]),
    skew=st.sampled_from([0.0, 1.0, 5.0]),
    T=st.integers(1, 40),
    pads=st.integers(0, 40),
    seed=st.integers(0, 1000),
)
@example(k=2, E=4, factor="1.25", skew=5.0, T=40, pads=40, seed=0)
@settings(max_examples=100)
def test_capacity_goes_by_choice_and_then_position(
    k: int, E: int, factor: str, skew: float, T: int, pads: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(T, E, generator=generator) - skew * torch.arange(E)
    indices = scores.argsort(-1, descending=True)[:, :k]
    valid = torch.ones(T, dtype=torch.bool)
    valid[torch.randperm(T, generator=generator)[:pads]] = False
    kept = keep_within_capacity(indices, valid, E, float(factor))
    assert kept.tolist() == capacity_by_loop(indices.tolist(), valid.tolist(), E, factor)


@pytest.mark.parametrize(
    ("factor", "k", "valid", "E", "capacity"),
    [
        (1.1, 2, 40, 8, 11),
        (1.1, 2, 25, 5, 11),
        (1.05, 2, 50, 5, 21),
        (1.1, 2, 41, 8, 12),
        (1.0, 2, 16, 4, 8),
        (1.25, 2, 4, 16, 1),
    ],
)
def test_capacity_is_the_exact_ceiling(
    factor: float, k: int, valid: int, E: int, capacity: int
) -> None:
    real = torch.arange(50) < valid
    indices = torch.arange(k).expand(50, k)  # all want the same experts
    kept = keep_within_capacity(indices, real, E, factor)
    assert kept.sum(0).tolist() == [capacity] * k
    assert kept[:capacity].all()


def test_first_choices_go_before_second_ones() -> None:
    indices = torch.tensor([[1, 0], [0, 1], [0, 1]])
    kept = keep_within_capacity(indices, torch.ones(3, dtype=torch.bool), 2, 2 / 3)  # capacity 2
    assert kept.tolist() == [[True, False], [True, True], [True, False]]


def test_counts_leave_out_pads() -> None:
    indices = torch.tensor([[1, 0], [0, 2], [0, 1]])
    counts = expert_counts(indices, torch.tensor([True, True, False]), 4)
    assert counts.tolist() == [2, 1, 1, 0]
    assert counts.dtype == torch.int64


@pytest.mark.parametrize(("norm", "scale"), [("paper", 1 / 3), ("switch", 3 / 2)])
def test_auxiliary_loss_by_hand(norm: Literal["paper", "switch"], scale: float) -> None:
    counts = torch.tensor([5, 1, 2])  # of 4 tokens, 2 choices each
    probs_sum = torch.tensor([2.0, 0.5, 1.5], dtype=torch.float64, requires_grad=True)
    loss = auxiliary_loss(counts, probs_sum, 4, top_k=2, coef=0.1, norm=norm)
    by_hand = 5 / 4 * 2 / 4 + 1 / 4 * 0.5 / 4 + 2 / 4 * 1.5 / 4
    assert loss.item() == pytest.approx(0.1 * scale * by_hand, rel=1e-12)
    (grad,) = torch.autograd.grad(loss, probs_sum)
    close(grad, 0.1 * scale * counts.double() / 16)


@pytest.mark.parametrize(("E", "k"), [(4, 2), (32, 2), (5, 1)])
def test_auxiliary_loss_at_balance(E: int, k: int) -> None:
    T = 3 * E
    indices = (torch.arange(T * k) % E).view(T, k)
    counts = expert_counts(indices, torch.ones(T, dtype=torch.bool), E)
    assert float((counts / T).sum()) == pytest.approx(k)  # f sums to k
    probs_sum = torch.full((E,), T / E, dtype=torch.float64)

    def loss(norm: Literal["paper", "switch"]) -> float:
        return float(auxiliary_loss(counts, probs_sum, T, top_k=k, coef=0.01, norm=norm))

    assert loss("switch") == pytest.approx(0.01)
    assert loss("paper") == pytest.approx(0.01 * k / E**2)


CASES: dict[str, Callable[[Tensor], Tensor]] = {
    "any": lambda indices: indices,
    "all to one pair": lambda indices: torch.tensor([[3, 1]]).expand_as(indices),
    "two experts idle": lambda indices: 2 * (indices % 2) + torch.tensor([0, 1]),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("keep", ["none given", "all", "some", "nothing"])
@pytest.mark.parametrize("case", CASES)
def test_mixing_equals_a_loop_over_tokens(case: str, keep: str, dtype: torch.dtype) -> None:
    T, E = 23, 5
    gates, indices = route(T, E, 2)
    indices = CASES[case](indices)
    kept = {
        "none given": None,
        "all": torch.ones(T, 2, dtype=torch.bool),
        "some": torch.rand(T, 2, generator=torch.Generator().manual_seed(1)) < 0.5,
        "nothing": torch.zeros(T, 2, dtype=torch.bool),
    }[keep]
    x = torch.randn(T, D, dtype=dtype, requires_grad=True)
    w13, w2 = experts(E, dtype)
    inputs = [x, gates, w13, w2]
    exact = [i.detach().double().requires_grad_() for i in inputs]
    got = mix_experts(x, gates, indices, kept, w13, w2)
    want = mix_by_loop(exact[0], exact[1], indices, kept, exact[2], exact[3])
    assert got.dtype == dtype
    tolerance = 1e-12 if dtype == torch.float64 else 1e-5
    weights = torch.randn(T, D, dtype=torch.float64)
    got_grads = torch.autograd.grad(got, inputs, weights.to(dtype))
    want_grads = torch.autograd.grad(
        want, exact, weights, allow_unused=True, materialize_grads=True
    )
    for a, b in zip((got, *got_grads), (want, *want_grads), strict=True):
        close(a.double(), b, tolerance * max(1.0, b.abs().max().item()))


def test_a_dropped_choice_does_not_raise_the_other_gate() -> None:
    x = torch.randn(1, D, dtype=torch.float64)
    w13, w2 = experts(3)
    gates, indices = torch.tensor([[0.7, 0.3]]), torch.tensor([[2, 0]])
    kept = torch.tensor([[True, False]])
    close(
        mix_experts(x, gates, indices, kept, w13, w2)[0], gates[0, 0] * swiglu(x[0], w13[2], w2[2])
    )
    assert not mix_experts(x, gates, indices, ~kept & ~kept.any(), w13, w2).any()


@pytest.mark.parametrize(("T", "keep"), [(3, True), (0, True), (0, False)])
def test_nothing_to_mix_has_zero_gradients(T: int, keep: bool) -> None:
    x = torch.randn(T, D, requires_grad=True)
    gates, indices = torch.ones(T, 2), torch.zeros(T, 2, dtype=torch.int64)
    w13, w2 = experts(3, torch.float32)
    kept = torch.zeros(T, 2, dtype=torch.bool)
    y = mix_experts(x, gates, indices, kept if keep else None, w13, w2)
    assert torch.equal(y, torch.zeros(T, D))
    for grad in torch.autograd.grad(y.sum(), [x, w13, w2]):
        assert not grad.any()


def test_numbers_of_a_token_do_not_depend_on_dropped_ones() -> None:
    """A dropped row isn't computed and multiplied by zero: it may hold anything."""
    gates, indices = route(6, 3, 2)
    kept = torch.ones(6, 2, dtype=torch.bool)
    kept[4] = False
    x = torch.randn(6, D, dtype=torch.float64)
    want = mix_experts(x, gates, indices, kept, *experts(3))
    x[4] = float("nan")
    got = mix_experts(x, gates, indices, kept, *experts(3))
    assert torch.equal(got, want)


@pytest.mark.parametrize("counts", [[3, 0, 4], [0, 7, 0], [0, 0, 7], [0, 0, 0]])
def test_grouped_rows_go_to_their_own_expert(counts: list[int]) -> None:
    w13, w2 = experts(3)
    x = torch.randn(sum(counts), D, dtype=torch.float64)
    got = grouped_swiglu(x, w13, w2, torch.tensor(counts))
    owner = [e for e, n in enumerate(counts) for _ in range(n)]
    assert got.shape == x.shape
    for row, e in enumerate(owner):
        close(got[row], swiglu(x[row], w13[e], w2[e]))


@pytest.mark.parametrize("counts", [[3, 0, 4], [0, 7, 0], [7, 0, 0]])
def test_the_grouped_product_of_gpus_equals_the_loop_of_cpus(
    counts: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library's `grouped_mm` runs on a CPU too, slowly."""
    w13, w2 = (w.detach().float().requires_grad_() for w in experts(3))
    x = torch.randn(7, D, requires_grad=True)
    results = []
    for on_host in (True, False):
        monkeypatch.setattr("sferic.ops.moe.experts.on_host", lambda x, here=on_host: here)
        y = grouped_swiglu(x, w13, w2, torch.tensor(counts))
        results.append((y, *torch.autograd.grad(y.square().sum(), [x, w13, w2])))
        with torch.no_grad():
            assert torch.allclose(grouped_swiglu(x, w13, w2, torch.tensor(counts)), y, atol=1e-4)
    for a, b in zip(*results, strict=True):
        assert torch.allclose(a, b, rtol=1e-4, atol=1e-4)


def test_dropless_mixing_never_waits_for_the_host(no_host_sync: Callable[[], Any]) -> None:
    T, E = 6, 4
    x = torch.randn(T, 16, dtype=torch.bfloat16)
    w13, w2 = torch.randn(E, 16, 2, 8).to(x.dtype), torch.randn(E, 8, 16).to(x.dtype)
    gates, indices = route(T, E, 2)
    with no_host_sync() as fake:
        rows, places = fake(x), fake(indices)
        y = mix_experts(rows, fake(gates.detach()), places, None, fake(w13), fake(w2))
        assert y.shape == (T, 16)


def test_routing_never_waits_for_the_host(no_host_sync: Callable[[], Any]) -> None:
    with no_host_sync() as fake:
        probs, valid = fake(torch.rand(6, 4)), fake(torch.ones(6, dtype=torch.bool))
        gates, indices = top_k_gates(probs, 2)
        counts = expert_counts(indices, valid, 4)
        kept = keep_within_capacity(indices, valid, 4, 1.25)
        auxiliary_loss(counts, probs.sum(0), valid.sum(), top_k=2, coef=0.1, norm="switch")
        assert gates.shape == kept.shape == (6, 2)
