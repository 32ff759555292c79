"""The experts' SwiGLU over tokens sorted by expert, and the sorting itself.

Legend: T tokens, k choices, N = T * k rows, D model width, F FFN width, E experts.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sferic.ops.blocked import blocked_copy
from sferic.ops.matmul import linear, on_host, onednn_linear, onednn_runs

# On a CPU the rows of an expert, when they are more, are filled up to a multiple of this: the
# library compiles a product for each new shape, which takes as long as the product itself.
ROWS = 64
# Up to so many choices for each expert count as few.
FEW = 4


def grouped_swiglu(x: Tensor, w13: Tensor, w2: Tensor, counts: Tensor) -> Tensor:
    """w2(SiLU(w1 x) * w3 x) with each row's own expert.

    Args:
        x: [N, D], rows of expert 0 first, then expert 1, ...
        w13: [E, D, 2, F]: w1 at index 0 of the third dim, w3 at 1.
        w2: [E, F, D].
        counts: [E] rows of each expert, summing to N.

    Returns:
        [N, D].
    """
    if x.shape[0] == 0:
        return x + 0 * (w13.sum() + w2.sum())  # no rows: the gradients exist and are zero
    if on_host(x) or x.dtype == torch.float64:  # the library's grouped product has no float64
        parts = x.split(counts.tolist())
        experts = zip(parts, w13.flatten(2).unbind(), w2.unbind(), strict=True)
        return torch.cat([_swiglu(rows, a, b) for rows, a, b in experts])
    offsets = counts.cumsum(0).to(torch.int32)
    gate, up = F.grouped_mm(x, w13.flatten(2), offs=offsets).chunk(2, dim=-1)
    return F.grouped_mm(F.silu(gate) * up, w2, offs=offsets)


def _swiglu(x: Tensor, w13: Tensor, w2: Tensor) -> Tensor:
    """One expert: x [n, D], w13 [D, 2F], w2 [F, D]; what lies between stays in a CPU's cache."""
    n = len(x)
    if n > ROWS:
        x = F.pad(x, (0, 0, 0, -n % ROWS))
    gate, up = linear(x, w13.T).chunk(2, dim=-1)
    if torch.is_grad_enabled():
        hidden = F.silu(gate) * up
    else:
        hidden = F.silu(gate, inplace=True).mul_(up)
    return linear(hidden, w2.T)[:n]


def mix_experts(
    x: Tensor, gates: Tensor, indices: Tensor, kept: Tensor | None, w13: Tensor, w2: Tensor
) -> Tensor:
    """sum_j gates[t, j] * expert[indices[t, j]](x_t), without the choices that are not kept.

    Args:
        x: [T, D].
        gates, indices: [T, k].
        kept: [T, k] bool, or None for all (then nothing waits for the host).
        w13, w2: the experts' weights, as in `grouped_swiglu`.

    Returns:
        [T, D] in the dtype of x.
    """
    T, k = indices.shape
    E = w13.shape[0]
    w13, w2 = w13.to(x.dtype), w2.to(x.dtype)
    few = 0 < T * k <= FEW * E and kept is None
    if few and on_host(x) and not torch.is_grad_enabled():
        mixed = _mix_all(x, gates, indices, w13, w2)
        return _mix_few(x, gates, indices, w13, w2) if mixed is None else mixed
    expert = indices.reshape(-1)
    if kept is not None:
        expert = torch.where(kept.reshape(-1), expert, E)
    order = expert.argsort(stable=True)  # choice number t * k + j of each row
    counts = torch.zeros(E + 1, dtype=torch.int64, device=x.device)
    counts = counts.scatter_add_(0, expert, torch.ones_like(expert))[:E]
    if kept is not None:
        order = order[: int(counts.sum())]
    rows = _Spread.apply(x, order, k)
    out = grouped_swiglu(rows, w13, w2, counts)
    out = out * gates.reshape(-1)[order][:, None].to(x.dtype)
    return _Gather.apply(out, order, T, k)


def _mix_all(x: Tensor, gates: Tensor, indices: Tensor, w13: Tensor, w2: Tensor) -> Tensor | None:
    """`mix_experts` on a CPU by all experts on all tokens: two products with blocked weights.

    Few tokens choose nearly every expert anyway, and reading weights is what takes the time.  None
    where they choose fewer, or where there are no copies of the weights to use.
    """
    E, _, _, F_ = w13.shape
    if indices.numel() < E or x.dtype != torch.float32 or not onednn_runs(x):
        return None
    first = blocked_copy(x, (w13,), lambda w: w.permute(2, 0, 3, 1).flatten(0, 2))  # [2 * E * F, D]
    second = None if first is None else blocked_copy(x, (w2,), lambda w: w.flatten(0, 1).T)
    if first is None or second is None:
        return None
    gate, up = onednn_linear(x, first).chunk(2, dim=-1)
    hidden = F.silu(gate, inplace=True).mul_(up)  # [T, E * F]
    weight = torch.zeros(len(x), E).scatter_(1, indices, gates)
    hidden.unflatten(1, (E, F_)).mul_(weight[..., None])
    return onednn_linear(hidden, second)


def _mix_few(x: Tensor, gates: Tensor, indices: Tensor, w13: Tensor, w2: Tensor) -> Tensor:
    """`mix_experts` of few tokens on a CPU, in one batched product: the calls would cost the most.

    Every expert gets as many rows as the busiest one, the others' are zeros.
    """
    T, k = indices.shape
    E, D = w13.shape[:2]
    counts, places = [0] * E, []
    chosen = indices.flatten().tolist()
    for e in chosen:
        places.append(counts[e])
        counts[e] += 1
    busiest = max(counts)
    at = torch.tensor([e * busiest + place for e, place in zip(chosen, places, strict=True)])
    rows = x.new_zeros(E * busiest, D).index_copy_(0, at, x.repeat_interleave(k, 0))
    gate, up = torch.bmm(rows.view(E, busiest, D), w13.flatten(2)).chunk(2, dim=-1)
    out = torch.bmm(F.silu(gate, inplace=True).mul_(up), w2).flatten(0, 1)
    out = out.index_select(0, at).mul_(gates.reshape(-1, 1).to(x.dtype))
    return out.view(T, k, D).sum(1)


def _spread(x: Tensor, order: Tensor, k: int) -> Tensor:
    return x.index_select(0, order // k)


def _gather(rows: Tensor, order: Tensor, T: int, k: int) -> Tensor:
    # every row has a place of its own, so the sum over choices has a fixed order
    places = rows.new_zeros(T * k, rows.shape[-1]).index_copy_(0, order, rows)
    return places.view(T, k, rows.shape[-1]).sum(1)


class _Spread(torch.autograd.Function):
    """Tokens [T, D] to rows [N, D], row i a copy of token order[i] // k."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, k: int) -> Tensor:
        ctx.save_for_backward(order)
        ctx.sizes = x.shape[0], k
        return _spread(x, order, k)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (order,) = ctx.saved_tensors
        return _gather(grads[0], order, *ctx.sizes), None, None


class _Gather(torch.autograd.Function):
    """The transpose of `_Spread`: rows [N, D] summed into tokens [T, D]."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, T: int, k: int) -> Tensor:
        ctx.save_for_backward(order)
        ctx.k = k
        return _gather(rows, order, T, k)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        (order,) = ctx.saved_tensors
        return _spread(grads[0], order, ctx.k), None, None, None
