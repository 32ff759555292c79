"""Matrix products, at their fastest where the library's own choice is slow.

For float32 on a CPU, PyTorch calls MKL, which leaves AVX-512 unused on AMD processors; oneDNN,
which PyTorch also carries, uses it.  Both are IEEE float32 and differ in the order of their sums.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sferic.ops.blocked import blocked_copy

# products of so few multiplications (or none) end before a call of oneDNN has begun, 8 us
SMALL = 2**18
_PLAIN = (Tensor, torch.nn.Parameter)  # not DTensor, fake tensors, ...
_HAS_ONEDNN = torch.backends.mkldnn.is_available() and hasattr(
    torch.ops.mkldnn, "_linear_pointwise"
)


def linear(x: Tensor, w: Tensor) -> Tensor:
    """x w^T.

    Args:
        x: [..., K].
        w: [N, K] in the dtype of x.

    Returns:
        [..., N].
    """
    fits = x.dim() > 1 and w.dim() == 2 and x.shape[-1] == w.shape[-1] and x.dtype == w.dtype
    if not (fits and x.dtype == torch.float32 and onednn_runs(x)):
        return F.linear(x, w)
    if x.numel() * len(w) <= SMALL:
        return F.linear(x, w)
    if torch.is_grad_enabled() and (x.requires_grad or w.requires_grad):
        return _Linear.apply(x, w)
    copy = blocked_copy(x, (w,), _rows)
    return _product(x, w) if copy is None else onednn_linear(x, copy)


def on_host(x: Tensor) -> bool:
    """Whether a tensor's numbers lie here, to be read without waiting (those of a fake don't)."""
    return x.device.type == "cpu" and type(x) in _PLAIN


def onednn_runs(x: Tensor) -> bool:
    """Whether oneDNN's own products can be called on x, if float32."""
    return _HAS_ONEDNN and on_host(x) and not torch.is_autocast_enabled("cpu")


def _product(x: Tensor, w: Tensor) -> Tensor:
    if not (w.is_contiguous() or w.T.is_contiguous()):
        w = (
            w.contiguous()
        )  # oneDNN takes a weight with gaps to a loop that is hundreds of times slower
    return onednn_linear(x, w)


def linears(x: Tensor, weights: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
    """x w^T of several weights in one product, or None where that is not faster.

    It is for few rows on a CPU: see `blocked.py`.
    """
    if torch.is_grad_enabled() or x.dtype != torch.float32 or not onednn_runs(x):
        return None
    copy = blocked_copy(x, weights, _rows)
    if copy is None:
        return None
    return onednn_linear(x, copy).split([len(w) for w in weights], -1)


def _rows(*weights: Tensor) -> Tensor:
    return torch.cat(weights)


def onednn_linear(x: Tensor, w: Tensor) -> Tensor:
    """x w^T of a plain or a blocked weight, without a gradient."""
    return torch.ops.mkldnn._linear_pointwise(x, w, None, "none", [], "")


class _Linear(torch.autograd.Function):
    """oneDNN's product has no gradient of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return _product(x, w)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None]:
        (dy,) = grads
        x, w = ctx.saved_tensors
        # by `linear`, so that a second derivative is one
        dx = linear(dy, w.T) if ctx.needs_input_grad[0] else None
        if not ctx.needs_input_grad[1]:
            return dx, None
        return dx, linear(dy.flatten(0, -2).T, x.flatten(0, -2).T)
