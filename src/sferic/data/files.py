"""Writing so that nothing is lost: beside the target, flushed to disk, then renamed over it."""

import os
from pathlib import Path


def temporary(path: Path) -> Path:
    """The name beside ``path`` under which it is written."""
    return path.with_name(path.name + ".tmp")


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


def write_file(path: Path, content: bytes) -> None:
    """Write a whole file in one step, replacing what was there."""
    temporary(path).write_bytes(content)
    publish(path)
