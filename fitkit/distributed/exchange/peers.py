"""What an exchange needs from the other ranks: the seam to torch.distributed, and its double."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

from fitkit.distributed.collectives import Collectives, RankGroup
from fitkit.distributed.world import counting_connections


class Sum(Protocol):
    """A sum over the ranks that is under way."""

    def is_completed(self) -> bool: ...

    def wait(self) -> Any: ...


class Peers(Protocol):
    """The ranks that exchange vectors; every function is collective among them."""

    rank: int
    size: int

    def mean(self, vector: torch.Tensor) -> None:
        """Replace a vector by its mean over the ranks."""

    def begin_sum(self, vector: torch.Tensor) -> Sum:
        """Begin to replace a vector by its sum over the ranks; it isn't to be touched meanwhile."""

    def swap(self, tensor: torch.Tensor, others: list[int]) -> list[torch.Tensor]:
        """Send a tensor to some ranks, which send theirs to this one; what they sent."""

    def deal(self, rows: torch.Tensor) -> torch.Tensor:
        """Send row r to rank r: (R, K); what the ranks sent to this one, in rank order: (R, K)."""

    def join(self, row: torch.Tensor) -> torch.Tensor:
        """Every rank's row (K,), in rank order: (R, K)."""

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value (anything that can be pickled), in rank order."""

    def apart(self) -> Peers:
        """The same ranks in a group of their own, whose exchanges pass those of others by."""

    def leave(self) -> None:
        """Give that group up."""


class GroupPeers:
    """The ranks of a process group.

    Args:
        collectives: of the ranks.
        timeout: bound of each exchange in a group of its own; None for torch's default.
        group: None for torch's default group.
    """

    def __init__(
        self, collectives: Collectives, timeout: timedelta | None, group: RankGroup | None = None
    ) -> None:
        self.rank = collectives.rank
        self.size = collectives.world_size
        self._collectives = collectives
        self._timeout = timeout
        self._group = group

    @property
    def _handle(self) -> Any:
        return None if self._group is None else self._group.handle

    def mean(self, vector: torch.Tensor) -> None:
        dist.all_reduce(vector, group=self._handle)
        vector.div_(self.size)

    def begin_sum(self, vector: torch.Tensor) -> Sum:
        work: Sum = dist.all_reduce(vector, group=self._handle, async_op=True)
        return work

    def swap(self, tensor: torch.Tensor, others: list[int]) -> list[torch.Tensor]:
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
        received = torch.empty_like(rows)
        dist.all_to_all_single(received, rows, group=self._handle)
        return received

    def join(self, row: torch.Tensor) -> torch.Tensor:
        joined = row.new_empty(self.size, len(row))
        dist.all_gather(list(joined.unbind(0)), row, group=self._handle)
        return joined

    def gather(self, value: Any) -> list[Any]:
        return self._collectives.gather(value)

    def apart(self) -> GroupPeers:
        backend = dist.get_backend()
        with counting_connections():
            group = RankGroup([list(range(self.size))], self.rank, backend, self._timeout)
        return GroupPeers(self._collectives, self._timeout, group)

    def leave(self) -> None:
        if self._group is not None:
            self._group.leave()
