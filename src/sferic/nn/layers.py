"""Linear maps and norms."""

import torch
from torch import Tensor, nn

from sferic.nn.init import Draw, Initialised
from sferic.ops.fused import rms_norm
from sferic.ops.matmul import linear, linears


class Linear(nn.Linear):
    """y = x W^T without bias, in the dtype of x: float32 weights serve bf16 activations."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__(in_features, out_features, bias=False)

    def reset_parameters(self) -> None:
        """Leave the weight empty: the model draws it (`init_weights`) or loads it."""

    def forward(self, input: Tensor) -> Tensor:
        return linear(input, self.weight.to(input.dtype))


def joint(x: Tensor, *maps: Linear) -> tuple[Tensor, ...]:
    """Each map of x [T, D], in one product where that is faster and nobody watches the maps."""
    if not any(type(m) is not Linear or m._forward_hooks or m._forward_pre_hooks for m in maps):
        together = linears(x, tuple(m.weight for m in maps))
        if together is not None:
            return together
    return tuple(m(x) for m in maps)


class RMSNorm(Initialised):
    """x / rms(x) * weight over the last dim."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(size))

    def init_weights(self, draw: Draw, gain: float) -> None:
        """Norms begin at 1."""
        nn.init.ones_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)
