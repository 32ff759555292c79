"""A micro-batch: one flat pack of tokens with the documents' boundaries."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from sferic.ops.packs import check_cu_seqlens

if TYPE_CHECKING:
    from sferic.data import Pack


@dataclass(frozen=True)
class Batch:
    """What the model reads.  T tokens, S sequences.

    A sequence is a document in training; in serving it is the new part of a request whose earlier
    part is in the cache.
    """

    cu_seqlens: Tensor  # [S + 1] int32, from 0 to T
    positions: Tensor  # [T], of each token in its own document
    valid: Tensor  # [T] bool; pads take no expert capacity and no part in the auxiliary loss
    max_seqlen: int  # the longest sequence of this pack, known to the host
    tokens: Tensor | None = None  # [T]
    embeddings: Tensor | None = None  # [T, D], instead of tokens
    labels: Tensor | None = None  # [T], -100 where there is none
    # serving
    slots: Tensor | None = None  # [S], the cache row of each sequence
    has_state: Tensor | None = None  # [S] bool: earlier tokens are in the cache
    block_table: Tensor | None = None  # [S, n], where keys and values lie in blocks; else in rows
    decodes: int = 0  # so many first sequences have one token, and earlier ones in the cache
    max_context: int = 0  # the longest of these with its cached part, known to the host

    @staticmethod
    def pack(
        sequences: Sequence[Tensor], starts: Sequence[int] | None = None, **serving: Any
    ) -> "Batch":
        """Lay token sequences [t_i] end to end.

        Args:
            sequences: token ids, [t_i] each.
            starts: their first positions, 0 by default.
            serving: fields of the batch that serving needs.
        """
        if not sequences:
            raise ValueError("a batch needs at least one sequence")
        device = sequences[0].device
        lengths = [len(s) for s in sequences]
        first = [0] * len(lengths) if starts is None else list(starts)
        ends = [0, *accumulate(lengths)]
        shift = [a - end for a, end in zip(first, ends[:-1], strict=True)]
        positions = np.arange(ends[-1]) + np.repeat(shift, lengths)
        return Batch(
            tokens=torch.cat(list(sequences)),
            cu_seqlens=torch.tensor(ends, dtype=torch.int32, device=device),
            positions=torch.from_numpy(positions).to(device),
            valid=torch.ones(ends[-1], dtype=torch.bool, device=device),
            max_seqlen=max(lengths),
            **serving,
        )

    @staticmethod
    def from_cu_seqlens(tokens: Tensor, cu_seqlens: Tensor) -> "Batch":
        """A pack of tokens [T] whose documents end at cu_seqlens [S + 1]."""
        check_cu_seqlens(cu_seqlens, len(tokens))
        lengths = cu_seqlens.diff()
        starts = torch.repeat_interleave(cu_seqlens[:-1], lengths, output_size=len(tokens))
        return Batch(
            tokens=tokens,
            cu_seqlens=cu_seqlens.to(torch.int32),
            positions=torch.arange(len(tokens), device=tokens.device) - starts,
            valid=torch.ones_like(tokens, dtype=torch.bool),
            max_seqlen=int(lengths.max()) if len(lengths) else 0,
        )

    @staticmethod
    def from_pack(pack: "Pack", device: torch.device | str) -> "Batch":
        """A pack of the data stream, with its labels, on a device."""
        return Batch(
            cu_seqlens=torch.from_numpy(pack.cu_seqlens).to(device),
            positions=torch.from_numpy(pack.positions).to(device),
            valid=torch.from_numpy(pack.valid).to(device),
            max_seqlen=pack.max_seqlen,
            tokens=torch.from_numpy(pack.tokens).to(device),
            labels=torch.from_numpy(pack.labels).to(device),
        )

    def with_embeddings(self, embeddings: Tensor) -> "Batch":
        """The same pack with embeddings [T, D] in place of tokens."""
        return replace(self, embeddings=embeddings)
