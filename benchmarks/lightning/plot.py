"""Milliseconds per case: each implementation beside the floor."""

from collections.abc import Sequence
from pathlib import Path

from benchmarks.lightning.rows import Row, find

COLOURS = {
    "sferic": "tab:blue",
    "sferic-triton": "tab:cyan",
    "fla": "tab:orange",
    "sdpa-cudnn": "tab:gray",
}
FLOOR = "black"


def plot(rows: Sequence[Row], file: Path) -> None:
    """Bars of the training part: idle, early slopes, contiguous; a line at each floor.

    Args:
        rows: of a run; ours give the floors.
        file: the PNG to write; nothing if there are no such rows.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    shown = find(rows, part="training", thermal="idle", slopes="early", layout="contiguous")
    cases = list(dict.fromkeys((row["case"], row["pass"]) for row in shown))
    if not cases:
        return
    names = [name for name in COLOURS if find(shown, impl=name)]
    figure = Figure(figsize=(2 + 0.9 * len(cases), 5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    width = 0.8 / len(names)
    for i, name in enumerate(names):
        label = f"{name} (softmax)" if name.startswith("sdpa") else name
        mine = [(cases.index((r["case"], r["pass"])), r["ms"]) for r in find(shown, impl=name)]
        x = [at - 0.4 + width * (i + 0.5) for at, _ in mine]
        axes.bar(x, [ms for _, ms in mine], width, color=COLOURS[name], label=label)
    floors = {
        cases.index((r["case"], r["pass"])): r["floor_ms"]
        for r in shown
        if r["impl"] != "sdpa-cudnn"
    }
    axes.hlines(
        list(floors.values()), [at - 0.45 for at in floors], [at + 0.45 for at in floors],
        color=FLOOR, label="floor: each tensor moved once",
    )  # fmt: skip
    axes.set_yscale("log")
    axes.set_ylabel("ms")
    axes.set_xticks(range(len(cases)), [f"{c}\n{p}" for c, p in cases], rotation=60, ha="right")
    axes.set_title(f"Lightning attention, bf16, head dim 128, {shown[0]['device']}")
    axes.legend()
    figure.savefig(file, dpi=120)
