"""How long each epoch is, where callbacks set the sizes of batches or of updates by epoch."""

from __future__ import annotations

from collections.abc import Iterable

from fitkit.callbacks.batch_sizes import SetsAccumulation, batch_sizes_among, value_in
from fitkit.data.batches import Source


class EpochLengths:
    """The batches and updates of each epoch.

    Args:
        callbacks: the user's.
        source: the whole data, which all ranks share.
        steps: the batches in an epoch of a rank, if no callback sets the batch size. None if
            unknown.
        accumulate: the batches of an update, if no callback says so.
        shares: into how many shares the data are divided.
    """

    def __init__(
        self,
        callbacks: Iterable[object],
        source: Source,
        steps: int | None,
        accumulate: int,
        shares: int,
    ) -> None:
        callbacks = list(callbacks)
        self._source, self._steps, self._shares = source, steps, shares
        self._sizes = batch_sizes_among(callbacks)
        self._parts = {0: accumulate}
        for callback in callbacks:
            if isinstance(callback, SetsAccumulation):
                self._parts = {0: accumulate, **callback.scheduling}

    def updates_after(self, epoch: int, steps: int) -> int:
        """Return how many updates the first batches of an epoch make."""
        return steps // value_in(self._parts, epoch, 1)

    def updates(self, default_size: int) -> tuple[tuple[int, int], ...] | None:
        """Return from which epochs on an epoch has how many updates; None if that is unknown.

        Args:
            default_size: the samples in a batch, where no callback sets them.
        """
        found: list[tuple[int, int]] = []
        for epoch in sorted({*self._sizes, *self._parts}):
            steps, samples = self._steps, self._source.samples
            if self._sizes and samples is not None:
                size = value_in(self._sizes, epoch, None) or default_size
                steps = -(-samples // size // self._shares)
            if steps is None:
                return None
            found.append((epoch, -(-steps // value_in(self._parts, epoch, 1))))
        return tuple(found)
