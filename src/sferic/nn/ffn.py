"""Feature mixers: dense SwiGLU and the mixture of experts."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sferic.config import DenseFFN, MoEFFN
from sferic.nn.batch import Batch
from sferic.nn.dispatch import LocalDispatcher, Routing
from sferic.nn.layers import Linear


class Dense(nn.Module):
    """w2(SiLU(w1 x) * w3 x), with w13 [D, 2, F] and w2 [F, D] laid out as one expert's."""

    def __init__(self, hidden_size: int, config: DenseFFN) -> None:
        super().__init__()
        self.w13 = nn.Parameter(torch.empty(hidden_size, 2, config.size))
        self.w2 = nn.Parameter(torch.empty(config.size, hidden_size))

    def forward(
        self, x: Tensor, batch: Batch, indices: Tensor | None = None
    ) -> tuple[Tensor, None]:
        gate, up = (x @ self.w13.to(x.dtype).flatten(1)).chunk(2, dim=-1)
        return (F.silu(gate) * up) @ self.w2.to(x.dtype), None


class MoE(nn.Module):
    """A router in at least float32 and E SwiGLU experts, of which each token takes top_k.

    Experts' weights: w13 [E, D, 2, F], w2 [E, F, D].
    """

    def __init__(self, hidden_size: int, config: MoEFFN) -> None:
        super().__init__()
        E, D, F_ = config.num_experts, hidden_size, config.size
        self.config = config
        self.router = Linear(D, E)
        self.w13 = nn.Parameter(torch.empty(E, D, 2, F_))
        self.w2 = nn.Parameter(torch.empty(E, F_, D))
        self.dispatcher = LocalDispatcher()

    def forward(
        self, x: Tensor, batch: Batch, indices: Tensor | None = None
    ) -> tuple[Tensor, Routing]:
        """Mix x [T, D]; `indices` [T, k] repeats an earlier routing."""
        logits = self.router(x.to(torch.promote_types(x.dtype, torch.float32)))
        return self.dispatcher(
            x,
            logits.softmax(-1),
            batch.valid,
            self.w13,
            self.w2,
            top_k=self.config.top_k,
            training=self.training,
            capacity_factor=self.config.capacity_factor,
            indices=indices,
        )
