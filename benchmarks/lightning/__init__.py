"""Lightning attention on one GPU, beside public kernels and the memory floor.

`python -m benchmarks.lightning` checks, times and writes rows; `targets` says what they must reach.
"""
