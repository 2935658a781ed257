"""A pass's values over all ranks, from what each of them has summed up."""

from __future__ import annotations

from typing import Any

from fitkit.distributed.collectives import Collectives
from fitkit.training.logbook import Logbook


def reduced(logbook: Logbook, collectives: Collectives) -> dict[str, Any]:
    """The logbook's values over the samples of all ranks, the same on each of them.

    Sums and counts travel, never means: each sample counts once, on whichever rank. A name
    that a rank doesn't have counts no samples there.

    Ranks:
        Collective: one exchange; a second where a rank saw no batch at all.
    """
    if collectives.world_size == 1:
        return logbook.results()
    told = collectives.gather((logbook.sums(), logbook.meters.state()))
    names = list(dict.fromkeys(name for sums, _ in told for name in sums))
    means: dict[str, Any] = {}
    for name in names:
        pairs = [sums[name] for sums, _ in told if name in sums]
        count = sum(count for _, count in pairs)
        if count:
            means[name] = sum(total for total, _ in pairs) / count
    states = [state for _, state in told if state is not None]
    metrics: dict[str, Any] = {}
    if logbook.meters.state() is not None:
        logbook.meters.merge(states)
        metrics = logbook.meters.results()
    if states and len(states) < collectives.world_size:
        # A rank without batches never learned which metrics there are.
        metrics = next(found for found in collectives.gather(metrics) if found)
    return {**means, **metrics}
