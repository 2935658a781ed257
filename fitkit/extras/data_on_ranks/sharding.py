"""Each rank's shard of the data: the same batches as in one process, assigned to ranks in turn.

A run on n ranks with batches of b samples learns from the same n·b samples at a time as one
process with batches of n·b. The order is the user's: rank 0 draws it, with its own sampler and
random numbers, and the others get that list.

In training all ranks make the same number of steps, because gradients are exchanged in each. An
incomplete last group of batches is divided evenly. A rank that gets nothing, or only a batch
without rows, repeats a sample that doesn't count. Evaluation and prediction need no equal numbers
of steps, so rank r simply takes every n-th batch.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    default_collate,
)

from fitkit.errors import ConfigurationError, warn
from fitkit.extras.data_on_ranks.order import PART, Order, in_parts
from fitkit.extras.data_on_ranks.same_data import batch_facts, check_same_on_all_ranks
from fitkit.random_states import digest_of_random_state, random_state, set_random_state
from fitkit.samples import counted, samples_of
from fitkit.seams.callbacks import ArraySource
from fitkit.seams.data import (
    Batch,
    CountedSource,
    DataDraws,
    DrawnSource,
    IndexBatches,
    LoaderSource,
    NoRows,
    ReadInOrder,
    Source,
    begin_order,
    collate_without_masks,
    computed_batches,
    is_mosaic_stream,
    key_of_state,
    marked,
    parts_of,
    reads_by_index,
    seeds_apart,
    tell_epoch,
    with_repeats,
    without_first,
)
from fitkit.seams.strategies import Collectives

KEEPS_ROWS = "keeps_rows"
"""A collate function with this attribute set to True makes one row of each sample."""

SHARDS_ITSELF = "shards_itself"
"""An IterableDataset with this attribute set to True gives each rank its own part already."""


def sharded(
    source: Source,
    ranks: Collectives,
    *,
    training: bool,
    replace_sampler: bool,
    scatter: bool,
    steps: int | None = None,
    fills: bool = False,
    samples_of: Callable[[Any], int] = samples_of,
) -> Source:
    """Return the rank's shard of a source, of `Batch`es.

    Args:
        ranks: the ranks that share the data, at least two.
        training: whether ranks must make equal numbers of steps.
        replace_sampler: whether a loader's sampler may be replaced.
        scatter: whether only rank 0 can read plain iterables, and sends batches to the others.
        steps: how many batches are read at most (of a pass, or for a training's epoch), if known.
        fills: whether a rank without a batch gets `NoRows` where rank 0 hands batches out. So all
            get equally many, and may exchange other things between two of them.
        samples_of: counts a batch's samples.
    """
    if source.draws is None and isinstance(source, (LoaderSource, DrawnSource)):
        source.draws = DataDraws(ranks.broadcast(key_of_state()))
    shard = _shard_of(source, ranks, training, replace_sampler, scatter, steps)
    shard.samples_of, shard.fills = samples_of, fills
    return shard if training else CountedSource(shard, samples_of)


def _shard_of(
    source: Source,
    ranks: Collectives,
    training: bool,
    replace_sampler: bool,
    scatter: bool,
    steps: int | None,
) -> _Shard:
    if isinstance(source, (LoaderSource, DrawnSource)):
        loaders = source.loaders if isinstance(source, DrawnSource) else [source.loader]
        dataset = loaders[0].dataset if isinstance(source, LoaderSource) else None
        if isinstance(dataset, IterableDataset):
            is_part = gives_parts(dataset, ranks)
            return _ReadByAll(source, ranks, training, steps, is_part=is_part)
        if not replace_sampler or any(has_own_part(loader, ranks) for loader in loaders):
            shard = _ReadByAll(source, ranks, training, None, is_part=True)
            shard.steps = source.steps
            return shard
    if isinstance(source, LoaderSource) and source.is_stream:
        return _HandedOut(source, ranks, training, steps)
    if isinstance(source, (ArraySource, LoaderSource, DrawnSource)):
        if not scatter:  # else all ranks have the data that rank 0 sent them
            check_same_on_all_ranks(source, ranks)
        if isinstance(source, DrawnSource):
            return _DealtDrawn(source, ranks, training)
        return _DealtByIndex(source, ranks, training, steps)
    if scatter:
        return _HandedOut(source, ranks, training, steps)
    is_part = gives_parts(getattr(source, "iterable", None), ranks)
    return _ReadByAll(source, ranks, training, steps, is_part=is_part)


def has_own_part(loader: DataLoader[Any], ranks: Collectives) -> bool:
    """Whether a sampler anywhere in a loader gives this rank its own part.

    That is a `DistributedSampler`, or one of another library with the same attributes.

    Raises:
        ConfigurationError: it gives the part of another rank.
    """
    for part in parts_of(loader):
        place = None if isinstance(part, Dataset) else _place_of(part)
        if place is not None:
            if place != (ranks.rank, ranks.world_size):
                raise ConfigurationError(
                    f"The {type(part).__name__} gives rank {ranks.rank} of {ranks.world_size} the "
                    f"data of rank {place[0]} of {place[1]}. Leave the sampler out, and "
                    "fitkit divides the data."
                )
            return True
    return False


PLACES = (("rank", "num_replicas"), ("process_index", "num_processes"))
"""The attributes in which samplers keep the rank that they are for, and how many there are."""


def _place_of(sampler: Any) -> tuple[int, int] | None:
    """Return the rank that a sampler is for, and how many there are; None for a general one."""
    for names in PLACES:
        rank, count = (getattr(sampler, name, None) for name in names)
        if isinstance(rank, int) and isinstance(count, int):
            return rank, count
    return None


def keeps_rows(loader: DataLoader[Any]) -> bool:
    """Whether each batch is known to have as many rows as the sampler gives indices for it.

    A `collate_fn` may leave out samples or join them, and so may a data set that reads many at
    once. Workers may give batches in another order than they were asked for.
    """
    collate = getattr(loader.collate_fn, "func", loader.collate_fn)
    many = getattr(type(loader.dataset), "__getitems__", loader.collate_fn)
    is_by_torch = collate in (default_collate, collate_without_masks)
    return (
        (is_by_torch or getattr(collate, KEEPS_ROWS, False) is True)
        and many.__module__.partition(".")[0] in ("torch", "datasets", "fitkit")
        and loader.in_order
    )


def gives_parts(dataset: Any, ranks: Collectives) -> bool:
    """Whether a stream gives each rank its own part, by its own account or by its library's.

    Keeping every n-th batch of a part would silently leave out the rest.

    Raises:
        ConfigurationError: Hugging Face's datasets gave this rank another one's part.
    """
    said = getattr(dataset, SHARDS_ITSELF, None)
    if said is not None:
        return bool(said)
    if is_mosaic_stream(dataset):  # it uses only the launcher's variables
        return os.environ.get("WORLD_SIZE", "1") == str(ranks.world_size)
    # The mark that datasets.distributed.split_dataset_by_node leaves.
    divided = getattr(dataset, "_distributed", None)
    given = (getattr(divided, "rank", None), getattr(divided, "world_size", None))
    if None not in given:
        expected = (ranks.rank, ranks.world_size)
        if given != expected:
            raise ConfigurationError(
                f"split_dataset_by_node gave rank {expected[0]} of {expected[1]} the data of rank "
                f"{given[0]} of {given[1]}. Pass the whole data set, and fitkit divides it."
            )
        return True
    stages = getattr(dataset, "pipeline", None)  # WebDataset's
    return isinstance(stages, list) and any(
        getattr(stage, "__name__", "") == "split_by_node"
        and getattr(stage, "__module__", "").startswith("webdataset.")
        for stage in stages
    )


class _Shard(Source):
    """The base of all shards: their sizes, and the steps that the ranks make together.

    `batches` leaves out the first `skip` of all ranks' batches. A shard keeps no loader's state.

    Attributes:
        source: all ranks' data.
        samples_of: counts a batch's samples.
        fills: see `sharded`.
    """

    samples_of: Callable[[Any], int]
    fills = False

    def __init__(self, source: Any, ranks: Collectives, training: bool) -> None:
        self.source = source
        self.ranks = ranks
        self.training = training
        self.samples, self.batch_size = source.samples, source.batch_size
        self.repeatable = source.repeatable
        self.steps = None if source.steps is None else -(-source.steps // self.size)
        self._seen: Any = None  # the last batch with rows, also another rank's

    @property
    def size(self) -> int:
        return self.ranks.world_size

    @property
    def target(self) -> Any:
        return self.source.target

    @property
    def generators(self) -> list[torch.Generator]:
        return self.source.generators

    @property
    def whole(self) -> Any:
        return self.source

    def _own(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Every n-th batch."""
        for index, batch in enumerate(batches):
            self._seen = self._seen if batch is NoRows else batch
            if index % self.size == self.ranks.rank:
                yield batch

    def _together(
        self, batches: Iterator[Any], promised: Iterator[int] | None = None
    ) -> Iterator[Any]:
        """Batches as steps that all ranks make, even if they have different numbers of batches.

        Args:
            promised: how many samples each batch was asked for.

        Ranks:
            Collective at each step: the ranks exchange how many samples they have.
        """
        last: Any = None
        self._seen = None
        while True:
            batch = next(batches, None)
            last = self._seen if last is None else last  # another rank's fills a place as well
            count = self._count_of(batch, None if promised is None else next(promised, None))
            has_nothing = not count and last is None
            # Sums only: a step's cost must not grow with the number of ranks.
            facts = (count, batch is not None, has_nothing, has_nothing and batch is None)
            total, reading, lacking, ended = map(int, self.ranks.sums([float(f) for f in facts]))
            if total == 0:
                if not reading:
                    return
                yield NoRows
                continue
            if ended:
                if self.ranks.rank == 0:
                    warn(
                        f"Some ranks got no batch from x, so {total} samples of the other ranks "
                        "aren't used."
                    )
                return
            if lacking:
                lent = self.ranks.gather(batch if count else None)
                last = next(b for b in lent if b is not None) if last is None else last
            last = batch if count else last
            yield Batch(last, count, total)

    def _count_of(self, batch: Any, promised: int | None = None) -> int:
        """Return a batch's samples; at least 1 if it has rows, because 0 means that it doesn't
        count.

        Args:
            promised: how many it was asked for, if the batch doesn't show how many it has.
        """
        if batch is None or batch is NoRows:
            return 0
        if promised is not None and not counted(batch).is_shown:
            return promised
        return max(self.samples_of(batch), 1)


class _DealtByIndex(_Shard):
    """Data whose order is known before they are read: arrays, and loaders of map-style data sets.

    All ranks have the same indices of all batches, and each reads its own.

    Args:
        limit: how many batches are read at most (of a pass, or for a training's epoch), if known.
    """

    source: ArraySource | LoaderSource

    def __init__(
        self,
        source: ArraySource | LoaderSource,
        ranks: Collectives,
        training: bool,
        limit: int | None = None,
    ) -> None:
        super().__init__(source, ranks, training)
        self._limit = limit
        self.lends = source.lends
        self._by_sample, self._drop_last, self._keeps_rows = True, False, True
        if isinstance(source, LoaderSource):
            self._reader = ReadInOrder(source.loader)
            self._drop_last = bool(getattr(source.loader, "drop_last", False))
            # Without a batch sampler each index stands for a whole batch, of unknown size.
            self._by_sample = source.loader.batch_sampler is not None
            self._keeps_rows = keeps_rows(source.loader)

    def batches(self, number: int, skip: int = 0) -> Iterator[Any]:
        order, seeds = self._begin(number)
        order.leave_out(skip)
        first = skip + self.ranks.rank
        read = partial(
            self._read,
            is_computed=isinstance(order.groups, IndexBatches),
            number=number,
            first=first,
            seeds=None if seeds is None else seeds_apart(seeds, first),
        )
        if not self.training:
            return read(order.all(self._limit)[self.ranks.rank :: self.size])
        if not self._by_sample:
            return self._together(read(order.steps(partial(in_turn, ranks=self.ranks))))
        deals = partial(deal, ranks=self.ranks, drop_last=self._drop_last)
        dealt, also = itertools.tee(order.steps(deals))
        if self._keeps_rows:
            return rank_batches(dealt, read(indices for indices, _, _ in also), self.lends)
        promised = (count for _, count, _ in dealt)
        return self._together(read(indices for indices, count, _ in also if count), promised)

    def _begin(self, number: int) -> tuple[Order, torch.Generator | None]:
        """Return a pass's order, as one process would draw it, and the seeds of its workers."""
        source, is_first = self.source, self.ranks.rank == 0
        if isinstance(source, ArraySource):  # the order follows from a seed
            if source.shuffle and source.seed is None:
                source.seed = self.ranks.broadcast(source.draw_seed() if is_first else None)
            return Order(self.ranks, source.index_batches(number)), None
        tell_epoch(source.loader, number)
        drawn = parts = None
        if is_first:
            draws = source.pass_draws()
            indices, seeds = begin_order(source.loader, draws)
            indices = with_repeats(source.loader, indices)
            with draws.drawing():
                computed = computed_batches(source.loader)  # a seed instead of all indices
            # No further than the epoch needs: a sampler may have no end, and draw at each index.
            most = PART if self._limit is None else min(self._limit, PART)
            parts = in_parts(indices, max(source.steps or 0, most))
            first = next(parts) if computed is None else (computed, True)
            drawn = (*first, seeds)
        groups, ended, seeds = self.ranks.broadcast(drawn)
        return Order(self.ranks, groups, ended, parts), seeds

    def _read(
        self,
        chosen: Iterable[Any],
        *,
        is_computed: bool,
        number: int,
        first: int,
        seeds: torch.Generator | None,
    ) -> Iterator[Any]:
        """Return the batches of these indices, without drawing more random numbers.

        Args:
            is_computed: whether they are tensors instead of a sampler's lists.
            number: the number of the pass.
            first: the number of this rank's first batch in the pass.
            seeds: of this rank's workers; None for arrays.
        """
        source = self.source
        if isinstance(source, ArraySource):
            return source.read(chosen)
        assert seeds is not None
        read = partial(
            self._reader,
            number=number,
            seeds=seeds,
            key=source.pass_draws().key,
            batches=itertools.count(first, self.size),
        )
        if reads_by_index(source.loader):
            return read(chosen)
        indices = map(torch.Tensor.tolist, chosen) if is_computed else iter(chosen)
        some = list(itertools.islice(indices, 1))
        return marked(read(itertools.chain(some, indices))) if some else iter(())


class _DealtDrawn(_Shard):
    """Several loaders side by side, whose batches are divided among the ranks together."""

    source: DrawnSource

    def batches(self, number: int, skip: int = 0) -> Iterator[Any]:
        for loader in self.source.loaders:
            tell_epoch(loader, number)
        draws, first = self.source.pass_draws(), skip + self.ranks.rank
        drawn = self.source.draw(draws) if self.ranks.rank == 0 else None
        orders, seeds = self.ranks.broadcast(drawn)
        mine = [order[first :: self.size] for order in orders]
        batches = self.source.read(mine, number, seeds, key=draws.key, place=first, step=self.size)
        return self._together(batches) if self.training else batches


class _ReadByAll(_Shard):
    """Data that every rank reads in their own order, keeping every n-th batch.

    Args:
        limit: how many batches of a pass are read at most, if that is known.
        is_part: whether a rank already reads only its own part. Then it keeps all. Otherwise all
            ranks must read the same, which is checked at the first batch of each pass.
    """

    def __init__(
        self,
        source: Any,
        ranks: Collectives,
        training: bool,
        limit: int | None = None,
        *,
        is_part: bool,
    ) -> None:
        super().__init__(source, ranks, training)
        self._is_part = is_part
        self.limit = None if training or is_part else limit

    def batches(self, number: int, skip: int = 0) -> Iterator[Any]:
        if self._is_part:
            seeds = partial(seeds_apart, place=skip + self.ranks.rank)
            batches = self._begin(number, skip // self.size, seeds)
            return self._together(batches) if self.training else batches
        batches, is_random = self._read_alike(number)
        if is_random:
            handed_out = _HandedOut(self.source, self.ranks, self.training, self.limit)
            handed_out.samples_of, handed_out.fills = self.samples_of, self.fills
            return handed_out.deal(batches, skip)
        batches = self._own(itertools.islice(without_first(batches, skip), self.limit))
        return self._together(batches) if self.training else batches

    def _begin(
        self, number: int, skip: int, seeds: Callable[[torch.Generator], torch.Generator]
    ) -> Iterator[Any]:
        if isinstance(self.source, LoaderSource):
            place, step = (self.ranks.rank, self.size) if self._is_part else (0, 1)
            return self.source.batches_of_rank(number, skip, seeds, place, step)
        return self.source.batches(number, skip)

    def _read_alike(self, number: int) -> tuple[Iterator[Any], bool]:
        """Begin to read the same batches on all ranks.

        The first one is read with rank 0's random numbers, by workers and by the ranks themselves.

        Returns:
            The batches, and whether the ranks themselves draw random numbers for them. Their later
            draws would differ, because a net's dropout draws in between.

        Raises:
            ConfigurationError: on every rank, if the first batches differ.

        Ranks:
            Collective.
        """
        own = random_state()
        set_random_state(self.ranks.broadcast(own))
        before = digest_of_random_state()

        def seeds_of_all(seeds: torch.Generator) -> torch.Generator:
            nonlocal before
            before = digest_of_random_state()
            return self.ranks.broadcast(seeds)

        batches = self._begin(number, 0, seeds_of_all)
        first = list(itertools.islice(batches, 1))
        is_random = digest_of_random_state() != before
        if self.ranks.rank:
            set_random_state(own)
        seen = [fact for batch in first for fact in batch_facts(batch)]
        everyone = self.ranks.gather((seen, is_random))
        for rank, (facts, _) in enumerate(everyone):
            if facts != everyone[0][0]:
                raise ConfigurationError(
                    f"{self._name} gives rank {rank} other batches than rank 0. If it gives each "
                    f"rank its own part, set {SHARDS_ITSELF} = True on it. If it has another order "
                    "on each rank, let it shuffle with torch's random numbers, or by the epoch "
                    "that set_epoch gets.",
                    code="FK044",
                )
        return itertools.chain(first, batches), everyone[0][1]

    @property
    def _name(self) -> str:
        """The class of the data, for messages."""
        source = self.source
        data = source.loader.dataset if isinstance(source, LoaderSource) else source.iterable
        return f"The {type(data).__name__}"


class _HandedOut(_Shard):
    """An iterable that only rank 0 has. It reads a batch for each rank and sends it there.

    Args:
        limit: how many batches of a pass are read at most, if that is known.
    """

    def __init__(
        self, source: Any, ranks: Collectives, training: bool, limit: int | None = None
    ) -> None:
        super().__init__(source, ranks, training)
        self.limit = None if training else limit

    def batches(self, number: int, skip: int = 0) -> Iterator[Any]:
        # Begun here, not at the first batch: all that a pass draws must be drawn by now.
        return self._handed_out(self.source.batches(number, skip) if self.ranks.rank == 0 else ())

    def deal(self, batches: Iterator[Any], skip: int) -> Iterator[Any]:
        """Return a pass that has begun: on rank 0 these batches without the first `skip`."""
        return self._handed_out(without_first(batches, skip) if self.ranks.rank == 0 else ())

    def _handed_out(self, batches: Iterable[Any]) -> Iterator[Any]:
        """Yield a batch for each rank, as long as there are any."""
        batches = itertools.islice(batches, self.limit)
        while True:
            mine, count, total = self.ranks.scatter(self._next(batches))
            if mine is None:
                return
            if self.training:
                yield Batch(mine, count, total) if total else NoRows
            elif count or mine is NoRows or self.fills:
                yield mine if count else NoRows

    def _next(self, batches: Iterator[Any]) -> list[Any] | None:
        """Return the batch and samples of each rank, and the samples of all ranks in this step."""
        if self.ranks.rank != 0:
            return None
        found = [batch for _, batch in zip(range(self.size), batches, strict=False)]
        if not found:
            return [(None, 0, 0)] * self.size
        counts = list(map(self._count_of, found))
        total = sum(counts)
        filler = next((batch for batch in found if batch is not NoRows), NoRows)
        handed = [
            (filler if self.training and batch is NoRows else batch, count, total)
            for batch, count in zip(found, counts, strict=True)
        ]
        return handed + [(filler, 0, total)] * (self.size - len(found))


def filled(batches: Iterator[Any]) -> Iterator[tuple[Any, bool]]:
    """Each batch, and whether it has rows. A batch without rows is replaced by one with rows.

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
            f"All {waiting} batches that x gave on this rank are empty. Leave them out, or give "
            "each rank some samples."
        )


def rank_batches(dealt: Iterable[Any], batches: Iterator[Any], is_lent: bool) -> Iterator[Any]:
    """Yield a loader's batches as a rank's parts of the steps that their indices belong to."""
    for (_, count, total), (batch, has_rows) in zip(dealt, filled(batches), strict=True):
        yield Batch(batch, count if has_rows else 0, total, is_lent) if total else NoRows


def in_turn(groups: Any, ranks: Collectives) -> Iterator[Any]:
    """Every n-th entry, beginning with the rank's."""
    return iter(groups[ranks.rank :: ranks.world_size])


def deal(groups: Any, ranks: Collectives, *, drop_last: bool) -> Iterator[tuple[Any, int, int]]:
    """Yield a rank's indices for each step, their number, and that of all ranks.

    Args:
        groups: the indices of every batch, in order: tensors (B,) or lists.
        drop_last: whether a last step that isn't full is left out.
    """
    size, rank = ranks.world_size, ranks.rank
    # In full steps a rank looks at its own batch only, however many ranks there are.
    full = _count_of_equal(groups) // size * size
    for mine in groups[rank:full:size]:
        yield mine, len(mine), size * len(mine)
    for start in range(full, len(groups), size):
        step = list(groups[start : start + size])
        total = sum(len(batch) for batch in step)
        is_last = start + size >= len(groups)
        if len(step) == size and not (is_last and _uneven(step)):
            yield step[rank], len(step[rank]), total
        elif not drop_last or len(step) == size:
            mine = _part(step, rank, size, total)
            # Nothing left for this rank: a single sample is its placeholder.
            yield (mine if len(mine) else step[0][:1]), len(mine), total


def _count_of_equal(groups: Any) -> int:
    """How many of the first batches are known to have the same number of samples."""
    if isinstance(groups, IndexBatches):
        return groups.full
    if isinstance(groups, tuple):  # a tensor that was split: the last part may be shorter
        return len(groups) - (len(groups[-1]) != len(groups[0])) if groups else 0
    return 0


def _uneven(step: Any) -> bool:
    return any(len(batch) != len(step[0]) for batch in step)


def _part(step: Any, rank: int, size: int, total: int) -> Any:
    """Return a rank's contiguous part of a group's samples. Parts differ by one at most."""
    bounds = [index * total // size for index in (rank, rank + 1)]
    if isinstance(step[0], torch.Tensor):
        return torch.cat(list(step))[bounds[0] : bounds[1]]
    joined = [index for batch in step for index in batch]
    return joined[bounds[0] : bounds[1]]
