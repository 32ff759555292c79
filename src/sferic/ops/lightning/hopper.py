"""Lightning attention for Hopper (sm_90) in Gluon, at the speed of memory: the host's side.

The functions are those that `scans.py` asks of kernels; the kernels are in `hopper_kernels.py`.
Where sequences are split, the sums of parts are the plain Triton kernel's.
"""

from functools import lru_cache

import torch
import triton
from torch import Tensor
from triton.runtime._allocation import NullAllocator, _allocator

from sferic.ops.launch import launch
from sferic.ops.lightning import hopper_kernels as kernels
from sferic.ops.lightning import triton as plain
from sferic.ops.lightning.plan import Plan, batch_plan, pack_plan
from sferic.ops.lightning.scans import Parts, Pool
from sferic.ops.lightning.triton import parts, pool

__all__ = ["parts", "plan", "plan_back", "pool", "problem", "ready", "scan", "scan_back"]

CHUNK = 64
WIDTH = 128  # of a tile; smaller head dims are padded by TMA
BUFFERS = 2  # of each input; a third measured slower


def problem(q: Tensor, k: Tensor, v: Tensor) -> str | None:
    """Why these kernels can't take an input, or None."""
    if not q.is_cuda or _capability(q.device.index) != (9, 0):
        return f"{q.device} is no Hopper GPU (sm_90)"
    if q.dtype not in (torch.bfloat16, torch.float16) or not q.dtype == k.dtype == v.dtype:
        return f"q {q.dtype}, k {k.dtype}, v {v.dtype} are not all bfloat16 or float16"
    dims = q.shape[-1], v.shape[-1]
    if any(d % 8 or not WIDTH // 2 < d <= WIDTH for d in dims):
        return f"head dims {dims[0]} and {dims[1]} are not multiples of 8 in 72..{WIDTH}"
    return None


@lru_cache
def _capability(device: int) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


def plan(
    q: Tensor, v: Tensor, cu_seqlens: Tensor | None, deterministic: bool, scans: int = 1
) -> Plan:
    """The cut of q [B, T, H, K] or [T, H, K] for a launch of so many scans."""
    programs = plain.processors(q.device.index)
    heads = q.shape[-2] * scans
    if cu_seqlens is None:
        return batch_plan(q.shape[0], q.shape[1], heads, CHUNK, programs, deterministic)
    cut = pack_plan(cu_seqlens, q.shape[0], heads, CHUNK, programs, deterministic)
    plain.place_items(cut, deterministic)
    return cut


def plan_back(q: Tensor, v: Tensor, forward: Plan, deterministic: bool) -> Plan:
    """The cut for `scan_back`, which needs half as many items to fill the GPU."""
    return plan(q, v, forward.cu_seqlens, deterministic, scans=2)


def ready(x: Tensor) -> Tensor:
    """The input as TMA reads it: last stride 1, other strides and the address full 16 bytes."""
    strides = x.stride()
    good = strides[-1] == 1 and x.data_ptr() % 16 == 0
    good = good and all(s % 8 == 0 and (s > 0) for s in strides[:-1])
    return x if good else x.contiguous()


def scan(
    plan: Plan,
    slopes: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    out: Tensor,
    *,
    reverse: bool = False,
    transposed: bool = False,
    parts: Parts | None = None,
    entering: Tensor | None = None,
    leaving: Tensor | None = None,
    pool: Pool | None = None,
) -> None:
    """See `scans.Kernels`."""
    heads = b.shape[-2]
    sums, entry = parts or (slopes, slopes)
    slots, known, checkpoints = pool or (slopes, slopes, None)
    lengths, firsts = checkpoints or (slopes, slopes)
    _allow_scratch()
    launch(
        kernels.scan_kernel,
        plan.items * heads,
        (a, b, c, out, slopes, sums, entry, _or(entering, slopes), _or(leaving, slopes),
         slots, known, lengths, firsts, _or(plan.cu_seqlens, slopes), _or(plan.table, slopes)),
        (plan.tokens, plan.segments, heads, plan.shares,
         0 if checkpoints is None else lengths.shape[1],
         *plain.strides(a), *plain.strides(b), *plain.strides(c), *plain.strides(out)),
        (),
        (b.shape[-1], c.shape[-1], CHUNK, WIDTH, BUFFERS, reverse, transposed,
         plan.table is not None, plan.split, entering is not None, leaving is not None,
         pool is not None, checkpoints is not None,
         leaving is not None and b.shape[-1] == WIDTH),
        num_warps=4,
    )  # fmt: skip


def scan_back(
    plan: Plan,
    slopes: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    do: Tensor,
    dk: Tensor,
    dv: Tensor,
    *,
    parts: Parts | None,
    entering: Tensor | None,
    leaving: Tensor | None,
) -> None:
    """See `scans.Kernels`."""
    heads = q.shape[-2]
    sums, entry = parts or (slopes, slopes)
    _allow_scratch()
    launch(
        kernels.scan_back_kernel,
        2 * plan.items * heads,
        (q, k, v, do, dk, dv, slopes, sums, entry, _or(entering, slopes), _or(leaving, slopes),
         _or(plan.cu_seqlens, slopes), _or(plan.table, slopes)),
        (plan.tokens, plan.segments, heads, plan.shares,
         *(s for x in (q, k, v, do, dk, dv) for s in plain.strides(x))),
        (),
        (q.shape[-1], v.shape[-1], CHUNK, WIDTH, BUFFERS, plan.table is not None, plan.split,
         entering is not None, leaving is not None,
         leaving is not None and q.shape[-1] == WIDTH),
        num_warps=4,
    )  # fmt: skip


def _or(x: Tensor | None, instead: Tensor) -> Tensor:
    """Kernels take a tensor even where they read none."""
    return instead if x is None else x


def _allow_scratch() -> None:
    """The kernels build their TMA descriptors in memory for which Triton asks the caller."""
    if isinstance(_allocator.get(), NullAllocator):
        triton.set_allocator(_scratch)


def _scratch(size: int, alignment: int, stream: int | None) -> Tensor:
    return torch.empty(size, dtype=torch.int8, device="cuda")
