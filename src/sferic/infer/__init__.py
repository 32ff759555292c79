"""Inference: sampling and generation."""

from sferic.infer.generate import generate, generate_stream
from sferic.infer.sampler import sample
from sferic.infer.text import continue_text

__all__ = ["continue_text", "generate", "generate_stream", "sample"]
