"""What "fp32" means here: at least float32, so that a float64 model is float64 throughout."""

import torch
from torch import Tensor


def fp32(dtype: torch.dtype) -> torch.dtype:
    """float32, or float64 if that is what it is."""
    return torch.promote_types(dtype, torch.float32)


def at_least_float32(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Cast every tensor to `fp32` of the first one's dtype."""
    dtype = fp32(tensors[0].dtype)
    return tuple(t.to(dtype) for t in tensors)
