"""Which code computes lightning attention: the plain PyTorch blocks, or kernels."""

import logging
import warnings
from functools import lru_cache
from importlib import import_module
from types import ModuleType
from typing import Any, Literal

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
) -> Any:
    """The module of kernels (`scans.Kernels`) for these inputs; None stands for the reference.

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
    empty = q.numel() == 0 or v.numel() == 0
    if backend == "auto" and empty:
        return None
    names = (backend,) if backend != "auto" else ("hopper", "triton")
    reasons = {}
    for name in names:
        module = _module("decode" if decode else name)
        if isinstance(module, ModuleType):
            reasons[name] = _problem(module, q, k, v, slopes, pool)
            if reasons[name] is None:
                _say(f"lightning attention: {module.__name__.rpartition('.')[2]} kernels")
                return module
        else:
            reasons[name] = module
    if backend != "auto":
        raise ValueError(f"backend {backend!r} can't take this input: {reasons[backend]}")
    _warn("; ".join(f"{name}: {reason}" for name, reason in reasons.items()))
    return None


def _problem(
    kernels: Any,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    slopes: Tensor,
    pool: Tensor | None,
) -> str | None:
    if slopes.requires_grad:
        return "slopes want a gradient"
    if q.numel() == 0 or v.numel() == 0:
        return f"q {list(q.shape)} or v {list(v.shape)} is empty"
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


@lru_cache
def _say(choice: str) -> None:
    """Once for each choice."""
    logging.getLogger(__name__).info(choice)


@lru_cache
def _warn(reasons: str) -> None:
    """Once for each reason."""
    warnings.warn(f"lightning attention runs in plain PyTorch ({reasons})", stacklevel=4)
