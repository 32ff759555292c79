"""Inference: sampling and generation."""

from sferic.infer.generate import generate, generate_stream
from sferic.infer.sampler import sample

__all__ = ["generate", "generate_stream", "sample"]
