"""Which code computes lightning attention: the plain PyTorch blocks, or kernels."""

import warnings
from functools import lru_cache
from importlib import import_module
from types import ModuleType
from typing import Literal

from torch import Tensor

Backend = Literal["auto", "reference", "triton", "hopper"]
BACKENDS = ("auto", "reference", "triton", "hopper")


def kernels_for(
    backend: Backend, q: Tensor, k: Tensor, v: Tensor, slopes: Tensor
) -> ModuleType | None:
    """The module of kernels for these inputs; None stands for the reference.

    Raises:
        ValueError: `backend` is not one of the four, or can't take the inputs.
    """
    if backend not in BACKENDS:
        names = ", ".join(map(repr, BACKENDS))
        raise ValueError(f"backend {backend!r} is not one of {names}")
    if backend == "reference" or (backend == "auto" and not q.is_cuda):
        return None
    if backend != "auto":
        kernels = _module(backend)
        reason = _problem(kernels, q, k, v, slopes)
        if reason is not None:
            raise ValueError(f"backend {backend!r} can't take this input: {reason}")
        return kernels
    reasons = []
    for name in ("hopper", "triton"):
        kernels = _module(name)
        reason = _problem(kernels, q, k, v, slopes)
        if reason is None:
            return kernels
        reasons.append(f"{name}: {reason}")
    _tell("; ".join(reasons))
    return None


def _problem(
    kernels: ModuleType | str, q: Tensor, k: Tensor, v: Tensor, slopes: Tensor
) -> str | None:
    if isinstance(kernels, str):
        return kernels
    if slopes.requires_grad:
        return "slopes want a gradient"
    if q.numel() == 0 or v.numel() == 0:
        return f"q {list(q.shape)} is empty"
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
