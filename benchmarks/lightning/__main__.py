"""Check and time lightning attention on one GPU; write rows, a plot beside them, and a table.

    python -m benchmarks.lightning --only decode,host --impl sferic --out decode.json

Exits with 1 if an operator was refused or a part failed; what was measured is written all the same.
With `--only` or `--impl` the file's other rows stay.  The parts:

"""

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from benchmarks.lightning.bench import Bench
from benchmarks.lightning.impls import BUILDERS, Impl, Serving, sferic
from benchmarks.lightning.parts import PARTS
from benchmarks.lightning.plan import FULL
from benchmarks.lightning.plot import plot
from benchmarks.lightning.rows import RESULTS, provenance, read, write
from benchmarks.lightning.run import kept, run, table
from benchmarks.lightning.timing import CudaClock


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    begin = time.perf_counter()
    given = _parse(arguments)
    if not torch.cuda.is_available():
        sys.stderr.write("benchmarks.lightning: no CUDA device here; nothing was measured\n")
        return 2
    clock = CudaClock()
    impls, failures = build(given.impl or list(BUILDERS))
    bench = Bench(
        clock,
        FULL,
        impls,
        [sferic("sferic-triton", "triton"), sferic("sferic-hopper", "hopper")],
        Serving(),
        provenance(clock.device, given.commit),
        failures=failures,
    )
    parts = [part for part in PARTS if part.name in (given.only or [p.name for p in PARTS])]
    stay = kept(read(given.out), [part.name for part in parts], given.impl)

    def save() -> None:
        write(given.out, stay + bench.rows)

    run(bench, parts, save)
    plot(stay + bench.rows, given.out.with_suffix(".png"))
    print(table(bench.rows))
    print(f"{given.out}: {len(bench.rows)} rows in {time.perf_counter() - begin:.0f} s")
    for failure in bench.failures:
        print(f"NOT MEASURED: {failure}")
    return 1 if bench.failures else 0


def build(names: Sequence[str]) -> tuple[list[Impl], list[str]]:
    """Implementations by name, and why others are not there."""
    impls, failures = [], []
    for name in names:
        try:
            impls.append(BUILDERS[name]())
        except ImportError as error:
            failures.append(f"{name}: {error}")
    return impls, failures


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    names = [part.name for part in PARTS]
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.lightning",
        description=(__doc__ or "")
        + "\n".join(f"    {p.name:<10}{p.description} ({p.seconds:.0f} s)" for p in PARTS),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--only", type=_names(names), help="parts to run, with commas between")
    parser.add_argument(
        "--impl", type=_names(list(BUILDERS)), help=f"of {', '.join(BUILDERS)}; all if not given"
    )
    parser.add_argument("--out", type=Path, default=RESULTS, help="the JSON file to write")
    parser.add_argument("--commit", help="of this code, where git can't be asked")
    return parser.parse_args(arguments)


def _names(known: Sequence[str]) -> Callable[[str], list[str]]:
    """Parses names with commas between them, all of a known list."""

    def parse(text: str) -> list[str]:
        names = text.split(",")
        for name in names:
            if name not in known:
                raise argparse.ArgumentTypeError(f"{name!r} is not one of {', '.join(known)}")
        return names

    return parse


if __name__ == "__main__":
    sys.exit(main())
