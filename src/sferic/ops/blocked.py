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

Weights = tuple[Tensor, ...]
Matrix = Callable[..., Tensor]

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
        # the weights themselves are held, so that no other ones get their ids
        self._copies: dict[tuple[int, ...], tuple[Weights, list[int], Tensor]] = {}

    @contextmanager
    def used(self) -> Iterator[None]:
        """Inside, `blocked_copy` answers from here."""
        token = _CURRENT.set(self)
        try:
            yield
        finally:
            _CURRENT.reset(token)

    def copy(self, weights: Weights, matrix: Matrix, rows: int) -> Tensor | None:
        """The copy of matrix(*weights), made for so many rows; or None where that has no room."""
        key, versions = tuple(map(id, weights)), [w._version for w in weights]
        known = self._copies.get(key)
        if known is not None and known[1] == versions:
            return known[2]
        if known is None:
            size = sum(w.nbytes for w in weights)
            if self.bytes + size > self.max_bytes:
                return None
            self.bytes += size
        plain = matrix(*(w.detach() for w in weights)).contiguous()
        copy = torch.ops.mkldnn._reorder_linear_weight(plain, rows)
        self._copies[key] = weights, versions, copy
        return copy


_CURRENT: ContextVar[BlockedWeights | None] = ContextVar("blocked weights", default=None)


def blocked_copy(x: Tensor, weights: Weights, matrix: Matrix) -> Tensor | None:
    """The copy of weights to multiply x with, by oneDNN alone.

    Args:
        x: [T, K], float32 on the CPU.
        weights: as the model holds them.
        matrix: makes one [N, K] of them; always the same for the same weights.

    Returns:
        None outside `BlockedWeights.used`, for more than `MAX_ROWS` rows, for what is not a model's
        parameter or can't be watched for changes, or where no room is left: use the plain weights.
    """
    current = _CURRENT.get()
    if current is None or len(x) > MAX_ROWS:
        return None
    if not all(isinstance(w, Parameter) and not w.is_inference() for w in weights):
        return None
    return current.copy(weights, matrix, max(len(x), MIN_ROWS))
