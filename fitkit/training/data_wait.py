"""How long the first epoch of a fit waits for its data, and one line about it if that is long."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from operator import itemgetter
from time import perf_counter
from typing import Any

import torch

from fitkit.accelerators import has_streams
from fitkit.data.batches import Source
from fitkit.data.loaders import reads_by_index
from fitkit.data.sources import LoaderSource

MOST = 100_000
"""So many batches of the first epoch are measured at most."""


class DataWait:
    """Measures the waits for the batches of one epoch.

    The clock is read by iterators of Python's own, so that a batch calls nothing and costs 0.2 µs.
    Where a device computes meanwhile, only waits at whose end it has nothing to do count.

    Args:
        device: where the steps are computed.
        source: of the training's data.
    """

    def __init__(self, device: torch.device, source: Source) -> None:
        self._device = device
        whole = source.whole
        self._loader = whole if isinstance(whole, LoaderSource) else None
        self._batch_size = source.batch_size
        self._asked: list[float] = []  # when each batch was asked for
        self._came: list[float] = []
        self._busy: set[int] = set()  # the batches at whose coming the device had work

    def timed(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Return the batches of an epoch; their waits are measured."""
        measured = itertools.islice(batches, MOST)
        ticks = iter(perf_counter, None)
        asked, came = map(self._asked.append, ticks), map(self._came.append, ticks)
        timed: Iterator[Any] = map(itemgetter(1), zip(asked, measured, came, strict=False))
        if has_streams(self._device):
            timed = map(self._looked_at, timed)
        return itertools.chain(timed, batches)

    def _looked_at(self, batch: Any) -> Any:
        if not self._is_idle():
            self._busy.add(len(self._came) - 1)
        return batch

    def _is_idle(self) -> bool:
        """Whether the device has done all that it was given. It asks without waiting."""
        return torch.accelerator.current_stream(self._device).query()

    def _measured(self) -> tuple[float, float, int]:
        """Return how long batches were waited for, how long they took, and their number.

        Without the first batch of each worker, if there are others: workers start for it, and code
        is compiled.
        """
        first = 1 if self._loader is None else max(self._loader.loader.num_workers, 1)
        if len(self._came) <= first:
            first = 0
        waited = [
            came - self._asked[number]
            for number, came in enumerate(self._came)
            if number >= first and number not in self._busy
        ]
        begin = self._came[first - 1] if first else self._asked[0]
        return sum(waited), self._asked[-1] - begin, len(self._came) - first

    @property
    def share(self) -> float:
        """The share of the epoch that was waiting."""
        if not self._came:
            return 0.0
        waited_s, seconds, _ = self._measured()
        return waited_s / max(seconds, 1e-9)

    def line(self) -> str | None:
        """Return what to say of the waits; None where they are short, or the data in memory."""
        if not self._came or self._loader is None or reads_by_index(self._loader.loader):
            return None
        from fitkit.extras.data_advice import advice

        found, loader = self._measured(), self._loader
        return advice(loader.loader, *found, self._batch_size, loader.is_stream)
