"""Tensors in, tensors out: the operators of the hybrid model, each with a slow truth beside it."""

from sferic.ops.attention import packed_attention
from sferic.ops.fused import linear_cross_entropy
from sferic.ops.lightning import lightning_attention, lightning_decode, lightning_prefill

__all__ = [
    "lightning_attention",
    "lightning_decode",
    "lightning_prefill",
    "linear_cross_entropy",
    "packed_attention",
]
