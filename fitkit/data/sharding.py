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

import dataclasses
import itertools
import os
import zlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.utils.data import ConcatDataset, Dataset, IterableDataset, Subset, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from fitkit import trees
from fitkit.arguments import dtype_name
from fitkit.data.arrays import ArraySource
from fitkit.data.batches import NoRows, Source, marked, samples_of
from fitkit.data.combined import CombinedSource
from fitkit.data.loaders import (
    ReadInOrder,
    begin_order,
    computed_batches,
    is_mosaic_stream,
    reads_by_index,
)
from fitkit.data.permutation import IndexBatches
from fitkit.data.sources import IterableSource, LoaderSource, length_of
from fitkit.distributed.collectives import Collectives
from fitkit.errors import ConfigurationError, warn

SHARDS_ITSELF = "shards_itself"
"""An IterableDataset with this attribute set to True gives each rank its own part already."""


@dataclasses.dataclass
class RankBatch:
    """A rank's part of one step.

    Attributes:
        batch: what the rank computes.
        samples: their number; 0 for a placeholder batch that doesn't count.
        total: the samples of all ranks in this step.
    """

    batch: Any
    samples: int
    total: int


def sharded(
    source: Source, ranks: Collectives, *, training: bool, replace_sampler: bool, scatter: bool
) -> Source:
    """The rank's shard of a source.

    Args:
        ranks: the ranks that share the data, at least two.
        training: whether ranks must make equal numbers of steps, of `RankBatch`es.
        replace_sampler: whether a loader's sampler may be replaced.
        scatter: whether only rank 0 can read plain iterables, and sends batches to the others.
    """
    dataset: Any = source.loader.dataset if isinstance(source, LoaderSource) else None
    if isinstance(dataset, IterableDataset):
        return _ReadByAll(source, ranks, training, is_part=gives_parts(dataset, ranks))
    if isinstance(source, LoaderSource) and (
        isinstance(source.loader.sampler, DistributedSampler) or not replace_sampler
    ):
        shard = _ReadByAll(source, ranks, training, is_part=True)
        shard.steps = source.steps
        return shard
    if isinstance(source, CombinedSource):
        given = any(isinstance(each.sampler, DistributedSampler) for each in source.loaders)
        if given or not replace_sampler:
            return _ReadByAll(source, ranks, training, is_part=True)
        if not scatter:
            check_same_on_all_ranks(source, ranks)
        return _DealtCombined(source, ranks, training)
    if isinstance(source, (ArraySource, LoaderSource)):
        if not scatter:  # else all ranks have the data that rank 0 sent them
            check_same_on_all_ranks(source, ranks)
        return _DealtByIndex(source, ranks, training)
    if scatter and isinstance(source, IterableSource):
        return _HandedOut(source, ranks, training)
    return _ReadByAll(source, ranks, training, is_part=False)


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
    """

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

    def _together(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Batches as steps that all ranks make, even if they have different numbers of batches.

        Ranks:
            Collective at each step: the ranks exchange how many samples they have.
        """
        last: Any = None
        self._seen = None
        while True:
            batch = next(batches, None)
            last = self._seen if last is None else last  # another rank's fills a place as well
            count = count_of(batch)
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
            yield RankBatch(last, count, total)


class _DealtByIndex(_Shard):
    """Data whose order is known before they are read: arrays, and loaders of map-style data sets.

    All ranks have the same indices of all batches, and each reads its own.
    """

    source: ArraySource | LoaderSource

    def __init__(
        self, source: ArraySource | LoaderSource, ranks: Collectives, training: bool
    ) -> None:
        super().__init__(source, ranks, training)
        self._by_sample, self._drop_last = True, False
        if isinstance(source, LoaderSource):
            self._reader = ReadInOrder(source.loader)
            self._drop_last = bool(getattr(source.loader, "drop_last", False))
            # Without a batch sampler each index stands for a whole batch, of unknown size.
            self._by_sample = source.loader.batch_sampler is not None

    def batches(self, number: int, skip: int = 0) -> Iterator[Any]:
        groups = self._order(number)[skip:]
        if self.training and self._by_sample:
            dealt, read = itertools.tee(deal(groups, self.ranks, drop_last=self._drop_last))
            chosen = (indices for indices, _, _ in read)
            return rank_batches(dealt, self._read(chosen, isinstance(groups, IndexBatches)))
        own = groups[self.ranks.rank :: self.size]
        batches = self._read(own, isinstance(groups, IndexBatches))
        return self._together(batches) if self.training else batches

    def _order(self, number: int) -> Any:
        """The indices of all batches of a pass, as one process would draw them."""
        source, is_first = self.source, self.ranks.rank == 0
        if isinstance(source, ArraySource):  # the order follows from a seed
            if source.shuffle and source.seed is None:
                source.seed = self.ranks.broadcast(source.draw_seed() if is_first else None)
            return source.index_batches(number)
        drawn = None
        if is_first:
            indices = begin_order(source.loader, number)
            computed = computed_batches(source.loader)  # a seed instead of all indices
            drawn = list(indices) if computed is None else computed
        return self.ranks.broadcast(drawn)

    def _read(self, chosen: Iterable[Any], is_computed: bool) -> Iterator[Any]:
        """The batches of these indices, without drawing more random numbers.

        Args:
            is_computed: whether they are tensors instead of a sampler's lists.
        """
        source = self.source
        if isinstance(source, ArraySource):
            return source.read(chosen)
        if reads_by_index(source.loader):
            return self._reader(chosen)
        indices = map(torch.Tensor.tolist, chosen) if is_computed else iter(chosen)
        first = list(itertools.islice(indices, 1))
        if not first:
            return iter(())
        return marked(self._reader(itertools.chain(first, indices)))


class _DealtCombined(_Shard):
    """Several loaders side by side, whose batches are divided among the ranks together."""

    source: CombinedSource

    def batches(self, number: int, skip: int = 0) -> Iterator[Any]:
        drawn = self.ranks.broadcast(self.source.draw(number) if self.ranks.rank == 0 else None)
        first = skip + self.ranks.rank
        batches = self.source.read([order[first :: self.size] for order in drawn])
        return self._together(batches) if self.training else batches


class _ReadByAll(_Shard):
    """Data that every rank reads in their own order, keeping every n-th batch.

    Args:
        is_part: whether a rank already reads only its own part. Then it keeps all.
    """

    def __init__(self, source: Any, ranks: Collectives, training: bool, *, is_part: bool) -> None:
        super().__init__(source, ranks, training)
        self._is_part = is_part

    def batches(self, number: int, skip: int = 0) -> Iterator[Any]:
        if self._is_part:
            batches = self.source.batches(number, skip // self.size)
        else:
            batches = self._own(self.source.batches(number, skip))
        return self._together(batches) if self.training else batches


class _HandedOut(_Shard):
    """An iterable that only rank 0 has. It reads a batch for each rank and sends it there."""

    def batches(self, number: int, skip: int = 0) -> Iterator[Any]:
        # Begun here, not at the first batch: all that a pass draws must be drawn by now.
        batches = self.source.batches(number, skip) if self.ranks.rank == 0 else iter(())
        return self._handed_out(batches)

    def _handed_out(self, batches: Iterator[Any]) -> Iterator[Any]:
        """A batch for each rank, as long as there are any."""
        while True:
            mine, count, total = self.ranks.scatter(self._next(batches))
            if mine is None:
                return
            if self.training:
                yield RankBatch(mine, count, total) if total else NoRows
            elif count or mine is NoRows:
                yield mine

    def _next(self, batches: Iterator[Any]) -> list[Any] | None:
        """The batch and samples of each rank, and the samples of all ranks in this step."""
        if self.ranks.rank != 0:
            return None
        found = [batch for _, batch in zip(range(self.size), batches, strict=False)]
        if not found:
            return [(None, 0, 0)] * self.size
        total = sum(map(count_of, found))
        filler = next((batch for batch in found if batch is not NoRows), NoRows)
        handed = [
            (filler if self.training and batch is NoRows else batch, count_of(batch), total)
            for batch in found
        ]
        return handed + [(filler, 0, total)] * (self.size - len(found))


def count_of(batch: Any) -> int:
    """A batch's samples; at least 1 if it has rows, because 0 means that it doesn't count."""
    return 0 if batch is None or batch is NoRows else max(samples_of(batch), 1)


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


def rank_batches(dealt: Iterable[tuple[Any, int, int]], batches: Iterator[Any]) -> Iterator[Any]:
    """A loader's batches as a rank's parts of the steps that their indices belong to."""
    for (_, count, total), (batch, has_rows) in zip(dealt, filled(batches), strict=True):
        yield RankBatch(batch, count if has_rows else 0, total) if total else NoRows


def deal(groups: Any, ranks: Collectives, *, drop_last: bool) -> Iterator[tuple[Any, int, int]]:
    """A rank's indices for each step, their number, and that of all ranks.

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
    """A rank's contiguous part of a group's samples. Parts differ by one at most."""
    bounds = [index * total // size for index in (rank, rank + 1)]
    if isinstance(step[0], torch.Tensor):
        return torch.cat(list(step))[bounds[0] : bounds[1]]
    joined = [index for batch in step for index in batch]
    return joined[bounds[0] : bounds[1]]


# ---------------------------------------------------------------------- the same data on all ranks

LOOKED_AT = 256
"""How many numbers of each array are compared, evenly spread."""


def check_same_on_all_ranks(source: Source, ranks: Collectives) -> None:
    """Refuse data that differ between the ranks, as far as a small part of them shows.

    If each rank runs the script, each makes its own data. Random data or splits without a seed then
    differ. The ranks would silently train on parts of different data sets.

    Arrays (also inside a `TensorDataset`) are compared by shape, dtype and some of their numbers.
    A `Subset` is compared by some of its indices. Of other data sets only the length is known.

    Ranks:
        Collective.

    Raises:
        ConfigurationError: on every rank, with what two ranks have.
    """
    everyone = ranks.gather(list(_facts(source)))
    first = everyone[0]
    for rank, facts in enumerate(everyone):
        if facts == first:
            continue
        pairs = zip([*first, ("nothing", 0)], [*facts, ("nothing", 0)], strict=False)
        (one, _), (other, _) = next((a, b) for a, b in pairs if a != b)
        differ = f"rank 0 has {one}, rank {rank} has {other}"
        if one == other:
            differ = f"{one} holds other numbers on rank {rank} than on rank 0"
        raise ConfigurationError(
            f"The ranks have different data: {differ}. Every rank runs the script and must create "
            "the same data, and fitkit gives each rank its part. Call fitkit.set_seed(0) before "
            "you create, split or shuffle them. If each rank already has only its part, give a "
            "DataLoader and write compile(replace_sampler=False).",
            code="FK044",
        )


def _facts(source: Source) -> Iterator[tuple[str, int]]:
    """Cheap facts about a source, in words, each with a checksum."""
    if isinstance(source, ArraySource):
        for name, part in zip(("x", "y", "sample_weight"), source.batch, strict=False):
            for path, leaf in trees.leaves_with_paths(part):
                yield _array_facts(name + path, leaf)
    elif isinstance(source, CombinedSource):
        for loader in source.loaders:
            yield from _dataset_facts(loader.dataset)
    elif isinstance(source, LoaderSource):
        yield from _dataset_facts(source.loader.dataset)


def _dataset_facts(dataset: Dataset[Any]) -> Iterator[tuple[str, int]]:
    yield f"a {type(dataset).__name__} of {length_of(dataset)} samples", 0
    if type(dataset) is TensorDataset:
        for index, tensor in enumerate(dataset.tensors):
            yield _array_facts(f"tensors[{index}]", tensor)
    elif type(dataset) is Subset:
        # It may have a list of millions of indices, and a slice of it would be made in full.
        step = max(len(dataset.indices) // LOOKED_AT, 1)
        chosen = [int(dataset.indices[at]) for at in range(0, len(dataset.indices), step)]
        yield "a Subset's indices", zlib.crc32(repr(chosen).encode())
        yield from _dataset_facts(dataset.dataset)
    elif type(dataset) is ConcatDataset:
        for part in dataset.datasets:
            yield from _dataset_facts(part)


def _array_facts(name: str, value: Any) -> tuple[str, int]:
    """An array's name, shape and dtype, and the checksum of some of its numbers."""
    if not isinstance(value, torch.Tensor):
        return f"{name} {type(value).__name__}", 0
    words = f"{name} {tuple(value.shape)} {dtype_name(value.dtype)}"
    if value.layout is not torch.strided or value.numel() == 0:
        return words, 0
    positions = torch.linspace(0, value.numel() - 1, LOOKED_AT, dtype=torch.float64).long()
    places = torch.unravel_index(positions.to(value.device), value.shape)
    seen = value.detach()[places].contiguous().cpu().view(torch.uint8)
    return words, zlib.crc32(seen.numpy().tobytes())
