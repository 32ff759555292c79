"""Benchmarks: what is measured, how, and what it must reach; not part of the package."""
