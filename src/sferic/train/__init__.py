"""Training on one process; parallel training replaces the model's objects, not this loop."""

from sferic.train.loop import Diverged, Interrupted, Trainer
from sferic.train.metrics import read_metrics

__all__ = ["Diverged", "Interrupted", "Trainer", "read_metrics"]
