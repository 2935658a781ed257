"""What `fit` says of where it runs, before its first epoch."""

from __future__ import annotations

from fitkit.distributed.strategies import Strategy
from fitkit.printing import say


def say_where(strategy: Strategy, batch_size: int | None, accumulate: int) -> None:
    """Print where training runs and what an update sees; print nothing on a single CPU.

    Args:
        batch_size: the samples in a rank's batch; None if unknown.
        accumulate: the batches in an update.
    """
    ranks, replicas, device = strategy.collectives.world_size, strategy.replicas, strategy.device
    alone = ranks * replicas == 1 and device.type == "cpu"
    if alone or strategy.collectives.rank:
        return
    what = f"{ranks} processes" if ranks > 1 else "1 process"
    what += f" of {replicas} replicas each" if replicas > 1 else ""
    batch, parts = "", strategy.data_ranks.world_size
    if batch_size:
        sizes = f"{parts} x {batch_size} = {parts * batch_size}" if parts > 1 else f"{batch_size}"
        batch = f", batches of {sizes} samples"
        if accumulate > 1:
            samples = parts * batch_size * accumulate
            batch += f", an update every {accumulate} batches ({samples} samples)"
    say(f"{what} on {device if ranks * replicas == 1 else device.type}{batch}")
