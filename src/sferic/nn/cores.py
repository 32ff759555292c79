"""The replaceable objects of the model, in their single-device form.

Parallel training and the engine put others in their places; the model calls them and knows no
difference.  They hold no weights.  The fifth object, the MoE dispatcher, is in `dispatch.py`.
"""

from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor

from sferic.nn.batch import Batch
from sferic.ops.attention import decode_attention, packed_attention, prefill_attention
from sferic.ops.fused import gated_rms_norm, linear_cross_entropy
from sferic.ops.lightning import lightning_attention, lightning_decode, lightning_prefill
from sferic.ops.matmul import linear
from sferic.ops.slots import consecutive, fill_empty_rows

KV = tuple[Tensor, Tensor]


class SoftmaxCore:
    """Attention of q [T, H, K] to k, v [T, G, K] and to the cached ones, after RoPE."""

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, batch: Batch, cache: KV | None) -> Tensor:
        if cache is None:
            scale = q.shape[-1] ** -0.5
            return packed_attention(q, k, v, batch.cu_seqlens, batch.max_seqlen, scale)[0]
        n = batch.decodes
        return _joined(
            len(q),
            n,
            lambda: self._decode(q[:n], k[:n], v[:n], batch, cache),
            lambda: self._extend(q[n:], k[n:], v[n:], batch, cache),
        )

    @staticmethod
    def _decode(q: Tensor, k: Tensor, v: Tensor, batch: Batch, cache: KV) -> Tensor:
        """One token for each of the first sequences, without waiting for the host."""
        assert batch.slots is not None
        scale, size = q.shape[-1] ** -0.5, cache[0].shape[1]
        slots, at, n = batch.slots[: len(q)], batch.positions[: len(q)], batch.max_context
        first = consecutive(slots, len(cache[0])) if batch.block_table is None else None
        if first is not None:
            past = [cached[first : first + len(q), :n] for cached in cache]
            for cached, new in zip(past, (k, v), strict=True):
                cached.scatter_(1, at[:, None, None, None].expand_as(new[:, None]), new[:, None])
            return decode_attention(q, past[0], past[1], at + 1, scale)
        live, rows, index = fill_empty_rows(slots)
        table = index[:, None] if batch.block_table is None else batch.block_table[: len(q)]
        if rows is not None:
            q, k, v, at = q[rows], k[rows], v[rows], at[rows]
            table = table if batch.block_table is None else table[rows]
        block, offset = table.gather(1, (at // size)[:, None])[:, 0], at % size
        for cached, new in zip(cache, (k, v), strict=True):
            if live is not None:
                new = torch.where(live.any(), new, cached[block, offset])
            cached[block, offset] = new
        past = [cached[table[:, : -(-n // size)]].flatten(1, 2)[:, :n] for cached in cache]
        o = decode_attention(q, past[0], past[1], at + 1, scale)
        return o if live is None else torch.where(live[:, None, None], o, 0)

    @staticmethod
    def _extend(q: Tensor, k: Tensor, v: Tensor, batch: Batch, cache: KV) -> Tensor:
        """Any number of tokens for each of the other sequences."""
        assert batch.slots is not None
        n, size = batch.decodes, cache[0].shape[1]
        cu_seqlens = batch.cu_seqlens[n:] - n
        ends, starts = cu_seqlens.tolist(), batch.positions[n:]
        table = batch.slots[:, None] if batch.block_table is None else batch.block_table
        past = []
        for (a, b), own in zip(pairwise(ends), table[n:].tolist(), strict=True):
            start = int(starts[a]) if b > a else 0
            blocks = own[: -(-(start + b - a) // size)]
            past.append(tuple(_read(cached, blocks, start) for cached in cache))
            for cached, new in zip(cache, (k[a:b], v[a:b]), strict=True):
                _write(cached, blocks, start, new)
        return prefill_attention(q, k, v, cu_seqlens, past, q.shape[-1] ** -0.5)


def _joined(
    tokens: int, decodes: int, decode: Callable[[], Tensor], extend: Callable[[], Tensor]
) -> Tensor:
    """What both parts of a batch give, of which either may be empty."""
    if decodes == 0:
        return extend()
    return decode() if decodes == tokens else torch.cat([decode(), extend()])


def _read(cached: Tensor, blocks: list[int], n: int) -> Tensor:
    """The first n tokens of a sequence, [n, G, K]: those of one block as they lie."""
    if len(blocks) <= 1 or n <= cached.shape[1]:
        return cached[blocks[0] if blocks else 0, :n]
    return cached[blocks].flatten(0, 1)[:n]


def _write(cached: Tensor, blocks: list[int], start: int, new: Tensor) -> None:
    """Put tokens [n, G, K] at positions start .. start + n - 1 of a sequence."""
    size, at = cached.shape[1], start
    while len(new):
        offset = at % size
        n = min(len(new), size - offset)
        cached[blocks[at // size], offset : offset + n] = new[:n]
        at, new = at + n, new[n:]


class LightningCore:
    """Lightning attention of q, k [T, H, K], v [T, H, V], slopes [H] and the cached states."""

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, slopes: Tensor, batch: Batch, cache: Tensor | None
    ) -> Tensor:
        if cache is None:
            o = lightning_attention(q, k, v, slopes, cu_seqlens=batch.cu_seqlens)
            assert isinstance(o, Tensor)
            return o
        n, slots, known = batch.decodes, batch.slots, batch.has_state
        assert slots is not None
        assert known is not None
        return _joined(
            len(q),
            n,
            lambda: lightning_decode(q[:n], k[:n], v[:n], slopes, cache, slots[:n]),
            lambda: lightning_prefill(
                q[n:], k[n:], v[n:], slopes, cache, slots[n:], known[n:], batch.cu_seqlens[n:] - n
            ),
        )


class GatedNorm:
    """sigmoid(gate) * RMSNorm(o) over all heads jointly; o [T, H, V], gate and weight H * V."""

    def __call__(self, o: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
        return gated_rms_norm(o, gate, weight, eps)


class Vocabulary:
    """Everything that spans the vocabulary; weights are [V, D]."""

    def embed(self, tokens: Tensor, weight: Tensor) -> Tensor:
        """[T] -> [T, D]."""
        return torch.nn.functional.embedding(tokens, weight)

    def logits(self, h: Tensor, weight: Tensor) -> Tensor:
        """[T, D] -> [T, V]."""
        return linear(h, weight.to(h.dtype))

    def loss(self, h: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        """Summed cross entropy of labels [T] (-100: none), without holding all logits."""
        return linear_cross_entropy(h, weight, labels)
