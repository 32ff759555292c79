"""One run: its clock, its plan, what it has measured and what went wrong."""

import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from benchmarks.lightning.calls import training_call
from benchmarks.lightning.check import Refused, check_attention
from benchmarks.lightning.floors import Rates
from benchmarks.lightning.impls import Impl, Serving
from benchmarks.lightning.inputs import draw
from benchmarks.lightning.plan import Case, Plan
from benchmarks.lightning.rows import Row
from benchmarks.lightning.timing import Call, Clock, Sample, Timed, burst, prepare

Errors = dict[str, float]  # by pass


def show(line: str) -> None:
    """Print a line at once, also into a pipe."""
    print(line, flush=True)


@dataclass
class Bench:
    """What every part needs, and where it puts its rows."""

    clock: Clock
    plan: Plan
    impls: Sequence[Impl]  # refused ones are gone after `check`
    host_impls: Sequence[Impl]  # ours by each kind of kernels, for host time
    serving: Serving
    provenance: Row
    say: Callable[[str], None] = show
    rows: list[Row] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    errors: dict[str, Errors] = field(default_factory=dict)
    _rates: Rates | None = None

    @property
    def rates(self) -> Rates:
        """The ceilings measured in this run.

        Raises:
            RuntimeError: they were not measured.
        """
        if self._rates is None:
            raise RuntimeError("the device's copy and product were not measured, so no floor")
        return self._rates

    @rates.setter
    def rates(self, rates: Rates) -> None:
        self._rates = rates

    @property
    def ours(self) -> Impl | None:
        """Our operator as users get it, unless it is left out or refused."""
        return next((impl for impl in self.impls if impl.name == "sferic"), None)

    def check(self) -> None:
        """Check every implementation at small sizes; one that fails is not timed at all."""
        passed = []
        for impl in self.impls:
            with self.attempt(f"check of {impl.name}"):
                if impl.autotuned:
                    self._tune(impl)
                self.errors[impl.name] = self.errors_of(impl, self._small(impl))
                passed.append(impl)
        self.impls = passed

    def _tune(self, impl: Impl) -> None:
        """Let it choose at shapes that are timed, the first of each head count; no time is kept."""
        first = {case.H: case for case in reversed(self.plan.training) if case.backward}
        for case in first.values():
            inputs = draw(case, 1, self.clock.device)
            training_call(impl, inputs, "early", "contiguous", "fwd+bwd")(0)

    def _small(self, impl: Impl) -> list[Case]:
        """Cases of its check; a peer's have head counts that are timed, for each costs tuning."""
        heads = {case.H for case in self.plan.training}
        return [case for case in self.plan.check if impl.ours or case.H in heads]

    def errors_of(self, impl: Impl, cases: Sequence[Case]) -> Errors:
        """Errors of an implementation that passes its check.

        Raises:
            Refused: it doesn't.
        """
        errors = check_attention(impl, cases, self.clock.device)
        shown = ", ".join(f"{key} {error:.1e}" for key, error in errors.items())
        self.say(f"  {impl.name}: worst head {shown}")
        return errors

    @contextmanager
    def attempt(self, what: str) -> Iterator[None]:
        """A failure inside is printed and recorded, and the run goes on.

        Raises:
            RuntimeError: the device itself no longer works.
        """
        try:
            yield
        except Refused as error:
            self.failures.append(str(error))
            self.say(f"REFUSED: {error}")
        except Exception as error:
            self.failures.append(f"{what}: {type(error).__name__}: {str(error)[:200]}")
            self.say(f"FAILED: {what}\n{traceback.format_exc()}")
        self.clock.synchronize()
        self.clock.free()

    def prepare(self, call: Call, sets: int, *, graph: bool = False) -> Timed:
        """`timing.prepare` by this run's clock."""
        return prepare(self.clock, call, sets, graph=graph)

    def burst(self, timed: Timed) -> Sample:
        """A short burst after a short pause."""
        time.sleep(self.plan.pause_s)
        return burst(self.clock, timed, self.plan.burst_ms)

    def idle(self) -> None:
        """Let the device cool down."""
        self.clock.synchronize()
        time.sleep(self.plan.idle_s)

    def add(
        self,
        part: str,
        case: str,
        passes: str,
        impl: str,
        sample: Sample,
        *,
        floor_ms: float | None,
        timed: Timed | None = None,
        slopes: str | None = "early",
        layout: str | None = "contiguous",
        thermal: str = "idle",
        error: float | None = None,
        **more: Any,
    ) -> None:
        """Record a row; see `rows` for what the values mean."""
        self.rows.append(
            {
                "part": part,
                "case": case,
                "pass": passes,
                "impl": impl,
                "slopes": slopes,
                "layout": layout,
                "thermal": thermal,
                "graph": timed is not None and timed.graph,
                "ms": sample.ms,
                "lo": sample.lo,
                "hi": sample.hi,
                "floor_ms": floor_ms,
                "peak_gib": None if timed is None else timed.peak_gib,
                "err_worst_head": error,
                **self.provenance,
                **more,
            }
        )
