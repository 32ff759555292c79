"""Tensors in, tensors out: the operators of the hybrid model.

The two kinds of attention have a slow, obvious form beside them in `reference.py`, for tests.
"""

from sferic.ops.attention import packed_attention
from sferic.ops.fused import linear_cross_entropy
from sferic.ops.lightning import lightning_attention, lightning_decode, lightning_prefill
from sferic.ops.matmul import linear

__all__ = [
    "lightning_attention",
    "lightning_decode",
    "lightning_prefill",
    "linear",
    "linear_cross_entropy",
    "packed_attention",
]
