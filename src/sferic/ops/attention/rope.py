"""Rotary position embedding on the first dims of each head."""

import torch
from torch import Tensor

from sferic.ops.precision import fp32


def rope(x: Tensor, positions: Tensor, rope_dim: int, base: float) -> Tensor:
    """Rotate dims 0 .. R - 1, R = rope_dim, in pairs (i, i + R/2) by positions * base^(-2i/R).

    Angles are computed in at least float32, the other dims pass through (MiniMax-01: half of each
    head; "rotate-half" pairing of the released model).

    Args:
        x: [T, heads, K].
        positions: [T], integers.

    Returns:
        [T, heads, K] in the dtype of x.
    """
    dtype = fp32(x.dtype)
    exponent = torch.arange(0, rope_dim, 2, device=x.device, dtype=dtype) / rope_dim
    angle = positions.to(dtype)[:, None, None] * base**-exponent  # [T, 1, rope_dim / 2]
    cos, sin = angle.cos(), angle.sin()
    a, b, rest = x.split([rope_dim // 2, rope_dim // 2, x.shape[-1] - rope_dim], dim=-1)
    a_, b_ = a.to(dtype), b.to(dtype)
    rotated = torch.cat([a_ * cos - b_ * sin, b_ * cos + a_ * sin], dim=-1).to(x.dtype)
    return torch.cat([rotated, rest], dim=-1)
