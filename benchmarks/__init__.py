"""Benchmarks: fitkit against hand-written loops and other libraries. `python -m benchmarks -h`."""
