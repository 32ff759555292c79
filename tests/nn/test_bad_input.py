"""Offsets and rows that make no sense are refused by name."""

import pytest
import torch

from sferic.config import load_model
from sferic.nn import Batch, ContiguousCache, HybridModel
from sferic.ops import packed_attention

OFFSETS = [[0, 3], [0, 4, 2, 5], [1, 5], []]


@pytest.mark.parametrize("offsets", OFFSETS)
def test_offsets_must_rise_to_the_number_of_tokens(offsets: list[int]) -> None:
    cu_seqlens = torch.tensor(offsets, dtype=torch.int32)
    model = HybridModel(load_model("tiny")).init_weights(0).eval()
    with pytest.raises(ValueError, match="cu_seqlens"):
        model(torch.zeros(5, dtype=torch.int64), cu_seqlens=cu_seqlens)
    x = torch.zeros(5, 2, 16)
    with pytest.raises(ValueError, match="cu_seqlens"):
        packed_attention(x, x, x, cu_seqlens, 5, 1.0)


def test_a_pack_without_documents_is_empty() -> None:
    batch = Batch.from_cu_seqlens(torch.zeros(0, dtype=torch.int64), torch.tensor([0]))
    assert batch.max_seqlen == 0


def test_a_cache_row_is_extended_once() -> None:
    cache = ContiguousCache(load_model("tiny"), 2, 8)
    with pytest.raises(ValueError, match="different"):
        cache.extend([torch.zeros(2), torch.zeros(2)], rows=[0, 0])
    assert cache.lengths == [0, 0]


@pytest.mark.parametrize(("heads", "kv_heads"), [(3, 2), (2, 4)])
def test_heads_that_do_not_divide_are_refused(heads: int, kv_heads: int) -> None:
    q, k = torch.randn(10, heads, 8), torch.randn(10, kv_heads, 8)
    with pytest.raises(ValueError, match="G dividing H"):
        packed_attention(q, k, k, torch.tensor([0, 10]), 10, 0.3)
