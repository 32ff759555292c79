"""Lightning attention in plain Triton, for any GPU that Triton supports: the host's side.

The functions are those that `scans.py` asks of kernels; the kernels are in `triton_kernels.py`.
"""

from dataclasses import dataclass
from functools import lru_cache

import torch
import triton
from torch import Tensor

from sferic.ops.launch import launch
from sferic.ops.lightning import triton_kernels as kernels
from sferic.ops.lightning.plan import COLUMNS, SEGMENT, Plan, batch_plan, pack_plan
from sferic.ops.lightning.scans import Parts, Pool

INTERPRETED = triton.knobs.runtime.interpret  # pyright: ignore
PARTS_COLUMNS, PARTS_WARPS, PARTS_STAGES = 64, 4, 4


@dataclass(frozen=True)
class Tile:
    """Sizes of a program: chunk and column blocks, what a product keeps, loads in flight."""

    chunk: int
    width: int  # of a and b, padded
    columns: int  # of c in one program
    precision: str
    stages: int
    warps: int


@lru_cache
def tile(width: int, columns: int, dtype: torch.dtype, tf32: bool, memory: int) -> Tile:
    """The tile for a, b [.., width] and c [.., columns] on a GPU with so much shared memory."""
    wide = max(16, power_of_2(width))
    single = dtype == torch.float32
    chunk = 32 if single else 64
    block = min(32 if wide > 128 or single else 64, max(16, power_of_2(columns)))
    stage = chunk * (2 * wide + block) * dtype.itemsize
    stages = max(1, min(2, (memory - 24 * 1024) // stage))
    precision = "tf32" if single and tf32 else "ieee"
    return Tile(chunk, wide, block, precision, stages, 8 if wide > 128 or single else 4)


def power_of_2(n: int) -> int:
    """The least one that is not below n."""
    return 1 << (n - 1).bit_length()


def _tile(b: Tensor, c: Tensor) -> Tile:
    tf32 = b.dtype == torch.float32 and torch.backends.cuda.matmul.allow_tf32
    return tile(b.shape[-1], c.shape[-1], b.dtype, tf32, _memory(b))


def _memory(x: Tensor) -> int:
    """Bytes of shared memory that a program may have."""
    return _shared_memory(x.device.index) if x.is_cuda else 99 * 1024


@lru_cache
def _shared_memory(device: int) -> int:
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin


@lru_cache
def processors(device: int) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def problem(q: Tensor, k: Tensor, v: Tensor) -> str | None:
    """Why these kernels can't take an input, or None."""
    if q.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f"{q.dtype} is not bfloat16, float16 or float32"
    if not q.dtype == k.dtype == v.dtype:
        return f"q {q.dtype}, k {k.dtype} and v {v.dtype} differ"
    if max(q.shape[-1], v.shape[-1]) > 256:
        return f"head dims {q.shape[-1]} and {v.shape[-1]} go beyond 256"
    if not q.is_cuda and not INTERPRETED:
        return f"{q.device} is no GPU"
    if INTERPRETED and q.dtype == torch.bfloat16:
        return "Triton's interpreter multiplies no bfloat16"
    return None


def plan(q: Tensor, v: Tensor, cu_seqlens: Tensor | None, deterministic: bool) -> Plan:
    """The cut of q [B, T, H, K] or [T, H, K], its table filled."""
    chunk = _tile(q, v).chunk
    here = processors(q.device.index) if q.is_cuda else 4
    # two programs for each block of v's columns fill a multiprocessor
    programs = max(1, 2 * here // -(-v.shape[-1] // _tile(q, v).columns))
    if cu_seqlens is None:
        return batch_plan(q.shape[0], q.shape[1], q.shape[2], chunk, programs, deterministic)
    cut = pack_plan(cu_seqlens, q.shape[0], q.shape[1], chunk, programs, deterministic)
    place_items(cut, deterministic)
    return cut


def plan_back(q: Tensor, v: Tensor, forward: Plan, deterministic: bool) -> Plan:
    """The cut for `scan_back`: here the same."""
    return forward


def place_items(plan: Plan, deterministic: bool) -> None:
    """Fill a pack's table."""
    assert plan.cu_seqlens is not None
    assert plan.table is not None
    launch(
        kernels.place_items,
        plan.items,
        (plan.cu_seqlens, plan.table),
        (plan.sequences, plan.items),
        (),
        (plan.chunk, SEGMENT if deterministic else 0, COLUMNS, 256),
        num_warps=4,
    )


def pool(
    slots: Tensor, has_state: Tensor, checkpoints: tuple[Tensor, Tensor, Tensor] | None
) -> Pool:
    """The slots [S] of a pack's documents; checkpoints are (document, length, slot), [M] each."""
    slots = slots.to(torch.int32).contiguous()
    known = has_state.to(torch.uint8).contiguous()
    if checkpoints is None or checkpoints[0].numel() == 0:
        return Pool(slots, known)
    rows, documents = torch.stack([x.to(torch.int32) for x in checkpoints]), len(slots)
    count = rows.shape[1]
    ordered, first = rows.new_empty(2, count), rows.new_empty(documents + 1)
    launch(
        kernels.sort_checkpoints,
        -(-max(count, documents + 1) // 128),
        (rows, ordered, first),
        (count, documents),
        (),
        (128,),
        num_warps=4,
    )
    return Pool(slots, known, (ordered, first))


def parts(
    plan: Plan,
    slopes: Tensor,
    b: Tensor,
    c: Tensor,
    *,
    reverse: bool = False,
    entering: Tensor | None = None,
    pool: Pool | None = None,
) -> Parts:
    """See `scans.Kernels`."""
    heads, width, columns = b.shape[-2], b.shape[-1], c.shape[-1]
    t = _tile(b, c)
    block = min(t.columns, PARTS_COLUMNS)
    sums = b.new_empty(plan.items, plan.shares, heads, width, columns, dtype=torch.float32)
    entry = torch.empty_like(sums[:, 0]) if entering is not None else sums
    stage = t.chunk * (t.width + block) * b.dtype.itemsize
    launch(
        kernels.parts_kernel,
        plan.items * heads * plan.shares * -(-columns // block),
        (b, c, slopes, sums, entry, entering, *(pool or (None, None))[:2],
         plan.cu_seqlens, plan.table),
        (plan.tokens, plan.segments, heads, plan.shares),
        (*strides(b), *strides(c)),
        (width, columns, t.width, block, t.chunk, reverse, plan.table is not None,
         entering is not None, pool is not None, t.precision),
        num_warps=PARTS_WARPS,
        num_stages=max(1, min(PARTS_STAGES, (_memory(b) - 24 * 1024) // stage)),
    )  # fmt: skip
    return sums, entry


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
    heads, width, columns = b.shape[-2], b.shape[-1], c.shape[-1]
    t = _tile(b, c)
    sums, entry = parts or (None, None)
    slots, known, checkpoints = pool or (None, None, None)
    lengths, firsts = checkpoints or (None, None)
    launch(
        kernels.scan_kernel,
        plan.items * heads * -(-columns // t.columns),
        (a, b, c, out, slopes, sums, entry, entering, leaving, slots, known, lengths, firsts,
         plan.cu_seqlens, plan.table),
        (plan.tokens, plan.segments, heads, plan.shares,
         0 if lengths is None else lengths.shape[1]),
        (*strides(a), *strides(b), *strides(c), *strides(out)),
        (width, columns, t.width, t.columns, t.chunk, reverse, transposed, plan.table is not None,
         plan.split, entering is not None, leaving is not None, pool is not None,
         checkpoints is not None, t.precision, t.stages),
        num_warps=t.warps,
    )  # fmt: skip


def strides(x: Tensor) -> tuple[int, int, int]:
    """Of batch, token and head; a pack has no batch."""
    s = x.stride()
    return s[:3] if len(s) == 4 else (0, s[0], s[1])


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
    """dk and dv, from the gradients of the final states to those of the initial ones."""
    scan(
        plan, slopes, k, q, do, dv,
        reverse=True, parts=parts, entering=entering, leaving=leaving,
    )  # fmt: skip
    scan(
        plan, slopes, v, do, q, dk,
        reverse=True, transposed=True, parts=parts, entering=entering,
    )  # fmt: skip


def ready(x: Tensor) -> Tensor:
    """The input as the kernels read it: last stride 1."""
    return x if x.stride(-1) == 1 else x.contiguous()
