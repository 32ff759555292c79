"""Which dtype the branches of the model compute in."""

from typing import Literal

import torch


def compute_dtype(
    precision: Literal["auto", "fp32", "bf16"], device: torch.device
) -> torch.dtype | None:
    """None (the weights' float32) or bfloat16.

    Args:
        precision: "fp32", "bf16", or "auto": bf16 on GPUs that multiply it natively.  A CPU
            computes in float32 unless asked: at the sizes it trains, bf16 gains nothing.
        device: where the model runs.
    """
    native = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)
    if precision == "bf16" or (precision == "auto" and native):
        return torch.bfloat16
    return None
