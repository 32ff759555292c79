"""What the rows must reach, and what they miss.

Limits in milliseconds hold for early slopes after idling, in both layouts.  Late slopes may take
`LATE_FACTOR` times as long, sustained load `SUSTAINED` times.  A row that isn't there is a miss.

An odd shape may take `ODD` times what a regular shape of as many bytes takes.  That comes from the
regular shapes (`FULL.anchors`) measured in the same run, in the same way: graph, early slopes,
contiguous, idle; see `expected_ms`.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np

from benchmarks.lightning.floors import moved_bytes
from benchmarks.lightning.plan import FULL, Case
from benchmarks.lightning.rows import Row, find

PASSES = ("fwd", "fwd+bwd")
TRAINING: dict[str, dict[str, float]] = {
    "B4 N8192 H64": {"fwd": 0.56, "fwd+bwd": 2.25},
    "B16 N2048 H64": {"fwd": 0.56, "fwd+bwd": 2.25},
    "B1 N32768 H64": {"fwd": 0.60, "fwd+bwd": 2.3},
    "B1 N131072 H64": {"fwd": 2.3, "fwd+bwd": 9.0},
    "B1 N1048576 H64": {"fwd": 19.0},
    "B1 N131072 H8": {"fwd": 0.38, "fwd+bwd": 1.25},
    "B4 N8192 H8": {"fwd": 0.12, "fwd+bwd": 0.36},  # from a CUDA graph
}
LATE_FACTOR = {"fwd": 2.9 / 2.3, "fwd+bwd": 10 / 9.0}
SUSTAINED = 1.10
MEMORY_GIB = {"B4 N8192 H64": 2.5}  # forward and backward, results included
HOST_MS = {"sferic-triton": 0.040, "sferic-hopper": 0.060}
PACKED = 1.15  # times one document of all tokens
PREFILL = 1.10  # times the training forward of the same tokens
ODD = 1.35  # times what regular shapes of so many bytes take
DECODE_SHARE = {"B16 H64": 0.82, "B64 H64": 0.90, "B256 H64": 0.93}  # of the copy's bandwidth
DECODE_MS = {"B1 H64": 0.005}


@dataclass(frozen=True)
class Check:
    """One comparison: what, the value (None: not measured), the limit it may reach."""

    what: str
    value: float | None
    limit: float | None  # None: the row that it comes from was not measured
    unit: str = "ms"

    @property
    def missed(self) -> bool:
        return self.value is None or self.limit is None or not self.value <= self.limit

    def __str__(self) -> str:
        value = "not measured" if self.value is None else f"{self.value:.4g} {self.unit}"
        limit = "not measured" if self.limit is None else f"{self.limit:.4g} {self.unit}"
        return f"{self.what}: {value}, limit {limit}"


def checks(rows: Sequence[Row]) -> list[Check]:
    """Every comparison of the table, met or missed."""
    return [
        *_training(rows),
        *_memory(rows),
        *_lengths(rows),
        *_ratio(rows, "packed", ("S64 N32768 H64", "S1 N32768 H64"), PACKED),
        *_prefill(rows),
        *_decode(rows),
        *_host(rows),
    ]


def _training(rows: Sequence[Row]) -> Iterable[Check]:
    variants = product(("early", "late"), ("contiguous", "qkv"), ("idle", "sustained"))
    for (when, layout, thermal), (case, limits) in product(list(variants), TRAINING.items()):
        for passes, limit in limits.items():
            late = LATE_FACTOR[passes] if when == "late" else 1.0
            hot = SUSTAINED if thermal == "sustained" else 1.0
            graph = next(c.graph for c in FULL.training if c.name == case)
            ms = value(
                rows, "ms", part="training", case=case, passes=passes, slopes=when,
                layout=layout, thermal=thermal, graph=graph,
            )  # fmt: skip
            what = f"{case} {passes}, {when} slopes, {layout}, {thermal}"
            yield Check(what, ms, limit * late * hot)


def _memory(rows: Sequence[Row]) -> Iterable[Check]:
    for (case, limit), layout in product(MEMORY_GIB.items(), ("contiguous", "qkv")):
        for when in ("early", "late"):
            gib = value(
                rows, "peak_gib", part="training", case=case, passes="fwd+bwd", slopes=when,
                layout=layout, thermal="idle",
            )  # fmt: skip
            yield Check(f"memory of {case} fwd+bwd, {when} slopes, {layout}", gib, limit, "GiB")


def _lengths(rows: Sequence[Row]) -> Iterable[Check]:
    mine = find(rows, part="lengths", impl="sferic", graph=True)
    for passes in PASSES:
        points = curve(find(mine, passes=passes), passes)
        for case in FULL.odd:
            ms = value(mine, "ms", case=case.name, passes=passes)
            limit = None
            if len(points) == len(FULL.anchors):
                limit = ODD * expected_ms(points, moved_bytes(case, passes != "fwd"))
            yield Check(f"{case.name} {passes} against regular shapes", ms, limit)


def curve(
    rows: Sequence[Row], passes: str, anchors: Sequence[Case] = FULL.anchors
) -> list[tuple[int, float]]:
    """(bytes, milliseconds) of the regular shapes that were measured, by rising bytes."""
    measured = {
        moved_bytes(case, passes != "fwd"): value(rows, "ms", case=case.name, passes=passes)
        for case in anchors
    }
    return sorted((size, ms) for size, ms in measured.items() if ms is not None)


def expected_ms(points: Sequence[tuple[int, float]], moved: int) -> float:
    """What a regular shape of so many bytes takes: log(ms) linear in log(bytes) between points.

    The smallest regular shape is bound by its launch, so what is smaller yet is expected to take
    the same.

    Args:
        points: (bytes, ms), by rising bytes.
        moved: bytes of each tensor moved once.

    Raises:
        ValueError: no regular shape is as large.
    """
    if moved > points[-1][0]:
        raise ValueError(f"{moved} bytes are more than those of the largest regular shape")
    sizes, times = zip(*points, strict=True)
    return math.exp(np.interp(math.log(moved), np.log(sizes), np.log(times)))


def _ratio(
    rows: Sequence[Row], part: str, cases: tuple[str, str], factor: float
) -> Iterable[Check]:
    for passes in PASSES:
        ms, base = (value(rows, "ms", part=part, case=case, passes=passes) for case in cases)
        limit = None if base is None else factor * base
        yield Check(f"{cases[0]} {passes} against {cases[1]}", ms, limit)


def _prefill(rows: Sequence[Row]) -> Iterable[Check]:
    case = FULL.prefill.name
    ms, base = (
        value(rows, "ms", part="prefill", case=case, passes=passes) for passes in ("prefill", "fwd")
    )
    limit = None if base is None else PREFILL * base
    yield Check(f"prefill of {case} against the training forward", ms, limit)


def _decode(rows: Sequence[Row]) -> Iterable[Check]:
    for case, share in DECODE_SHARE.items():
        keys: dict[str, Any] = {"part": "decode", "case": case, "graph": True}
        ms, floor = value(rows, "ms", **keys), value(rows, "floor_ms", **keys)
        limit = None if floor is None else floor / share
        yield Check(f"decode {case}, {share:.0%} of the copy's bandwidth", ms, limit)
    for case, limit in DECODE_MS.items():
        yield Check(
            f"decode {case}", value(rows, "ms", part="decode", case=case, graph=True), limit
        )


def _host(rows: Sequence[Row]) -> Iterable[Check]:
    for impl, limit in HOST_MS.items():
        ms = value(rows, "ms", part="host", case=FULL.host.name, impl=impl)
        yield Check(f"host time of a call, {impl}", ms, limit)


def value(rows: Sequence[Row], key: str, **wanted: Any) -> float | None:
    """A number of the row of ours with these values; None if it wasn't measured."""
    found = find(rows, **{"impl": "sferic", **wanted})
    return found[0][key] if found else None
