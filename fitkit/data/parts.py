"""One replica's part of the training data, where replicas come and go and can't ask each other.

Every replica computes the same order by itself. A step's batches are dealt out as among ranks:
n replicas with batches of b samples learn from the samples that one process would have in a
batch of n·b.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data.distributed import DistributedSampler

from fitkit.data.arrays import ArraySource
from fitkit.data.batches import NoRows, marked
from fitkit.data.loaders import Once, draw_as_iterating_does, tell_epoch, with_sampler
from fitkit.data.sharding import Share, count_of, deal, filled, shared
from fitkit.data.sources import LoaderSource, Source
from fitkit.random_states import random_state, set_random_state


def part_of(source: Source, number: int, count: int, *, replace_sampler: bool = True) -> Source:
    """A part of a source's steps; the source itself where there is one part.

    Args:
        number: of the part, from 0.
        count: how many parts there are.
        replace_sampler: whether a loader's sampler may be replaced; one that may not deals out by
            itself.
    """
    if count == 1:
        return source
    if isinstance(source, ArraySource):
        return _ArrayPart(source, number, count)
    if isinstance(source, LoaderSource) and not isinstance(source.loader.dataset, IterableDataset):
        if isinstance(source.loader.sampler, DistributedSampler) or not replace_sampler:
            return _OwnPart(source, number, count)
        if source.loader.batch_sampler is not None:
            return _LoaderPart(source, number, count)
    return _EveryNth(source, number, count)


class _Part:
    """What all parts share: sizes, and which one it is."""

    def __init__(self, source: Any, number: int, count: int) -> None:
        self.source = source
        self.rank, self.world_size = number, count
        self.samples: int | None = source.samples
        self.batch_size: int | None = source.batch_size
        self.repeatable = source.repeatable
        self.steps: int | None = None if source.steps is None else -(-source.steps // count)

    @property
    def target(self) -> Any:
        return self.source.target

    def batches(self, number: int, skip: int = 0) -> Iterator[Any]:
        """This part's batches of pass `number`, without the first `skip` of all parts' batches."""
        raise NotImplementedError

    def _dealt(self, groups: Any, skip: int, *, drop_last: bool) -> list[tuple[Any, int, int]]:
        """Indices, their number, and that of all parts, for each step."""
        return list(deal(groups[skip:], self, drop_last=drop_last))


class _ArrayPart(_Part):
    """In-memory data, in the order of a seed that a replica gets from the others."""

    source: ArraySource

    def __init__(self, source: ArraySource, number: int, count: int) -> None:
        super().__init__(source, number, count)
        if source.shuffle and source.seed is None:
            source.draw_seed()

    def batches(self, number: int, skip: int = 0) -> Iterator[Any]:
        groups = self.source.index_batches(number)
        for chosen, count, total in self._dealt(groups, skip, drop_last=False):
            yield Share(self.source.take(chosen), count, total)


class _LoaderPart(_Part):
    """A DataLoader over a map-style data set; its sampler draws from the pass's number."""

    source: LoaderSource

    def batches(self, number: int, skip: int = 0) -> Iterator[Any]:
        loader = self.source.loader
        drop_last = bool(getattr(loader, "drop_last", False))
        dealt = self._dealt(self._drawn(loader, number), skip, drop_last=drop_last)
        mine = with_sampler(loader, Once(iter([chosen for chosen, _, _ in dealt])))
        return shared(dealt, marked(iter(mine)))

    def _drawn(self, loader: DataLoader[Any], number: int) -> list[Any]:
        """All batches' indices, the same for each replica whatever it has drawn before."""
        generators = self.source.generators
        before = random_state(generators)
        for generator in (torch.default_generator, *generators):
            generator.manual_seed(number)
        try:
            tell_epoch(loader, number)
            drawn = iter(loader.batch_sampler or ())
            draw_as_iterating_does(loader)
            return list(drawn)
        finally:
            set_random_state(before, generators)


class _OwnPart(_Part):
    """A loader that gives each replica its part by itself."""

    def __init__(self, source: LoaderSource, number: int, count: int) -> None:
        super().__init__(source, number, count)
        self.steps = source.steps

    def batches(self, number: int, skip: int = 0) -> Iterator[Any]:
        for batch, has_rows in filled(self.source.batches(number, skip // self.world_size)):
            samples = count_of(batch)
            yield Share(batch, samples if has_rows else 0, samples * self.world_size)


class _EveryNth(_Part):
    """A stream that every replica reads whole; a last step that isn't full is left out."""

    def __init__(self, source: Source, number: int, count: int) -> None:
        super().__init__(source, number, count)
        self.steps = None if source.steps is None else source.steps // count

    def batches(self, number: int, skip: int = 0) -> Iterator[Any]:
        batches = self.source.batches(number, skip)
        while True:
            group = list(itertools.islice(batches, self.world_size))
            if len(group) < self.world_size:
                return
            counts = [count_of(batch) for batch in group]
            filler = next((batch for batch in group if batch is not NoRows), None)
            mine = group[self.rank] if counts[self.rank] else filler
            yield NoRows if filler is None else Share(mine, counts[self.rank], sum(counts))
