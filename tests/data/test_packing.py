from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sferic.data import make_pack, packing, plan
from sferic.data.packing import Plan

LENGTHS = st.lists(st.integers(1, 40), min_size=1, max_size=60).map(np.array)
SEQ_LEN = st.integers(2, 50)
SEED = st.integers(0, 2**40)


def log_normal(documents: int) -> np.ndarray:
    """Lengths of web-like documents, mean about 1,500 tokens."""
    sample = np.random.default_rng(0).lognormal(6.8, 1.0, documents)
    return np.maximum(sample, 1).astype(np.int64)


def columns(made: Plan) -> list[list[int]]:
    return [c.tolist() for c in (made.pack_offsets, made.document, made.start, made.length)]


@pytest.fixture(autouse=True, scope="module", params=["one window", "many windows"])
def windows(request: pytest.FixtureRequest) -> Any:
    """Every property holds for one window and for many."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        if request.param == "many windows":
            monkeypatch.setattr(packing, "WINDOW_DOCUMENTS", 8)
            monkeypatch.setattr(packing, "WINDOW_PACKS", 1)
        yield


@given(LENGTHS, SEQ_LEN, SEED, st.integers(0, 9))
@settings(deadline=None)
def test_every_token_is_in_exactly_one_pack(
    lengths: np.ndarray, seq_len: int, seed: int, epoch: int
) -> None:
    made = plan(lengths, seq_len, seed, epoch)
    seen = [np.zeros(length, int) for length in lengths]
    for document, start, length in zip(made.document, made.start, made.length, strict=True):
        seen[document][start : start + length] += 1
    assert all((count == 1).all() for count in seen)
    assert made.length.sum() == made.num_tokens == lengths.sum()
    assert made.report()["dropped"] == 0


@given(LENGTHS, SEQ_LEN, SEED)
@settings(deadline=None)
def test_no_pack_exceeds_its_length_and_none_is_empty(
    lengths: np.ndarray, seq_len: int, seed: int
) -> None:
    made = plan(lengths, seq_len, seed, 0)
    assert made.pack_offsets[0] == 0
    assert made.pack_offsets[-1] == len(made.document)
    assert (np.diff(made.pack_offsets) > 0).all()
    used = np.add.reduceat(made.length, made.pack_offsets[:-1])
    assert used.max() <= seq_len
    assert len(made) == len(used)


@given(LENGTHS, SEQ_LEN, SEED)
@settings(deadline=None)
def test_a_document_is_cut_only_where_it_must(lengths: np.ndarray, seq_len: int, seed: int) -> None:
    made = plan(lengths, seq_len, seed, 0)
    assert (made.start % seq_len == 0).all()
    assert (np.bincount(made.document) == -(-lengths // seq_len)).all()
    assert made.report()["split_documents"] == (lengths > seq_len).mean()


@given(LENGTHS, SEQ_LEN, SEED, st.integers(0, 9))
@settings(deadline=None)
def test_a_plan_is_a_pure_function(
    lengths: np.ndarray, seq_len: int, seed: int, epoch: int
) -> None:
    made = plan(lengths, seq_len, seed, epoch)
    np.random.seed(epoch)  # noqa: NPY002
    assert columns(plan(lengths, seq_len, seed, epoch)) == columns(made)


def test_seeds_and_epochs_have_their_own_orders() -> None:
    lengths = log_normal(100)
    orders = [
        tuple(plan(lengths, 2048, seed, epoch).document.tolist())
        for seed in range(3)
        for epoch in range(3)
    ]
    assert len(set(orders)) == 9


def test_epochs_mix_documents_anew() -> None:
    def neighbours(epoch: int) -> set[frozenset[int]]:
        made = plan(log_normal(2000), 2048, 0, epoch)
        return {frozenset(p.tolist()) for p in np.split(made.document, made.pack_offsets[1:-1])}

    first, second = neighbours(0), neighbours(1)
    shared = {documents for documents in first & second if len(documents) > 1}
    assert len(shared) < 0.2 * len(first)


def test_packs_are_shuffled() -> None:
    """Best-fit decreasing opens packs with the longest pieces: training must not see that order."""
    made = plan(np.arange(1, 201), 200, 0, 0)
    longest = np.maximum.reduceat(made.length, made.pack_offsets[:-1])
    correlation = np.corrcoef(longest, np.arange(len(made)))[0, 1]
    assert abs(correlation) < 0.4


def test_a_plan_is_the_same_on_every_machine() -> None:
    """Fixed for all time: another order would change what resumed runs train on."""
    made = plan(np.array([5, 3, 9, 2, 7, 4, 12]), 8, seed=1, epoch=2)
    assert columns(made) == [
        [0, 1, 3, 4, 5, 7, 9],
        [3, 0, 1, 6, 2, 4, 2, 5, 6],
        [0, 0, 0, 0, 0, 0, 8, 0, 8],
        [2, 5, 3, 8, 8, 7, 1, 4, 4],
    ]


@pytest.mark.parametrize(("seq_len", "bound"), [(2048, 0.99), (8192, 0.99), (65536, 0.98)])
def test_fill_on_log_normal_lengths(seq_len: int, bound: float) -> None:
    lengths = log_normal(20_000)
    with pytest.MonkeyPatch.context() as defaults:
        defaults.setattr(packing, "WINDOW_DOCUMENTS", 1024)
        defaults.setattr(packing, "WINDOW_PACKS", 256)
        report = plan(lengths, seq_len, 0, 0).report()
    assert report["fill"] > bound
    assert report["split_documents"] == (lengths > seq_len).mean()


@given(LENGTHS, SEQ_LEN)
@settings(deadline=None)
def test_packs_as_well_as_first_fit(lengths: np.ndarray, seq_len: int) -> None:
    """Against first-fit decreasing, written naively, and the bound both obey (11/9 optimum + 1)."""
    lengths = np.minimum(lengths, seq_len)
    packs = packing._best_fit_decreasing(lengths, seq_len)
    rooms: list[int] = []
    for length in sorted(lengths.tolist(), reverse=True):
        for i, room in enumerate(rooms):
            if room >= length:
                rooms[i] -= length
                break
        else:
            rooms.append(seq_len - length)
    optimum = -(-lengths.sum() // seq_len)
    assert optimum <= len(packs) <= max(len(rooms), 11 / 9 * optimum + 1)


def test_best_fit_takes_the_fullest_pack() -> None:
    # 6 and 5 open packs with room 4 and 5; 4 goes where it fits exactly, not to the last.
    assert packing._best_fit_decreasing(np.array([5, 4, 6, 5]), 10) == [[2, 1], [0, 3]]


def test_report() -> None:
    report = plan(np.array([256, 256, 101, 411]), 512, 0, 0).report()
    assert report == {
        "packs": 2,
        "fill": 1.0,
        "split_documents": 0.0,
        "padding_to_256_waste": (256 + 256 + 256 + 512) / 1024 - 1,
        "dropped": 0,
    }


@given(st.lists(st.integers(1, 12), max_size=8), st.integers(0, 10))
@settings(deadline=None)
def test_pack(lengths: list[int], room: int) -> None:
    used = sum(lengths)
    seq_len = max(used + room, 1)
    pieces = [np.arange(100 * i, 100 * i + n, dtype=np.uint32) for i, n in enumerate(lengths)]
    pack = make_pack(pieces, seq_len, pad_id=999)
    ends = np.cumsum([0, *lengths, *([seq_len - used] if seq_len > used else [])])
    assert pack.cu_seqlens.tolist() == ends.tolist()
    assert pack.max_seqlen == np.diff(ends).max()
    assert pack.valid.tolist() == [True] * used + [False] * (seq_len - used)
    assert (pack.tokens[used:] == 999).all()
    for i, piece in enumerate(pieces):
        row = slice(ends[i], ends[i + 1])
        assert (pack.tokens[row] == piece).all()
        assert pack.labels[row].tolist() == [*piece[1:].tolist(), -100]
        assert pack.positions[row].tolist() == list(range(len(piece)))
    assert (pack.labels[used:] == -100).all()
    assert pack.positions[used:].tolist() == list(range(seq_len - used))
    dtypes = [x.dtype for x in (pack.tokens, pack.labels, pack.cu_seqlens, pack.positions)]
    assert dtypes == [np.int64, np.int64, np.int32, np.int32]
    assert pack.valid.dtype == bool
    assert type(pack.max_seqlen) is int


@pytest.mark.parametrize("lengths", [[5, 4], [3, 0]])
def test_pack_refuses_pieces_that_do_not_fit(lengths: list[int]) -> None:
    with pytest.raises(ValueError, match="do not fit"):
        make_pack([np.ones(n, int) for n in lengths], 8, 0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([], 8, 0, 0), r"lengths of shape \[0\]"),
        (([[1]], 8, 0, 0), r"lengths of shape \[1, 1\]"),
        (([3, 0], 8, 0, 0), "positive"),
        (([3], 1, 0, 0), "seq_len is 1"),
        (([3], 8, -1, 0), "seed -1"),
        (([3], 8, 0, -1), "epoch -1"),
    ],
)
def test_plan_refuses_bad_arguments(arguments: Any, message: str) -> None:
    lengths, *rest = arguments
    with pytest.raises(ValueError, match=message):
        plan(np.array(lengths), *rest)
