"""Where text comes from: a folder of UTF-8 files, or the interpreter's own standard library."""

import logging
import os
import sysconfig
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

logger = logging.getLogger(__name__)

STDLIB = "stdlib"
STDLIB_EXCLUDED = frozenset({"site-packages", "dist-packages", "test", "tests", "__pycache__"})


@dataclass(frozen=True)
class Document:
    """One text with a name that is unique in its corpus (a path relative to the corpus)."""

    id: str
    text: str


def read_corpus(corpus: str) -> Iterator[Document]:
    """Read the documents of a corpus, sorted by id, one in memory at a time.

    Args:
        corpus: ``"stdlib"`` for the ``*.py`` files of the running interpreter's standard library
            (without its tests and site-packages), otherwise a folder, read recursively. Names
            that start with a dot are not read. Empty files, and files that are not UTF-8 text
            (a NUL byte counts as binary), are skipped; their number is logged.

    Raises:
        ValueError: the folder is missing, or holds no text (the latter when the last file is read).
    """
    if corpus == STDLIB:
        folder = Path(sysconfig.get_path("stdlib"))
        paths = _list_files(folder, ".py", STDLIB_EXCLUDED)
    else:
        folder = Path(corpus)
        if not folder.is_dir():
            raise ValueError(
                f"corpus {corpus!r} is not a folder: name a folder of UTF-8 text files, "
                f"or {STDLIB!r} for the Python standard library"
            )
        paths = _list_files(folder, "", frozenset())
    if not paths:
        raise ValueError(f"corpus {corpus!r} holds no files: put UTF-8 text files in {folder}")
    return _read_files(corpus, paths)


def split(
    documents: Iterable[Document], heldout: float, seed: int
) -> tuple[list[Document], list[Document]]:
    """Split documents into (train, heldout), both in the given order.

    The side depends on (seed, id) alone, so adding a document never moves another.

    Args:
        documents: a corpus.
        heldout: expected share of held-out documents, in (0, 1).
        seed: another seed, another split.

    Raises:
        ValueError: the share is out of range, or a side is empty.
    """
    if not 0 < heldout < 1:
        raise ValueError(f"heldout is {heldout}, it must lie between 0 and 1: 0.05 is usual")
    sides: tuple[list[Document], list[Document]] = ([], [])
    for document in documents:
        sides[_uniform(seed, document.id) < heldout].append(document)
    for name, side in zip(("train", "heldout"), sides, strict=True):
        if not side:
            raise ValueError(
                f"the {name} side of {len(sides[0]) + len(sides[1])} documents is empty at "
                f"heldout={heldout}: add documents, or change heldout or seed={seed}"
            )
    return sides


def _uniform(seed: int, id: str) -> float:
    """A number in [0, 1) that every machine computes alike."""
    key = f"{seed}:{id}".encode("utf-8", "surrogateescape")
    return int.from_bytes(blake2b(key, digest_size=8).digest(), "little") / 2**64


def _list_files(folder: Path, suffix: str, excluded: Collection[str]) -> list[tuple[str, Path]]:
    """All (id, path) under a folder, sorted by id: a directory's own order differs by machine."""
    found = []
    for root, folders, names in os.walk(folder):
        folders[:] = [n for n in folders if not n.startswith(".") and n not in excluded]
        for name in names:
            path = Path(root, name)
            if not name.startswith(".") and name.endswith(suffix) and path.is_file():
                found.append((path.relative_to(folder).as_posix(), path))
    return sorted(found)


def _read_files(corpus: str, paths: list[tuple[str, Path]]) -> Iterator[Document]:
    skipped = 0
    for id, path in paths:
        # Bytes, then decode: reading as text would turn CRLF into LF.
        content = path.read_bytes()
        try:
            text = content.decode("utf-8")
        except UnicodeDecodeError:
            text = ""
        if not text or "\0" in text:
            skipped += 1
            continue
        yield Document(id, text)
    if skipped:
        logger.info(
            "corpus %s: skipped %d of %d files (empty or not UTF-8)", corpus, skipped, len(paths)
        )
    if skipped == len(paths):
        raise ValueError(
            f"corpus {corpus!r} holds no text: all {skipped} files are empty or not UTF-8"
        )
