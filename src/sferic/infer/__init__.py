"""Inference: sampling, generation, and the engine that runs many requests together."""

from sferic.infer.engine import Completion, Engine, Event
from sferic.infer.generate import generate, generate_stream
from sferic.infer.sampler import Sampling, sample
from sferic.infer.text import continue_text

__all__ = [
    "Completion",
    "Engine",
    "Event",
    "Sampling",
    "continue_text",
    "generate",
    "generate_stream",
    "sample",
]
