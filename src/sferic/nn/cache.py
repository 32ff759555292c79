"""What generation remembers: keys and values of softmax layers, states of lightning layers."""

import copy
from collections.abc import Sequence

import torch
from torch import Tensor

from sferic.config import ModelConfig
from sferic.nn.batch import Batch
from sferic.nn.mixers import MIXERS


class Cache:
    """Storage by layer and row.  The model writes into the tensors it hands out.

    Args:
        tensors: of each layer what its mixer's `new_cache` makes.
    """

    def __init__(self, tensors: list[tuple[Tensor, ...]]) -> None:
        self._tensors = tensors

    def kv(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys (after RoPE) and values of a softmax layer, [rows, capacity, G, K] each.

        Or [blocks, tokens of a block, G, K], with a `block_table` in the batch.
        """
        k, v = self._tensors[layer]
        return k, v

    def state(self, layer: int) -> Tensor:
        """States of a lightning layer, [rows, H, K, V], at least float32."""
        (state,) = self._tensors[layer]
        return state


class ContiguousCache(Cache):
    """One row per sequence, each with room for `capacity` tokens."""

    def __init__(
        self,
        config: ModelConfig,
        rows: int,
        capacity: int,
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.capacity = capacity
        self.device = torch.device(device)
        self.lengths = [0] * rows  # tokens of each row, known to the host
        new = (MIXERS[kind].new_cache(config, rows, capacity, dtype) for kind in config.mixers)
        super().__init__([tuple(t.to(self.device) for t in layer) for layer in new])

    def reorder(self, rows: Tensor) -> None:
        """Row i becomes what row rows[i] was."""
        self._tensors = [tuple(t[rows] for t in layer) for layer in self._tensors]
        self.lengths = [self.lengths[r] for r in rows.tolist()]

    def fork(self, slots: Tensor) -> "ContiguousCache":
        """A new cache whose row i is a copy of row slots[i]."""
        other = copy.copy(self)
        other.reorder(slots)
        return other

    def extend(self, sequences: Sequence[Tensor], rows: Sequence[int] | None = None) -> Batch:
        """The batch that appends token sequences [t_i] to rows (default: row i gets sequence i).

        The rows' lengths advance at once, so run the batch exactly once.

        Raises:
            ValueError: when a row would outgrow the capacity.
        """
        rows = range(len(sequences)) if rows is None else rows
        if len(set(rows)) < len(sequences):
            raise ValueError(f"rows {list(rows)} must be {len(sequences)} different ones")
        starts = [self.lengths[r] for r in rows]
        added = [len(s) for s in sequences]
        for r, n in zip(rows, added, strict=True):
            if self.lengths[r] + n > self.capacity:
                raise ValueError(
                    f"row {r} holds {self.lengths[r]} tokens and would get {n} more: "
                    f"the cache has room for {self.capacity}; make one with a larger capacity"
                )
        for r, n in zip(rows, added, strict=True):
            self.lengths[r] += n
        single = [n == 1 and start > 0 for n, start in zip(added, starts, strict=True)]
        decodes = [*single, False].index(False)
        return Batch.pack(
            sequences,
            starts,
            slots=torch.tensor(rows, device=self.device),
            has_state=torch.tensor([n > 0 for n in starts], device=self.device),
            decodes=decodes,
            max_context=max((self.lengths[r] for r in rows[:decodes]), default=0),
        )
