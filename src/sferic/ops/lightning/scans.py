"""Lightning attention and its gradients as scans, whatever kernels do them.

A scan makes of three streams a, b [.., Kb], c [.., Kc] of a head

    out_i = sum_j lambda^|i - j| (a_i . b_j) c_j,   over j <= i, or in reverse over j >= i

and carries the state S = sum_j lambda^.. b_j c_j^T of the tokens behind it:

    o  = scan(q, k, v)              S is the state [K, V]
    dq = scan(do, v, k)             S is its transpose
    dv = scan(k, q, do) in reverse  S is the state's gradient
    dk = scan(v, do, q) in reverse  S is its transpose

So a backward pass stores no states of its own: it scans again.
"""

from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from sferic.ops.lightning.plan import Plan

Parts = tuple[Tensor, Tensor]


class Pool(NamedTuple):
    """Where the states of a pack's documents lie.

    Attributes:
        slots: [S] of each document.
        known: [S] uint8, whether the slot holds a state.
        checkpoints: [2, M], lengths and slots in order, and [S + 1], the first of each document.
    """

    slots: Tensor
    known: Tensor
    checkpoints: tuple[Tensor, Tensor] | None = None


class Kernels(Protocol):
    """What a module of kernels offers; tensors are [B, T, H, d], or [T, H, d] of a pack."""

    def problem(self, q: Tensor, k: Tensor, v: Tensor) -> str | None:
        """Why the kernels can't take an input, or None."""
        ...

    def ready(self, x: Tensor) -> Tensor:
        """The input, copied if its strides are none that the kernels read."""
        ...

    def plan(self, q: Tensor, v: Tensor, cu_seqlens: Tensor | None, deterministic: bool) -> Plan:
        """The cut of a call, its table filled."""
        ...

    def plan_back(self, q: Tensor, v: Tensor, forward: Plan, deterministic: bool) -> Plan:
        """The cut for `scan_back`."""
        ...

    def pool(
        self,
        slots: Tensor,
        has_state: Tensor,
        checkpoints: tuple[Tensor, Tensor, Tensor] | None,
    ) -> Pool:
        """The slots [S] of a pack's documents; checkpoints are (document, length, slot)."""
        ...

    def parts(
        self,
        plan: Plan,
        slopes: Tensor,
        b: Tensor,
        c: Tensor,
        *,
        reverse: bool = False,
        entering: Tensor | None = None,
        pool: Pool | None = None,
    ) -> Parts:
        """Sums over each item's tokens of b c^T, and the states that documents start from.

        Returns:
            [items, shares, H, Kb, Kc] and, where states enter, [items, H, Kb, Kc], float32.
        """
        ...

    def scan(
        self,
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
        """out = scan(a, b, c).

        Args:
            slopes: [H].
            reverse: from the last token to the first.
            transposed: states lie in memory as [Kc, Kb], not [Kb, Kc].
            parts: from `parts`, if the plan splits sequences.
            entering: [S, H, ., .], the states before the first token (after the last, in reverse).
            leaving: the same, written: the states after the last token (before the first).
            pool: entering and leaving are a pool with these slots.
        """
        ...

    def scan_back(
        self,
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
        ...


def attention(
    kernels: Kernels,
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
    kernels: Kernels,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    slopes: Tensor,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    return_state: bool,
    deterministic: bool,
) -> tuple[Tensor, Tensor | None, Plan, Parts | None]:
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
    kernels: Kernels,
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
    def forward(ctx: Any, kernels: Kernels, q: Tensor, k: Tensor, v: Tensor, *args: Any) -> Any:
        slopes, initial_state, *options = args
        o, state, plan, parts = _forward(kernels, q, k, v, slopes, initial_state, *options)
        ctx.save_for_backward(q, k, v, slopes, initial_state, *(parts or ()))
        ctx.kernels, ctx.plan, ctx.deterministic = kernels, plan, options[-1]
        ctx.set_materialize_grads(False)
        return o, state

    @staticmethod
    def backward(ctx: Any, do: Tensor | None, dstate: Tensor | None) -> Any:  # pyright: ignore
        if torch.is_grad_enabled():  # create_graph: the result would miss its own graph
            raise RuntimeError(
                "the kernels of lightning attention have no second derivative; "
                'backend="reference" has'
            )
        kernels: Kernels = ctx.kernels
        plan: Plan = ctx.plan
        q, k, v, slopes, initial_state, *parts = ctx.saved_tensors
        do = kernels.ready(v.new_zeros(v.shape) if do is None else do)
        q, k, v = kernels.ready(q), kernels.ready(k), kernels.ready(v)
        dq, dk, dv = (x.new_empty(x.shape) for x in (q, k, v))
        if dstate is not None:
            dstate = dstate.contiguous()
        dinitial = None
        if initial_state is not None and ctx.needs_input_grad[5]:
            dinitial = torch.empty_like(initial_state)
        kernels.scan(
            plan, slopes, a=do, b=v, c=k, out=dq,
            transposed=True, parts=(parts[0], parts[1]) if parts else None, entering=initial_state,
        )  # fmt: skip
        back = kernels.plan_back(q, v, plan, ctx.deterministic)
        behind = None
        if back.split:
            behind = kernels.parts(back, slopes, q, do, reverse=True, entering=dstate)
        kernels.scan_back(
            back, slopes, q, k, v, do, dk, dv, parts=behind, entering=dstate, leaving=dinitial
        )
        return None, dq, dk, dv, None, dinitial, None, None, None
