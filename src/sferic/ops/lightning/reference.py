"""Lightning attention in its slow, obvious forms: the truth that fast code is checked against.

The operator (MiniMax-01, arXiv 2501.08313, section 2.2), per head with slope s >= 0:

    S_t = exp(-s) S_{t-1} + k_t v_t^T,      o_t = S_t^T q_t

There is no 1/sqrt(d), and the current token has weight 1.  Legend: B batch, T tokens, H heads,
K key dim, V value dim, S sequences of a pack.
"""

import torch
from torch import Tensor

from sferic.ops.precision import at_least_float32


def lightning_recurrent(
    q: Tensor, k: Tensor, v: Tensor, slopes: Tensor, initial_state: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The recurrence itself, token by token.

    Args:
        q, k: [B, T, H, K].
        v: [B, T, H, V].
        slopes: [H], >= 0.
        initial_state: [B, H, K, V] or None for zeros.

    Returns:
        o [B, T, H, V] in the dtype of v, and the final state [B, H, K, V], at least float32.
    """
    B, T, H, K = q.shape
    q_, k_, v_ = at_least_float32(q, k, v)
    decay = torch.exp(-slopes.to(q_.dtype))[:, None, None]
    state = q_.new_zeros(B, H, K, v.shape[-1]) if initial_state is None else initial_state
    outputs = []
    for t in range(T):
        state = decay * state + k_[:, t, :, :, None] * v_[:, t, :, None, :]
        outputs.append(torch.einsum("bhk,bhkv->bhv", q_[:, t], state))
    o = torch.stack(outputs, dim=1) if outputs else v_.new_zeros(v.shape)
    return o.to(v.dtype), state


def lightning_quadratic(
    q: Tensor, k: Tensor, v: Tensor, slopes: Tensor, initial_state: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The masked left product, o = (Q K^T * D) V with D[i, j] = exp(-s (i - j)) for i >= j.

    Same arguments and results as `lightning_recurrent`; memory grows with T squared.
    """
    T = q.shape[1]
    q_, k_, v_ = at_least_float32(q, k, v)
    s = slopes.to(q_.dtype)
    t = torch.arange(T, device=q.device, dtype=q_.dtype)
    distance = t[:, None] - t[None, :]
    mask = torch.exp(-s[:, None, None] * distance.clamp(min=0)) * (distance >= 0)  # [H, T, T]
    o = torch.einsum("bihk,bjhk,hij,bjhv->bihv", q_, k_, mask, v_)
    to_end = torch.exp(-s * (T - 1 - t)[:, None])  # [T, H]
    state = torch.einsum("bthk,th,bthv->bhkv", k_, to_end, v_)
    if initial_state is not None:
        from_start = torch.exp(-s * (t + 1)[:, None])
        o = o + torch.einsum("bthk,th,bhkv->bthv", q_, from_start, initial_state)
        state = state + torch.exp(-s * T)[:, None, None] * initial_state
    return o.to(v.dtype), state
