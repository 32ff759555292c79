"""What a run writes down while it trains: one JSON row per step, a live line, a plot."""

import json
import math
import os
import sys
import time
from collections import deque
from pathlib import Path
from typing import Any, TextIO

from sferic.data.files import publish, temporary, write_file

Row = dict[str, Any]

RECENT_STEPS = 50  # the time left is reckoned from their speed


class MetricsLog:
    """`metrics.jsonl`: a row per optimizer step, appended and flushed.

    On resume, rows past the checkpoint are dropped, since their steps run again.
    """

    def __init__(self, path: Path, last_step: int) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self.rows = [row for row in read_metrics(path) if row["step"] <= last_step]
        lines = "".join(json.dumps(row) + "\n" for row in self.rows)
        write_file(path, lines.encode())
        self._file = path.open("a", encoding="utf-8")

    def write(self, row: Row) -> None:
        """Append a row; it survives the death of this process."""
        self.rows.append(row)
        self._file.write(json.dumps(row) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Flush to disk."""
        os.fsync(self._file.fileno())
        self._file.close()


def read_metrics(path: Path) -> list[Row]:
    """Rows of a metrics file; a last line cut short by a kill is ignored."""
    if not path.exists():
        return []
    rows = []
    for line in path.read_text("utf-8").splitlines():
        try:
            rows.append(json.loads(line))
        except ValueError:
            break
    return rows


class LiveLine:
    """A live line: step, loss, tokens/s, time left.

    On a terminal the line is rewritten; elsewhere one is printed every `interval` seconds.
    """

    def __init__(
        self, name: str, share: float = 0.0, interval: float = 15.0, out: TextIO | None = None
    ) -> None:
        """Begin to measure, with a share (0 to 1) of the budget done before."""
        self.name = name
        self.out = out or sys.stderr
        self.live = self.out.isatty()
        self.interval = 0.2 if self.live else interval
        self._last = -math.inf
        self._recent = deque([(time.monotonic(), share)], maxlen=RECENT_STEPS + 1)

    def update(self, row: Row, share: float) -> None:
        """Show a step.

        Args:
            row: a metrics row.
            share: of the budget done, above that of the step before; 1 at the end.
        """
        now = time.monotonic()
        self._recent.append((now, share))
        if now - self._last < self.interval and share < 1:
            return
        self._last = now
        loss = "not finite" if row["loss"] is None else f"{row['loss']:.3f}"
        begin, before = self._recent[0]
        left = (now - begin) * (1 - share) / (share - before)
        percent = 100 if share >= 1 else min(round(100 * share), 99)
        line = (
            f"{self.name} {percent:3}%  step {row['step']}  loss {loss}  "
            f"lr {row['lr']:.2e}  {row['tokens_per_second']:,.0f} tokens/s  "
            f"{_clock(left)} left"
        )
        self._write(line)

    def note(self, text: str) -> None:
        """A line that stays."""
        self.out.write(("\r\x1b[K" if self.live else "") + text + "\n")
        self.out.flush()

    def finish(self) -> None:
        """Leave the live line."""
        if self.live:
            self.out.write("\n")

    def _write(self, line: str) -> None:
        self.out.write(f"\r\x1b[K{line[: self._width()]}" if self.live else line + "\n")
        self.out.flush()

    def _width(self) -> int:
        """Characters that fit before the terminal wraps, after which a line can't be rewritten."""
        try:
            columns = os.get_terminal_size(self.out.fileno()).columns
        except OSError:
            columns = 0
        return (columns or 80) - 1


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"


def plot_losses(rows: list[Row], path: Path, title: str) -> None:
    """Training loss by step, smoothed too, with the validation losses, as a PNG."""
    from matplotlib.figure import Figure  # slow to import

    finite = [row for row in rows if row["loss"] is not None]
    steps = [row["step"] for row in finite]
    losses = [row["loss"] for row in finite]
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    axes.plot(steps, losses, color="0.75", linewidth=0.8, label="training, each step")
    axes.plot(steps, _smooth(losses), color="C0", label="training, running mean")
    held = [(row["step"], row["validation_loss"]) for row in rows if "validation_loss" in row]
    if held:
        axes.plot(*zip(*held, strict=True), "o-", color="C1", label="held-out")
    axes.set(xlabel="optimizer step", ylabel="loss (nats per token)", title=title)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(temporary(path), format="png", dpi=120)
    publish(path)


def _smooth(values: list[float], decay: float = 0.95) -> list[float]:
    out, total, weight = [], 0.0, 0.0
    for value in values:
        total, weight = decay * total + value, decay * weight + 1
        out.append(total / weight)
    return out
