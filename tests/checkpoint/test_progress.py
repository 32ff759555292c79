"""The line of long reads and writes."""

import io

import pytest

from sferic.checkpoint.progress import ByteLine


class Clock:
    now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr("sferic.checkpoint.progress.time", made)
    return made


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def work(clock: Clock, stream: io.StringIO, seconds: float) -> str:
    with ByteLine("loading", 40_000_000_000, stream=stream) as line:
        for _ in range(20):
            clock.now += seconds
            line.add(2_000_000_000)
    return stream.getvalue()


def test_short_work_prints_nothing(clock: Clock) -> None:
    assert work(clock, io.StringIO(), 0.05) == ""


def test_a_log_gets_a_line_now_and_then_and_one_at_the_end(clock: Clock) -> None:
    lines = work(clock, io.StringIO(), 4.0).splitlines()
    assert lines[0] == "loading  2.0 of 40.0 GB   0.50 GB/s   1:16 left"
    assert lines[-1] == "loading  40.0 of 40.0 GB   0.50 GB/s   0:00 left"
    assert len(lines) == 8  # after 4 s, then every 10 s or more, and the end


def test_a_terminal_has_one_line_that_is_rewritten(clock: Clock) -> None:
    text = work(clock, Terminal(), 4.0)
    assert text.count("\r") == 21
    assert text.count("\n") == 1
