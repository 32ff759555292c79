"""What training minimises, and what it reports about the experts."""

import math

import torch
from torch import Tensor

from sferic.config import MoEFFN
from sferic.nn import Batch, HybridModel, Routing
from sferic.ops.moe import auxiliary_loss


def micro_batch_loss(
    model: HybridModel, batch: Batch, labels: int, micro_batches: int
) -> tuple[Tensor, Tensor, list[Routing]]:
    """One micro-batch's share of a step's loss; the shares add up, so gradients are summed.

    Args:
        model: the model.
        batch: with labels.
        labels: number of labels of the whole step, over all micro-batches (and ranks).
        micro_batches: of the whole step.

    Returns:
        Cross entropy and auxiliary loss, scalars, and the routing of each MoE layer.
    """
    assert batch.labels is not None
    h, routings = model.hidden(batch)
    cross_entropy = model.loss(h, batch.labels) / labels
    moe = [r for r in routings if r is not None]
    auxiliary = cross_entropy.new_zeros(())
    ffn = model.config.ffn
    for routing in moe:
        assert isinstance(ffn, MoEFFN)
        auxiliary = auxiliary + auxiliary_loss(
            routing.counts,
            routing.probs_sum,
            routing.tokens.clamp(min=1),
            top_k=ffn.top_k,
            coef=ffn.aux_coef,
            norm=ffn.aux_norm,
        )
    return cross_entropy, auxiliary / micro_batches, moe


class RoutingStats:
    """Sums of a step's routings, by layer."""

    def __init__(self) -> None:
        self._counts: list[Tensor] = []
        self._dropped: list[Tensor] = []
        self._entropy: list[Tensor] = []
        self._tokens: list[Tensor] = []

    def add(self, routings: list[Routing]) -> None:
        """Take in one micro-batch's routing of every MoE layer."""
        if routings:
            self._counts.append(torch.stack([r.counts for r in routings]))
            self._dropped.append(torch.stack([r.dropped for r in routings]))
            self._entropy.append(torch.stack([r.entropy_sum for r in routings]))
            self._tokens.append(torch.stack([r.tokens for r in routings]))

    def summary(self) -> dict[str, float]:
        """`max_load` (busiest expert over the mean, worst layer), `drop_rate` of all choices,
        `router_entropy` as a share of an even router's; empty without MoE layers."""
        if not self._counts:
            return {}
        counts = torch.stack(self._counts).sum(0).double()  # [layers, E]
        choices = counts.sum(-1).clamp(min=1)
        entropy = torch.stack(self._entropy).sum() / torch.stack(self._tokens).sum()
        return {
            "max_load": float((counts.max(-1).values * counts.shape[-1] / choices).max()),
            "drop_rate": float(torch.stack(self._dropped).sum() / choices.sum()),
            "router_entropy": float(entropy) / max(math.log(counts.shape[-1]), 1e-30),
        }
