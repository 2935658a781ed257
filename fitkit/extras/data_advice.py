"""What to write where a training waits for its data."""

from __future__ import annotations

import math
from typing import Any

from fitkit.seams.machines import usable_cores

SHARE = 0.25
"""What is waited for less than that part of an epoch isn't worth a line."""
LEAST_S = 1.0
"""Nor is an epoch that waited for less."""


def advice(
    loader: Any,
    waited_s: float,
    seconds: float,
    batches: int,
    batch_size: int | None,
    is_stream: bool,
) -> str | None:
    """Return a line with the number of workers that an epoch's measured times ask for.

    Without workers, a batch takes as long as it was waited for. With workers that are waited for,
    each of them was busy all the time, so that a batch took one of them `workers × period`.

    Args:
        loader: torch's `DataLoader`, or what has its `num_workers`.
        waited_s: how long the epoch waited for its batches.
        seconds: how long it took.
        batches: their number.
        batch_size: the samples of a batch; None where unknown.
        is_stream: whether the data set is iterable, so that it must be divided among workers.

    Returns:
        The line; None where the waits are short.

    Example:
        >>> from types import SimpleNamespace
        >>> from fitkit.extras.data_advice import advice
        >>> loader = SimpleNamespace(num_workers=0)
        >>> advice(loader, 13.2, 15.6, 100, 12, False)[:74]
        '85% of the first epoch waited for data: a sample takes 11 ms, a step 24 ms'
    """
    if waited_s < LEAST_S or waited_s < SHARE * seconds:
        return None
    workers = loader.num_workers
    step_s = max((seconds - waited_s) / batches, 1e-6)
    load_s = waited_s / batches if not workers else workers * seconds / batches
    needed = math.ceil(load_s / step_s)
    cores = usable_cores()
    spare = None if cores is None else max(cores, 1)
    what = (
        f"a sample takes {_ms(load_s / batch_size)}"
        if batch_size
        else f"a batch takes {_ms(load_s)}"
    )
    line = (
        f"{waited_s / seconds:.0%} of the first epoch waited for data: {what}, a step {_ms(step_s)}"
    )
    if spare is not None and needed > spare:
        if workers >= spare:
            return f"{line}. {workers} workers use all {spare} cores: make a sample cheaper."
        return (
            f"{line}. Write DataLoader(num_workers={spare}), for which there are cores; {needed} "
            "would be needed, so make a sample cheaper, too."
        )
    divided = ", whose data set must divide its samples among them" if is_stream else ""
    return f"{line}. Write DataLoader(num_workers={needed}){divided}."


def _ms(seconds: float) -> str:
    """Return a time in milliseconds with two digits."""
    ms = seconds * 1000
    return f"{ms:.0f} ms" if ms >= 10 else f"{ms:.2g} ms"
