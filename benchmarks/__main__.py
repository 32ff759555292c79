"""List the benchmarks and run those that can run on this machine.

python -m benchmarks [NAME ...] [--results FOLDER]
"""

import argparse
import sys
from pathlib import Path

from benchmarks.registry import ENTRIES, RESULTS, run


def main() -> int:
    """Run the command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    names = [entry.name for entry in ENTRIES]
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(names)}")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the JSON files")
    given = parser.parse_args()
    for name in given.names:
        if name not in names:
            parser.error(f"{name!r} is not one of {', '.join(names)}")
    entries = [entry for entry in ENTRIES if not given.names or entry.name in given.names]
    return run(entries, given.results.resolve())


if __name__ == "__main__":
    sys.exit(main())
