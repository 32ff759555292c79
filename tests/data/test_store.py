import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sferic.data import Document, StoreError, Tokenizer, TokenStore, tokenize, write_store

ROWS = [[1, 2, 3, 9], [9], [4, 5, 9], [0, 6, 7, 8, 9]]


def write(path: Path, rows: Any = ROWS, vocab_size: int = 10) -> TokenStore:
    return write_store(path, rows, tokenizer_hash="abc", vocab_size=vocab_size)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    write(tmp_path / "store")
    return tmp_path / "store"


def edit_meta(path: Path, **changes: Any) -> None:
    meta = json.loads((path / "meta.json").read_text())
    (path / "meta.json").write_text(json.dumps(meta | changes))


def test_round_trip(path: Path) -> None:
    store = TokenStore(path)
    assert [store.document(i).tolist() for i in range(len(store))] == ROWS
    assert store.lengths.tolist() == [4, 1, 3, 5]
    assert store.lengths.dtype == np.int64
    assert (len(store), store.num_tokens) == (4, 13)
    assert (store.vocab_size, store.tokenizer_hash) == (10, "abc")
    store.verify()
    assert [p.name for p in path.parent.iterdir()] == ["store"]


def test_files_are_as_documented(path: Path) -> None:
    flat = [token for row in ROWS for token in row]
    assert np.frombuffer((path / "tokens.bin").read_bytes(), "<u4").tolist() == flat
    assert np.frombuffer((path / "ends.idx").read_bytes(), "<u8").tolist() == [4, 5, 8, 13]
    assert json.loads((path / "meta.json").read_text())["version"] == 1


def test_documents_are_read_only_views(path: Path) -> None:
    document = TokenStore(path).document(0)
    assert not document.flags.owndata
    with pytest.raises(ValueError, match="read-only"):
        document[0] = 1


def test_real_text(tmp_path: Path, documents: list[Document], tokenizer: Tokenizer) -> None:
    store = write_store(
        tmp_path / "new" / "store",
        tokenize(documents, tokenizer),
        tokenizer_hash=tokenizer.hash,
        vocab_size=tokenizer.vocab_size,
    )
    store.verify()
    texts = [tokenizer.decode(store.document(i)) for i in range(len(store))]
    assert texts == [document.text for document in documents]


@pytest.mark.parametrize("index", [-1, 4])
def test_document_out_of_range(path: Path, index: int) -> None:
    with pytest.raises(ValueError, match=f"document {index} is out of range"):
        TokenStore(path).document(index)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([[1], [2, 10]], "document 1 has id 10, outside the vocabulary of 10"),
        ([[1], [-1]], "document 1 has id -1"),
        ([[1], [2**32 + 1]], "document 1 has id 4294967297"),
        ([[1], []], r"document 1 has shape \[0\]"),
        ([[[1, 2]]], r"document 0 has shape \[1, 2\]"),
        ([[1.5]], "document 0 has float64 ids"),
        ([], "no documents"),
    ],
)
def test_bad_documents_are_refused(tmp_path: Path, rows: Any, message: str) -> None:
    with pytest.raises(StoreError, match=message):
        write(tmp_path / "store", rows)
    assert not (tmp_path / "store").exists()


def test_a_store_is_never_overwritten(path: Path) -> None:
    with pytest.raises(StoreError, match="never overwritten"):
        write(path, [[1]])
    assert len(TokenStore(path)) == 4


def test_a_crash_leaves_no_store_and_the_next_write_cleans_up(tmp_path: Path) -> None:
    def crash() -> Iterator[list[int]]:
        yield [1, 2]
        raise RuntimeError("crash")

    path = tmp_path / "store"
    with pytest.raises(RuntimeError, match="crash"):
        write(path, crash())
    assert not path.exists()
    with pytest.raises(StoreError, match="is not a token store"):
        TokenStore(tmp_path / "store.tmp")
    (tmp_path / "store.tmp" / "stale").touch()
    store = write(path)
    assert store.num_tokens == 13
    assert sorted(p.name for p in path.iterdir()) == ["ends.idx", "meta.json", "tokens.bin"]
    assert not (tmp_path / "store.tmp").exists()


@pytest.mark.parametrize("name", ["tokens.bin", "ends.idx"])
@pytest.mark.parametrize("size", [0, -1, -8, 8])
def test_a_file_of_the_wrong_size(path: Path, name: str, size: int) -> None:
    content = (path / name).read_bytes()
    (path / name).write_bytes(content[:size] if size <= 0 else content + bytes(size))
    with pytest.raises(StoreError, match=f"{name} has .* bytes where"):
        TokenStore(path)


@pytest.mark.parametrize("name", ["tokens.bin", "ends.idx", "meta.json"])
def test_a_missing_file(path: Path, name: str) -> None:
    (path / name).unlink()
    with pytest.raises(StoreError, match=name):
        TokenStore(path)


@pytest.mark.parametrize("name", ["tokens.bin", "ends.idx"])
def test_verify_finds_a_flipped_bit(path: Path, name: str) -> None:
    content = bytearray((path / name).read_bytes())
    # In ends.idx this turns the ends 4, 5, 8 into 4, 5, 9: still a sound structure.
    content[16] ^= 1
    (path / name).write_bytes(content)
    store = TokenStore(path)
    with pytest.raises(StoreError, match=f"{name} has sha256"):
        store.verify()


@pytest.mark.parametrize(
    ("ends", "message"),
    [
        ([4, 5, 8, 12], "the last document ends at 12"),
        ([4, 8, 5, 13], "do not increase"),
        ([4, 4, 8, 13], "do not increase"),
        ([0, 5, 8, 13], "do not increase"),
    ],
)
def test_ends_that_make_no_sense(path: Path, ends: list[int], message: str) -> None:
    (path / "ends.idx").write_bytes(np.array(ends, "<u8").tobytes())
    with pytest.raises(StoreError, match=message):
        TokenStore(path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"version": 2}, "has version 2, this code reads version 1"),
        ({"num_tokens": 12}, "tokens.bin has 52 bytes where meta.json implies 48"),
        ({"num_documents": 5}, "ends.idx has 32 bytes where meta.json implies 40"),
        ({"vocab_size": "10"}, "vocab_size='10', which must be int"),
        ({"extra": 1}, "it must have"),
    ],
)
def test_a_meta_that_disagrees(path: Path, changes: dict[str, Any], message: str) -> None:
    edit_meta(path, **changes)
    with pytest.raises(StoreError, match=message):
        TokenStore(path)


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"version": 1}'])
def test_a_meta_that_is_none(path: Path, content: str) -> None:
    (path / "meta.json").write_text(content)
    with pytest.raises(StoreError, match="write the store again"):
        TokenStore(path)
