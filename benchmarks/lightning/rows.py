"""Result rows: what was measured, of what, by which code, and the file that holds them.

A row has the keys of `KEYS`.  `ms`, `lo`, `hi` and `floor_ms` are milliseconds of one call,
`peak_gib` the most memory of one call beyond its inputs (None: not measured), `err_worst_head` the
relative L2 error against float64 of the check before.  Rows of the part "ceilings" also have what
the device reached, `tb_per_s` or `tflop_per_s`.
"""

import importlib
import json
import platform
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

KEYS = (
    "part", "case", "pass", "impl", "slopes", "layout", "thermal", "graph", "ms", "lo", "hi",
    "floor_ms", "peak_gib", "err_worst_head", "device", "versions", "commit",
)  # fmt: skip
ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "lightning-h200.json"

Row = dict[str, Any]


def provenance(device: torch.device, commit: str | None) -> Row:
    """Device, versions and commit of a run.

    Args:
        device: what is timed.
        commit: of the code; None asks git, and says so if there are changes.
    """
    cuda = device.type == "cuda"
    name = torch.cuda.get_device_name(device) if cuda else platform.machine()
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    if cuda:
        versions["triton"] = importlib.import_module("triton").__version__
    if "fla" in sys.modules:  # else it isn't timed
        versions["fla"] = sys.modules["fla"].__version__
    return {"device": name, "versions": versions, "commit": commit or _commit()}


def _commit() -> str:
    try:
        head = _git("rev-parse", "--short=12", "HEAD")
        changed = _git("status", "--porcelain", "--", ".", ":!benchmarks/results")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return f"{head}-dirty" if changed else head


def _git(*arguments: str) -> str:
    command = ["git", *arguments]
    return subprocess.run(
        command, cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout.strip()


def read(file: Path) -> list[Row]:
    """The rows of a file; none if there is no file."""
    return json.loads(file.read_text("utf-8")) if file.exists() else []


def write(file: Path, rows: Iterable[Row]) -> None:
    """Write rows, one a line, so that a change of one shows as a change of one."""
    lines = ",\n".join(json.dumps(row) for row in rows)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f"[\n{lines}\n]\n", "utf-8")


def find(rows: Iterable[Row], **values: Any) -> list[Row]:
    """Rows with these values; `passes` stands for the key "pass"."""
    wanted = {"pass" if key == "passes" else key: value for key, value in values.items()}
    return [row for row in rows if all(row.get(key) == value for key, value in wanted.items())]
