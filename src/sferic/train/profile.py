"""A trace of one training step: which operators and kernels ran, when, for how long."""

from collections.abc import Callable
from pathlib import Path

import torch

from sferic.data.files import publish, temporary
from sferic.train.metrics import Row

WARMUP = 3  # steps before the traced one


class StepProfile:
    """Traces one step of a run with torch's profiler, after `WARMUP` steps."""

    def __init__(self, file: Path, device: torch.device) -> None:
        """Nothing is written yet.

        Args:
            file: of the trace, in Chrome's format; its folder is made.
            device: of the model; the kernels of a GPU are traced too.
        """
        self.file = file
        self.device = device
        self.traced: int | None = None  # number of the step that was
        self._passed = 0

    def run(self, step: Callable[[], Row]) -> Row:
        """Run a step, and trace it if it is its turn."""
        if self.traced is None and self._passed == WARMUP:
            row = self._trace(step)
            self.traced = row["step"]
            return row
        self._passed += 1
        return step()

    def outcome(self) -> str:
        """A line that says where the trace is, or why there is none."""
        if self.traced is None:
            return f"no step was traced: the first {WARMUP} steps of a call only warm up"
        return f"the trace of step {self.traced} is in {self.file}"

    def _trace(self, step: Callable[[], Row]) -> Row:
        from torch.profiler import ProfilerActivity, profile  # slow to import

        cuda = self.device.type == "cuda"
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
        with profile(activities=activities) as profiler:
            row = step()
            if cuda:  # the update is still on its way
                torch.cuda.synchronize(self.device)
        self.file.parent.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(temporary(self.file)))
        publish(self.file)
        return row
