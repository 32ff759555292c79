"""Training on one process; parallel training replaces the model's objects, not this loop."""

from sferic.train.loop import Diverged, Interrupted, Trainer
from sferic.train.metrics import read_metrics
from sferic.train.precision import compute_dtype
from sferic.train.profile import StepProfile

__all__ = ["Diverged", "Interrupted", "StepProfile", "Trainer", "compute_dtype", "read_metrics"]
