"""How several ranks on one machine share its cores."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import torch


def share_of_cores(ranks: int) -> int:
    """Threads for each of several ranks on this machine."""
    return max(1, len(os.sched_getaffinity(0)) // ranks) if hasattr(os, "sched_getaffinity") else 1


@contextlib.contextmanager
def threads_shared(ranks: int) -> Iterator[None]:
    """Give this process its share of the cores for the length of a call."""
    before = torch.get_num_threads()
    torch.set_num_threads(min(before, share_of_cores(ranks)))
    try:
        yield
    finally:
        torch.set_num_threads(before)
