"""From routing probabilities to the experts and back, on one device."""

from dataclasses import dataclass

import torch
from torch import Tensor

from sferic.ops.moe import expert_counts, keep_within_capacity, mix_experts, top_k_gates


@dataclass(frozen=True)
class Routing:
    """What one MoE layer did with a batch: enough for replay, the auxiliary loss and metrics.

    Sums run over valid tokens.  E experts, T tokens, k choices.
    """

    indices: Tensor  # [T, k], chosen experts, first choice first
    counts: Tensor  # [E] int64, choices before the drop
    dropped: Tensor  # scalar int64, choices lost to capacity
    probs_sum: Tensor  # [E], with gradient
    entropy_sum: Tensor  # scalar, nats
    tokens: Tensor  # scalar int64, valid tokens


class LocalDispatcher:
    """All experts on this device.  Capacity holds per micro-batch."""

    def __call__(
        self,
        x: Tensor,
        probs: Tensor,
        valid: Tensor,
        w13: Tensor,
        w2: Tensor,
        *,
        top_k: int,
        training: bool,
        capacity_factor: float | None,
        indices: Tensor | None,
    ) -> tuple[Tensor, Routing]:
        """Mix the experts' outputs.

        Args:
            x: [T, D].
            probs: [T, E], at least float32.
            valid: [T] bool.
            w13, w2: [E, D, 2, F] and [E, F, D].
            training: leave out pads, and what exceeds the capacity; else every row is computed
                and (in bf16, on a GPU) nothing waits for the host.
            capacity_factor: None for dropless.
            indices: an earlier choice to repeat (recompute, replay), or None to choose.

        Returns:
            y [T, D] and the routing, with the indices used.
        """
        E = probs.shape[-1]
        gates, indices = top_k_gates(probs, top_k, indices)
        counts = expert_counts(indices, valid, E)
        kept = None
        if training and capacity_factor is not None:
            kept = keep_within_capacity(indices, valid, E, capacity_factor)
        elif training:
            kept = valid[:, None].expand_as(indices)
        y = mix_experts(x, gates, indices, kept, w13, w2)
        with torch.no_grad():
            weight = valid.to(probs.dtype)
            entropy = -(probs * probs.clamp(min=1e-30).log()).sum(-1)
            dropped = counts.sum() - kept.sum() if kept is not None else counts.new_zeros(())
        routing = Routing(
            indices=indices,
            counts=counts,
            dropped=dropped,
            probs_sum=(probs * weight[:, None]).sum(0),
            entropy_sum=(entropy * weight).sum(),
            tokens=valid.sum(),
        )
        return y, routing
