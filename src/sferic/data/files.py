"""Writing so that nothing is lost: beside the target, flushed to disk, then renamed over it."""

import fcntl
import hashlib
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def temporary(path: Path) -> Path:
    """The name beside ``path`` under which it is written."""
    return path.with_name(path.name + ".tmp")


def sha256(path: Path) -> str:
    """Hash of a file's content, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sync(path: Path) -> None:
    """Flush a closed file, or a folder's list of names, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def publish(path: Path) -> None:
    """Give ``temporary(path)``, a file or a folder, its final name; a crash leaves old or new."""
    sync(temporary(path))
    os.replace(temporary(path), path)
    sync(path.parent)


def discard(folder: Path) -> None:
    """Delete a folder, if it is there, that a reader may open: its name goes before its files."""
    doomed = _old(folder)
    if folder.exists():
        shutil.rmtree(doomed, ignore_errors=True)
        os.replace(folder, doomed)
    shutil.rmtree(doomed, ignore_errors=True)  # also what a process that died here left


def replace_folder(path: Path) -> None:
    """Give the folder ``temporary(path)`` its final name in place of an older one.

    The older one loses its name first and its files last: a crash leaves one of the two whole, at
    worst under the name ``path.old.tmp``, from where ``recover`` takes it back.
    """
    sync(temporary(path))
    old = _old(path)
    if path.exists():
        shutil.rmtree(old, ignore_errors=True)
        os.replace(path, old)
    os.replace(temporary(path), path)
    sync(path.parent)
    shutil.rmtree(old, ignore_errors=True)


def recover(path: Path) -> None:
    """Undo a ``replace_folder`` that died between its two renames."""
    if not path.exists() and _old(path).exists():
        os.replace(_old(path), path)


def _old(path: Path) -> Path:
    return path.with_name(path.name + ".old.tmp")


@contextmanager
def locked(file: Path, taken: str) -> Iterator[None]:
    """Hold a lock on a file, made if it is not there; it ends with the process that holds it.

    Raises:
        ValueError: another process holds it; the text is ``taken``.
    """
    with file.open("ab") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ValueError(taken) from error
        yield


def write_file(path: Path, content: bytes) -> None:
    """Write a whole file in one step, replacing what was there."""
    temporary(path).write_bytes(content)
    publish(path)
