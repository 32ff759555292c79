"""Lightning attention: the operator of training, and its two forms that work on a slot pool."""

from itertools import pairwise

import torch
from torch import Tensor

from sferic.ops.lightning.backend import Backend, kernels_for
from sferic.ops.lightning.blocks import lightning_blocks
from sferic.ops.lightning.pool import lightning_decode, lightning_prefill
from sferic.ops.lightning.scans import attention
from sferic.ops.lightning.slopes import lightning_slopes
from sferic.ops.packs import check_cu_seqlens
from sferic.ops.precision import fp32

__all__ = ["lightning_attention", "lightning_decode", "lightning_prefill", "lightning_slopes"]


def lightning_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    slopes: Tensor,
    *,
    initial_state: Tensor | None = None,
    return_state: bool = False,
    cu_seqlens: Tensor | None = None,
    deterministic: bool = False,
    backend: Backend = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """S_t = exp(-slope) S_{t-1} + k_t v_t^T, o_t = S_t^T q_t (arXiv 2501.08313, section 2.2).

    Args:
        q, k: [B, T, H, K], or packed [T, H, K] with cu_seqlens.
        v: [B, T, H, V], or packed [T, H, V].
        slopes: [H], >= 0; any size, no slope overflows.
        initial_state: [B or S, H, K, V], zeros if None.
        return_state: also return the state after each sequence, at least float32.
        cu_seqlens: [S + 1] int32, offsets of the S documents of a pack; empty ones are allowed.
        deterministic: a sequence's bits don't depend on its neighbours in the batch or pack.
        backend: "reference" is the block form in plain PyTorch, "triton" the kernels for any GPU,
            "hopper" those for sm_90; "auto" takes the fastest that can.

    Returns:
        o in the shape and dtype of v, or (o, state [B or S, H, K, V]).

    Raises:
        ValueError: on shapes that don't fit together, or that the backend can't take, naming them.
    """
    _check(q, k, v, slopes, initial_state, cu_seqlens)
    kernels = kernels_for(backend, q, k, v, slopes)
    if kernels is not None:
        o, state = attention(
            kernels, q, k, v, slopes, initial_state, cu_seqlens, return_state, deterministic
        )
        return o if state is None else (o, state)
    if cu_seqlens is None:
        o, state = _batch(q, k, v, slopes, initial_state, deterministic)
    elif initial_state is None and not return_state and not deterministic:
        return _pack(q, k, v, slopes, cu_seqlens)
    else:
        o, state = _documents(q, k, v, slopes, initial_state, cu_seqlens)
    return (o, state) if return_state else o


def _batch(
    q: Tensor, k: Tensor, v: Tensor, slopes: Tensor, state: Tensor | None, one_by_one: bool
) -> tuple[Tensor, Tensor]:
    if not one_by_one or len(q) < 2:
        return _sequence(q, k, v, slopes, state)
    rows = [slice(b, b + 1) for b in range(len(q))]
    parts = [_sequence(q[b], k[b], v[b], slopes, None if state is None else state[b]) for b in rows]
    return torch.cat([o for o, _ in parts]), torch.cat([s for _, s in parts])


def _pack(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor, cu_seqlens: Tensor) -> Tensor:
    """All documents at once."""
    if len(q) == 0:
        return v
    documents = None
    if cu_seqlens.numel() > 2:
        t = torch.arange(len(q), device=q.device, dtype=cu_seqlens.dtype)
        documents = torch.searchsorted(cu_seqlens, t, right=True)
    return lightning_blocks(q[None], k[None], v[None], slopes, None, documents)[0][0]


def _documents(
    q: Tensor, k: Tensor, v: Tensor, slopes: Tensor, state: Tensor | None, cu_seqlens: Tensor
) -> tuple[Tensor, Tensor]:
    """Document by document, each with its states."""
    if cu_seqlens.numel() == 1:
        return v, _zeros(q, v, 0) if state is None else state
    parts = []
    for n, (a, b) in enumerate(pairwise(cu_seqlens.tolist())):
        before = None if state is None else state[n : n + 1]
        parts.append(_sequence(q[None, a:b], k[None, a:b], v[None, a:b], slopes, before))
    return torch.cat([o[0] for o, _ in parts]), torch.cat([s for _, s in parts])


def _sequence(
    q: Tensor, k: Tensor, v: Tensor, slopes: Tensor, state: Tensor | None
) -> tuple[Tensor, Tensor]:
    if q.shape[1] > 0:
        return lightning_blocks(q, k, v, slopes, state)
    return v, _zeros(q, v, len(q)) if state is None else state


def _zeros(q: Tensor, v: Tensor, sequences: int) -> Tensor:
    dtype = fp32(q.dtype)
    return q.new_zeros(sequences, q.shape[-2], q.shape[-1], v.shape[-1], dtype=dtype)


def _check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    slopes: Tensor,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
) -> None:
    dims, form = (4, "[B, T, H, K]") if cu_seqlens is None else (3, "[T, H, K] with cu_seqlens")
    shape, shape_v = q.shape, v.shape
    if len(shape) != dims or shape != k.shape or shape_v[:-1] != shape[:-1]:
        shapes = f"q {list(shape)}, k {list(k.shape)}, v {list(shape_v)}"
        raise ValueError(f"{shapes}: q and k must be {form}, v the same with its own last size")
    H, K, V = shape[-2], shape[-1], shape_v[-1]
    if slopes.shape != (H,):
        raise ValueError(f"slopes {list(slopes.shape)} must be [H] = [{H}]")
    if not slopes.is_cuda and slopes.device.type == "cpu" and not bool((slopes >= 0).all()):
        raise ValueError(f"slopes must be >= 0 (decay is exp(-slope)): {slopes.tolist()}")
    sequences = shape[0] if cu_seqlens is None else cu_seqlens.numel() - 1
    if initial_state is not None and initial_state.shape != (sequences, H, K, V):
        want = [sequences, H, K, V]
        raise ValueError(f"initial_state {list(initial_state.shape)} must be {want}")
    if cu_seqlens is not None:
        check_cu_seqlens(cu_seqlens, shape[0])
