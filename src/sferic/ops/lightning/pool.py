"""Lightning attention on a pool of state slots, written in place: the forms that serving uses."""

import torch
import torch.nn.functional as F
from torch import Tensor

from sferic.ops.lightning.backend import Backend, kernels_for
from sferic.ops.lightning.blocks import lightning_blocks
from sferic.ops.lightning.scans import prefill
from sferic.ops.packs import check_cu_seqlens
from sferic.ops.precision import at_least_float32
from sferic.ops.slots import consecutive, fill_empty_rows


def lightning_prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    slopes: Tensor,
    state_pool: Tensor,
    slots: Tensor,
    has_state: Tensor,
    cu_seqlens: Tensor,
    *,
    checkpoints: tuple[Tensor, Tensor, Tensor] | None = None,
    silu: bool = False,
    backend: Backend = "auto",
) -> Tensor:
    """Run a pack of sequences (or chunks of them) and leave their states in the pool.

    Args:
        q, k: [T, H, K]; v: [T, H, V].
        slopes: [H].
        state_pool: [slots, H, K, V] of one layer, written in place.
        slots: [S], the slot of each sequence, all different.
        has_state: [S] bool; where False the slot's old content is ignored.
        cu_seqlens: [S + 1] int32.
        checkpoints: (sequence, length, slot), [M] each: also write the state that a sequence has
            after its first `length` tokens of this call to that slot.
        silu: apply SiLU to q, k and v on the way in.
        backend: as in `lightning_attention`; kernels want a contiguous float32 pool and don't
            look at the numbers in slots, cu_seqlens and checkpoints.

    Returns:
        o [T, H, V] in the dtype of v.
    """
    check_cu_seqlens(cu_seqlens, len(q))
    if silu:
        q, k, v = F.silu(q), F.silu(k), F.silu(v)
    kernels = kernels_for(backend, q, k, v, slopes, state_pool)
    if kernels is not None:
        return prefill(
            kernels, q, k, v, slopes, state_pool, slots, has_state, cu_seqlens, checkpoints
        )
    own, sequences = slots.tolist(), cu_seqlens.numel() - 1
    if len(own) != sequences or len(set(own)) != sequences or min(own, default=0) < 0:
        raise ValueError(
            f"slots {own} must be a different one, >= 0, for each of the {sequences} sequences: "
            "every sequence of a prefill needs a slot"
        )
    ends = cu_seqlens.tolist()
    wanted: dict[int, list[tuple[int, int]]] = {}
    if checkpoints is not None:
        for sequence, length, slot in zip(*(c.tolist() for c in checkpoints), strict=True):
            limit = ends[sequence + 1] - ends[sequence]
            if not 0 <= length <= limit:
                raise ValueError(
                    f"checkpoint of sequence {sequence} at {length} tokens: it has {limit} here"
                )
            wanted.setdefault(sequence, []).append((length, slot))
    out = torch.empty_like(v)
    for n, (slot, known) in enumerate(zip(own, has_state.tolist(), strict=True)):
        state = state_pool[slot] if known else torch.zeros_like(state_pool[slot])
        state = state[None].to(torch.promote_types(state.dtype, q.dtype))
        a = ends[n]
        for length, copy in [*sorted(wanted.get(n, [])), (ends[n + 1] - ends[n], slot)]:
            b = ends[n] + length
            if b > a:
                o, state = lightning_blocks(q[None, a:b], k[None, a:b], v[None, a:b], slopes, state)
                out[a:b] = o[0]
            state_pool[copy] = state[0]
            a = b
    return out


def lightning_decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    slopes: Tensor,
    state_pool: Tensor,
    slots: Tensor,
    *,
    silu: bool = False,
    backend: Backend = "auto",
) -> Tensor:
    """One token per row, its state updated in place; no host synchronisation.

    Args:
        q, k: [S, H, K]; v: [S, H, V].
        slopes: [H].
        state_pool: [slots, H, K, V] of one layer.
        slots: [S]; -1 marks an empty row: its output is zero and it writes nothing.
        silu: apply SiLU to q, k and v on the way in.
        backend: "reference", "triton" (a contiguous float32 pool), or "auto", the fastest that can.

    Returns:
        o [S, H, V] in the dtype of v.
    """
    if len(slots) != len(q):
        raise ValueError(f"{len(slots)} slots for {len(q)} rows: each row needs one")
    if len(slots) == 0:
        return v
    kernels = kernels_for(backend, q, k, v, slopes, state_pool, decode=True)
    if kernels is not None:
        return kernels.decode(q, k, v, slopes, state_pool, slots, silu)
    if silu:
        q, k, v = F.silu(q), F.silu(k), F.silu(v)
    q_, k_, v_ = at_least_float32(q, k, v)
    decay = torch.exp(-slopes.to(q_.dtype))[:, None, None]
    first = consecutive(slots, len(state_pool))
    if first is not None and state_pool.dtype == q_.dtype and not torch.is_grad_enabled():
        state = state_pool[first : first + len(slots)]
        state.mul_(decay).addcmul_(k_[..., :, None], v_[..., None, :])
        return torch.bmm(q_.flatten(0, 1)[:, None], state.flatten(0, 1)).view_as(v).to(v.dtype)
    live, rows, index = fill_empty_rows(slots)
    if rows is not None:
        q_, k_, v_ = q_[rows], k_[rows], v_[rows]
    old = state_pool[index]
    new = torch.addcmul(decay * old.to(q_.dtype), k_[..., :, None], v_[..., None, :])
    stored = new.to(old.dtype)
    state_pool[index] = stored if live is None else torch.where(live.any(), stored, old)
    o = (q_[..., None, :] @ new)[..., 0, :].to(v.dtype)
    return o if live is None else torch.where(live[:, None, None], o, 0)
