"""The measured rows as tables in Markdown, for the docs.

python -m benchmarks.lightning.report [FILE]
"""

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from benchmarks.lightning.rows import RESULTS, Row, find, read
from benchmarks.lightning.targets import checks


def tables(rows: Sequence[Row]) -> str:
    """All tables, with a title each."""
    parts = (
        ("Forward, and forward with backward", training(rows)),
        ("The same under other conditions", conditions(rows)),
        ("Serving", serving(rows)),
    )
    return "\n\n".join(f"### {title}\n\n{table}" for title, table in parts)


def training(rows: Sequence[Row]) -> str:
    """Early slopes, contiguous, after idling: ours beside the others."""
    head = ("case", "pass", "ours, ms", "of the floor", "plain Triton", "fla", "times faster",
            "SDPA-cuDNN (softmax)")  # fmt: skip
    body = []
    for ours in _ours(rows, slopes="early", layout="contiguous", thermal="idle"):
        same = {"part": "training", "case": ours["case"], "passes": ours["pass"],
                "slopes": "early", "layout": "contiguous", "thermal": "idle"}  # fmt: skip
        others = {
            name: _ms(find(rows, impl=name, **same))
            for name in ("sferic-triton", "fla", "sdpa-cudnn")
        }
        fla = others["fla"]
        body.append((
            ours["case"] + (", graph" if ours["graph"] else ""), ours["pass"], _number(ours["ms"]),
            f"{ours['floor_ms'] / ours['ms']:.0%}", _number(others["sferic-triton"]),
            _number(fla), "-" if fla is None else f"{fla / ours['ms']:.1f}",
            _number(others["sdpa-cudnn"]),
        ))  # fmt: skip
    return _table(head, body)


def summary(rows: Sequence[Row]) -> str:
    """The table of the README: ours beside fla."""
    body = []
    for ours in _ours(rows, slopes="early", layout="contiguous", thermal="idle"):
        fla = _ms(find(rows, part="training", impl="fla", case=ours["case"], passes=ours["pass"]))
        if fla is not None:
            body.append((
                ours["case"], ours["pass"], _number(ours["ms"]), _number(fla),
                f"{fla / ours['ms']:.1f}", f"{ours['floor_ms'] / ours['ms']:.0%}",
            ))  # fmt: skip
    return _table(("case", "pass", "Sferic, ms", "fla, ms", "times faster", "of the floor"), body)


def conditions(rows: Sequence[Row]) -> str:
    """Ours, in ms: late slopes, fused qkv, sustained load."""
    variants = [
        (slopes, layout, thermal)
        for thermal in ("idle", "sustained")
        for slopes in ("early", "late")
        for layout in ("contiguous", "qkv")
    ]
    body = []
    for ours in _ours(rows, slopes="early", layout="contiguous", thermal="idle"):
        values = []
        for slopes, layout, thermal in variants:
            same = find(
                rows, part="training", impl="sferic", case=ours["case"], passes=ours["pass"],
                slopes=slopes, layout=layout, thermal=thermal,
            )  # fmt: skip
            values.append(_number(_ms(same)))
        body.append((ours["case"], ours["pass"], *values))
    return _table(("case", "pass", *(", ".join(v) for v in variants)), body)


def serving(rows: Sequence[Row]) -> str:
    """Packs, prefill, decode and the host's time of a call."""
    body = []
    for part in ("packed", "prefill", "decode", "host"):
        for row in find(rows, part=part):
            floor = row["floor_ms"]
            share = "-" if floor is None else f"{floor / row['ms']:.0%}"
            what = f"{row['case']}, {row['pass']}"
            body.append((part, what, row["impl"], _number(row["ms"]), share))
    return _table(("part", "case", "by", "ms", "of the floor"), body)


def _ours(rows: Sequence[Row], **values: str) -> list[Row]:
    return find(rows, part="training", impl="sferic", **values)


def _ms(rows: Sequence[Row]) -> float | None:
    return rows[0]["ms"] if rows else None


def _number(ms: float | None) -> str:
    """Three digits, or a dash for what wasn't measured."""
    if ms is None:
        return "-"
    return f"{ms:.3g}" if ms < 100 else f"{ms:.0f}"


def _table(head: Sequence[str], body: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *body]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def misses(rows: Sequence[Row]) -> str:
    """The targets that were missed, one a line."""
    return "\n".join(f"- {check}" for check in checks(rows) if check.missed)


if __name__ == "__main__":
    given = read(Path(sys.argv[1]) if len(sys.argv) > 1 else RESULTS)
    print("\n\n".join((summary(given), tables(given), misses(given))))
