"""Lightning attention by scans, with its gradients: see `triton.py` for what a scan is."""

from types import ModuleType
from typing import Any

import torch
from torch import Tensor


def attention(
    kernels: ModuleType,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    slopes: Tensor,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    return_state: bool,
    deterministic: bool,
) -> tuple[Tensor, Tensor | None]:
    """o and the state after each sequence (None unless asked for); `kernels` does the scans."""
    if initial_state is not None:
        initial_state = initial_state.to(torch.float32).contiguous()
    slopes = slopes.contiguous()
    args = (q, k, v, slopes, initial_state, cu_seqlens, return_state, deterministic)
    inputs = (q, k, v, initial_state)
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs):
        return _Attention.apply(kernels, *args)  # pyright: ignore
    return _forward(kernels, *args)[:2]


def _forward(
    kernels: Any,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    slopes: Tensor,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    return_state: bool,
    deterministic: bool,
) -> tuple[Tensor, Tensor | None, Any, Any]:
    q, k, v = kernels.ready(q), kernels.ready(k), kernels.ready(v)
    plan = kernels.plan(q, v, cu_seqlens, deterministic)
    parts = kernels.parts(plan, slopes, k, v, entering=initial_state) if plan.split else None
    o = v.new_empty(v.shape)
    state = None
    if return_state:
        shape = (plan.sequences, q.shape[-2], q.shape[-1], v.shape[-1])
        state = q.new_empty(shape, dtype=torch.float32)
    kernels.scan(
        plan, slopes, a=q, b=k, c=v, out=o, parts=parts, entering=initial_state, leaving=state
    )
    return o, state, plan, parts


def prefill(
    kernels: Any,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    slopes: Tensor,
    state_pool: Tensor,
    slots: Tensor,
    has_state: Tensor,
    cu_seqlens: Tensor,
    checkpoints: tuple[Tensor, Tensor, Tensor] | None,
) -> Tensor:
    """`lightning_prefill` by one scan whose states enter from the pool and leave to it."""
    q, k, v = kernels.ready(q), kernels.ready(k), kernels.ready(v)
    plan = kernels.plan(q, v, cu_seqlens, False)
    pool = kernels.pool(slots, has_state, checkpoints)
    parts = None
    if plan.split:
        parts = kernels.parts(plan, slopes, k, v, entering=state_pool, pool=pool)
    o = v.new_empty(v.shape)
    kernels.scan(
        plan, slopes, a=q, b=k, c=v, out=o,
        parts=parts, entering=state_pool, leaving=state_pool, pool=pool,
    )  # fmt: skip
    return o


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, kernels: Any, q: Tensor, k: Tensor, v: Tensor, *args: Any) -> Any:
        slopes, initial_state, *options = args
        o, state, plan, parts = _forward(kernels, q, k, v, slopes, initial_state, *options)
        ctx.save_for_backward(q, k, v, slopes, initial_state, *(parts or ()))
        ctx.kernels, ctx.plan, ctx.deterministic = kernels, plan, options[-1]
        ctx.set_materialize_grads(False)
        return o, state

    @staticmethod
    def backward(ctx: Any, do: Tensor | None, dstate: Tensor | None) -> Any:
        if torch.is_grad_enabled():  # create_graph: the result would miss its own graph
            raise RuntimeError(
                "the kernels of lightning attention have no second derivative; "
                'backend="reference" has'
            )
        kernels, plan = ctx.kernels, ctx.plan
        q, k, v, slopes, initial_state, *parts = ctx.saved_tensors
        do = v.new_zeros(v.shape) if do is None else kernels.ready(do)
        q, k, v = kernels.ready(q), kernels.ready(k), kernels.ready(v)
        dq, dk, dv = (x.new_empty(x.shape) for x in (q, k, v))
        if dstate is not None:
            dstate = dstate.contiguous()
        dinitial = None
        if initial_state is not None and ctx.needs_input_grad[5]:
            dinitial = torch.empty_like(initial_state)
        kernels.scan(
            plan, slopes, a=do, b=v, c=k, out=dq,
            transposed=True, parts=parts or None, entering=initial_state,
        )  # fmt: skip
        back = kernels.plan_back(q, v, plan, ctx.deterministic)
        behind = None
        if back.split:
            behind = kernels.parts(back, slopes, q, do, reverse=True, entering=dstate)
        kernels.scan_back(
            back, slopes, q, k, v, do, dk, dv, parts=behind, entering=dstate, leaving=dinitial
        )
        return None, dq, dk, dv, None, dinitial, None, None, None
