"""Copies of weights in oneDNN's own layout, for products of few rows on a CPU.

With few rows a product is as fast as its weight is read; the library's layout is read about 1.6
times as fast as a plain matrix.  Making a copy costs as much as some ten products.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor
from torch.nn import Parameter

# more rows are bound by arithmetic, where the layout doesn't matter
MAX_ROWS = 32
# the layout depends on the rows it is meant for; with fewer than these it is a slow one
MIN_ROWS = 8
# of all copies together; the weights of a larger model need the memory themselves
MAX_BYTES = 2**30


class BlockedWeights:
    """Copies made on first use, and again after a weight has changed in place."""

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self.max_bytes = max_bytes
        self.bytes = 0
        # the weight itself is held, so that no other one gets its id
        self._copies: dict[int, tuple[Tensor, int, Tensor]] = {}

    @contextmanager
    def used(self) -> Iterator[None]:
        """Inside, `blocked_copy` answers from here."""
        token = _CURRENT.set(self)
        try:
            yield
        finally:
            _CURRENT.reset(token)

    def copy(self, w: Tensor, matrix: Callable[[Tensor], Tensor], rows: int) -> Tensor | None:
        """The copy of matrix(w), made for so many rows; or None where that has no room."""
        known = self._copies.get(id(w))
        if known is not None and known[1] == w._version:
            return known[2]
        if known is None:
            if self.bytes + w.nbytes > self.max_bytes:
                return None
            self.bytes += w.nbytes
        plain = matrix(w.detach()).contiguous()
        copy = torch.ops.mkldnn._reorder_linear_weight(plain, rows)
        self._copies[id(w)] = w, w._version, copy
        return copy


_CURRENT: ContextVar[BlockedWeights | None] = ContextVar("blocked weights", default=None)


def blocked_copy(
    x: Tensor, w: Tensor, matrix: Callable[[Tensor], Tensor] = lambda w: w
) -> Tensor | None:
    """The copy of a weight to multiply x with, by oneDNN alone.

    Args:
        x: [T, K], float32 on the CPU.
        w: the weight as the model holds it.
        matrix: makes [N, K] of it; always the same for one weight.

    Returns:
        None outside `BlockedWeights.used`, for more than `MAX_ROWS` rows, for what is not a model's
        parameter or can't be watched for changes, or where no room is left: use the plain weight.
    """
    current = _CURRENT.get()
    if current is None or len(x) > MAX_ROWS:
        return None
    if not isinstance(w, Parameter) or w.is_inference():
        return None
    return current.copy(w, matrix, max(len(x), MIN_ROWS))
