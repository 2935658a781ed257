"""What was computed in parts on all ranks, for the history and the user."""

from __future__ import annotations

from typing import Any

from fitkit.callbacks import Callback
from fitkit.errors import warn
from fitkit.extras.splitting.updates import UpdateInParts


class PartsReport(Callback):
    """Tells rank 0 at each epoch's end in how many parts other ranks compute their batches.

    Args:
        updates: what the training makes updates with.
    """

    def __init__(self, updates: Any) -> None:
        self._updates: list[Any] = getattr(updates, "updates", [updates])
        self._said = False

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Note the parts of all ranks in `history.params["parts"]`.

        Ranks:
            Collective.
        """
        mine: dict[str, int] = {}
        for update in self._updates:
            mine.update(update.cuts.parts if isinstance(update, UpdateInParts) else {})
        ranks: Any = self.model._fitkit.compilation.strategy.collectives
        everyones = ranks.gather(mine) if ranks.world_size > 1 else [mine]
        several = len(everyones) > 1
        found = {
            f"rank {rank}: {shapes}" if several else shapes: count
            for rank, parts in enumerate(everyones)
            for shapes, count in parts.items()
        }
        if found:
            self.params["parts"] = found
        others = [rank for rank, parts in enumerate(everyones) if parts and rank]
        if others and not self._said and ranks.rank == 0:
            self._said = True
            names = ", ".join(map(str, others))
            warn(
                f"Batches that didn't fit into memory are computed in parts on rank {names}, with "
                "the same numbers. history.params['parts'] has their shapes.",
                code="FK069",
            )
