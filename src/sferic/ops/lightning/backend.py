"""Which code computes lightning attention: the plain PyTorch blocks, or kernels."""

import warnings
from functools import lru_cache
from importlib import import_module
from types import ModuleType
from typing import Literal

import torch
from torch import Tensor

Backend = Literal["auto", "reference", "triton", "hopper"]
BACKENDS = ("auto", "reference", "triton", "hopper")


def kernels_for(
    backend: Backend,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    slopes: Tensor,
    pool: Tensor | None = None,
    *,
    decode: bool = False,
) -> ModuleType | None:
    """The module of kernels for these inputs; None stands for the reference.

    Args:
        pool: the states that the call writes in place, if it does.
        decode: for one token a row; that kernel is the same on every GPU.

    Raises:
        ValueError: `backend` is not one of the four, or can't take the inputs.
    """
    if backend not in BACKENDS:
        names = ", ".join(map(repr, BACKENDS))
        raise ValueError(f"backend {backend!r} is not one of {names}")
    if backend == "reference" or (backend == "auto" and not q.is_cuda):
        return None
    if backend != "auto":
        kernels = _module("decode" if decode else backend)
        reason = _problem(kernels, q, k, v, slopes, pool)
        if reason is not None:
            raise ValueError(f"backend {backend!r} can't take this input: {reason}")
        return kernels
    reasons = []
    for name in ("decode",) if decode else ("hopper", "triton"):
        kernels = _module(name)
        reason = _problem(kernels, q, k, v, slopes, pool)
        if reason is None:
            return kernels
        reasons.append(f"{name}: {reason}")
    _tell("; ".join(reasons))
    return None


def _problem(
    kernels: ModuleType | str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    slopes: Tensor,
    pool: Tensor | None,
) -> str | None:
    if isinstance(kernels, str):
        return kernels
    if slopes.requires_grad:
        return "slopes want a gradient"
    if q.numel() == 0 or v.numel() == 0:
        return f"q {list(q.shape)} is empty"
    if pool is not None and (pool.dtype != torch.float32 or not pool.is_contiguous()):
        return f"the pool is {pool.dtype}, strides {pool.stride()}, not contiguous float32"
    return kernels.problem(q, k, v)


@lru_cache
def _module(name: str) -> ModuleType | str:
    """The kernels, or why they can't be imported."""
    try:
        return import_module(f"sferic.ops.lightning.{name}")
    except ImportError as error:
        return f"{error}"


@lru_cache(1)
def _tell(reasons: str) -> None:
    warnings.warn(f"lightning attention runs in plain PyTorch ({reasons})", stacklevel=4)
