"""Whatever the way through the cache, logits are those of the plain forward."""

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from sferic.config import ModelConfig
from sferic.nn import ContiguousCache, HybridModel

MakeConfig = Callable[..., ModelConfig]
MakeModel = Callable[..., HybridModel]
Documents = Callable[..., list[Tensor]]
Alone = Callable[[HybridModel, Tensor], Tensor]

T = 40


def new_cache(model: HybridModel, rows: int, capacity: int = T) -> ContiguousCache:
    return ContiguousCache(model.config, rows, capacity, dtype=model.lm_head.weight.dtype)


@torch.no_grad()
def step(
    model: HybridModel,
    cache: ContiguousCache,
    sequences: list[Tensor],
    rows: list[int] | None = None,
) -> list[Tensor]:
    """Append to the rows; logits of each sequence."""
    batch = cache.extend(sequences, rows)
    logits = model.head(model.hidden(batch, cache)[0])
    return list(logits.split([len(s) for s in sequences]))


def close(got: Tensor, want: Tensor) -> None:
    tolerance = 1e-12 if want.dtype == torch.float64 else 1e-5
    assert got.dtype == want.dtype
    torch.testing.assert_close(got, want, rtol=0, atol=tolerance * float(want.abs().max()))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_decoding_every_token_equals_one_forward(
    dtype: torch.dtype, make_model: MakeModel, documents: Documents, alone: Alone
) -> None:
    model = make_model(dtype=dtype)
    docs = documents(T, T, T)
    cache = new_cache(model, 3)
    steps = [step(model, cache, [d[t : t + 1] for d in docs]) for t in range(T)]
    assert cache.lengths == [T, T, T]
    for row, doc in enumerate(docs):
        close(torch.cat([s[row] for s in steps]), alone(model, doc))


@given(cuts=st.lists(st.integers(0, T), max_size=5))
@example(cuts=[1])
@example(cuts=[0, 1, 2])
@example(cuts=[T - 1])
@settings(max_examples=20)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_prefill_in_any_chunks_equals_one_forward(
    dtype: torch.dtype,
    cuts: list[int],
    make_model: MakeModel,
    documents: Documents,
    alone: Alone,
) -> None:
    model = make_model(dtype=dtype)
    (doc,) = documents(T)
    cache = new_cache(model, 1)
    edges = [0, *sorted(set(cuts)), T]
    chunks = [step(model, cache, [doc[a:b]])[0] for a, b in pairwise(edges) if b > a]
    close(torch.cat(chunks), alone(model, doc))


def test_chunks_longer_than_a_block(
    make_model: MakeModel, documents: Documents, alone: Alone
) -> None:
    model = make_model()
    (doc,) = documents(150)
    cache = new_cache(model, 1, 150)
    chunks = [step(model, cache, [doc[a:b]])[0] for a, b in pairwise([0, 70, 71, 150])]
    close(torch.cat(chunks), alone(model, doc))


def test_one_row_decodes_while_another_is_prefilled(
    make_model: MakeModel, documents: Documents, alone: Alone
) -> None:
    model = make_model()
    docs = documents(T, T, T)
    cache = new_cache(model, 5)
    rows = [3, 0, 4]
    sizes = [[10, 1, 1], [1, 12, 1], [1, 1, 1], [5, 1, 0], [1, 1, 1], [T - 18, T - 16, T - 4]]
    parts: list[list[Tensor]] = [[], [], []]
    at = [0, 0, 0]
    for added in sizes:
        sequences = [d[a : a + n] for d, a, n in zip(docs, at, added, strict=True)]
        for mine, logits in zip(parts, step(model, cache, sequences, rows), strict=True):
            mine.append(logits)
        at = [a + n for a, n in zip(at, added, strict=True)]
    assert cache.lengths == [T, 0, 0, T, T]
    for mine, doc in zip(parts, docs, strict=True):
        close(torch.cat(mine), alone(model, doc))


def test_rows_in_any_order_and_alone(
    make_model: MakeModel, documents: Documents, alone: Alone
) -> None:
    model = make_model()
    a, b = documents(T, T)
    cache = new_cache(model, 3)
    step(model, cache, [a[:9], b[:5]], [2, 0])
    step(model, cache, [b[5:9]], [0])
    first_b, first_a = step(model, cache, [b[9:10], a[9:10]], [0, 2])
    close(first_a, alone(model, a)[9:10])
    close(first_b, alone(model, b)[9:10])


def test_a_used_row_starts_afresh_when_its_length_is_zero(
    make_model: MakeModel, documents: Documents, alone: Alone
) -> None:
    model = make_model()
    a, b = documents(T, T)
    cache = new_cache(model, 1)
    step(model, cache, [a])
    for layer, kind in enumerate(model.config.mixers):
        tensors = cache.kv(layer) if kind == "softmax" else (cache.state(layer),)
        for tensor in tensors:
            tensor.fill_(float("nan"))
    cache.lengths[0] = 0
    got = step(model, cache, [b[:20]]) + step(model, cache, [b[20:]])
    close(torch.cat(got), alone(model, b))


def test_reorder_moves_rows(make_model: MakeModel, documents: Documents, alone: Alone) -> None:
    model = make_model()
    docs = documents(T, T, T)
    cache = new_cache(model, 3)
    step(model, cache, [docs[0][:9], docs[1][:5], docs[2][:20]])
    order = [2, 0, 2]
    cache.reorder(torch.tensor(order))
    assert cache.lengths == [20, 9, 20]
    sequences = [docs[n][a : a + 1] for n, a in zip(order, cache.lengths, strict=True)]
    sequences[2] = (sequences[2] + 1) % 40  # the copies of one row go different ways
    for got, n, last in zip(step(model, cache, sequences), order, sequences, strict=True):
        known = [9, 5, 20][n]
        close(got, alone(model, torch.cat([docs[n][:known], last]))[-1:])


def test_a_fork_is_a_copy(make_model: MakeModel, documents: Documents, alone: Alone) -> None:
    model = make_model()
    a, b = documents(T, T)
    cache = new_cache(model, 2)
    step(model, cache, [a[:9], b[:5]])
    fork = cache.fork(torch.tensor([1, 1, 0]))
    assert fork.lengths == [5, 5, 9]
    step(model, fork, [a[:7], a[:3], a[:1]])
    assert cache.lengths == [9, 5]
    for got, doc, known in zip(step(model, cache, [a[9:10], b[5:6]]), (a, b), (9, 5), strict=True):
        close(got, alone(model, doc)[known : known + 1])
    (got,) = step(model, fork, [b[:1]], [0])
    close(got, alone(model, torch.cat([b[:5], a[:7], b[:1]]))[-1:])


def test_a_row_that_outgrows_the_cache_is_named(
    make_model: MakeModel, documents: Documents
) -> None:
    model = make_model()
    cache = new_cache(model, 2, capacity=8)
    step(model, cache, documents(8, 5))
    with pytest.raises(ValueError, match=r"row 0 holds 8 tokens and would get 1 more.*room for 8"):
        cache.extend(documents(1, 1))


def test_a_refused_batch_leaves_the_cache_as_it_was(
    make_model: MakeModel, documents: Documents
) -> None:
    cache = new_cache(make_model(), 2, capacity=8)
    with pytest.raises(ValueError, match="row 1 holds 0 tokens"):
        cache.extend(documents(3, 9))
    assert cache.lengths == [0, 0]


def test_states_are_at_least_float32_and_keys_are_not(make_config: MakeConfig) -> None:
    config = make_config()
    cache = ContiguousCache(config, 2, 8, dtype=torch.bfloat16)
    assert config.mixers == ("lightning", "softmax", "lightning", "lightning")
    assert [cache.state(n).dtype for n in (0, 2, 3)] == [torch.float32] * 3
    assert cache.state(0).shape == (2, 4, 8, 8)
    assert [x.dtype for x in cache.kv(1)] == [torch.bfloat16] * 2
    assert [x.shape for x in cache.kv(1)] == [(2, 8, 2, 8)] * 2
    assert ContiguousCache(config, 2, 8, dtype=torch.float64).state(0).dtype == torch.float64


def test_only_batches_of_single_later_tokens_decode(
    make_config: MakeConfig, documents: Documents
) -> None:
    cache = ContiguousCache(make_config(), 2, 40)
    assert cache.extend(documents(1, 1)).decodes == 0
    batch = cache.extend(documents(1, 1))
    assert (batch.decodes, batch.positions.tolist(), batch.max_context) == (2, [1, 1], 2)
    assert cache.extend(documents(1, 2)).decodes == 1
    assert cache.extend(documents(0, 1)).decodes == 0
    assert cache.extend(documents(1), [1]).decodes == 1


def test_decoding_never_waits_for_the_host(
    make_config: MakeConfig,
    make_model: MakeModel,
    documents: Documents,
    no_host_sync: Callable[[], Any],
) -> None:
    ffn = make_config().ffn
    config = make_config(hidden_size=32, ffn=ffn)  # rows of whole 16 bytes
    model = make_model(config, dtype=torch.bfloat16)
    cache = new_cache(model, 3)
    step(model, cache, documents(4, 5, 6))
    batch = cache.extend(documents(1, 1, 1))
    assert batch.decodes == 3
    with torch.no_grad(), no_host_sync() as fake:
        fields = {n: fake(x) for n, x in vars(batch).items() if isinstance(x, Tensor)}
        logits = model.head(model.hidden(replace(batch, **fields), cache)[0])
        assert logits.shape == (3, 40)
