"""Rows without a request in a batch over pool slots."""

import torch
from torch import Tensor

from sferic.ops.matmul import on_host


def consecutive(slots: Tensor, limit: int) -> int | None:
    """The first of slots a, a + 1, ... that end before `limit`, if they lie on the host."""
    if not on_host(slots):
        return None
    numbers = slots.tolist()
    first = numbers[0]
    end = first + len(numbers)
    return first if first >= 0 and end <= limit and numbers == list(range(first, end)) else None


def fill_empty_rows(slots: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor]:
    """Let rows of slot -1 repeat the first live row, without waiting for the host.

    Two rows then write one slot, but the same values, so the order of their writes is nothing.

    Args:
        slots: [S], S >= 1; -1, the only sentinel, marks an empty row.

    Returns:
        live [S] bool; rows [S], which row's data each row uses; index [S], the slot it touches
        (0 if no row is live: write back there what you read).  Where the slots lie on the host and
        none is empty: None, None and the slots.
    """
    live = slots >= 0
    if on_host(slots) and bool(live.all()):
        return None, None, slots
    first = live.int().argmax()
    rows = torch.where(live, torch.arange(len(slots), device=slots.device), first)
    return live, rows, slots[rows].clamp(min=0)
