"""What an algorithm needs from the other ranks: the seam to torch.distributed."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from fitkit.distributed.collectives import Collectives, RankGroup
from fitkit.distributed.world import counting_connections


class Peers:
    """The ranks that exchange vectors; every method is collective among them.

    Args:
        collectives: of the ranks.
        timeout: bound of each exchange in a group of its own; None for torch's default.
        group: None for torch's default group.
    """

    def __init__(
        self, collectives: Collectives, timeout: timedelta | None, group: RankGroup | None = None
    ) -> None:
        self.rank: int = collectives.rank
        self.size: int = collectives.world_size
        self._collectives = collectives
        self._timeout = timeout
        self._group = group

    @property
    def _handle(self) -> Any:
        return None if self._group is None else self._group.handle

    def mean(self, vector: torch.Tensor) -> None:
        """Replace a vector by its mean over the ranks."""
        dist.all_reduce(vector, group=self._handle)
        vector.div_(self.size)

    def begin_sum(self, vector: torch.Tensor) -> Any:
        """Begin to replace a vector by its sum over the ranks; it isn't to be touched meanwhile.

        Returns:
            torch's `Work`, to be waited for.
        """
        return dist.all_reduce(vector, group=self._handle, async_op=True)

    def swap(self, tensor: torch.Tensor, others: list[int]) -> list[torch.Tensor]:
        """Send a tensor to some ranks, which send theirs to this one; what they sent."""
        received = [torch.empty_like(tensor) for _ in others]
        calls = [dist.P2POp(dist.isend, tensor, other, self._handle) for other in others]
        calls += [
            dist.P2POp(dist.irecv, place, other, self._handle)
            for other, place in zip(others, received, strict=True)
        ]
        for work in dist.batch_isend_irecv(calls):
            work.wait()
        return received

    def deal(self, rows: torch.Tensor) -> torch.Tensor:
        """Send row r to rank r: (R, K); what the ranks sent to this one, in rank order: (R, K)."""
        received = torch.empty_like(rows)
        dist.all_to_all_single(received, rows, group=self._handle)
        return received

    def join(self, row: torch.Tensor) -> torch.Tensor:
        """Every rank's row (K,), in rank order: (R, K)."""
        joined = row.new_empty(self.size, len(row))
        dist.all_gather(list(joined.unbind(0)), row, group=self._handle)
        return joined

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value (anything that can be pickled), in rank order."""
        return self._collectives.gather(value)

    def apart(self) -> Peers:
        """The same ranks in a group of their own, whose exchanges pass those of others by."""
        backend = dist.get_backend()
        with counting_connections():
            group = RankGroup([list(range(self.size))], self.rank, backend, self._timeout)
        return Peers(self._collectives, self._timeout, group)

    def leave(self) -> None:
        """Give that group up."""
        if self._group is not None:
            self._group.leave()
