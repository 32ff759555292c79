"""The list of benchmarks, what each needs, and the command that runs it."""

import importlib.util
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"


def no_cuda() -> str | None:
    """Why what needs a GPU can't run here; None if it can."""
    import torch

    return None if torch.cuda.is_available() else "no CUDA device here"


def no_transformers() -> str | None:
    """Why what needs transformers can't run here; None if it can."""
    found = importlib.util.find_spec("transformers")
    return None if found else "transformers isn't installed"


def nothing_missing() -> str | None:
    """For what runs everywhere."""
    return None


@dataclass(frozen=True)
class Entry:
    """One benchmark."""

    name: str
    description: str
    command: Callable[[Path], list[str]]  # of the results folder; runs in the repository's root
    missing: Callable[[], str | None]  # why it can't run here


ENTRIES = (
    Entry(
        "lightning",
        "lightning attention on one H200 beside fla and SDPA (about 6 minutes)",
        lambda out: ["-m", "benchmarks.lightning", "--out", f"{out / 'lightning-h200.json'}"],
        no_cuda,
    ),
    Entry(
        "cpu-transformers",
        "forward and greedy decode on a CPU beside transformers",
        lambda out: ["benchmarks/cpu_transformers.py", "--out", f"{out}"],
        no_transformers,
    ),
    Entry(
        "step-profile",
        "where a training step of the demo spends its time on a CPU",
        lambda out: [
            "benchmarks/step_profile.py", "demo", "--out", f"{out / 'step-profile-cpu.json'}",
        ],
        nothing_missing,
    ),
)  # fmt: skip


def run(
    entries: Sequence[Entry], results: Path, start: Callable[[list[str]], int] | None = None
) -> int:
    """List every benchmark, then run those that can run here; 1 if one of them failed.

    Args:
        entries: the benchmarks.
        results: the folder of their JSON files; made if it isn't there.
        start: runs a command and returns its exit code; by default a process of its own.
    """
    start = start or _start
    missing = {entry.name: entry.missing() for entry in entries}
    for entry in entries:
        why = missing[entry.name]
        print(f"{entry.name:<18}{entry.description}{f' - skipped: {why}' if why else ''}")
    results.mkdir(parents=True, exist_ok=True)
    failed = []
    for entry in entries:
        if missing[entry.name]:
            continue
        command = [sys.executable, *entry.command(results)]
        print(f"\n== {entry.name}: {' '.join(command)}", flush=True)
        if start(command):
            failed.append(entry.name)
    if failed:
        print(f"failed: {', '.join(failed)}")
    return 1 if failed else 0


def _start(command: list[str]) -> int:
    return subprocess.run(command, cwd=ROOT, check=False).returncode
