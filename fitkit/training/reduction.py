"""A pass's values over all ranks, from what each of them has summed up."""

from __future__ import annotations

from typing import Any

from fitkit.distributed.collectives import Collectives
from fitkit.training.logbook import Logbook, whole_loss


def reduced(
    logbook: Logbook, collectives: Collectives, carried: list[dict[str, Any]] | None = None
) -> tuple[dict[str, Any], int]:
    """The logbook's values over the samples of all ranks, the same on each of them.

    Sums and counts travel, never means: each sample counts once, on whichever rank. A name
    that a rank doesn't have counts no samples there.

    Args:
        carried: what was noted of this pass before it was cut, the same on every rank.

    Returns:
        The values by name, and the number of steps of all ranks.

    Raises:
        ConfigurationError: ranks logged different names with `sync_dist`.

    Ranks:
        Collective: one exchange; a second where a rank saw no batch at all.
    """
    if collectives.world_size == 1 and not carried:
        values = logbook.results()
        logbook.logged.finish()
        return values, logbook.steps
    told = [
        *(carried or ()),
        *collectives.gather(noted_by(logbook, logbook.steps, collectives.rank)),
    ]
    values = _means([notes["sums"] for notes in told])
    scales = {name: scale for notes in told for name, scale in notes.get("scales", {}).items()}
    loss = whole_loss(values, scales, values.get("loss"))
    if loss is not None:
        values = {"loss": loss, **{n: v for n, v in values.items() if n != "loss"}}
    metrics: dict[str, Any] = {}
    states = [notes["metrics"] for notes in told if notes["metrics"] is not None]
    if logbook.meters.state() is not None:
        logbook.meters.merge(states)
        metrics = logbook.meters.results()
    all_logged = [notes["logged"] for notes in told]
    logged = logbook.logged.merge(
        all_logged,
        [notes["steps"] - notes.get("fillers", 0) for notes in told],
        [notes.get("rank", 0) for notes in told],
    )
    logbook.logged.finish()
    if len(states) not in (0, len(told)) or _lacks_metrics(all_logged):
        # A rank without batches never learned which metrics there are.
        everyone = collectives.gather((metrics, logged))
        metrics = next((found for found, _ in everyone if found), {})
        logged = max((found for _, found in everyone), key=len)
    return {**values, **metrics, **logged}, sum(notes["steps"] for notes in told)


def noted_by(logbook: Logbook, steps: int, rank: int) -> dict[str, Any]:
    """What this rank has noted of a pass, as plain data."""
    return {
        "sums": logbook.sums(),
        "scales": dict(logbook.scales),
        "metrics": logbook.meters.state(),
        "logged": logbook.logged.state(),
        "steps": steps,
        "fillers": logbook.fillers,
        "rank": rank,
    }


def _means(all_sums: list[dict[str, tuple[float, float]]]) -> dict[str, Any]:
    means = {}
    for name in dict.fromkeys(name for sums in all_sums for name in sums):
        pairs = [sums[name] for sums in all_sums if name in sums]
        count = sum(count for _, count in pairs)
        if count:
            means[name] = sum(total for total, _ in pairs) / count
    return means


def _lacks_metrics(all_logged: list[dict[str, Any]]) -> bool:
    """Whether some rank logged no torchmetrics object where another did."""
    kinds = [{name for name, state in one.items() if state["metric"]} for one in all_logged]
    return any(kind != kinds[0] for kind in kinds)
