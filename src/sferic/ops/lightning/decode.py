"""One token for each row on a pool of states, in Triton: read a state, write it, nothing else."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from sferic.ops.launch import launch
from sferic.ops.lightning.triton import power_of_2, problem

__all__ = ["decode", "problem"]

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _silu(x):
    return x / (1.0 + tl.exp2(-x * LOG2E))


@triton.jit(do_not_specialize=["heads"])
def _decode_kernel(
    Q, K_, V_, OUT, SLOPES, POOL, SLOTS, heads,
    q_row, q_head, k_row, k_head, v_row, v_head,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, SILU: tl.constexpr,
):  # fmt: skip
    """A program: one row, one head, BV columns of its state [K, V]."""
    blocks: tl.constexpr = (V + BV - 1) // BV
    pid = tl.program_id(0)
    block = pid % blocks
    head = pid // blocks % heads
    row = (pid // blocks // heads).to(tl.int64)
    slot = tl.load(SLOTS + row).to(tl.int64)
    live = slot >= 0
    rows = tl.arange(0, BK)
    columns = block * BV + tl.arange(0, BV)
    has_k, has_v = (rows < K) & live, (columns < V) & live
    place = POOL + (slot * heads + head) * K * V + rows[:, None] * V + columns[None, :]
    inside = has_k[:, None] & has_v[None, :]
    state = tl.load(place, mask=inside, other=0.0)
    q = tl.load(Q + row * q_row + head * q_head + rows, mask=has_k, other=0.0).to(tl.float32)
    k = tl.load(K_ + row * k_row + head * k_head + rows, mask=has_k, other=0.0).to(tl.float32)
    v = tl.load(V_ + row * v_row + head * v_head + columns, mask=has_v, other=0.0).to(tl.float32)
    if SILU:
        q, k, v = _silu(q), _silu(k), _silu(v)
    decay = tl.exp2(-tl.load(SLOPES + head).to(tl.float32) * LOG2E)
    state = state * decay + k[:, None] * v[None, :]
    tl.store(place, state, mask=inside)
    out = tl.sum(q[:, None] * state, 0)
    to = OUT + (row * heads + head) * V + columns
    tl.store(to, out.to(OUT.dtype.element_ty), mask=columns < V)


def decode(
    q: Tensor, k: Tensor, v: Tensor, slopes: Tensor, pool: Tensor, slots: Tensor, silu: bool
) -> Tensor:
    """`lightning_decode` of a float32 pool."""
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    rows, heads, K = q.shape
    V = v.shape[-1]
    out = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    few = rows * heads <= 128  # then smaller programs keep more of the GPU busy
    BK, BV = power_of_2(K), min(32 if few else 64, power_of_2(V))
    launch(
        _decode_kernel,
        rows * heads * -(-V // BV),
        (q, k, v, out, slopes, pool, slots),
        (heads,),
        (*q.stride()[:2], *k.stride()[:2], *v.stride()[:2]),
        (K, V, BK, BV, silu),
        num_warps=8 if few or BK * BV > 8192 else 4,
    )
    return out
