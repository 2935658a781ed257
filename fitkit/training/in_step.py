"""Equally many steps on all ranks, where a rank's forward waits for the others'."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from fitkit.data.batches import NoRows
from fitkit.data.sharding import Share
from fitkit.distributed.strategies import Strategy

NOTHING = object()


class InStep:
    """A pass's batches; a rank that has run out, or whose batch has no rows, repeats one.

    That counts for nothing.

    Args:
        batches: this rank's.
        strategy: says whether its ranks go in step; where they don't, the batches are as given.
        muted: whether the step mutes a `Share` without samples. Else fillers come as they are,
            and `own` leaves out what became of them.
    """

    def __init__(self, batches: Iterator[Any], strategy: Strategy, *, muted: bool = True) -> None:
        self._batches = batches
        self._collectives = strategy.collectives
        self._together = strategy.evaluates_in_step
        self._muted = muted
        self._count = 0
        self._fillers: set[int] = set()

    def __iter__(self) -> Iterator[Any]:
        """The batches.

        Ranks:
            Collective, before each batch.
        """
        return self._in_step() if self._together else self._batches

    def own(self, outputs: list[Any]) -> list[Any]:
        """The outputs of this rank's own batches; `NoRows` in place of the others'."""
        return [NoRows if i in self._fillers else output for i, output in enumerate(outputs)]

    def _in_step(self) -> Iterator[Any]:
        last: Any = NOTHING
        while True:
            batch = next(self._batches, NOTHING)
            able = batch is not NOTHING and batch is not NoRows
            here, with_batch, ranks_ready = self._collectives.sums(
                [float(batch is not NOTHING), float(able), float(able or last is not NOTHING)]
            )
            if not here:
                return
            self._count += 1
            if not with_batch:
                yield NoRows
                continue
            if ranks_ready < self._collectives.world_size:  # a rank has had none to repeat
                told = self._collectives.gather(batch if able else None)
                last = last if last is not NOTHING else next(b for b in told if b is not None)
            if able:
                last = batch
                yield batch
            else:
                self._fillers.add(self._count - 1)
                yield Share(last, 0, 1) if self._muted else last
