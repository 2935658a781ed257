"""Several loaders that are read by index together, and data that know how they are read."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader

from fitkit.data.batches import Source
from fitkit.data.draws import DataDraws
from fitkit.data.loaders import generators_of, tell_epoch


class DrawnSource(Source, ABC):
    """Several loaders that are read by index together; a pass's order is drawn as it begins."""

    loaders: list[DataLoader[Any]]

    draws_orders = True

    @abstractmethod
    def draw(self, draws: DataDraws) -> tuple[list[list[Any]], list[torch.Generator]]:
        """Return the indices of each loader's batches in a pass, and its seeds."""

    @abstractmethod
    def read(
        self,
        orders: list[list[Any]],
        number: int,
        seeds: list[torch.Generator],
        *,
        key: int,
        place: int,
        step: int = 1,
    ) -> Iterator[Any]:
        """Return the batches of these indices, without drawing more random numbers.

        Args:
            number: the number of the pass.
            seeds: each loader's, as `draw` gives them.
            key: of the call's data.
            place: the number in the pass of the first of these batches, over all ranks.
            step: how far they are apart there.
        """

    @property
    def generators(self) -> list[torch.Generator]:
        return generators_of(*self.loaders)

    def batches(self, number: int, skip: int = 0) -> Iterator[Any]:
        for loader in self.loaders:
            tell_epoch(loader, number)
        draws = self.pass_draws()
        orders, seeds = self.draw(draws)
        rest = [order[skip:] for order in orders]
        return self.read(rest, number, seeds, key=draws.key, place=skip)


class ReadByItself(ABC):
    """Data that know how a pass over them is read."""

    @abstractmethod
    def pass_of(self, number: int) -> Iterator[Any]:
        """Return the batches of pass `number`."""

    @abstractmethod
    def by_index(
        self, prepared: Callable[[DataLoader[Any]], DataLoader[Any]]
    ) -> DrawnSource | None:
        """Return the source that reads them by index; None if that is impossible.

        Args:
            prepared: a function that returns the loader to read in place of a given one.

        Raises:
            ConfigurationError: a loader has no batches.
        """
