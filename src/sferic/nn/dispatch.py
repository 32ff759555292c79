"""From routing probabilities to the experts and back, on one device."""

from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from sferic.ops.moe import expert_counts, keep_within_capacity, mix_experts, top_k_gates


@dataclass(frozen=True)
class Routing:
    """What one MoE layer did with a batch: enough for replay, the auxiliary loss and metrics.

    Sums run over valid tokens and are formed when asked for, so that decoding doesn't pay for them.
    E experts, T tokens, k choices.
    """

    indices: Tensor  # [T, k], chosen experts, first choice first
    probs: Tensor  # [T, E], with gradient
    valid: Tensor  # [T] bool
    kept: Tensor | None  # [T, k] bool, choices within capacity; None is all of them

    @cached_property
    def counts(self) -> Tensor:
        """[E] int64, choices before the drop."""
        return expert_counts(self.indices, self.valid, self.probs.shape[-1])

    @cached_property
    def dropped(self) -> Tensor:
        """Scalar int64, choices lost to capacity."""
        kept = self.counts.sum() if self.kept is None else self.kept.sum()
        return self.counts.sum() - kept

    @cached_property
    def probs_sum(self) -> Tensor:
        """[E], with gradient."""
        return (self.probs * self.valid[:, None].to(self.probs.dtype)).sum(0)

    @cached_property
    def entropy_sum(self) -> Tensor:
        """Scalar, nats."""
        probs = self.probs.detach()
        entropy = -(probs * probs.clamp(min=1e-30).log()).sum(-1)
        return (entropy * self.valid.to(probs.dtype)).sum()

    @cached_property
    def tokens(self) -> Tensor:
        """Scalar int64, valid tokens."""
        return self.valid.sum()


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
        kept = None
        if training and capacity_factor is not None:
            kept = keep_within_capacity(indices, valid, E, capacity_factor)
        elif training:
            kept = valid[:, None].expand_as(indices)
        y = mix_experts(x, gates, indices, kept, w13, w2)
        return y, Routing(indices, probs, valid, kept)
