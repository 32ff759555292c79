"""Freed memory is used again, in a process of its own since the setting stays."""

import subprocess
import sys

import pytest

SCRIPT = """
import resource, sys, torch
from sferic.ops.memory import keep_freed_memory
torch.set_num_threads(1)
if "keep" in sys.argv:
    assert keep_freed_memory()
for _ in range(3):
    torch.ones(20_000_000)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(5):
    torch.ones(20_000_000)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(*arguments: str) -> int:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, *arguments], capture_output=True, text=True, check=True
    )
    return int(done.stdout)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="a setting of glibc")
def test_large_tensors_are_not_faulted_in_again() -> None:
    """In most processes: the system lays some out so that the heap has no room to grow."""
    assert any(faults("keep") < 100 for _ in range(10))
    assert faults() > 100
