"""Models and training state on disk."""

from sferic.checkpoint.training import latest_checkpoint, load_checkpoint, save_checkpoint, step_of
from sferic.checkpoint.weights import load, load_tokenizer, read_config, save

__all__ = [
    "latest_checkpoint",
    "load",
    "load_checkpoint",
    "load_tokenizer",
    "read_config",
    "save",
    "save_checkpoint",
    "step_of",
]
