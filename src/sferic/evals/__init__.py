"""Evaluation."""

from sferic.evals.compression import Compression, compression, unigram_nats

__all__ = ["Compression", "compression", "unigram_nats"]
