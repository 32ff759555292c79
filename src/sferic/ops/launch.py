"""Launching a Triton kernel in a few microseconds: the variant is looked up by a small key.

Triton's own launch looks at every argument to choose the compiled variant, 50 us for a kernel of
40 arguments.  Here the first call of a kind goes that way; later ones, whose tensors are aligned
to 16 bytes and whose numbers are multiples of 16 below 2^31 (or are not specialised), differ from
it in nothing that the compiler saw, and take its variant.
"""

from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor

_variants: dict[Hashable, Any] = {}


def launch(
    kernel: Any,
    programs: int,
    tensors: tuple[Tensor | None, ...],
    sizes: tuple[int, ...],
    strides: tuple[int, ...],
    constants: tuple[Any, ...],
    **options: int,
) -> None:
    """Run `programs` programs of a kernel on the first tensor's device and its current stream.

    Args:
        kernel: a jitted function of (*tensors, *sizes, *strides, *constants), the last constexpr.
        sizes: numbers it doesn't specialise on.
        strides: numbers that it may specialise on.
        options: num_warps, num_stages.  Which tensors are None must follow from the constants.
    """
    index = tensors[0].device.index if tensors[0] is not None else None
    if index is not None and index != torch.cuda.current_device():
        with torch.cuda.device(index):
            launch(kernel, programs, tensors, sizes, strides, constants, **options)
        return
    arguments = (*tensors, *sizes, *strides, *constants)
    addresses, types = 0, []
    for x in tensors:
        if x is not None:
            addresses |= x.data_ptr()
            types.append(x.dtype)
    steps = 0
    for s in strides:
        steps |= s
    if (addresses | steps) % 16 or max(steps, *sizes) >= 2**31 or not torch.cuda.is_initialized():
        kernel[(programs,)](*arguments, **options)
        return
    device = torch.cuda.current_device()
    key = (kernel, device, *types, *constants, *options.values())
    variant = _variants.get(key)
    if variant is None:
        _variants[key] = kernel[(programs,)](*arguments, **options)
        return
    stream = torch._C._cuda_getCurrentRawStream(device)
    variant.run(
        programs,
        1,
        1,
        stream,
        variant.function,
        variant.packed_metadata,
        None,
        None,
        None,
        *arguments,
    )
