"""What ranks say to each other.

Every function of a `Collectives` must be called by all ranks, in the same order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import torch

Result = TypeVar("Result")


class Collectives(Protocol):
    """Rank, world size, and the exchanges that fitkit needs beside a strategy's own."""

    rank: int
    world_size: int

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value (anything that can be pickled), in rank order, on every rank."""

    def collect(self, value: Any) -> list[Any] | None:
        """Every rank's value, in rank order, on rank 0 alone; None on the others."""

    def broadcast(self, value: Any) -> Any:
        """Rank 0's value, on every rank."""

    def scatter(self, values: list[Any] | None) -> Any:
        """Return this rank's entry of the list that rank 0 gives; the others give None."""

    def sums(self, numbers: list[float]) -> list[float]:
        """Return the numbers summed over the ranks, in float64."""

    def broadcast_tensors(self, tensors: list[torch.Tensor]) -> None:
        """Overwrite the tensors with rank 0's."""

    def mean_gradients(self, parameters: list[torch.nn.Parameter]) -> None:
        """Replace gradients by their mean over the ranks.

        A parameter that some ranks didn't use counts as zero there. One that no rank used keeps
        no gradient, so that the optimizer passes it over as it would in one process.
        """

    def join_rows(self, tensor: torch.Tensor) -> torch.Tensor:
        """Every rank's rows (N_r, ...) one below the other: (sum of N_r, ...), with gradients."""


def together(collectives: Collectives, work: Callable[[], Result]) -> Result:
    """Return what `work` gives here; an error on any rank is raised on all.

    Ranks:
        Collective.
    """
    problem: Exception | None = None
    try:
        result = work()
    except Exception as error:
        problem = error
    if collectives.world_size > 1:
        problem = next((p for p in [problem, *collectives.gather(problem)] if p is not None), None)
    if problem is not None:
        raise problem
    return result


def done_by_rank_zero(collectives: Collectives, work: Callable[[], Result]) -> Result:
    """Return on all ranks what `work` gives on rank 0, which alone does it; an error there is
    raised on all.

    Ranks:
        Collective.
    """
    given: tuple[Result | None, Exception | None] = (None, None)
    if collectives.rank == 0:
        try:
            given = work(), None
        except Exception as error:
            given = None, error
    result, problem = collectives.broadcast(given)
    if problem is not None:
        raise problem
    found: Result = result
    return found


class Solo:
    """The collectives of a run with one rank: nothing is exchanged."""

    rank = 0
    world_size = 1

    def gather(self, value: Any) -> list[Any]:
        return [value]

    def collect(self, value: Any) -> list[Any] | None:
        return [value]

    def broadcast(self, value: Any) -> Any:
        return value

    def scatter(self, values: list[Any] | None) -> Any:
        assert values is not None
        return values[0]

    def sums(self, numbers: list[float]) -> list[float]:
        return numbers

    def broadcast_tensors(self, tensors: list[torch.Tensor]) -> None:
        pass

    def mean_gradients(self, parameters: list[torch.nn.Parameter]) -> None:
        pass

    def join_rows(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor


class NodeShares:
    """The collectives of groups whose ranks see the same data and compute the same numbers.

    Args:
        ranks: the collectives of all ranks.
        groups: each group's ranks, the groups in the order of their first ranks.
    """

    def __init__(self, ranks: Collectives, groups: list[list[int]]) -> None:
        self.rank: int = next(index for index, group in enumerate(groups) if ranks.rank in group)
        self.world_size: int = len(groups)
        self._ranks = ranks
        self._groups = groups
        self._leads = ranks.rank == groups[self.rank][0]

    def gather(self, value: Any) -> list[Any]:
        """Return the value of each group's first rank, on every rank."""
        everyone = self._ranks.gather(value if self._leads else None)
        return [everyone[group[0]] for group in self._groups]

    def collect(self, value: Any) -> list[Any] | None:
        """Return the value of each group's first rank, on the first rank of all."""
        everyone = self._ranks.collect(value if self._leads else None)
        return None if everyone is None else [everyone[group[0]] for group in self._groups]

    def broadcast(self, value: Any) -> Any:
        return self._ranks.broadcast(value)

    def scatter(self, values: list[Any] | None) -> Any:
        if values is None:
            return self._ranks.scatter(None)
        dealt: list[Any] = [None] * self._ranks.world_size
        for group, value in zip(self._groups, values, strict=True):
            for rank in group:
                dealt[rank] = value
        return self._ranks.scatter(dealt)

    def sums(self, numbers: list[float]) -> list[float]:
        ranks = len(self._groups[self.rank])
        return [total / ranks for total in self._ranks.sums(numbers)]

    def broadcast_tensors(self, tensors: list[torch.Tensor]) -> None:
        self._ranks.broadcast_tensors(tensors)

    def mean_gradients(self, parameters: list[torch.nn.Parameter]) -> None:
        self._ranks.mean_gradients(parameters)

    def join_rows(self, tensor: torch.Tensor) -> torch.Tensor:
        return self._ranks.join_rows(tensor if self._leads else tensor[:0])
