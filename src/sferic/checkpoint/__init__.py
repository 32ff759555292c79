"""Models and training state on disk."""

from sferic.checkpoint.folder import read_config
from sferic.checkpoint.layouts import LAYOUTS, Layout
from sferic.checkpoint.training import latest_checkpoint, load_checkpoint, save_checkpoint, step_of
from sferic.checkpoint.weights import convert, load, load_tokenizer, save

__all__ = [
    "LAYOUTS",
    "Layout",
    "convert",
    "latest_checkpoint",
    "load",
    "load_checkpoint",
    "load_tokenizer",
    "read_config",
    "save",
    "save_checkpoint",
    "step_of",
]
