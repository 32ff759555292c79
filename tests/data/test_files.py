import os
from pathlib import Path

import pytest

from sferic.data import write_store
from sferic.data.files import write_file


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What reaches the disk, in order."""
    seen: list[str] = []
    fsync, replace = os.fsync, os.replace

    def record_fsync(descriptor: int) -> None:
        seen.append(Path(f"/proc/self/fd/{descriptor}").resolve().name)
        fsync(descriptor)

    def record_replace(source: Path, target: Path) -> None:
        seen.append(f"{source.name} -> {target.name}")
        replace(source, target)

    monkeypatch.setattr(os, "fsync", record_fsync)
    monkeypatch.setattr(os, "replace", record_replace)
    return seen


def test_a_file_is_flushed_then_renamed(tmp_path: Path, events: list[str]) -> None:
    (tmp_path / "a.json").write_bytes(b"old")
    write_file(tmp_path / "a.json", b"new")
    assert (tmp_path / "a.json").read_bytes() == b"new"
    assert events == ["a.json.tmp", "a.json.tmp -> a.json", tmp_path.name]


def test_a_store_is_flushed_then_renamed(tmp_path: Path, events: list[str]) -> None:
    write_store(tmp_path / "s", [[1]], tokenizer_hash="abc", vocab_size=2)
    files = ["tokens.bin", "ends.idx", "meta.json"]
    assert events == [*files, "s.tmp", "s.tmp -> s", tmp_path.name]


def test_a_failed_write_keeps_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError("no space left")

    (tmp_path / "a.json").write_bytes(b"old")
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="no space left"):
        write_file(tmp_path / "a.json", b"new")
    assert (tmp_path / "a.json").read_bytes() == b"old"
