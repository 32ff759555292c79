"""The head with its loss, and the norms, against their formulas."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from sferic.ops.fused import gated_rms_norm, linear_cross_entropy, rms_norm, token_losses
from sferic.ops.fused.cross_entropy import CHUNK

D, V = 12, 30


def head(
    T: int, dtype: torch.dtype = torch.float64, ignored: float = 0.2
) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(T)
    h = torch.randn(T, D, generator=generator, dtype=torch.float64)
    w = torch.randn(V, D, generator=generator, dtype=torch.float64)
    labels = torch.randint(V, (T,), generator=generator)
    labels[torch.rand(T, generator=generator) < ignored] = -100
    return h.to(dtype).requires_grad_(), w.to(dtype).requires_grad_(), labels


def plain(h: Tensor, w: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(h @ w.T, labels, reduction="sum", ignore_index=-100)


@pytest.mark.parametrize("T", [1, 7, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 3])
def test_loss_and_gradients_equal_cross_entropy(T: int) -> None:
    h, w, labels = head(T)
    got, want = linear_cross_entropy(h, w, labels), plain(h, w, labels)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=0)
    got_grads = torch.autograd.grad(got / 7, [h, w])
    for a, b in zip(got_grads, torch.autograd.grad(want / 7, [h, w]), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-12)
    losses = token_losses(h, w, labels)
    each = F.cross_entropy(h @ w.T, labels, reduction="none", ignore_index=-100)
    torch.testing.assert_close(losses, each, rtol=1e-12, atol=1e-12)
    assert not losses.requires_grad


def test_no_labels_at_all() -> None:
    h, w, labels = head(CHUNK + 5, ignored=1.0)
    assert (labels == -100).all()
    loss = linear_cross_entropy(h, w, labels)
    assert loss.item() == 0
    for grad in torch.autograd.grad(loss, [h, w]):
        assert not grad.any()
    assert not token_losses(h, w, labels).any()


def test_no_tokens_at_all() -> None:
    h, w, labels = head(0)
    loss = linear_cross_entropy(h, w, labels)
    assert loss.item() == 0
    for grad in torch.autograd.grad(loss, [h, w]):
        assert not grad.any()
    assert token_losses(h, w, labels).shape == (0,)


def test_no_gradients_are_formed_where_none_are_wanted(operators: type[Any]) -> None:
    h, w, labels = head(5)
    with torch.no_grad(), operators() as seen:
        linear_cross_entropy(h, w, labels)
    assert seen.names.count("aten.mm.default") == 1


@pytest.mark.parametrize("wanted", [0, 1])
def test_one_of_the_two_may_be_frozen(wanted: int) -> None:
    h, w, labels = head(9)
    (h, w)[1 - wanted].requires_grad_(False)
    got, want = linear_cross_entropy(h, w, labels), plain(h, w, labels)
    (a,), (b,) = (torch.autograd.grad(loss, (h, w)[wanted]) for loss in (got, want))
    torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("grad", [False, True])
def test_the_loss_alone_is_the_same(grad: bool) -> None:
    h, w, labels = head(CHUNK + 9)
    with torch.set_grad_enabled(grad):
        got = linear_cross_entropy(h.detach(), w.detach(), labels)
    assert not got.requires_grad
    torch.testing.assert_close(got, plain(h, w, labels).detach(), rtol=1e-12, atol=0)


def test_huge_logits_do_not_overflow() -> None:
    h, w, labels = head(5, torch.float32, ignored=0)
    with torch.no_grad():
        h *= 1e4
    loss = linear_cross_entropy(h, w, labels)
    torch.testing.assert_close(loss, plain(h, w, labels))
    assert all(g.isfinite().all() for g in torch.autograd.grad(loss, [h, w]))


@pytest.mark.parametrize("weight_dtype", [torch.bfloat16, torch.float32])
def test_bf16_hidden_states_are_summed_in_float32(weight_dtype: torch.dtype) -> None:
    h, _, labels = head(300, torch.bfloat16)
    _, w, _ = head(300, weight_dtype)
    loss = linear_cross_entropy(h, w, labels)
    assert loss.dtype == torch.float32
    exact = [h.detach().double().requires_grad_(), w.detach().double().requires_grad_()]
    want = plain(exact[0], exact[1], labels)
    assert loss.item() == pytest.approx(want.item(), rel=5e-3)
    got_grads = torch.autograd.grad(loss, [h, w])
    assert [g.dtype for g in got_grads] == [torch.bfloat16, weight_dtype]
    for a, b in zip(got_grads, torch.autograd.grad(want, exact), strict=True):
        assert float((a.double() - b).abs().max()) < 0.02 * float(b.abs().max())


def test_the_logits_never_exist_whole(operators: type[Any]) -> None:
    T = 4 * CHUNK
    h, w, labels = head(T)
    with operators() as seen:
        linear_cross_entropy(h, w, labels).backward()
    assert 0 < seen.largest <= max(CHUNK * V, T * D) < T * V
    with operators() as seen:
        token_losses(h, w, labels)
    assert 0 < seen.largest <= CHUNK * V


@pytest.mark.parametrize("eps", [1e-6, 0.5])
def test_rms_norm_by_formula(eps: float) -> None:
    x = torch.randn(5, D, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(D, dtype=torch.float64, requires_grad=True)
    got = rms_norm(x, weight, eps)
    want = x / torch.sqrt((x**2).sum(-1, keepdim=True) / D + eps) * weight
    torch.testing.assert_close(got, want, rtol=1e-13, atol=1e-13)
    cotangent = torch.randn(5, D, dtype=torch.float64)
    got_grads = torch.autograd.grad(got, [x, weight], cotangent)
    want_grads = torch.autograd.grad(want, [x, weight], cotangent)
    for a, b in zip(got_grads, want_grads, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_rms_norm_of_bf16_has_float32_statistics() -> None:
    x = (torch.randn(4, 4096) * 100).to(torch.bfloat16)
    weight = torch.randn(4096).to(torch.bfloat16)
    got = rms_norm(x, weight, 1e-6)
    exact = x.double()
    normed = exact / exact.square().mean(-1, keepdim=True).sqrt()
    assert torch.equal(got, normed.to(torch.bfloat16) * weight)  # cast back, then multiply


def test_gated_norm_is_joint_over_heads() -> None:
    o = torch.randn(5, 3, 4, dtype=torch.float64) * torch.tensor([1.0, 10.0, 100.0])[:, None]
    gate, weight = torch.randn(5, 12, dtype=torch.float64), torch.randn(12, dtype=torch.float64)
    got = gated_rms_norm(o, gate, weight, 1e-3)
    flat = o.reshape(5, 12)
    mean = (flat**2).sum(1, keepdim=True) / 12
    want = flat / (mean + 1e-3).sqrt() * weight / (1 + torch.exp(-gate))
    torch.testing.assert_close(got, want, rtol=1e-13, atol=1e-13)
