"""Linear maps and norms."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sferic.ops.fused import rms_norm


class Linear(nn.Module):
    """y = x W^T without bias, in the dtype of x: float32 weights serve bf16 activations."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_features, in_features))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype))


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dim."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)
