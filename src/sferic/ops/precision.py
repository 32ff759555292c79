"""What "fp32" means here: at least float32, so that a float64 model is float64 throughout."""

import torch
from torch import Tensor


def at_least_float32(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Cast every tensor to promote(first tensor's dtype, float32)."""
    dtype = torch.promote_types(tensors[0].dtype, torch.float32)
    return tuple(t.to(dtype) for t in tensors)
