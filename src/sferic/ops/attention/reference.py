"""Causal softmax attention over packed documents as one masked product: the truth."""

import torch
from torch import Tensor

from sferic.ops.precision import at_least_float32


def attention_quadratic(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """softmax(scale Q K^T) V within each document and causally; memory grows with T squared.

    Args:
        q: [T, H, K]; k, v: [T, G, K], head h reads KV head h // (H / G).
        cu_seqlens: [S + 1].
        scale: multiplies the scores.

    Returns:
        o [T, H, K] in the dtype of q, and the log-sum-exp of the scores, [T, H], at least float32.
    """
    T, H, _ = q.shape
    group = H // k.shape[1]
    q_, k_, v_ = at_least_float32(q, k, v)
    k_, v_ = k_.repeat_interleave(group, dim=1), v_.repeat_interleave(group, dim=1)
    t = torch.arange(T, device=q.device)
    doc = torch.searchsorted(cu_seqlens, t.to(cu_seqlens.dtype), right=True)
    allowed = (doc[:, None] == doc) & (t[:, None] >= t)
    scores = torch.einsum("ihk,jhk->hij", q_, k_) * scale
    scores = scores.masked_fill(~allowed, float("-inf"))
    o = torch.einsum("hij,jhk->ihk", scores.softmax(-1), v_)
    return o.to(q.dtype), scores.logsumexp(-1).T
