"""RMS norms with statistics in at least float32."""

import torch
import torch.nn.functional as F
from torch import Tensor

from sferic.ops.precision import fp32


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps), cast back to the dtype of x, then times weight [D]."""
    dtype = fp32(x.dtype)
    if x.dtype == dtype:  # nothing is cast between the two
        return F.rms_norm(x, x.shape[-1:], weight.to(dtype), eps)
    normed = F.rms_norm(x.to(dtype), x.shape[-1:], None, eps)
    return normed.to(x.dtype) * weight.to(x.dtype)


def gated_rms_norm(o: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """sigmoid(gate) * rms_norm over all heads jointly (lightning attention's output).

    Args:
        o: [T, H, V].
        gate: [T, H * V], before the sigmoid.
        weight: [H * V].

    Returns:
        [T, H * V].
    """
    return torch.sigmoid(gate) * rms_norm(o.flatten(1), weight, eps)
