"""Packs and padded rows equal each document alone."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sferic.config import ModelConfig
from sferic.nn import Batch, HybridModel

MakeConfig = Callable[..., ModelConfig]
MakeModel = Callable[..., HybridModel]
Documents = Callable[..., list[Tensor]]
Alone = Callable[[HybridModel, Tensor], Tensor]


@given(lengths=st.lists(st.integers(0, 12), min_size=1, max_size=6).filter(any))
@settings(max_examples=15)
def test_documents_of_a_pack_equal_each_alone(
    lengths: list[int], make_model: MakeModel, documents: Documents, alone: Alone
) -> None:
    model = make_model()
    docs = documents(*lengths)
    with torch.no_grad():
        logits = model.head(model.hidden(Batch.pack(docs))[0])
    for got, doc in zip(logits.split(lengths), docs, strict=True):
        if len(doc):
            torch.testing.assert_close(got, alone(model, doc), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)], ids=str
)
@pytest.mark.parametrize("lengths", [[30, 0, 1, 7], [1, 1], [0, 90], [5]])
def test_padded_rows_equal_true_ones(
    lengths: list[int],
    dtype: torch.dtype,
    tolerance: float,
    make_model: MakeModel,
    documents: Documents,
    alone: Alone,
) -> None:
    model = make_model(dtype=dtype)
    docs = documents(*lengths)
    rows = torch.full((len(lengths), max(lengths) + 3), 39)
    for row, doc in zip(rows, docs, strict=True):
        row[: len(doc)] = doc
    with torch.no_grad():
        logits = model(rows, lengths=torch.tensor(lengths))
        assert torch.equal(logits, model(rows, lengths=lengths))
    assert logits.shape == (*rows.shape, 40)
    for got, doc in zip(logits, docs, strict=True):
        if len(doc):
            want = alone(model, doc)
            close = tolerance * float(want.abs().max())
            torch.testing.assert_close(got[: len(doc)], want, rtol=0, atol=close)
        assert not got[len(doc) :].any()


def test_rows_without_tokens(make_model: MakeModel) -> None:
    model = make_model()
    with torch.no_grad():
        logits = model(torch.zeros(2, 3, dtype=torch.int64), lengths=[0, 0])
    assert torch.equal(logits, torch.zeros(2, 3, 40))


@given(order=st.permutations(range(4)))
@settings(max_examples=8)
def test_the_order_of_documents_does_not_matter(
    order: list[int], make_model: MakeModel, documents: Documents
) -> None:
    model = make_model()
    docs = documents(70, 1, 5, 12)

    def run(order: list[int]) -> dict[int, Tensor]:
        some = [docs[n] for n in order]
        with torch.no_grad():
            logits = model.head(model.hidden(Batch.pack(some))[0])
        return dict(zip(order, logits.split([len(d) for d in some]), strict=True))

    want, got = run([0, 1, 2, 3]), run(order)
    for n in range(4):
        torch.testing.assert_close(got[n], want[n], rtol=1e-12, atol=1e-12)


def test_other_documents_do_not_matter(make_model: MakeModel, documents: Documents) -> None:
    model = make_model()
    mine = documents(30)[0]
    others = [documents(9, 40, seed=1), documents(40, 9, seed=2), documents(1, 0, seed=3)]
    results = []
    for before, after in others:
        with torch.no_grad():
            logits = model.head(model.hidden(Batch.pack([before, mine, after]))[0])
        results.append(logits[len(before) : len(before) + 30])
    for other in results[1:]:
        torch.testing.assert_close(other, results[0], rtol=1e-12, atol=1e-12)


def test_batches_of_a_pack_and_of_offsets_are_the_same(documents: Documents) -> None:
    docs = documents(3, 0, 5, 1)
    a = Batch.pack(docs)
    b = Batch.from_cu_seqlens(torch.cat(docs), torch.tensor([0, 3, 3, 8, 9]))
    for name in ("tokens", "cu_seqlens", "positions", "valid"):
        assert torch.equal(getattr(a, name), getattr(b, name)), name
        assert getattr(a, name).dtype == getattr(b, name).dtype, name
    assert a.positions.tolist() == [0, 1, 2, 0, 1, 2, 3, 4, 0]
    assert a.max_seqlen == b.max_seqlen == 5
    assert Batch.pack(docs, [7, 0, 2, 4]).positions.tolist() == [7, 8, 9, 2, 3, 4, 5, 6, 4]
    with pytest.raises(ValueError, match="at least one sequence"):
        Batch.pack([])
