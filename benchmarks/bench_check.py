"""Hold measured rows against what they must reach; exit with 1 on a miss.

python -m benchmarks.bench_check [FILE]
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.lightning.rows import RESULTS, read
from benchmarks.lightning.targets import checks


def main(arguments: Sequence[str] | None = None) -> int:
    """Print each miss with value and limit; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path, nargs="?", default=RESULTS, metavar="FILE")
    file = parser.parse_args(arguments).file
    rows = read(file)
    commits = sorted({row["commit"] for row in rows})
    print(f"{file}: {len(rows)} rows of commit {', '.join(commits) or 'none'}")
    done = checks(rows)
    missed = [check for check in done if check.missed]
    for check in missed:
        print(f"MISS  {check}")
    print(f"{len(done) - len(missed)} of {len(done)} targets met")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
