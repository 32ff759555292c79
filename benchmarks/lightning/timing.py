"""Clocks: CUDA events for a GPU, the host's clock for everything else."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

GIB = 2**30
GRAPH_CALLS = 16  # in one graph, at least: its launch is then a small part
WARM_CALLS = 3
MAX_RUNS = 50
LOAD_MS = 20.0  # of load between two looks at the clock

Call = Callable[[int], object]  # runs the operator on one set of inputs


@dataclass(frozen=True)
class Sample:
    """Milliseconds of one call: median, smallest, largest."""

    ms: float
    lo: float
    hi: float


@dataclass(frozen=True)
class Timed:
    """A call that is ready for timing: compiled, its memory known, its graph captured."""

    run: Call  # `calls` operator calls
    calls: int
    ms: float  # of one run, roughly
    peak_gib: float | None  # most memory of one call beyond its inputs, results included
    graph: bool


class Clock(Protocol):
    """How a device is timed."""

    device: torch.device

    def times(self, run: Call, count: int) -> list[float]:
        """Milliseconds of each of so many runs."""
        ...

    def peak_gib(self, call: Call) -> float | None:
        """Most memory that a call holds beyond what was allocated before it, in GiB."""
        ...

    def capture(self, call: Call, calls: int) -> Call | None:
        """One run of so many calls as a CUDA graph; None where there are no graphs."""
        ...

    def synchronize(self) -> None:
        """Wait for the device."""
        ...

    def free(self) -> None:
        """Give cached memory back."""
        ...


class HostClock:
    """Wall time of a device that works when it is called."""

    device = torch.device("cpu")

    def times(self, run: Call, count: int) -> list[float]:
        result = []
        for i in range(count):
            begin = time.perf_counter()
            run(i)
            result.append(1e3 * (time.perf_counter() - begin))
        return result

    def peak_gib(self, call: Call) -> float | None:
        call(0)
        return None

    def capture(self, call: Call, calls: int) -> Call | None:
        return None

    def synchronize(self) -> None:
        pass

    def free(self) -> None:
        pass


class CudaClock:
    """CUDA events around each run, all queued before the first is waited for."""

    device = torch.device("cuda")

    def times(self, run: Call, count: int) -> list[float]:
        def event() -> torch.cuda.Event:
            return torch.cuda.Event(enable_timing=True)

        events = [(event(), event()) for _ in range(count)]
        for i, (begin, end) in enumerate(events):
            begin.record()
            run(i)
            end.record()
        torch.cuda.synchronize()
        return [begin.elapsed_time(end) for begin, end in events]

    def peak_gib(self, call: Call) -> float | None:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call(0)
        torch.cuda.synchronize()
        return (torch.cuda.max_memory_allocated() - before) / GIB

    def capture(self, call: Call, calls: int) -> Call | None:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            call(0)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for i in range(calls):
                call(i)
        return lambda _: graph.replay()

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def free(self) -> None:
        torch.cuda.empty_cache()


def prepare(clock: Clock, call: Call, sets: int, *, graph: bool = False) -> Timed:
    """Compile, touch every set, measure the memory, capture; nothing is timed for good yet.

    Args:
        clock: of the device.
        call: runs the operator on set i modulo `sets`.
        sets: of inputs.
        graph: run it from a CUDA graph where there are any.
    """
    call(0)  # compiles, and an autotuner may hold much memory meanwhile
    clock.free()
    peak = clock.peak_gib(call)
    for i in range(sets):
        call(i)
    clock.synchronize()
    calls = sets * -(-GRAPH_CALLS // sets)
    captured = clock.capture(call, calls) if graph else None
    run, calls = (call, 1) if captured is None else (captured, calls)
    ms = statistics.median(clock.times(run, 3))
    return Timed(run, calls, ms, peak, captured is not None)


def burst(clock: Clock, timed: Timed, budget_ms: float) -> Sample:
    """Time as many runs as the budget allows, 3 to `MAX_RUNS`, after a few that aren't timed."""
    clock.times(timed.run, WARM_CALLS if timed.ms < budget_ms else 1)
    count = max(3, min(MAX_RUNS, int(budget_ms / max(timed.ms, 1e-3))))
    times = [ms / timed.calls for ms in clock.times(timed.run, count)]
    return Sample(statistics.median(times), min(times), max(times))


def load(clock: Clock, timed: Timed, seconds: float) -> None:
    """Keep the device busy with a call."""
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        for i in range(max(1, int(LOAD_MS / max(timed.ms, 1e-3)))):
            timed.run(i)
        clock.synchronize()


def host_time(clock: Clock, call: Call, calls: int, rounds: int = 15) -> Sample:
    """Wall time of a call in a queue of many, without waiting for the device's work."""
    for i in range(calls):
        call(i)
    times = []
    for _ in range(rounds):
        clock.synchronize()
        begin = time.perf_counter()
        for i in range(calls):
            call(i)
        times.append(1e3 * (time.perf_counter() - begin) / calls)
    clock.synchronize()
    return Sample(statistics.median(times), min(times), max(times))
