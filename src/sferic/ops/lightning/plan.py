"""How a kernel cuts the tokens: chunks of each sequence, and items, runs of chunks, one a program.

Chunks start at a sequence's first token; an empty sequence has one chunk of no tokens, through
which its state passes.  In a batch an item is one of `segments` equal parts of a sequence.  In a
pack an item is one of equal parts of all its chunks, so it may begin inside one document and end
inside another; with `deterministic` it is `SEGMENT` chunks of one document, whatever the others
are.  A pack's lengths stay on the GPU: its items are counted from above, and the table of where
they lie is filled by `triton.place_items`.
"""

from dataclasses import dataclass
from functools import lru_cache
from math import ceil

import torch
from torch import Tensor

SEGMENT = 64  # chunks of an item in a deterministic pack
COLUMNS = 6  # of the table: begin, end, first document and its first chunk, last one and its


@dataclass(frozen=True)
class Plan:
    """The cut of a batch [B, T, H, d], or of a pack [T, H, d].

    Attributes:
        sequences: B, or the documents of the pack.
        tokens: T.
        chunk: tokens of a chunk.
        items: programs for each head (at most, in a pack).
        segments: items of a sequence of a batch; 0 in a pack.
        shares: programs that sum up one item's tokens, for those after it.
        cu_seqlens: [S + 1] int32 in a pack.
        table: [items, COLUMNS] int32 in a pack.
    """

    sequences: int
    tokens: int
    chunk: int
    items: int
    segments: int = 0
    shares: int = 1
    cu_seqlens: Tensor | None = None
    table: Tensor | None = None

    @property
    def split(self) -> bool:
        """Whether a sequence may be spread over several items."""
        return self.segments != 1


@lru_cache(1024)
def batch_plan(
    sequences: int, tokens: int, heads: int, chunk: int, programs: int, deterministic: bool
) -> Plan:
    """Cut a batch so that about `programs` programs run at a time, in full waves."""
    alone = 1 if deterministic else sequences
    segments = segment_count(alone * heads, max(1, ceil(tokens / chunk)), programs)
    chunks = max(1, ceil(tokens / chunk))
    shares = share_count(segments - 1, ceil(chunks / segments), alone * heads)
    return Plan(sequences, tokens, chunk, sequences * segments, segments, shares)


def pack_plan(
    cu_seqlens: Tensor, tokens: int, heads: int, chunk: int, programs: int, deterministic: bool
) -> Plan:
    """Cut a pack; its table is still to be filled."""
    sequences = cu_seqlens.numel() - 1
    chunks = tokens // chunk + sequences  # at most
    if deterministic:
        items, shares = chunks // SEGMENT + sequences, 1
    else:
        items = segment_count(heads, chunks, programs)
        shares = share_count(items - 1, ceil(chunks / items), heads)
    offsets = cu_seqlens.to(torch.int32).contiguous()
    table = torch.empty(items, COLUMNS, dtype=torch.int32, device=cu_seqlens.device)
    return Plan(sequences, tokens, chunk, items, 0, shares, offsets, table)


def share_count(parts: int, chunks: int, heads: int) -> int:
    """Programs for each of `parts` sums of so many chunks, one after the other, for each head.

    Shares shorten the sums, and lengthen what is left to add at the start of the last item.
    """
    most = max(1, min(4, 200 // max(1, parts * heads)))
    return min(range(1, most + 1), key=lambda n: 0.6 * chunks / n + 0.8 * parts * n)


@lru_cache(1024)
def segment_count(rows: int, chunks: int, programs: int) -> int:
    """Parts of each of `rows` equal runs of chunks that finish first on so many programs at a time.

    A program costs its chunks and, for its start, about `START` more; splitting costs a pass over
    part of the input, `SPLIT` of the time when nothing can be cut off.
    """
    best, least = 1, float("inf")
    for parts in range(1, min(chunks, 2 * programs) + 1):
        if parts > 1 and (chunks / parts < 8 or rows * parts > 4 * programs):
            break
        waves = ceil(rows * parts / programs)
        cost = waves * (ceil(chunks / parts) + START) + (
            SPLIT * chunks * rows / programs + START
        ) * (parts > 1)
        if cost < least * 0.97:
            best, least = parts, cost
    return best


START = 3.0
SPLIT = 0.06
