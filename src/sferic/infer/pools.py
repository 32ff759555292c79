"""What requests share: blocks of keys and values, and slots of lightning states."""

import torch
from torch import Tensor

from sferic.config import ModelConfig
from sferic.nn.cache import Cache
from sferic.nn.mixers import MIXERS


class Pool:
    """Numbers, each free or taken once."""

    def __init__(self, name: str, numbers: range) -> None:
        self.name = name
        self.size = len(numbers)
        self._free = list(reversed(numbers))
        self._taken: set[int] = set()

    @property
    def free(self) -> int:
        """How many can be taken."""
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """So many numbers; the caller has seen that they are free."""
        if count > self.free:
            raise ValueError(f"{count} {self.name} are wanted, {self.free} are free")
        numbers = [self._free.pop() for _ in range(count)]
        self._taken.update(numbers)
        return numbers

    def give_back(self, numbers: list[int]) -> None:
        """Make numbers free again."""
        if len(set(numbers)) != len(numbers) or not self._taken.issuperset(numbers):
            raise ValueError(f"{self.name} {numbers} given back, of which some are not taken")
        self._taken.difference_update(numbers)
        self._free.extend(reversed(numbers))


class PagedCache(Cache):
    """Keys and values in blocks of `block_size` tokens, states in slots; see `nn.cache.Cache`.

    Block 0 is never given to a sequence and holds zeros: what a block table points to beyond a
    sequence's own blocks.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        blocks: int,
        block_size: int,
        slots: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self.block_size = block_size
        self.blocks = Pool("blocks of the cache", range(1, blocks + 1))
        self.slots = Pool("state slots", range(slots))
        self._kinds = config.mixers
        tensors: list[tuple[Tensor, ...]] = []
        for kind in config.mixers:
            rows = blocks + 1 if kind == "softmax" else slots
            new = MIXERS[kind].new_cache(config, rows, block_size, dtype)
            tensors.append(tuple(t.to(device) for t in new))
        super().__init__(tensors)

    def blocks_for(self, tokens: int) -> int:
        """Blocks that so many tokens of one sequence need."""
        return -(-tokens // self.block_size)

    def clear(self, slot: int, blocks: list[int]) -> None:
        """Zero what a sequence has written: a NaN there would outlive it."""
        for kind, tensors in zip(self._kinds, self._tensors, strict=True):
            for tensor in tensors:
                tensor[blocks if kind == "softmax" else [slot]] = 0
