"""The replaceable objects of the model, in their single-device form.

Parallel training and the engine put others in their places; the model calls them and knows no
difference.  They hold no weights.  The fifth object, the MoE dispatcher, is in `dispatch.py`.
"""

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
        scale = q.shape[-1] ** -0.5
        if cache is None:
            return packed_attention(q, k, v, batch.cu_seqlens, batch.max_seqlen, scale)[0]
        keys, values = cache
        assert batch.slots is not None
        if batch.decode:
            at, n = batch.positions, batch.max_context
            first = consecutive(batch.slots, len(keys))
            if first is not None:
                rows = slice(first, first + len(q))
                past = keys[rows, :n], values[rows, :n]
                for cached, new in zip(past, (k, v), strict=True):
                    cached.scatter_(
                        1, at[:, None, None, None].expand_as(new[:, None]), new[:, None]
                    )
                return decode_attention(q, *past, at + 1, scale)
            live, rows, index = fill_empty_rows(batch.slots)
            if rows is not None:
                q, k, v, at = q[rows], k[rows], v[rows], at[rows]
            for cached, new in ((keys, k), (values, v)):
                if live is not None:
                    new = torch.where(live.any(), new, cached[index, at])
                cached[index, at] = new
            o = decode_attention(q, keys[index, :n], values[index, :n], at + 1, scale)
            return o if live is None else torch.where(live[:, None, None], o, 0)
        past = []
        ends, slots = batch.cu_seqlens.tolist(), batch.slots.tolist()
        for slot, a, b in zip(slots, ends, ends[1:], strict=False):
            start = int(batch.positions[a]) if b > a else 0
            past.append((keys[slot, :start], values[slot, :start]))
            keys[slot, start : start + b - a] = k[a:b]
            values[slot, start : start + b - a] = v[a:b]
        return prefill_attention(q, k, v, batch.cu_seqlens, past, scale)


class LightningCore:
    """Lightning attention of q, k [T, H, K], v [T, H, V], slopes [H] and the cached states."""

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, slopes: Tensor, batch: Batch, cache: Tensor | None
    ) -> Tensor:
        if cache is None:
            o = lightning_attention(q, k, v, slopes, cu_seqlens=batch.cu_seqlens)
            assert isinstance(o, Tensor)
            return o
        assert batch.slots is not None
        if batch.decode:
            return lightning_decode(q, k, v, slopes, cache, batch.slots)
        assert batch.has_state is not None
        return lightning_prefill(
            q, k, v, slopes, cache, batch.slots, batch.has_state, batch.cu_seqlens
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
