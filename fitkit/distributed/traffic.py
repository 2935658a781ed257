"""What exchanges between ranks send, in bytes: the arithmetic."""

from __future__ import annotations


def all_reduce(size: float, ranks: int) -> float:
    """Bytes that each rank sends in a ring all-reduce of `size` bytes.

    Reference: Patarasuk and Yuan, Bandwidth Optimal All-reduce Algorithms for Clusters of
    Workstations, 2009, doi:10.1016/j.jpdc.2008.09.002.
    """
    return 2 * all_gather(size, ranks)


def all_gather(size: float, ranks: int) -> float:
    """Bytes that each rank sends so that all have `size` bytes of which each had an equal part;
    a reduce-scatter sends as many."""
    return size * (ranks - 1) / ranks
