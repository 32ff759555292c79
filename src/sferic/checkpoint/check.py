"""What is in a model folder and whether it would load, from headers alone."""

import os
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from sferic.checkpoint.folder import ModelFolder
from sferic.checkpoint.layouts import is_derived
from sferic.config import sizes
from sferic.data import Tokenizer

T = TypeVar("T")


@dataclass
class Report:
    """What `check` found.  Sizes in bytes; None where something before it is wrong."""

    path: str
    layout: str | None = None
    files: int = 0
    tensors: int = 0
    derived: int = 0  # decay tables, which loading ignores
    stored_dtypes: dict[str, int] = field(default_factory=dict)  # tensors of each
    stored_bytes: int | None = None
    parameters: int | None = None
    layers: str | None = None
    weight_bytes: dict[str, int] | None = None  # in memory, by dtype
    kv_bytes_per_token: int | None = None
    state_bytes_per_sequence: int | None = None
    tokenizer: str | None = None
    problems: list[str] = field(default_factory=list)  # what would make loading fail
    notes: list[str] = field(default_factory=list)  # what would not

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)

    def lines(self) -> list[str]:
        """The same for a reader."""
        rows = [("folder", self.path)]
        if self.layout is not None:
            dtypes = ", ".join(f"{n:,} {dtype}" for dtype, n in self.stored_dtypes.items())
            ignored = f", {self.derived:,} of them decay tables (ignored)" if self.derived else ""
            rows += [
                ("layout", self.layout),
                ("stored", f"{_size(self.stored_bytes)} in {self.files:,} files"),
                ("tensors", f"{self.tensors:,} ({dtypes}){ignored}"),
            ]
        if self.parameters is not None and self.weight_bytes is not None:
            weights = ", ".join(f"{_size(n)} in {dtype}" for dtype, n in self.weight_bytes.items())
            rows += [
                ("model", f"{self.parameters:,} parameters; layers: {self.layers}"),
                ("memory", f"{weights}; for each sequence {_size(self.state_bytes_per_sequence)}"),
                ("", f"of states (float32), and {_size(self.kv_bytes_per_token)} a token (bf16)"),
            ]
        rows.append(("tokenizer", self.tokenizer or "none that can be used"))
        lines = [f"{name:<10}{text}" for name, text in rows]
        lines += [f"note: {note}" for note in self.notes]
        if self.problems:
            return [*lines, f"won't load; problems: {len(self.problems):,}", *self.problems]
        return [*lines, "would load"]


def check(path: str | Path) -> Report:
    """Compare a local model folder with its architecture; reads headers, no weights."""
    report = Report(str(path))
    if not Path(path).is_dir():
        what = "is a file: give its folder" if Path(path).exists() else "is no folder here"
        report.problems.append(f"{path} {what}; of the hub, download a repository first")
        return report
    folder = ModelFolder(path)
    config = _try(lambda: folder.config, report.problems)
    headers = _try(lambda: folder.headers, report.problems)
    if config is not None:
        numbers = sizes(config)
        report.parameters = numbers["total_params"]
        report.layers = f"{config.num_lightning} lightning, {config.num_softmax} softmax"
        report.kv_bytes_per_token = numbers["kv_bytes_per_token"]
        report.state_bytes_per_sequence = numbers["state_bytes_per_sequence"]
        report.weight_bytes = {"fp32": 4 * report.parameters, "bf16": 2 * report.parameters}
    if headers is not None:
        report.layout = folder.layout
        report.files = len({header.file for header in headers.values()})
        report.tensors = len(headers)
        report.derived = sum(map(is_derived, headers))
        report.stored_dtypes = dict(Counter(header.dtype for header in headers.values()))
        report.stored_bytes = sum(header.nbytes for header in headers.values())
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        if report.stored_bytes > memory:
            report.notes.append(
                f"this machine has {_size(memory)} of memory: the CPU can't hold the weights "
                f"({_size(report.stored_bytes)})"
            )
    if config is not None and headers is not None:
        report.problems += _try(lambda: folder.problems, report.problems) or []
    tokenizer = _try(lambda: Tokenizer.load(folder.path), report.notes)
    if tokenizer is not None:
        report.tokenizer = f"{tokenizer.vocab_size:,} entries"
        if config is not None and tokenizer.vocab_size > config.vocab_size:
            report.notes.append(
                f"the tokenizer has {tokenizer.vocab_size} entries for a vocabulary of "
                f"{config.vocab_size}: it belongs to another model"
            )
    return report


def _try(read: Callable[[], T], problems: list[str]) -> T | None:
    try:
        return read()
    except Exception as error:  # whatever is in the folder, a check tells and doesn't fail
        told = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
        problems.append(told)
        return None


def _size(nbytes: int | None) -> str:
    size, unit = float(nbytes or 0), "bytes"
    for larger in ("KB", "MB", "GB"):
        if size < 1000:
            break
        size, unit = size / 1000, larger
    return f"{size:,.4g} {unit}"
