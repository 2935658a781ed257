"""Each rank's share of the data: the same batches as in one process, dealt out in turn.

A run on n ranks with batches of b samples learns from the same n·b samples at a time as one
process with batches of n·b. The order is the user's: rank 0 draws it, with its own sampler and
random numbers, and the others get that list.

In training all ranks make the same number of steps, because gradients are exchanged in each.
The last group of batches, where it isn't full, is dealt out evenly; a rank that gets nothing
repeats a sample that counts for nothing, and so does one whose batch has no rows. In evaluation and
prediction nothing is exchanged, so rank r simply takes every n-th batch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data.distributed import DistributedSampler

from fitkit.data.arrays import ArraySource
from fitkit.data.batches import NoRows, marked, samples_of
from fitkit.data.fingerprints import check_same_on_all_ranks
from fitkit.data.loaders import (
    batches_by_index,
    draw_as_iterating_does,
    reads_by_index,
    tell_epoch,
    with_sampler,
)
from fitkit.data.sources import (
    IterableSource,
    LoaderSource,
    Source,
)
from fitkit.errors import ConfigurationError, warn

SHARDS_ITSELF = "shards_itself"
"""An IterableDataset with this attribute set to True gives each rank its own part already."""


class Place(Protocol):
    """Which share is meant, of how many."""

    rank: int
    world_size: int


class Exchange(Place, Protocol):
    """What sharding needs of the ranks' collectives."""

    def gather(self, value: Any) -> list[Any]: ...
    def broadcast(self, value: Any) -> Any: ...
    def scatter(self, values: list[Any] | None) -> Any: ...


@dataclasses.dataclass
class Share:
    """A rank's part of one step.

    Attributes:
        batch: what the rank computes.
        count: its samples; 0 where the batch only fills a place and counts for nothing.
        total: the samples of all ranks in this step.
    """

    batch: Any
    count: int
    total: int


def whole_of(source: Any) -> Any:
    """The source that a share is of; a source that is no share, itself."""
    return getattr(source, "source", source)


def sharded(
    source: Source, exchange: Exchange, *, training: bool, replace_sampler: bool, scatter: bool
) -> Source:
    """The rank's part of a source; the source itself where there is one rank.

    Args:
        training: whether ranks must make equal numbers of steps; the batches are `Share`s then.
        replace_sampler: whether a loader's sampler may be replaced.
        scatter: whether rank 0 alone can read plain iterables and hands batches out.
    """
    if exchange.world_size == 1:
        return source
    own = not scatter  # Else all ranks have the data that rank 0 sent them.
    if isinstance(source, ArraySource):
        if own:
            check_same_on_all_ranks(source, exchange)
        return _ArrayShard(source, exchange, training)
    if isinstance(source, LoaderSource) and _has_indices(source.loader):
        if isinstance(source.loader.sampler, DistributedSampler) or not replace_sampler:
            return _AsItIs(source, exchange, training)
        if own:
            check_same_on_all_ranks(source, exchange)
        return _LoaderShard(source, exchange, training)
    if scatter and isinstance(source, IterableSource):
        return _Scattered(source, exchange, training)
    return _EveryNth(source, exchange, training)


def _has_indices(loader: DataLoader[Any]) -> bool:
    return not isinstance(loader.dataset, IterableDataset)


class _Shard:
    """What all shards share: sizes, and the steps that the ranks make together."""

    def __init__(self, source: Any, exchange: Exchange, training: bool) -> None:
        self.source = source
        self.exchange = exchange
        self.training = training
        self.samples: int | None = source.samples
        self.batch_size: int | None = source.batch_size
        self.repeatable = source.repeatable
        self._seen: Any = None
        whole, size = source.steps, exchange.world_size
        self.steps: int | None = None if whole is None else -(-whole // size)

    @property
    def target(self) -> Any:
        return self.source.target

    def batches(self, number: int, skip: int = 0) -> Iterator[Any]:
        """This rank's batches of pass `number`, without the first `skip` of all ranks' batches."""
        raise NotImplementedError

    def _own(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Every n-th batch."""
        for index, batch in enumerate(batches):
            self._seen = self._seen if batch is NoRows else batch
            if index % self.exchange.world_size == self.exchange.rank:
                yield batch

    def _together(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Batches as steps that all ranks make, though they may have different numbers of them.

        Ranks:
            Collective at each step: the ranks tell each other how many samples they have.
        """
        last: Any = None
        self._seen = None
        while True:
            batch = next(batches, None)
            last = self._seen if last is None else last  # another rank's fills a place as well
            count = count_of(batch)
            told = self.exchange.gather((count, batch is None, not count and last is None))
            total = sum(count for count, _, _ in told)
            if total == 0:
                if all(has_ended for _, has_ended, _ in told):
                    return
                yield NoRows
                continue
            lacking = [has_ended for _, has_ended, has_nothing in told if has_nothing]
            if any(lacking):
                if self.exchange.rank == 0:
                    warn(
                        f"x ended on some ranks before their first batch; {total} samples of the "
                        "others are left over."
                    )
                return
            if lacking:
                lent = self.exchange.gather(batch if count else None)
                last = next(b for b in lent if b is not None) if last is None else last
            last = batch if count else last
            yield Share(last, count, total)


class _ArrayShard(_Shard):
    """In-memory data: every rank computes the same order from one seed."""

    source: ArraySource

    def batches(self, number: int, skip: int = 0) -> Iterator[Any]:
        source = self.source
        if source.shuffle and source.seed is None:
            if self.exchange.rank == 0:
                source.draw_seed()
            source.seed = self.exchange.broadcast(source.seed)
        groups = source.index_batches(number)[skip:]
        if not self.training:
            for chosen in self._own(iter(groups)):
                yield source.take(chosen)
            return
        for chosen, count, total in deal(groups, self.exchange, drop_last=False):
            yield Share(source.take(chosen), count, total)


class _LoaderShard(_Shard):
    """A DataLoader over a map-style data set: rank 0's sampler decides for all."""

    def __init__(self, source: LoaderSource, exchange: Exchange, training: bool) -> None:
        super().__init__(source, exchange, training)
        self._mine = _Fixed()
        self._loader = with_sampler(source.loader, self._mine)
        self._by_batch = source.loader.batch_sampler is not None

    def batches(self, number: int, skip: int = 0) -> Iterator[Any]:
        drawn = self._draw(number) if self.exchange.rank == 0 else None
        groups = self.exchange.broadcast(drawn)[skip:]
        if not self.training:
            self._mine.items = list(self._own(iter(groups)))
            return self._iterate() if self._mine.items else iter(())
        if not self._by_batch:  # each index stands for a whole batch, of unknown size
            self._mine.items = list(self._own(iter(groups)))
            return self._together(self._iterate())
        drop_last = bool(getattr(self.source.loader, "drop_last", False))
        dealt = list(deal(groups, self.exchange, drop_last=drop_last))
        self._mine.items = [chosen for chosen, _, _ in dealt]
        batches = self._iterate()
        return shared(dealt, batches)

    def _iterate(self) -> Iterator[Any]:
        """Iterate the loader over this rank's batches, without a draw of random numbers more."""
        if reads_by_index(self.source.loader):
            return batches_by_index(self.source.loader, self._mine.items)
        generator = self.source.loader.generator or torch.default_generator
        state = generator.get_state()
        batches = iter(self._loader)
        generator.set_state(state)
        return marked(batches)

    def _draw(self, number: int) -> list[Any]:
        """The indices of all batches, drawn as the loader itself would draw them."""
        loader = self.source.loader
        tell_epoch(loader, number)
        drawn = iter(loader.batch_sampler if self._by_batch else loader.sampler)
        draw_as_iterating_does(loader)  # so the order is that of one process
        return list(drawn)


class _Fixed:
    """A sampler over a list that is replaced each epoch, so that a loader's workers may live on."""

    def __init__(self) -> None:
        self.items: list[Any] = []

    def __iter__(self) -> Iterator[Any]:
        return iter(self.items)

    def __len__(self) -> int:
        return len(self.items)


class _AsItIs(_Shard):
    """A loader that shards itself (a DistributedSampler, or replace_sampler=False)."""

    def __init__(self, source: LoaderSource, exchange: Exchange, training: bool) -> None:
        super().__init__(source, exchange, training)
        self.steps = source.steps

    def batches(self, number: int, skip: int = 0) -> Iterator[Any]:
        batches = self.source.batches(number, skip // self.exchange.world_size)
        return self._together(batches) if self.training else batches


class _EveryNth(_Shard):
    """Every rank reads the whole stream and keeps every n-th batch."""

    def batches(self, number: int, skip: int = 0) -> Iterator[Any]:
        dataset = getattr(getattr(self.source, "loader", None), "dataset", None)
        if getattr(dataset, SHARDS_ITSELF, False):
            batches = self.source.batches(number, skip // self.exchange.world_size)
        else:
            batches = self._own(self.source.batches(number, skip))
        return self._together(batches) if self.training else batches


class _Scattered(_Shard):
    """An iterable that only rank 0 has: it reads, and hands out a batch to each rank."""

    def batches(self, number: int, skip: int = 0) -> Iterator[Any]:
        # Begun here, not at the first batch: what a pass draws has to be drawn by now.
        batches = self.source.batches(number, skip) if self.exchange.rank == 0 else iter(())
        return self._dealt(batches)

    def _dealt(self, batches: Iterator[Any]) -> Iterator[Any]:
        """A batch for each rank, as long as there are any."""
        while True:
            mine, count, total = self.exchange.scatter(self._next(batches))
            if mine is None:
                return
            if self.training:
                yield Share(mine, count, total) if total else NoRows
            elif count or mine is NoRows:
                yield mine

    def _next(self, batches: Iterator[Any]) -> list[Any] | None:
        """For each rank its batch, its samples, and those of all ranks in this step."""
        if self.exchange.rank != 0:
            return None
        size = self.exchange.world_size
        found = [batch for _, batch in zip(range(size), batches, strict=False)]
        if not found:
            return [(None, 0, 0)] * size
        total = sum(map(count_of, found))
        filler = next((batch for batch in found if batch is not NoRows), NoRows)
        told = [
            (filler if self.training and batch is NoRows else batch, count_of(batch), total)
            for batch in found
        ]
        return told + [(filler, 0, total)] * (size - len(found))


def count_of(batch: Any) -> int:
    """A batch's samples; at least 1 where it has rows, for 0 says that it counts for nothing."""
    return 0 if batch is None or batch is NoRows else max(samples_of(batch), 1)


def filled(batches: Iterator[Any]) -> Iterator[tuple[Any, bool]]:
    """Each batch, and whether it has rows; in place of one without comes another that has some.

    Raises:
        ConfigurationError: no batch has rows.
    """
    last, waiting = None, 0
    for batch in batches:
        if batch is not NoRows:
            yield from [(batch, False)] * waiting
            last, waiting = batch, 0
            yield batch, True
        elif last is None:
            waiting += 1
        else:
            yield last, False
    if waiting:
        raise ConfigurationError(
            f"x gave {waiting} batches on this rank, all without rows. Leave them out, or let "
            "each rank have some with rows."
        )


def shared(dealt: list[tuple[Any, int, int]], batches: Iterator[Any]) -> Iterator[Any]:
    """A loader's batches as a rank's parts of the steps that their indices were dealt for."""
    for (_, count, total), (batch, has_rows) in zip(dealt, filled(batches), strict=True):
        yield Share(batch, count if has_rows else 0, total) if total else NoRows


def deal(groups: Any, place: Place, *, drop_last: bool) -> Iterator[tuple[Any, int, int]]:
    """A rank's indices for each step, their number, and that of all ranks.

    Args:
        groups: the indices of every batch, in order: tensors (B,) or lists.
        drop_last: whether a last step that isn't full is left out.
    """
    size, rank = place.world_size, place.rank
    for start in range(0, len(groups), size):
        step = groups[start : start + size]
        total = sum(len(batch) for batch in step)
        is_last = start + size >= len(groups)
        if len(step) == size and not (is_last and _uneven(step)):
            yield step[rank], len(step[rank]), total
        elif not drop_last or len(step) == size:
            mine = _part(step, rank, size, total)
            # Nothing left for this rank: one sample fills the place.
            yield (mine if len(mine) else step[0][:1]), len(mine), total


def _uneven(step: Any) -> bool:
    return any(len(batch) != len(step[0]) for batch in step)


def _part(step: Any, rank: int, size: int, total: int) -> Any:
    """A rank's contiguous part of a group's samples; parts differ by one at the most."""
    bounds = [index * total // size for index in (rank, rank + 1)]
    if isinstance(step[0], torch.Tensor):
        return torch.cat(list(step))[bounds[0] : bounds[1]]
    joined = [index for batch in step for index in batch]
    return joined[bounds[0] : bounds[1]]
