"""Matrix products, at their fastest where the library's own choice is slow.

For float32 on a CPU, PyTorch calls MKL, which leaves AVX-512 unused on AMD processors; oneDNN,
which PyTorch also carries, uses it.  Both are IEEE float32 and differ in the order of their sums.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

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
    if not _onednn(x) or type(w) not in _PLAIN:
        return F.linear(x, w)
    return _Linear.apply(x, w) if torch.is_grad_enabled() else _product(x, w)


def grouped_matmul(x: Tensor, w: Tensor, offsets: Tensor) -> Tensor:
    """Each group of rows times its own matrix.

    Args:
        x: [N, K], rows of group 0 first, then of group 1, ...
        w: [E, K, M].
        offsets: [E] int32, where each group ends.

    Returns:
        [N, M].
    """
    if x.dtype == torch.float64 or _onednn(x):
        ends = offsets.tolist()
        rows = x.split([b - a for a, b in zip([0, *ends], ends, strict=False)])
        return torch.cat([linear(r, m.T) for r, m in zip(rows, w.unbind(), strict=True)])
    return F.grouped_mm(x, w, offs=offsets)


def _onednn(x: Tensor) -> bool:
    return (
        _HAS_ONEDNN
        and x.device.type == "cpu"
        and x.dtype == torch.float32
        and type(x) in _PLAIN
        and x.numel() > 0
    )


def _product(x: Tensor, w: Tensor) -> Tensor:
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
        dx = _product(dy, w.T) if ctx.needs_input_grad[0] else None
        if not ctx.needs_input_grad[1]:
            return dx, None
        return dx, _product(dy.flatten(0, -2).T, x.flatten(0, -2).T)
