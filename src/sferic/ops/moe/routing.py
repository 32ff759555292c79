"""Which experts a token goes to, who is dropped, and how balanced that is.

Legend: T tokens, E experts, k choices per token, C capacity of an expert.
"""

from typing import Literal

import torch
from torch import Tensor


def top_k_gates(probs: Tensor, top_k: int, indices: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The k most probable experts and their probabilities, renormalised to sum to 1.

    Args:
        probs: [T, E].
        indices: [T, k] to reuse an earlier choice; gates are then taken at those experts.

    Returns:
        gates [T, k] and indices [T, k], first choice first.
    """
    if indices is None:
        with torch.no_grad():
            chosen, indices = probs.topk(top_k, dim=-1)
        if torch.is_grad_enabled():
            chosen = probs.gather(-1, indices)  # the same operations whether chosen or repeated
    else:
        chosen = probs.gather(-1, indices)
    return chosen / chosen.sum(-1, keepdim=True), indices


def expert_counts(indices: Tensor, valid: Tensor, num_experts: int) -> Tensor:
    """How many choices of valid tokens fell on each expert, [E] int64, before any drop."""
    weight = valid[:, None].expand_as(indices).reshape(-1).long()
    return weight.new_zeros(num_experts).scatter_add_(0, indices.reshape(-1), weight)


def keep_within_capacity(
    indices: Tensor, valid: Tensor, num_experts: int, capacity_factor: float
) -> Tensor:
    """Token drop: each expert keeps its first C = ceil(capacity_factor * k * valid / E) choices.

    Order is (choice, position): all first choices come before any second one, and earlier tokens
    before later ones (with several ranks the rank, rotated, stands between the two).  Pads are
    never kept and take no capacity.

    Args:
        indices: [T, k]; valid: [T] bool.

    Returns:
        kept [T, k] bool.
    """
    T, k = indices.shape
    exact = valid.sum().double() * (capacity_factor * k / num_experts)
    capacity = (exact - 1e-9 * exact).ceil()  # 1.1 * 2 * 40 / 8 is 11, not 11.000000000000002
    choice = indices.T.reshape(-1)  # [k * T], first choices first
    real = valid.repeat(k)
    taken = torch.zeros(k * T, num_experts, dtype=torch.int64, device=indices.device)
    taken.scatter_(1, choice[:, None], real.long()[:, None])
    place = taken.cumsum(0).gather(1, choice[:, None])[:, 0] - 1
    return (real & (place < capacity)).view(k, T).T


def auxiliary_loss(
    counts: Tensor,
    probs_sum: Tensor,
    tokens: Tensor | float,
    *,
    top_k: int,
    coef: float,
    norm: Literal["paper", "switch"],
) -> Tensor:
    """Load-balancing loss of one layer (arXiv 2501.08313, section 2.1).

    With f_i = counts_i / tokens (so that they sum to k) and m_i the mean routing probability:
    "paper" is coef / E * sum f_i m_i as printed, "switch" is coef * E / k * sum f_i m_i (Switch
    Transformer, 1 at balance).

    Args:
        counts: [E] choices before the drop; no gradient.
        probs_sum: [E], routing probabilities summed over valid tokens.
        tokens: number of valid tokens.
    """
    E = counts.shape[0]
    scale = {"paper": 1 / E, "switch": E / top_k}[norm]
    f = counts.to(probs_sum.dtype) / tokens
    return coef * scale * (f * probs_sum / tokens).sum()
