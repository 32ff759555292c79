"""The implementations that are compared."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from sferic.ops import lightning_attention, lightning_decode, lightning_prefill


@dataclass(frozen=True)
class Impl:
    """A training operator: q, k, v [B, N, H, 128] and slopes [H] to o [B, N, H, 128]."""

    name: str
    attention: Callable[..., Tensor]  # ours also takes a pack with cu_seqlens
    softmax: bool = False  # a different operator, beside ours for scale; ignores the slopes
    ours: bool = False  # both layouts, any shape, and from CUDA graphs
    autotuned: bool = False  # keeps for all lengths what it found fastest at the first


@dataclass(frozen=True)
class Serving:
    """The operators on a slot pool."""

    prefill: Callable[..., Tensor] = lightning_prefill
    decode: Callable[..., Tensor] = lightning_decode


def sferic(name: str, backend: str) -> Impl:
    """Ours with that backend."""
    attention: Any = partial(lightning_attention, backend=backend)  # pyright: ignore
    return Impl(name, attention, ours=True)


def fla() -> Impl:
    """flash-linear-attention's `chunk_simple_gla`: the same operator."""
    chunk_simple_gla = importlib.import_module("fla.ops.simple_gla").chunk_simple_gla

    def attention(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor) -> Tensor:
        return chunk_simple_gla(q, k, v, g_gamma=-slopes, scale=1.0)[0]

    return Impl("fla", attention, autotuned=True)


def sdpa_cudnn() -> Impl:
    """Causal softmax attention by cuDNN."""

    def attention(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor) -> Tensor:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return softmax_attention(q, k, v)

    return Impl("sdpa-cudnn", attention, softmax=True)


def softmax_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """SDPA, causal, in our layout; the caller chooses the backend."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


BUILDERS: dict[str, Callable[[], Impl]] = {
    "sferic": partial(sferic, "sferic", "auto"),
    "sferic-triton": partial(sferic, "sferic-triton", "triton"),
    "fla": fla,
    "sdpa-cudnn": sdpa_cudnn,
}
