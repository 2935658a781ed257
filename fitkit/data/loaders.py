"""The parts of a DataLoader: its samplers, its rows by index, and its own state."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
)

from fitkit.data.arrays import select_rows
from fitkit.data.draws import DataDraws
from fitkit.data.permutation import IndexBatches, PermutationSampler
from fitkit.data.seeded import Keys, Seeded, marked_repeats, may_repeat
from fitkit.errors import warn
from fitkit.random_states import kept_random_numbers
from fitkit.shortcuts import Shortcut
from fitkit.tensors import is_dense

_INSIDE = ("sampler", "batch_sampler", "dataset")
"""The attributes under which loaders, samplers and data sets hold one another."""

_INSIDE_SEVERAL = ("datasets", "loaders")
"""The same, for attributes that hold several."""

_DEPTH = 16
"""How deep they are looked into. An object that answers to every name has no end."""


def parts_of(data: Any) -> list[Any]:
    """Return a loader with the samplers, data sets and loaders in it, each once.

    torch's `Subset`, `ConcatDataset`, `ChainDataset` and `BatchSampler` are looked into, and all
    classes that call what they hold by the same names.
    """
    found: dict[int, Any] = {}
    level = [data]
    for _ in range(_DEPTH):
        new = {id(part): part for part in level if part is not None and id(part) not in found}
        found |= new
        level = [getattr(part, name, None) for part in new.values() for name in _INSIDE]
        for part in new.values():
            for several in (getattr(part, name, None) for name in _INSIDE_SEVERAL):
                if isinstance(several, Mapping):
                    level += several.values()
                elif isinstance(several, (list, tuple)):
                    level += several
    return list(found.values())


def tell_epoch(data: Any, number: int) -> None:
    """Call `set_epoch` of all parts of a loader, and of the loader itself, if they have it."""
    for part in parts_of(data):
        set_epoch = getattr(part, "set_epoch", None)
        if callable(set_epoch):
            set_epoch(number)
        if is_mosaic_stream(part):
            # It counts its own passes, from 0 again in a resumed process.
            part.next_epoch = number


def follows_epochs(dataset: Any) -> bool:
    """Whether a data set takes the epoch's number, on which its samples may depend."""
    return any(
        callable(getattr(part, "set_epoch", None)) or is_mosaic_stream(part)
        for part in parts_of(dataset)
    )


def iterates_by_itself(loader: DataLoader[Any]) -> bool:
    """Whether a subclass gives batches by its own code, so that its sampler says nothing of them.

    Libraries whose loaders give one batch for each entry of the sampler don't count.
    """
    for name in ("__iter__", "_get_iterator", "_index_sampler"):
        owner = next(kind for kind in type(loader).__mro__ if name in vars(kind))
        if owner.__module__.partition(".")[0] not in ("torch", "torchdata", "torch_geometric"):
            return True
    return False


def is_mosaic_stream(dataset: object) -> bool:
    """Whether a data set is MosaicML's StreamingDataset."""
    return any(
        kind.__name__ == "StreamingDataset" and kind.__module__.startswith("streaming.")
        for kind in type(dataset).__mro__
    )


def draw_as_iterating_does(loader: DataLoader[Any]) -> None:
    """Draw the workers' seed, as iterating a loader does after it has begun to iterate its sampler
    and before the first index is asked for."""
    torch.empty((), dtype=torch.int64).random_(generator=loader.generator)


def begin_seeds(loader: DataLoader[Any]) -> torch.Generator:
    """Draw the workers' seed of a pass as iterating a loader does.

    Returns:
        A generator whose next number is that seed.
    """
    seeds = torch.Generator()
    seeds.set_state((loader.generator or torch.default_generator).get_state())
    draw_as_iterating_does(loader)
    return seeds


def seeds_apart(seeds: torch.Generator, place: int) -> torch.Generator:
    """Return the seeds of one of several places that read a pass: each gets other random numbers.

    Args:
        seeds: of the pass, from `begin_seeds`.
        place: the number of the first batch that is read there. 0 has the pass's own seed.
    """
    own = seeds.clone_state()
    if place:
        first = torch.empty((), dtype=torch.int64).random_(generator=own).item()
        own.manual_seed((int(first) + place) % 2**63)
    return own


class _Pass:
    """A pass that reads by a loader's living workers."""

    def __init__(self, batches: Iterator[Any]) -> None:
        self._batches = batches
        self.is_over = False

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        try:
            return next(self._batches)
        except BaseException:
            self.is_over = True
            raise


_last_pass: weakref.WeakKeyDictionary[DataLoader[Any], weakref.ref[_Pass]]
_last_pass = weakref.WeakKeyDictionary()
"""The last pass by each loader's living workers."""

_told: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
"""The epoch of the data set that living workers have, by the iterator that they belong to."""


def iterate(loader: DataLoader[Any], number: int) -> Iterator[Any]:
    """Begin pass `number`, with the same draws of random numbers for new and persistent workers.

    torch draws a seed when it starts workers, but none if `persistent_workers=True` keeps them. The
    order would depend on which process started them, and when.

    A loader has only one set of living workers. Two kinds of passes get workers of their own: one
    that begins while another is being read, and one whose data set was told of another epoch.
    """
    if not loader.persistent_workers or iterates_by_itself(loader):
        return iter(loader)
    earlier = _last_pass.get(loader, lambda: None)()
    if earlier is not None and not earlier.is_over:
        return iter(with_sampler(loader, getattr(loader, sampler_name(loader))))
    living = loader._iterator
    if living is not None and _told.get(living) != number and follows_epochs(loader.dataset):
        living = loader._iterator = None
    if living is not None:
        iter(getattr(loader, sampler_name(loader)))  # torch begins twice there
        draw_as_iterating_does(loader)
    batches = _Pass(iter(loader))
    _last_pass[loader] = weakref.ref(batches)
    _told[loader._iterator] = number
    return batches


def pins_new_memory(loader: DataLoader[Any]) -> bool:
    """Whether a pinned tensor in a loader's batches is a new one, which nobody fills again.

    `pin_memory=True` copies tensors, but for those that are pinned already. Such ones come neither
    from workers nor from torch's own collate.
    """
    is_new = loader.num_workers > 0 or loader.collate_fn is default_collate
    return loader.pin_memory and is_new and not iterates_by_itself(loader)


def sampler_name(loader: DataLoader[Any]) -> str:
    """Return the name of the sampler that determines a loader's batches."""
    return "sampler" if loader.batch_sampler is None else "batch_sampler"


def with_sampler(loader: DataLoader[Any], sampler: Any) -> DataLoader[Any]:
    """Return the loader with another sampler in place of the determining one."""
    # A shallow copy keeps the user's subclass and attributes; a DataLoader refuses new samplers by
    # its own __setattr__.
    other = copy.copy(loader)
    object.__setattr__(other, sampler_name(loader), sampler)
    object.__setattr__(other, "_iterator", None)  # persistent workers follow the old sampler
    return other


def begin_order(
    loader: DataLoader[Any], draws: DataDraws, *, twice: bool = False
) -> tuple[Iterator[Any], torch.Generator]:
    """Return the indices of a new pass's batches and its seeds, with the draws that iterating
    makes.

    Args:
        draws: from which they are drawn.
        twice: whether the sampler is begun twice, as torch does where it starts workers.
    """
    sampler = getattr(loader, sampler_name(loader))
    with draws.drawing():
        indices = iter(sampler)
        seeds = begin_seeds(loader)
        if twice:
            indices = iter(sampler)
    return draws.each(indices, at_once=draws_at_once(loader)), seeds


def with_repeats(
    loader: DataLoader[Any], indices: Iterable[Any], *, cycles: bool = False
) -> Iterator[Any]:
    """Yield the indices of a pass's batches, those marked that came before in the pass.

    Args:
        cycles: whether the loader's sampler is begun several times in a pass.
    """
    if not reads_samples(loader) or reads_by_index(loader):
        return iter(indices)
    if not (cycles or may_repeat(loader)):
        return iter(indices)
    return marked_repeats(indices, by_batch=loader.batch_sampler is not None)


def generators_of(*loaders: DataLoader[Any]) -> list[torch.Generator]:
    """Return the loaders' and their samplers' own generators, each once."""
    owners = [(each, each.sampler, each.batch_sampler) for each in loaders]
    found = [getattr(one, "generator", None) for these in owners for one in these]
    return list({id(g): g for g in found if isinstance(g, torch.Generator)}.values())


class GivenOrder:
    """A sampler over given items, which may be replaced for each pass."""

    def __init__(self, items: Iterable[Any] = ()) -> None:
        self.items = items

    def __iter__(self) -> Iterator[Any]:
        return iter(self.items)

    def __len__(self) -> int:
        return len(self.items)  # type: ignore[arg-type]


class ReadInOrder:
    """Reads the batches of a loader in orders that are given, without drawing random numbers.

    It is kept from pass to pass, so that the loader's workers can stay alive.
    """

    def __init__(self, loader: DataLoader[Any]) -> None:
        self._loader = weakref.ref(loader)  # it may be kept as long as the loader is
        self._facts = _facts_of(loader)
        self._order = GivenOrder()
        self._ordered = with_sampler(loader, self._order)
        self._reads_by_index = reads_by_index(loader)
        self._is_seeded = reads_samples(loader)
        if self._is_seeded:
            _read_by_keys(self._ordered)

    def __reduce__(self) -> tuple[Any, ...]:
        # Another process gets a new one: neither the reference nor the order can be sent.
        return ReadInOrder, (self._loader(),)

    def fits(self, loader: DataLoader[Any]) -> bool:
        """Whether this reads as a new reader of the loader would."""
        pairs = zip(self._facts, _facts_of(loader), strict=True)
        return all(mine is now or mine == now for mine, now in pairs)

    def __call__(
        self,
        chosen: Iterable[Any],
        number: int,
        seeds: torch.Generator,
        *,
        key: int,
        batches: Iterable[int],
    ) -> Iterator[Any]:
        """Return the batches of these indices, as the loader's sampler gives them or
        `index_batches`.

        Args:
            number: the number of the pass.
            seeds: of the workers that read here.
            key: of the call's data, from which the random numbers of samples follow.
            batches: the numbers of the batches in the pass, over all ranks.
        """
        if self._reads_by_index:
            loader = self._loader()
            assert loader is not None
            return batches_by_index(loader, chosen)
        if self._is_seeded:
            pairs = zip(chosen, batches, strict=False)
            chosen = (Keys(key, number, batch, indices) for indices, batch in pairs)
        self._order.items = chosen
        self._ordered.generator = seeds  # else the loader's own would be drawn from
        return iterate(self._ordered, number)


def _facts_of(loader: DataLoader[Any]) -> tuple[Any, ...]:
    """Return what a reader takes from a loader, which may get others between two passes."""
    return loader.dataset, loader.collate_fn, loader.worker_init_fn, reads_by_index(loader)


def reads_samples(loader: DataLoader[Any]) -> bool:
    """Whether samples are read by their indices, by a loader without a state of its own."""
    return not (
        isinstance(loader.dataset, IterableDataset)
        or iterates_by_itself(loader)
        or own_state_of(loader) is not None
    )


def _read_by_keys(loader: DataLoader[Any]) -> None:
    """Let a copy of a loader read by `Keys`."""
    by_batch = loader.batch_sampler is not None
    seeded = Seeded(loader.dataset, loader.collate_fn, loader.worker_init_fn, by_batch=by_batch)
    # A DataLoader refuses another data set by its own __setattr__.
    vars(loader).update(dataset=seeded, collate_fn=_as_it_is, worker_init_fn=seeded)


def _as_it_is(batch: Any) -> Any:
    return batch


_readers: weakref.WeakKeyDictionary[DataLoader[Any], ReadInOrder] = weakref.WeakKeyDictionary()
"""What reads by each loader's living workers, which outlast a call."""


def reader_of(loader: DataLoader[Any]) -> ReadInOrder:
    """Return what reads a loader: the same again for one whose workers live on."""
    collated_by = getattr(loader.collate_fn, "__self__", None)
    if not loader.persistent_workers or collated_by is loader:  # it would never be freed
        return ReadInOrder(loader)
    if loader not in _readers:
        _readers[loader] = ReadInOrder(loader)
    return _readers[loader]


def draws_at_once(loader: DataLoader[Any]) -> bool:
    """Whether a loader's sampler draws all numbers of a pass with its first index."""
    sampler: Any = loader.sampler
    if loader.batch_sampler is not None:
        if type(loader.batch_sampler) is not BatchSampler:
            return False
        sampler = loader.batch_sampler.sampler
    own = getattr(sampler, "generator", None)
    return type(sampler) in _AT_ONCE and own is not torch.default_generator


_AT_ONCE = (
    *(SequentialSampler, RandomSampler, SubsetRandomSampler, WeightedRandomSampler),
    PermutationSampler,
)


ROWS_BY_INDEX = Shortcut("a DataLoader's batches as rows of its tensors")


def reads_by_index(loader: DataLoader[Any]) -> bool:
    """Whether a loader's batches are rows of tensors in memory, and none of its code acts.

    Classes are compared exactly: what a subclass changes can't be known.
    """
    return (
        type(loader) is DataLoader
        and loader.num_workers == 0
        and loader.collate_fn is default_collate
        and loader.batch_sampler is not None
        and not loader.pin_memory
        and _holds_tensors(loader.dataset)
        and ROWS_BY_INDEX.is_on
    )


def _holds_tensors(dataset: Any) -> bool:
    while type(dataset) is Subset:
        dataset = dataset.dataset
    return type(dataset) is TensorDataset and all(
        type(tensor) is Tensor and is_dense(tensor) and not tensor.requires_grad
        for tensor in dataset.tensors
    )


def targets_by_index(loader: DataLoader[Any]) -> Any:
    """Return the source of the targets of a loader that `reads_by_index`; None if it has none."""
    dataset: Any = loader.dataset
    while type(dataset) is Subset:
        dataset = dataset.dataset
    return dataset.tensors[1] if len(dataset.tensors) in (2, 3) else None


def batches_by_index(loader: DataLoader[Any], chosen: Iterable[Any]) -> Iterator[Any]:
    """Yield the batches of a loader that `reads_by_index`.

    Args:
        chosen: each batch's indices, as `index_batches` or the loader's sampler gives them.
    """
    found = _rows_of(loader.dataset)
    for indices in chosen:
        rows = None if found is None else _usable(indices)
        batch = None if found is None or rows is None else _selected(*found, rows)
        yield _sample_by_sample(loader, indices) if batch is None else batch


def _selected(whole: TensorDataset, among: Tensor | None, rows: Tensor) -> list[Tensor] | None:
    """Return a batch of rows. None if some don't exist: torch itself may count from the end."""
    try:
        if among is not None:
            rows = among.index_select(0, rows)
        return [select_rows(tensor, rows) for tensor in whole.tensors]
    except IndexError:
        return None


def index_batches(loader: DataLoader[Any]) -> Iterator[Any]:
    """Return the indices of each batch.

    Tensors (B,) if the samplers are torch's own for a loader's `shuffle`. Otherwise what the
    loader's sampler yields.
    """
    batches = loader.batch_sampler
    if type(batches) is BatchSampler and type(batches.batch_size) is int:
        sampler = batches.sampler
        if type(sampler) is RandomSampler and not sampler.replacement:
            return _cut(_permutations(sampler), batches.batch_size, batches.drop_last)
        if type(sampler) is SequentialSampler:
            size, drop_last = batches.batch_size, batches.drop_last
            return iter(IndexBatches(len(sampler), size, drop_last=drop_last))
    assert batches is not None
    return iter(batches)


def computed_batches(loader: DataLoader[Any]) -> IndexBatches | None:
    """Return the indices of each batch of a new pass, if each can be computed without the others.

    None if the samplers aren't torch's own, or the order isn't that of the data set or of a
    `PermutationSampler`, which draws the pass's order here.
    """
    batches = loader.batch_sampler
    if type(batches) is not BatchSampler or type(batches.batch_size) is not int:
        return None
    sampler: Any = batches.sampler
    if type(sampler) not in (SequentialSampler, PermutationSampler):
        return None
    order = sampler.draw() if type(sampler) is PermutationSampler else None
    return IndexBatches(len(sampler), batches.batch_size, order, drop_last=batches.drop_last)


def _permutations(sampler: RandomSampler) -> Iterator[Tensor]:
    """Yield a `RandomSampler`'s indices in parts, each drawn when its first index is asked for."""
    count = len(sampler.data_source)
    generator = sampler.generator
    if generator is None:
        seed = int(torch.empty((), dtype=torch.int64).random_().item())
        generator = torch.Generator()
        generator.manual_seed(seed)
    for _ in range(sampler.num_samples // count):
        yield torch.randperm(count, generator=generator)
    # torch's sampler also draws this one if nothing of it is left to yield.
    yield torch.randperm(count, generator=generator)[: sampler.num_samples % count]


def _cut(parts: Iterator[Tensor], size: int, drop_last: bool) -> Iterator[Tensor]:
    """Parts joined and cut into batches. The next part is drawn when an index of it is needed."""
    rest = torch.empty(0, dtype=torch.int64)
    for part in parts:
        joined = torch.cat([rest, part]) if len(rest) else part
        whole = len(joined) - len(joined) % size
        yield from joined[:whole].split(size) if whole else ()
        rest = joined[whole:]
    if len(rest) and not drop_last:
        yield rest


def _rows_of(dataset: Any) -> tuple[TensorDataset, Tensor | None] | None:
    """Return the data set that holds the tensors, and the rows of it in `dataset` (None for all).

    None if a subset's indices aren't plain: torch itself says what is wrong with them.
    """
    among: Tensor | None = None
    while type(dataset) is Subset:
        indices = _plain_indices(dataset.indices)
        if indices is None or not _are_within(among, len(indices)):
            return None
        among = indices if among is None else indices.index_select(0, among)
        dataset = dataset.dataset
    if not _are_within(among, len(dataset)):
        return None
    if among is None and any(tensor.device.type != "cpu" for tensor in dataset.tensors):
        # Main memory refuses an index that doesn't exist. A GPU loses all that is on it.
        among = torch.arange(len(dataset))
    return dataset, among


def _are_within(among: Tensor | None, count: int) -> bool:
    return among is None or not len(among) or int(among.max()) < count


def _plain_indices(indices: Sequence[int]) -> Tensor | None:
    """Return a subset's indices as a tensor; None if some aren't integers from 0."""
    if not isinstance(indices, (range, list, tuple, np.ndarray, Tensor)):
        return None  # a pandas Series looks up entries by labels
    if isinstance(indices, range):
        found = torch.arange(indices.start, indices.stop, indices.step)
    else:
        try:
            found = torch.as_tensor(indices)
        except (TypeError, ValueError, RuntimeError):
            return None
    # Not uint8 and bool: torch takes them as masks.
    is_plain = found.ndim == 1 and found.dtype in (torch.int64, torch.int32, torch.int16)
    if not is_plain or (len(found) and int(found.min()) < 0):
        return None
    return found.to("cpu", torch.int64)


def _usable(indices: Any) -> Tensor | None:
    """Return a batch's indices as a tensor (B,); None if `index_select` would take them
    otherwise.
    """
    if type(indices) is Tensor:
        is_plain = indices.dtype is torch.int64 and indices.ndim == 1 and indices.is_cpu
        return indices if is_plain else None
    if type(indices) is list and set(map(type, indices)) == {int}:
        return torch.tensor(indices)
    return None


def _sample_by_sample(loader: DataLoader[Any], indices: Any) -> Any:
    """Return a batch as torch's own fetcher makes it."""
    dataset: Any = loader.dataset
    indices = indices.tolist() if type(indices) is Tensor else indices
    if hasattr(dataset, "__getitems__"):
        return default_collate(dataset.__getitems__(indices))
    return default_collate([dataset[index] for index in indices])


def own_state_of(loader: Any) -> OwnState | None:
    """Return the tracker of a loader's own state; None for a loader without one."""
    methods = (getattr(loader, name, None) for name in ("state_dict", "load_state_dict"))
    return OwnState(loader) if all(callable(method) for method in methods) else None


class OwnState:
    """Saves and restores the state that a loader keeps by itself, at the right moments.

    Args:
        loader: an iterable with `state_dict()` and `load_state_dict(state)`.

    Attributes:
        waits: whether a restored state waits for the next pass.
    """

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self._taken: Any = None
        self._begun = False
        self._at_end = False
        self._warned = False
        self.waits: bool = False

    def batches(self, generators: Sequence[torch.Generator] = ()) -> Iterator[Any]:
        """Return the batches of a new pass or, after `take`, the remaining ones of a restored pass.

        Args:
            generators: the loader's own generators, with their states from the saved training.
        """
        if self.waits:
            self._load(self._taken["state"], generators)
        self._begun, self._at_end = True, False
        return self._until_end(iter(self._loader))

    def _load(self, state: Any, generators: Sequence[torch.Generator]) -> None:
        """Restore the loader's state, without draws that the saved training didn't make."""
        with kept_random_numbers(generators):
            self._loader.load_state_dict(state)
            self._loader.state_dict()  # torchdata's loader loads at its next use: make it this one
        self.waits = False

    def _until_end(self, batches: Iterator[Any]) -> Iterator[Any]:
        yield from batches
        self._at_end = True

    def state(self, *, ends_pass: bool) -> dict[str, Any] | None:
        """Return the loader's state to resume from; None if a new pass begins as the first one
        does.

        Args:
            ends_pass: whether the next batch belongs to a new pass. Otherwise a state from within
                an interrupted pass would continue with the rest of that pass.
        """
        if self.waits:
            taken: dict[str, Any] = self._taken
            return taken
        # A loader that is asked before its first pass begins one: workers start, numbers are drawn.
        if not self._begun or (ends_pass and not self._at_end):
            return None
        if not self._at_end and not self._warned and _has_shuffle_buffer(self._loader):
            self._warned = True
            warn(
                "A training resumed from this checkpoint gets other batches than without a stop: "
                f"the state of the {type(self._loader).__name__} lacks the samples in the "
                "stream's shuffle buffer. A plain DataLoader reads the epoch again from its "
                "beginning, and gets the same batches."
            )
        return {"state": self._loader.state_dict()}

    def take(self, state: dict[str, Any]) -> None:
        """Let the next pass resume from what `state` returned."""
        self._taken, self.waits = state, True


def _has_shuffle_buffer(loader: Any) -> bool:
    """Whether samples wait in the shuffle of a Hugging Face stream, whose state lacks them."""
    waiting = [getattr(getattr(loader, "dataset", None), "_ex_iterable", None)]
    while waiting:
        stage = waiting.pop()
        if type(stage).__name__ == "BufferShuffledExamplesIterable":
            return True
        if type(stage).__module__.startswith("datasets."):
            waiting.append(getattr(stage, "ex_iterable", None))
            waiting.extend(getattr(stage, "ex_iterables", ()))
    return False
