"""Cross entropy of a linear head, a chunk of tokens at a time: the logits never exist whole."""

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from sferic.ops.matmul import linear
from sferic.ops.precision import fp32

IGNORE = -100
CHUNK = 1024


def linear_cross_entropy(h: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """Sum over tokens of -log softmax(h @ weight.T)[label], in at least float32.

    Args:
        h: [T, D]; the products run in its dtype.
        weight: [V, D]; its gradient is summed in its own dtype.
        labels: [T]; tokens with label -100 don't count.

    Returns:
        A scalar.  Divide by the global number of labels, whatever ranks and micro-batches hold.
    """
    if labels.shape != h.shape[:1]:
        raise ValueError(f"labels {list(labels.shape)} must be [T] = {list(h.shape[:1])}")
    if torch.is_grad_enabled() and (h.requires_grad or weight.requires_grad):
        return _LinearCrossEntropy.apply(h, weight, labels)
    return token_losses(h, weight, labels).sum()


def token_losses(h: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """The loss of each token, [T], at least float32, 0 where the label is -100; no gradient."""
    with torch.no_grad():
        w = weight.to(h.dtype)
        return torch.cat([_losses(h[c], w, labels[c])[0] for c in _chunks(h)])


def _chunks(h: Tensor) -> list[slice]:
    return [slice(a, a + CHUNK) for a in range(0, max(len(h), 1), CHUNK)]


def _losses(h: Tensor, w: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Losses, logits and their log-sum-exp, [n], [n, V] and [n]."""
    logits = linear(h, w).to(fp32(h.dtype))
    lse = logits.logsumexp(-1)
    target = logits.gather(1, labels.clamp(min=0)[:, None])[:, 0]
    return torch.where(labels == IGNORE, 0, lse - target), logits, lse


class _LinearCrossEntropy(torch.autograd.Function):
    """Gradients are formed on the way forward, while a chunk's logits exist."""

    @staticmethod
    def forward(ctx: FunctionCtx, h: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        w = weight.to(h.dtype)
        total = h.new_zeros((), dtype=fp32(h.dtype))
        dh, dw = torch.empty_like(h), torch.zeros_like(weight)
        for c in _chunks(h):
            losses, logits, lse = _losses(h[c], w, labels[c])
            total += losses.sum()
            counted = labels[c] != IGNORE
            lse = lse.masked_fill(~counted, float("inf"))  # makes the rows without label 0
            probs = logits.sub_(lse[:, None]).exp_()
            minus = -counted.to(probs.dtype)[:, None]
            dlogits = probs.scatter_add_(1, labels[c].clamp(min=0)[:, None], minus).to(h.dtype)
            dh[c] = linear(dlogits, w.T)
            dw += linear(dlogits.T, h[c].T)
        ctx.save_for_backward(dh, dw)
        return total

    @staticmethod
    def backward(ctx: FunctionCtx, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        dh, dw = ctx.saved_tensors  # type: ignore[attr-defined]
        (grad,) = grads
        return dh * grad.to(dh.dtype), dw * grad.to(dw.dtype), None
