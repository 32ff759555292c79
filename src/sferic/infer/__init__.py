"""Inference: sampling and generation."""

from sferic.infer.generate import generate, generate_stream
from sferic.infer.sampler import Sampling, sample
from sferic.infer.text import continue_text

__all__ = ["Sampling", "continue_text", "generate", "generate_stream", "sample"]
