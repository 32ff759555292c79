"""Feature mixers: dense SwiGLU and the mixture of experts."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sferic.config import DenseFFN, MoEFFN
from sferic.nn.batch import Batch
from sferic.nn.dispatch import LocalDispatcher, Routing
from sferic.nn.init import Draw, Initialised
from sferic.nn.layers import Linear
from sferic.ops.precision import fp32


class Dense(Initialised):
    """w2(SiLU(w1 x) * w3 x); w1 and w3 are [F, D], w2 is [D, F]."""

    def __init__(self, hidden_size: int, config: DenseFFN) -> None:
        super().__init__()
        self.w1 = Linear(hidden_size, config.size)
        self.w3 = Linear(hidden_size, config.size)
        self.w2 = Linear(config.size, hidden_size)

    def init_weights(self, draw: Draw, gain: float) -> None:
        """All take the gain."""
        D, F_ = self.w2.weight.shape
        draw.xavier("w1.weight", D, F_, gain)
        draw.xavier("w3.weight", D, F_, gain)
        draw.xavier("w2.weight", F_, D, gain)

    def forward(
        self, x: Tensor, batch: Batch, indices: Tensor | None = None
    ) -> tuple[Tensor, None]:
        return self.w2(F.silu(self.w1(x)) * self.w3(x)), None


class MoE(Initialised):
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

    def init_weights(self, draw: Draw, gain: float) -> None:
        """Experts take the gain, the router doesn't."""
        E, F_, D = self.w2.shape
        draw.xavier("router.weight", D, E)
        draw.xavier("w13", D, F_, gain)
        draw.xavier("w2", F_, D, gain)

    def forward(
        self, x: Tensor, batch: Batch, indices: Tensor | None = None
    ) -> tuple[Tensor, Routing]:
        """Mix x [T, D]; `indices` [T, k] repeats an earlier routing."""
        logits = self.router(x.to(fp32(x.dtype)))
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
