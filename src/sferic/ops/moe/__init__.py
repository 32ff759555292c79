"""Mixture of experts: routing, token drop, balance, and the experts' arithmetic."""

from sferic.ops.moe.experts import grouped_swiglu, mix_experts
from sferic.ops.moe.routing import (
    auxiliary_loss,
    expert_counts,
    keep_within_capacity,
    top_k_gates,
)

__all__ = [
    "auxiliary_loss",
    "expert_counts",
    "grouped_swiglu",
    "keep_within_capacity",
    "mix_experts",
    "top_k_gates",
]
