"""Softmax attention with grouped K/V heads: over packs, over a cache, and the merge of two parts.

Legend: T tokens, H query heads, G K/V heads, K head dim, S sequences, L cached tokens.
"""

from itertools import pairwise

import torch
from torch import Tensor

from sferic.ops.attention.reference import attention_quadratic
from sferic.ops.attention.rope import rope
from sferic.ops.packs import check_cu_seqlens
from sferic.ops.precision import fp32

__all__ = [
    "attention_piece",
    "attention_quadratic",
    "decode_attention",
    "merge",
    "packed_attention",
    "prefill_attention",
    "rope",
]


def packed_attention(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_seqlen: int, scale: float
) -> tuple[Tensor, Tensor]:
    """Causal attention inside each document of a pack.

    Args:
        q: [T, H, K]; k, v: [T, G, K].
        cu_seqlens: [S + 1] int32; documents may be empty.
        max_seqlen: the longest document.
        scale: multiplies the scores.

    Returns:
        o [T, H, K] in the dtype of q, and log-sum-exp [T, H], at least float32.
    """
    check_cu_seqlens(cu_seqlens, len(q))
    _check_heads(q, k, v)
    if len(k) != len(q):
        raise ValueError(f"a pack of {len(q)} queries has {len(k)} keys: they must be as many")
    if q.device.type == "cuda" and q.dtype in (torch.float16, torch.bfloat16):
        n = max_seqlen
        o, lse, *_ = torch.ops.aten._flash_attention_forward(
            q, k, v, cu_seqlens, cu_seqlens, n, n, 0.0, True, False, scale=scale
        )
        return o, lse.T
    if q.device.type != "cpu":
        return attention_quadratic(q, k, v, cu_seqlens, scale)
    ends = cu_seqlens.tolist()
    pieces = [
        attention_piece(q[a:b], k[a:b], v[a:b], scale, causal=True)
        for a, b in pairwise(ends)
        if b > a
    ]
    if not pieces:
        return q, q.new_zeros(q.shape[:2], dtype=fp32(q.dtype))
    return torch.cat([o for o, _ in pieces]), torch.cat([lse for _, lse in pieces])


def attention_piece(
    q: Tensor, k: Tensor, v: Tensor, scale: float, *, causal: bool
) -> tuple[Tensor, Tensor]:
    """Attention of n queries to m keys, all of them or (n = m) causally; m >= 1.

    Args:
        q: [n, H, K]; k, v: [m, G, K].

    Returns:
        o [n, H, K], log-sum-exp [n, H].
    """
    _check_heads(q, k, v)
    if causal and q.shape[0] != k.shape[0]:
        raise ValueError(f"causal needs as many queries as keys, got {len(q)} and {len(k)}")
    if q.device.type == "cpu":
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        o, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, causal, scale=scale
        )
        return o[0].transpose(0, 1), lse[0].T
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    dtype = fp32(q.dtype)
    scores = torch.einsum("nhk,mhk->hnm", q, k).to(dtype) * scale
    if causal:
        future = torch.ones(len(q), len(q), dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(future, float("-inf"))
    o = torch.einsum("hnm,mhk->nhk", scores.softmax(-1).to(v.dtype), v)
    return o, scores.logsumexp(-1).T


def _check_heads(q: Tensor, k: Tensor, v: Tensor) -> None:
    """The library's attention reads past its inputs where these don't hold."""
    good = q.dim() == k.dim() == 3 and k.shape == v.shape and q.shape[-1] == k.shape[-1]
    if not good or k.shape[1] == 0 or q.shape[1] % k.shape[1] or not q.dtype == k.dtype == v.dtype:
        shapes = ", ".join(
            f"{n} {list(x.shape)} {x.dtype}" for n, x in zip("qkv", (q, k, v), strict=True)
        )
        raise ValueError(
            f"{shapes}: q must be [T, H, K], k and v [T, G, K] with G dividing H, in one dtype"
        )


def merge(o1: Tensor, lse1: Tensor, o2: Tensor, lse2: Tensor) -> tuple[Tensor, Tensor]:
    """Join attention over two disjoint sets of keys: o [n, H, K] and lse [n, H] of each."""
    lse = torch.logaddexp(lse1, lse2)
    w1, w2 = torch.exp(lse1 - lse)[..., None], torch.exp(lse2 - lse)[..., None]
    return (o1 * w1 + o2 * w2).to(o1.dtype), lse


def prefill_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    cached: list[tuple[Tensor, Tensor]],
    scale: float,
) -> Tensor:
    """Causal attention of new tokens to themselves and to their sequences' cached tokens.

    Args:
        q: [T, H, K]; k, v: [T, G, K], the new tokens, packed.
        cu_seqlens: [S + 1].
        cached: of each sequence its earlier keys and values, [L, G, K] each, L may be 0.

    Returns:
        o [T, H, K].
    """
    ends = cu_seqlens.tolist()
    outputs = []
    for a, b, (past_k, past_v) in zip(ends, ends[1:], cached, strict=False):
        if b == a:
            continue
        o, lse = attention_piece(q[a:b], k[a:b], v[a:b], scale, causal=True)
        if len(past_k):
            past = attention_piece(q[a:b], past_k, past_v, scale, causal=False)
            o, _ = merge(o, lse, *past)
        outputs.append(o)
    return torch.cat(outputs) if outputs else q


def decode_attention(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, scale: float) -> Tensor:
    """One query per row over its cached tokens; no host synchronisation.

    Args:
        q: [S, H, K].
        k, v: [S, L, G, K], of which the first `lengths` [S] tokens of a row count (the query's
            own token is among them).

    Returns:
        o [S, H, K].
    """
    S, H, K = q.shape
    L, G = k.shape[1:3]
    q = q.view(S, G, H // G, K)
    beyond = torch.arange(L, device=q.device) >= lengths[:, None]  # [S, L]
    dtype = fp32(q.dtype)
    scores = (q @ k.permute(0, 2, 3, 1)).to(dtype) * scale  # [S, G, H/G, L]
    scores = scores.masked_fill(beyond[:, None, None], float("-inf"))
    o = scores.softmax(-1).to(v.dtype) @ v.permute(0, 2, 1, 3)
    return o.reshape(S, H, K)
