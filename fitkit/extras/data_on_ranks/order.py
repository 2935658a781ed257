"""The order of a pass on several ranks, which rank 0 draws."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

from fitkit.seams.strategies import Collectives

PART = 4096
"""The most batches of an order of unknown length that rank 0 draws at a time."""


class Order:
    """The indices of a pass's batches. Rank 0 draws them, in parts if they may have no end.

    Args:
        ranks: the ranks that read the pass.
        groups: the first batches' indices.
        ended: whether these are all.
        parts: what follows on rank 0, as `in_parts` gives it.
    """

    def __init__(
        self,
        ranks: Collectives,
        groups: Any,
        ended: bool = True,
        parts: Iterator[tuple[list[Any], bool]] | None = None,
    ) -> None:
        self.groups: Any = groups
        self._ranks = ranks
        self._ended = ended
        self._parts = parts

    def _read_on(self) -> None:
        """Add the next part.

        Ranks:
            Collective.
        """
        part = None if self._parts is None else next(self._parts)
        more, self._ended = self._ranks.broadcast(part)
        self.groups = self.groups + more

    def leave_out(self, skip: int) -> None:
        """Leave out the first batches."""
        while True:
            left_out = min(skip, len(self.groups))
            self.groups, skip = self.groups[left_out:], skip - left_out
            if not skip or self._ended:
                return
            self._read_on()

    def all(self, limit: int | None) -> Any:
        """All batches, or at least `limit` of them."""
        while not self._ended and (limit is None or len(self.groups) < limit):
            self._read_on()
        return self.groups

    def steps(self, deal: Callable[[Any], Iterator[Any]]) -> Iterator[Any]:
        """Yield what `deal` makes of the batches. It gets whole steps, until the last part."""
        while not self._ended:
            full = len(self.groups) // self._ranks.world_size * self._ranks.world_size
            yield from deal(self.groups[:full])
            self.groups = self.groups[full:]
            self._read_on()
        yield from deal(self.groups)


def in_parts(indices: Iterator[Any], size: int) -> Iterator[tuple[list[Any], bool]]:
    """Yield parts of `size` entries, and whether each is the last one: one entry is read ahead."""
    ahead = list(itertools.islice(indices, 1))
    while True:
        part = ahead + list(itertools.islice(indices, size - len(ahead)))
        ahead = list(itertools.islice(indices, 1))
        yield part, not ahead
        if not ahead:
            return
