from collections.abc import Iterator
from dataclasses import astuple
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sferic.data import (
    Document,
    Pack,
    PackStream,
    Tokenizer,
    TokenStore,
    heldout_packs,
    packing,
    tokenize,
    write_store,
)

PAD = 1
END = 0


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> TokenStore:
    """Documents whose tokens are all different, so that a pack tells where it came from."""
    lengths = np.random.default_rng(0).integers(1, 60, 200)
    ids = np.split(np.arange(2, 2 + lengths.sum()), np.cumsum(lengths)[:-1])
    rows = [np.append(row, END) for row in ids]
    path = tmp_path_factory.mktemp("stream") / "store"
    return write_store(path, rows, tokenizer_hash="abc", vocab_size=100_000)


@pytest.fixture(autouse=True, scope="module")
def small_windows() -> Iterator[None]:
    """Many windows, so that epochs differ in their number of packs."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(packing, "WINDOW_DOCUMENTS", 8)
        monkeypatch.setattr(packing, "WINDOW_PACKS", 1)
        yield


def same(a: Pack, b: Pack) -> bool:
    return all(np.array_equal(x, y) for x, y in zip(astuple(a), astuple(b), strict=True))


def tokens(packs: list[Pack]) -> list[int]:
    return sorted(np.concatenate([pack.tokens[pack.valid] for pack in packs]).tolist())


def all_tokens(store: TokenStore) -> list[int]:
    return sorted(np.concatenate([store.document(i) for i in range(len(store))]).tolist())


def test_each_epoch_covers_everything_in_its_own_order(store: TokenStore) -> None:
    stream = PackStream(store, 64, 0, PAD)
    assert len({stream.packs_per_epoch(epoch) for epoch in range(3)}) > 1
    first = 0
    orders = []
    for epoch in range(3):
        packs = [stream.pack(first + i) for i in range(stream.packs_per_epoch(epoch))]
        assert {stream.epoch_of(first + i) for i in range(len(packs))} == {epoch}
        assert tokens(packs) == all_tokens(store)
        orders.append(tuple(packs[0].tokens.tolist()))
        first += len(packs)
    assert len(set(orders)) == 3


@given(st.lists(st.integers(0, 600), min_size=1, max_size=5), st.integers(0, 3))
@settings(deadline=None, max_examples=30)
def test_a_pack_is_a_pure_function_of_seed_and_index(
    store: TokenStore, indices: list[int], seed: int
) -> None:
    stream = PackStream(store, 64, seed, PAD)
    for index in indices:
        assert same(stream.pack(index), PackStream(store, 64, seed, PAD).pack(index))


def test_ranks_and_restarts_read_one_stream(store: TokenStore) -> None:
    whole = PackStream(store, 64, 0, PAD)
    end = whole.packs_per_epoch(0) + 8
    expected = [whole.pack(i) for i in range(end)]
    # 2 ranks, then 4, then 1, over an epoch's edge; each phase opens the store anew.
    read: dict[int, Pack] = {}
    for ranks, phase in ((2, range(20)), (4, range(20, end - 4)), (1, range(end - 4, end))):
        for rank in range(ranks):
            stream = PackStream(TokenStore(store.path), 64, 0, PAD)
            read.update({i: stream.pack(i) for i in phase[rank::ranks]})
    assert sorted(read) == list(range(end))
    assert all(same(read[i], pack) for i, pack in enumerate(expected))


def test_labels_never_cross_a_document(store: TokenStore) -> None:
    stream = PackStream(store, 32, 0, PAD)
    for i in range(stream.packs_per_epoch(0)):
        pack = stream.pack(i)
        labelled = pack.labels >= 0
        # Tokens of a document count up, and only its last one is the end id.
        follows = pack.labels[labelled] == pack.tokens[labelled] + 1
        assert (follows | (pack.labels[labelled] == END)).all()
        assert not (labelled & (pack.tokens == END)).any()
        assert not (labelled & ~pack.valid).any()


def test_seeds_differ(store: TokenStore) -> None:
    assert not same(PackStream(store, 64, 0, PAD).pack(0), PackStream(store, 64, 1, PAD).pack(0))


def test_two_plans_are_kept(store: TokenStore) -> None:
    stream = PackStream(store, 64, 0, PAD)
    stream.packs_per_epoch(5)
    assert sorted(stream._plans) == [4, 5]
    assert stream.report(0)["dropped"] == 0
    assert len(stream._plans) == 2


def test_heldout_is_one_fixed_pass(store: TokenStore) -> None:
    packs = list(heldout_packs(store, 64, PAD))
    assert tokens(packs) == all_tokens(store)
    again = heldout_packs(store, 64, PAD)
    assert all(same(a, b) for a, b in zip(packs, again, strict=True))


def test_real_text(tmp_path: Path, documents: list[Document], tokenizer: Tokenizer) -> None:
    store = write_store(
        tmp_path / "store",
        tokenize(documents, tokenizer),
        tokenizer_hash=tokenizer.hash,
        vocab_size=tokenizer.vocab_size,
    )
    stream = PackStream(store, 1024, 0, tokenizer.fill_id)
    assert stream.report()["fill"] > 0.9
    packs = [stream.pack(i) for i in range(stream.packs_per_epoch())]
    assert sum(int(pack.valid.sum()) for pack in packs) == store.num_tokens
    assert sum(int((pack.tokens == tokenizer.end_id).sum()) for pack in packs) == len(documents)
    text = "".join(document.text for document in documents)
    pack = packs[0]
    for start, end in zip(pack.cu_seqlens, pack.cu_seqlens[1:], strict=False):
        piece = tokenizer.decode(pack.tokens[start:end])
        # A cut may fall inside a character.
        assert piece.strip("\ufffd") in text


@pytest.mark.parametrize("pad_id", [-1, 100_000])
def test_pad_id_must_be_in_the_vocabulary(store: TokenStore, pad_id: int) -> None:
    with pytest.raises(ValueError, match=f"pad_id {pad_id} lies outside"):
        PackStream(store, 64, 0, pad_id)


def test_indices_are_not_negative(store: TokenStore) -> None:
    stream = PackStream(store, 64, 0, PAD)
    with pytest.raises(ValueError, match="pack index -1"):
        stream.pack(-1)
    with pytest.raises(ValueError, match="epoch -1"):
        stream.packs_per_epoch(-1)
