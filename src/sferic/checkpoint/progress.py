"""A line that says how far reading or writing weights has come."""

import sys
import time
from types import TracebackType
from typing import Self, TextIO

QUIET = 2.0  # seconds before the line first shows


class ByteLine:
    """`loading  12.3 of 912.2 GB   1.9 GB/s   7:53 left`, for work that lasts.

    On a terminal the line is rewritten, elsewhere one is printed every `interval` seconds; work of
    less than two seconds prints nothing.
    """

    def __init__(
        self, what: str, total: int, *, stream: TextIO | None = None, interval: float = 10.0
    ) -> None:
        self._what, self._total, self._done = what, total, 0
        self._stream = sys.stderr if stream is None else stream
        self._live = self._stream.isatty()
        self._interval = 0.1 if self._live else interval
        self._begin = time.monotonic()
        self._next = self._begin + QUIET
        self._shown = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._shown:
            self._print(time.monotonic())
            if self._live:
                self._stream.write("\n")

    def add(self, nbytes: int) -> None:
        """So many more bytes are done."""
        self._done += nbytes
        now = time.monotonic()
        if now >= self._next:
            self._print(now)
            self._next = now + self._interval
            self._shown = True

    def _print(self, now: float) -> None:
        speed = self._done / max(now - self._begin, 1e-9)
        left = int((self._total - self._done) / max(speed, 1.0))
        text = (
            f"{self._what}  {self._done / 1e9:.1f} of {self._total / 1e9:.1f} GB   "
            f"{speed / 1e9:.2f} GB/s   {left // 60}:{left % 60:02d} left"
        )
        self._stream.write(f"\r{text}\x1b[K" if self._live else f"{text}\n")
        self._stream.flush()
