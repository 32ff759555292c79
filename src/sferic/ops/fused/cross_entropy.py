"""Cross entropy of a linear head, a chunk of tokens at a time: the logits never exist whole."""

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

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
    return _LinearCrossEntropy.apply(h, weight, labels)


def token_losses(h: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """The loss of each token, [T], at least float32, 0 where the label is -100; no gradient."""
    with torch.no_grad():
        parts = [
            _losses(logits, lab) for _, _, logits, lab in _chunks(h, weight.to(h.dtype), labels)
        ]
    return torch.cat(parts)


def _chunks(h: Tensor, weight: Tensor, labels: Tensor):  # noqa: ANN202
    dtype = torch.promote_types(h.dtype, torch.float32)
    for a in range(0, h.shape[0], CHUNK):
        b = min(a + CHUNK, h.shape[0])
        yield a, b, (h[a:b] @ weight.T).to(dtype), labels[a:b]


def _losses(logits: Tensor, labels: Tensor) -> Tensor:
    target = logits.gather(1, labels.clamp(min=0)[:, None])[:, 0]
    return torch.where(labels == IGNORE, 0, logits.logsumexp(-1) - target)


class _LinearCrossEntropy(torch.autograd.Function):
    """Gradients are formed on the way forward, while a chunk's logits exist."""

    @staticmethod
    def forward(ctx: FunctionCtx, h: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        need = ctx.needs_input_grad[0] or ctx.needs_input_grad[1]  # type: ignore[attr-defined]
        w = weight.to(h.dtype)
        total = h.new_zeros((), dtype=torch.promote_types(h.dtype, torch.float32))
        dh = torch.empty_like(h) if need else None
        dw = torch.zeros_like(weight) if need else None
        for a, b, logits, lab in _chunks(h, w, labels):
            total += _losses(logits, lab).sum()
            if dh is not None and dw is not None:
                minus = logits.new_full((b - a, 1), -1.0)
                dlogits = logits.softmax(-1).scatter_add_(1, lab.clamp(min=0)[:, None], minus)
                dlogits = (dlogits * (lab != IGNORE)[:, None]).to(h.dtype)
                dh[a:b] = dlogits @ w
                dw += dlogits.T @ h[a:b]
        if dh is not None and dw is not None:
            ctx.save_for_backward(dh, dw)
        return total

    @staticmethod
    def backward(ctx: FunctionCtx, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        dh, dw = ctx.saved_tensors  # type: ignore[attr-defined]
        (grad,) = grads
        return dh * grad.to(dh.dtype), dw * grad.to(dw.dtype), None
