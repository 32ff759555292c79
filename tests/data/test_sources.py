import logging
from itertools import islice
from pathlib import Path

import pytest

from sferic.data import Document, read_corpus, split


def test_stdlib_is_the_source_of_the_standard_library() -> None:
    documents = list(islice(read_corpus("stdlib"), 400))
    ids = [document.id for document in documents]
    assert len(ids) == 400
    assert ids == sorted(set(ids))
    assert all(id.endswith(".py") for id in ids)
    excluded = {"site-packages", "dist-packages", "test", "tests", "__pycache__"}
    assert not any(excluded & set(id.split("/")) for id in ids)
    assert "class ABCMeta" in next(d.text for d in documents if d.id == "abc.py")


def test_folder_is_read_recursively_in_order_and_unchanged(tmp_path: Path) -> None:
    texts = {"b.txt": "two\r\nlines \n", "a/z.md": "漢字", "a.txt": "\ufeffmark", "B.txt": "x"}
    for id, text in texts.items():
        (tmp_path / id).parent.mkdir(exist_ok=True)
        (tmp_path / id).write_bytes(text.encode())
    assert list(read_corpus(str(tmp_path))) == [Document(i, texts[i]) for i in sorted(texts)]


def test_what_is_no_text_is_skipped_and_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "good.txt").write_text("text")
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    (tmp_path / "binary").write_bytes(b"a\0b")
    (tmp_path / "empty.txt").write_bytes(b"")
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "config").write_text("hidden")
    (tmp_path / ".hidden").write_text("hidden")
    with caplog.at_level(logging.INFO):
        assert [document.id for document in read_corpus(str(tmp_path))] == ["good.txt"]
    assert "skipped 3 of 4 files" in caplog.text


def test_missing_and_empty_folders(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="absent' is not a folder"):
        read_corpus(str(tmp_path / "absent"))
    with pytest.raises(ValueError, match="holds no files"):
        read_corpus(str(tmp_path))
    (tmp_path / "binary").write_bytes(b"\xff")
    with pytest.raises(ValueError, match="holds no text"):
        list(read_corpus(str(tmp_path)))


def test_split_keeps_every_document_on_its_side() -> None:
    documents = [Document(f"{i}.txt", "text") for i in range(1000)]
    train, heldout = split(documents, 0.1, 0)
    assert sorted(train + heldout, key=documents.index) == documents
    assert 60 < len(heldout) < 140
    fewer_train, fewer_heldout = split(documents[::2], 0.1, 0)
    assert set(fewer_train) <= set(train)
    assert set(fewer_heldout) <= set(heldout)
    assert split(documents, 0.1, 1)[1] != heldout
    # Fixed for all time: another hash would put held-out text into training.
    assert [document.id for document in heldout[:4]] == ["3.txt", "11.txt", "15.txt", "22.txt"]


@pytest.mark.parametrize("share", [0.0, 1.0, -0.1, 5])
def test_split_refuses_a_share_outside_0_to_1(share: float) -> None:
    with pytest.raises(ValueError, match="between 0 and 1"):
        split([Document("a", "x"), Document("b", "x")], share, 0)


@pytest.mark.parametrize("share", [1e-9, 1 - 1e-9])
def test_split_refuses_an_empty_side(share: float) -> None:
    with pytest.raises(ValueError, match="side of 3 documents is empty"):
        split([Document(name, "x") for name in "abc"], share, 0)
