"""A run of parts, one after the other: a failure costs its own rows only."""

import time
from collections.abc import Callable, Collection, Sequence

from benchmarks.lightning.bench import Bench
from benchmarks.lightning.parts import Part, ceilings
from benchmarks.lightning.rows import Row

ALWAYS = "ceilings"  # of every run: floors come from them
WHOLE = ("ceilings", "host")  # parts that an implementation's name doesn't cut down


def run(bench: Bench, parts: Sequence[Part], save: Callable[[], None]) -> None:
    """Check, measure the ceilings, then each part.

    Args:
        bench: takes rows and failures.
        parts: what to measure.
        save: called after each part, and when the device has failed.
    """
    begin = time.perf_counter()
    bench.say("[check] against float64; compiles and tunes every peer first (2 minutes for fla)")
    bench.check()
    bench.say(f"[check] {time.perf_counter() - begin:.1f} s")
    try:
        with bench.attempt(ALWAYS):
            ceilings(bench)
        for n, part in enumerate(parts):
            bench.say(f"[{part.name}] {part.description}")
            start = time.perf_counter()
            with bench.attempt(part.name):
                part.run(bench)
            save()
            left = sum(p.seconds for p in parts[n + 1 :])
            seconds = time.perf_counter() - start
            bench.say(f"[{part.name}] {seconds:.1f} s; about {left:.0f} s left")
    finally:
        save()


def kept(old: Sequence[Row], parts: Collection[str], impls: Collection[str] | None) -> list[Row]:
    """The rows of an older file that a run doesn't measure anew, failed or not.

    Args:
        old: the file's rows.
        parts: names of the parts that run.
        impls: names of the implementations that run; None for all.
    """

    def measured(row: Row) -> bool:
        named = impls is None or row["part"] in WHOLE or row["impl"] in impls
        return row["part"] in {*parts, ALWAYS} and named

    return [row for row in old if not measured(row)]


def table(rows: Sequence[Row]) -> str:
    """Idle rows of early slopes and contiguous inputs, for people; not the many odd lengths."""
    lines = [f"{'case':<18}{'pass':<9}{'impl':<15}{'ms':>10}{'floor':>8}{'GiB':>7}{'error':>9}"]
    for row in rows:
        variant = (row["thermal"], row["slopes"] or "early", row["layout"] or "contiguous")
        if row["part"] == "lengths" or variant != ("idle", "early", "contiguous"):
            continue
        floor, peak, error = row["floor_ms"], row["peak_gib"], row["err_worst_head"]
        lines.append(
            f"{row['case']:<18.18}{row['pass']:<9}{row['impl']:<15}{row['ms']:>10.4f}"
            + (f"{floor / row['ms']:>8.0%}" if floor else f"{'-':>8}")
            + (f"{peak:>7.2f}" if peak is not None else f"{'-':>7}")
            + (f"{error:>9.1e}" if error is not None else f"{'-':>9}")
        )
    return "\n".join(lines)
