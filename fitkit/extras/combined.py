"""Several loaders in one: each step takes a batch from each, or from one of them by weight."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from fitkit.arguments import check_choice, check_number, describe
from fitkit.errors import ArgumentTypeError, ConfigurationError
from fitkit.seams.data import (
    DataDraws,
    DrawnSource,
    ReadByItself,
    ReadInOrder,
    begin_order,
    iterate,
    iterates_by_itself,
    key_within,
    length_of,
    marked,
    seeds_apart,
    with_repeats,
)

NO_NEW_CYCLE = "A loader of the CombinedLoader gave no batch in a new cycle."
MODES = ("min_size", "max_size_cycle", "max_size")


class CombinedLoader(ReadByItself):
    """Yields a batch from each of several loaders at a time, or from one of them by weight.

    Without `weights` a step gets a batch of each loader, in the loaders' structure. With `weights`
    it gets a batch of one loader as it is: a mixture. In a pass each loader has its share by weight
    exactly, in a random order. If a loader has no length, each step's loader is drawn by weight.

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
            `"max_size"`: the longest, with None in place of those that have ended. A mixture ends
            before a loader would have to start again, or with `"max_size_cycle"` when each has been
            read at least once.
        weights: how often each loader's batches come: positive numbers in the loaders' structure,
            of which the ratios matter. Default None: a batch of each in every step.

    Raises:
        ArgumentTypeError, ConfigurationError: there are no loaders, the mode is unknown, or the
            weights aren't a positive number for each loader.

    Example:
        >>> import fitkit
        >>> pairs = fitkit.data.CombinedLoader({"a": [1, 2, 3], "b": "xy"}, "max_size_cycle")
        >>> list(pairs)
        [{'a': 1, 'b': 'x'}, {'a': 2, 'b': 'y'}, {'a': 3, 'b': 'x'}]
        >>> mixture = fitkit.data.CombinedLoader([[1, 2, 3], "xyz"], weights=[3, 1])
        >>> sorted(mixture, key=str)
        [1, 2, 3, 'x']
    """

    def __init__(self, loaders: Any, mode: str = "min_size", *, weights: Any = None) -> None:
        if not isinstance(loaders, (Mapping, list, tuple)) or not loaders:
            raise ArgumentTypeError(
                f"loaders={describe(loaders)} must be a dict, list or tuple of loaders."
            )
        if mode == "sequential":
            raise ConfigurationError(
                "mode='sequential' is one loader after the other: give fit a DataLoader over a "
                "torch.utils.data.ConcatDataset, and call evaluate once for each loader."
            )
        mode = check_choice("mode", mode, MODES)
        self.loaders: Any = loaders
        self.mode = mode
        named = loaders.items() if isinstance(loaders, Mapping) else enumerate(loaders)
        for name, loader in named:
            if isinstance(loader, Iterator) or not isinstance(loader, Iterable):
                raise ArgumentTypeError(
                    f"loaders[{name!r}]={describe(loader)} must be a DataLoader, or an iterable "
                    "that can be read again."
                )
        self.weights: list[float] | None = None if weights is None else self._checked(weights)

    def _checked(self, weights: Any) -> list[float]:
        """Return the weights in the loaders' order."""
        if self.mode == "max_size":
            raise ConfigurationError(
                "mode='max_size' gives None in place of loaders that have ended, which a mixture "
                "can't. With weights write 'min_size' or 'max_size_cycle'."
            )
        names = list(self.loaders) if isinstance(self.loaders, Mapping) else None
        if names is not None and isinstance(weights, Mapping) and set(weights) == set(names):
            weights = [weights[name] for name in names]
        elif names is not None or not isinstance(weights, (list, tuple)):
            weights = []
        if len(weights) != len(self.loaders):
            wanted = f"a list of {len(self.loaders)} numbers"
            if names is not None:
                wanted = f"a dict with a number for each of {', '.join(map(repr, names))}"
            raise ConfigurationError(f"weights must be {wanted}, as there are loaders.")
        return [float(check_number("weights", weight, above=0)) for weight in weights]

    @property
    def parts(self) -> list[Any]:
        """The loaders, in their order."""
        return list(self.loaders.values() if isinstance(self.loaders, Mapping) else self.loaders)

    def structured(self, batches: Iterable[Any]) -> Any:
        """Return one batch from each loader in the loaders' structure, or the one that there is."""
        if self.weights is not None:
            return next(batch for batch in batches if batch is not EMPTY)
        if isinstance(self.loaders, Mapping):
            return dict(zip(self.loaders, batches, strict=True))
        return tuple(batches)

    def length(self, lengths: Iterable[int]) -> int:
        """Return the number of batches in a pass, for loaders with these lengths."""
        if self.weights is not None:
            return sum(self._shares(list(lengths)))
        return min(lengths) if self.mode == "min_size" else max(lengths)

    def _shares(self, lengths: list[int]) -> list[int]:
        """Return how many batches of each loader a mixture's pass has, for these lengths."""
        assert self.weights is not None
        parts = [weight / sum(self.weights) for weight in self.weights]
        cycles = self.mode == "max_size_cycle"
        passes = [length / part for length, part in zip(lengths, parts, strict=True)]
        steps = math.ceil(max(passes) - 1e-9) if cycles else math.floor(min(passes) + 1e-9)
        while True:
            shares = apportioned(steps, parts)
            pairs = list(zip(shares, lengths, strict=True))
            if all(share >= length if cycles else share <= length for share, length in pairs):
                return shares
            steps += 1 if cycles else -1  # rounding took a batch too many of a loader, or too few

    def _turns(self) -> Iterator[int]:
        """Yield the numbers of the loaders whose turn it is in a mixture's pass."""
        assert self.weights is not None
        seed = int(torch.empty((), dtype=torch.int64).random_())
        generator = torch.Generator().manual_seed(seed)
        lengths = [length_of(part) for part in self.parts]
        known = [length for length in lengths if length is not None]
        if len(known) < len(lengths):
            weights = torch.tensor(self.weights, dtype=torch.float64)
            while True:
                yield from torch.multinomial(weights, 256, True, generator=generator).tolist()
        shares = torch.tensor(self._shares(known))
        turns = torch.arange(len(shares)).repeat_interleave(shares)
        yield from turns[torch.randperm(len(turns), generator=generator)].tolist()

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
        self,
        readers: list[Iterator[Any]],
        again: Sequence[Callable[[], Iterator[Any]]],
        draws: DataDraws | None = None,
    ) -> Iterator[Any]:
        """Return an entry of each reader at a time, as the mode says.

        Args:
            again: functions that begin each reader once more, for the mode that cycles.
            draws: from which a mixture's turns are drawn; None for the process's generators.
        """
        if self.weights is not None:
            turns = self._turns()
            if draws is not None:
                turns = draws.each(turns, at_once=True)
            return _mixed(readers, again, turns, ends_early=self.mode == "min_size")
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
                    raise ConfigurationError(NO_NEW_CYCLE)
            batches.append(batch)
        yield batches


def _mixed(
    readers: list[Iterator[Any]],
    again: Sequence[Callable[[], Iterator[Any]]],
    turns: Iterator[int],
    *,
    ends_early: bool,
) -> Iterator[list[Any]]:
    """Yield the entry of the reader whose turn it is, with `EMPTY` in the others' places."""
    missing = object()
    over = [False] * len(readers)
    for turn in turns:
        entry = next(readers[turn], missing)
        if entry is missing:
            over[turn] = True
            if ends_early or all(over):
                return
            readers[turn] = again[turn]()
            entry = next(readers[turn], missing)
            if entry is missing:
                raise ConfigurationError(NO_NEW_CYCLE)
        yield [entry if place == turn else EMPTY for place in range(len(readers))]


def apportioned(count: int, parts: list[float]) -> list[int]:
    """Divide a count into whole numbers by parts of 1: the largest remainders are rounded up."""
    shares = [math.floor(count * part + 1e-9) for part in parts]
    by_remainder = sorted(range(len(parts)), key=lambda place: shares[place] - count * parts[place])
    for place in by_remainder[: count - sum(shares)]:
        shares[place] += 1
    return shares


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

    def draw(self, draws: DataDraws) -> tuple[list[list[Any]], list[torch.Generator]]:
        """As of all drawn sources; `EMPTY` stands for a batch of a loader that has ended."""
        seeds: list[torch.Generator] = []

        def begin(loader: DataLoader[Any], *, first: bool) -> Iterator[Any]:
            indices, its_seeds = begin_order(loader, draws)
            if first:  # its workers read all cycles
                seeds.append(its_seeds)
            return indices

        begun = [begin(loader, first=True) for loader in self.loaders]
        again = [partial(begin, loader, first=False) for loader in self.loaders]
        steps = list(self.combined.joined(begun, again, draws))
        orders = [
            list(with_repeats(loader, order, cycles=True))
            for loader, order in zip(self.loaders, zip(*steps, strict=True), strict=True)
        ]
        return orders, seeds

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
        found = []
        for which, (reader, chosen, own) in enumerate(
            zip(self._readers, orders, seeds, strict=True)
        ):
            numbered = zip(itertools.count(place, step), chosen, strict=False)
            filled = [(batch, indices) for batch, indices in numbered if indices is not EMPTY]
            batches = reader(
                [indices for _, indices in filled],
                number,
                seeds_apart(own, place),
                key=key_within(key, which),  # two loaders may have one data set
                batches=[batch for batch, _ in filled],
            )
            found.append(_in_places(chosen, batches if filled else iter(())))
        return marked(map(self.combined.structured, zip(*found, strict=True)))


def _in_places(chosen: list[Any], batches: Iterator[Any]) -> Iterator[Any]:
    """Yield a loader's batches, and `EMPTY` where it gives none."""
    return (EMPTY if indices is EMPTY else next(batches) for indices in chosen)


EMPTY = None
"""In place of a batch, or of its indices, of a loader that has ended or whose turn it isn't."""
