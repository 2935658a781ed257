"""Several loaders side by side: each step takes a batch from each."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from fitkit.arguments import check_choice, describe
from fitkit.errors import ArgumentTypeError, ConfigurationError
from fitkit.seams import (
    DrawnSource,
    ReadByItself,
    ReadInOrder,
    begin_order,
    iterate,
    iterates_by_itself,
    marked,
    seeds_apart,
)

MODES = ("min_size", "max_size_cycle", "max_size")


class CombinedLoader(ReadByItself):
    """Yields a batch from each of several loaders at a time, in the loaders' structure.

    `fit`, `evaluate` and `predict` take it like any loader. Your own steps get the batch, for
    example `batch["labelled"]` and `batch["unlabelled"]`.

    A `DataLoader` over a data set with a length is read by index. All orders of a pass, including
    those of further cycles, are drawn when it begins. So ranks load only their own combined batches
    (in turn), and a resumed training continues at its place without loading earlier ones. Every
    rank reads other iterables in full.

    Args:
        loaders: a dict, list or tuple of loaders, or of any iterables that can be read again.
        mode: the length of a pass if lengths differ. `"min_size"` (default): the shortest.
            `"max_size_cycle"`: the longest, while shorter ones start again in a new order.
            `"max_size"`: the longest, with None in place of those that have ended.

    Raises:
        ArgumentTypeError, ConfigurationError: there are no loaders, or the mode is unknown.

    Example:
        >>> import fitkit
        >>> pairs = fitkit.data.CombinedLoader({"a": [1, 2, 3], "b": "xy"}, "max_size_cycle")
        >>> list(pairs)
        [{'a': 1, 'b': 'x'}, {'a': 2, 'b': 'y'}, {'a': 3, 'b': 'x'}]
    """

    def __init__(self, loaders: Any, mode: str = "min_size") -> None:
        if not isinstance(loaders, (Mapping, list, tuple)) or not loaders:
            raise ArgumentTypeError(
                f"loaders={describe(loaders)} must be a dict, list or tuple of loaders."
            )
        if mode == "sequential":
            raise ConfigurationError(
                "mode='sequential' is one loader after the other: give fit a DataLoader over a "
                "torch.utils.data.ConcatDataset, and call evaluate once for each loader."
            )
        check_choice("mode", mode, MODES)
        self.loaders: Any = loaders
        self.mode = mode
        named = loaders.items() if isinstance(loaders, Mapping) else enumerate(loaders)
        for name, loader in named:
            if isinstance(loader, Iterator) or not isinstance(loader, Iterable):
                raise ArgumentTypeError(
                    f"loaders[{name!r}]={describe(loader)} must be a DataLoader, or an iterable "
                    "that can be read again."
                )

    @property
    def parts(self) -> list[Any]:
        """The loaders, in their order."""
        return list(self.loaders.values() if isinstance(self.loaders, Mapping) else self.loaders)

    def structured(self, batches: Iterable[Any]) -> Any:
        """One batch from each loader, in the loaders' structure."""
        if isinstance(self.loaders, Mapping):
            return dict(zip(self.loaders, batches, strict=True))
        return tuple(batches)

    def length(self, lengths: Iterable[int]) -> int:
        """Return the number of batches in a pass, for loaders with these lengths."""
        return min(lengths) if self.mode == "min_size" else max(lengths)

    def __len__(self) -> int:
        return self.length(len(loader) for loader in self.parts)

    def __iter__(self) -> Iterator[Any]:
        return self._pass([partial(iter, part) for part in self.parts])

    def pass_of(self, number: int) -> Iterator[Any]:
        begins: list[Callable[[], Iterator[Any]]] = [
            partial(iterate, part, number) if isinstance(part, DataLoader) else partial(iter, part)
            for part in self.parts
        ]
        return self._pass(begins)

    def by_index(
        self, prepared: Callable[[DataLoader[Any]], DataLoader[Any]]
    ) -> CombinedSource | None:
        for loader in self.parts:
            if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
                return None
            if iterates_by_itself(loader):
                return None
            try:
                length = len(loader)
            except TypeError:
                return None  # its sampler has none
            if not length:
                raise ConfigurationError(
                    "A loader of the CombinedLoader is empty: it has no batches."
                )
        return CombinedSource(self, [prepared(loader) for loader in self.parts])

    def _pass(self, begins: list[Callable[[], Iterator[Any]]]) -> Iterator[Any]:
        # All begin now, in their order, as in `zip(first, second)`.
        return map(self.structured, self.joined([begin() for begin in begins], begins))

    def joined(
        self, readers: list[Iterator[Any]], again: Sequence[Callable[[], Iterator[Any]]]
    ) -> Iterator[Any]:
        """Return an entry of each reader at a time, as the mode says.

        Args:
            again: functions that begin each reader once more, for the mode that cycles.
        """
        if self.mode == "min_size":
            return zip(*readers, strict=False)
        if self.mode == "max_size":
            return itertools.zip_longest(*readers)
        return _cycled(readers, again)


def _cycled(
    readers: list[Iterator[Any]], again: Sequence[Callable[[], Iterator[Any]]]
) -> Iterator[Any]:
    missing = object()
    over = [False] * len(readers)
    while True:
        batches = []
        for index, begin in enumerate(again):
            batch = next(readers[index], missing)
            if batch is missing:
                over[index] = True
                if all(over):
                    return
                readers[index] = begin()
                batch = next(readers[index], missing)
                if batch is missing:
                    raise ConfigurationError(
                        "A loader of the CombinedLoader gave no batch in a new cycle."
                    )
            batches.append(batch)
        yield batches


class CombinedSource(DrawnSource):
    """The batches of a `CombinedLoader` whose loaders are all read by index.

    Args:
        combined: the loaders' structure and mode.
        loaders: the loaders that are read in place of the given ones.
    """

    def __init__(self, combined: CombinedLoader, loaders: list[DataLoader[Any]]) -> None:
        self.combined = combined
        self.loaders = loaders
        self.steps: int | None = combined.length(map(len, loaders))
        self._readers = [ReadInOrder(loader) for loader in loaders]

    def draw(self) -> tuple[list[list[Any]], list[torch.Generator]]:
        """As of all drawn sources; `EMPTY` stands for a batch of a loader that has ended."""
        seeds: list[torch.Generator] = []

        def begin(loader: DataLoader[Any], *, first: bool) -> Iterator[Any]:
            indices, its_seeds = begin_order(loader)
            if first:  # its workers read all cycles
                seeds.append(its_seeds)
            return indices

        begun = [begin(loader, first=True) for loader in self.loaders]
        again = [partial(begin, loader, first=False) for loader in self.loaders]
        steps = list(self.combined.joined(begun, again))
        return [list(order) for order in zip(*steps, strict=True)], seeds

    def read(
        self, orders: list[list[Any]], number: int, seeds: list[torch.Generator], *, place: int
    ) -> Iterator[Any]:
        found = [
            self._batches(reader, chosen, number, seeds_apart(own, place))
            for reader, chosen, own in zip(self._readers, orders, seeds, strict=True)
        ]
        return marked(map(self.combined.structured, zip(*found, strict=True)))

    def _batches(
        self, reader: ReadInOrder, chosen: list[Any], number: int, seeds: torch.Generator
    ) -> Iterator[Any]:
        filled = [indices for indices in chosen if indices is not EMPTY]
        ended = itertools.repeat(None, len(chosen) - len(filled))
        return itertools.chain(reader(filled, number, seeds), ended) if filled else ended


EMPTY = None
"""In place of the indices of a batch, for a loader that has ended."""
