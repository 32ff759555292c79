"""Which dtype the branches of the model compute in."""

import torch


def compute_dtype(precision: str, device: torch.device) -> torch.dtype | None:
    """None (the weights' float32) or bfloat16.

    Args:
        precision: "fp32", "bf16", or "auto": bf16 where the device multiplies it natively.
        device: where the model runs.
    """
    if precision == "auto":
        precision = "bf16" if _native_bf16(device) else "fp32"
    return {"fp32": None, "bf16": torch.bfloat16}[precision]


def _native_bf16(device: torch.device) -> bool:
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= (8, 0)
    return device.type == "cpu" and torch.cpu._is_avx512_bf16_supported()
