"""Anything that users call data, as one kind of thing: a source of batches."""

from __future__ import annotations

import contextlib
import copy
import inspect
import itertools
import numbers
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Subset,
    TensorDataset,
    default_collate,
)

from fitkit import trees
from fitkit.arguments import describe
from fitkit.data import permutation
from fitkit.data.arrays import (
    ArraySource,
    as_tensors,
    check_cuttable,
    check_lengths,
    column_names,
    is_array,
    refuse_masked,
    samples_between,
    wide_dtype,
)
from fitkit.data.batches import (
    Source,
    check_weights,
    marked,
    unpack_batch,
    warn_of_second_target,
)
from fitkit.data.drawn import ReadByItself
from fitkit.data.draws import DataDraws
from fitkit.data.loaders import (
    ReadInOrder,
    batches_by_index,
    begin_order,
    computed_batches,
    draw_as_iterating_does,
    draws_at_once,
    generators_of,
    index_batches,
    iterate,
    iterates_by_itself,
    own_state_of,
    pins_new_memory,
    reader_of,
    reads_by_index,
    seeds_apart,
    targets_by_index,
    tell_epoch,
    with_repeats,
)
from fitkit.data.permutation import PermutationSampler
from fitkit.data.stream_workers import watched
from fitkit.errors import ArgumentTypeError, ConfigurationError, warn
from fitkit.random_states import kept_random_numbers
from fitkit.samples import samples_among

DEFAULT_BATCH_SIZE = 32


def first_inputs(source: Source) -> Any:
    """Return the inputs of a first batch, or of its first sample, read without a trace.

    Raises:
        ConfigurationError: the data can be read only once.
    """
    with kept_random_numbers(devices=[]):
        if isinstance(source, ArraySource):
            batch = source.take(torch.arange(min(source.samples, 2)))
        elif isinstance(source, LoaderSource):
            batch = _first_of(source.loader)
        elif isinstance(source, IterableSource) and source.repeatable:
            batch = next(iter(source.iterable))
        else:
            raise ConfigurationError(
                "The net has no weights before its first batch, and these data can be read only "
                "once. Call the net on a batch before fit: model.predict_on_batch(x)."
            )
    return trees.cloned(unpack_batch(batch)[0])  # the net that is called may write into them


def _first_of(loader: DataLoader[Any]) -> Any:
    """Return a loader's first sample as a batch; its first batch if it reads no samples."""
    if isinstance(loader.dataset, IterableDataset) or loader.batch_size is None:
        return next(iter(loader.dataset))
    return loader.collate_fn([loader.dataset[0]])


def targets_of(source: Source) -> Any:
    """Return what the targets of all of a source's batches are drawn from; None where nobody
    knows.
    """
    source = source.whole
    if isinstance(source, LoaderSource) and reads_by_index(source.loader):
        return targets_by_index(source.loader)
    return source.target


class LoaderSource(Source):
    """The batches of a `DataLoader`, in its own order.

    Args:
        loader: the user's, or one for the user's data set.
        is_ours: whether it was made here for a data set with a length.
    """

    def __init__(self, loader: DataLoader[Any], *, is_ours: bool = False) -> None:
        self._is_ours = is_ours
        self._take(loader)

    def _take(self, loader: DataLoader[Any]) -> None:
        self.pins: bool = pins_new_memory(loader)
        loader = _without_masks(loader)
        self.loader: DataLoader[Any] = loader
        self.own_state: Any = own_state_of(loader)
        self.lends: bool = not reads_by_index(loader)
        self._reader: ReadInOrder | None = None  # kept, so that its workers can live on
        self.batch_size: int | None = loader.batch_size
        self.steps: int | None = length_of(loader)
        if self.steps is not None and loader.batch_size is not None:
            sampled = length_of(loader.sampler)
            full = self.steps * loader.batch_size
            self.samples: int = full if sampled is None else min(sampled, full)

    def cut_into(self, batch_size: int) -> None:
        if not self._is_ours:
            super().cut_into(batch_size)
        self._take(DataLoader(self.loader.dataset, batch_size, sampler=self.loader.sampler))

    def batches(self, number: int, skip: int = 0) -> Iterator[Any]:
        if reads_by_index(self.loader):
            return batches_by_index(self.loader, self.index_batches(number, skip))
        tell_epoch(self.loader, number)
        return marked(self._read(number, skip, self.pass_draws()))

    def index_batches(self, number: int, skip: int = 0) -> Iterable[Any]:
        """Return the indices of each batch of pass `number`, without the first `skip`, for a loader
        that `reads_by_index`.
        """
        tell_epoch(self.loader, number)
        draws = self.pass_draws()
        with draws.drawing():
            chosen = index_batches(self.loader)
            draw_as_iterating_does(self.loader)
            computed = computed_batches(self.loader) if skip else None
        if computed is not None:
            return computed[skip:]
        return without_first(draws.each(chosen, at_once=draws_at_once(self.loader)), skip)

    def _read(self, number: int, skip: int, draws: DataDraws) -> Iterator[Any]:
        if self.own_state is not None and (not skip or self.own_state.waits):
            return watched(self.own_state.batches(self.generators), self.loader)
        if self.is_stream:
            with draws.drawing() if self.draws_orders else contextlib.nullcontext():
                batches = iterate(self.loader, number)
            return without_first(watched(batches, self.loader), skip)
        indices, seeds = self.begin(draws)
        computed = None
        if skip:
            with draws.drawing():
                computed = computed_batches(self.loader)
        rest = without_first(indices, skip) if computed is None else computed[skip:].lists()
        return self.reader()(
            rest,
            number,
            seeds_apart(seeds, skip),
            key=draws.key,
            batches=itertools.count(skip),
        )

    def reader(self) -> ReadInOrder:
        """Return what reads its batches by index, the same as in the last pass if it can be."""
        if self._reader is None or not self._reader.fits(self.loader):
            self._reader = reader_of(self.loader)
        return self._reader

    @property
    def is_stream(self) -> bool:
        """Whether batches can only be read in their order, from the first one on."""
        is_stream = isinstance(self.loader.dataset, IterableDataset)
        return is_stream or iterates_by_itself(self.loader)

    @property
    def draws_orders(self) -> bool:  # type: ignore[override]
        """Whether its orders are drawn with `draws`: not what a stream draws in this process."""
        return not self.is_stream or self.loader.num_workers > 0

    def begin(self, draws: DataDraws) -> tuple[Iterator[Any], torch.Generator]:
        """Return the indices of a new pass's batches and its seeds, as torch draws them."""
        indices, seeds = begin_order(self.loader, draws, twice=self.loader.num_workers > 0)
        return with_repeats(self.loader, indices), seeds

    def batches_of_rank(
        self,
        number: int,
        skip: int,
        seeds_here: Callable[[torch.Generator], torch.Generator],
        place: int = 0,
        step: int = 1,
    ) -> Iterator[Any]:
        """`batches`, by workers with the seeds of a rank.

        Args:
            seeds_here: given the seeds of the pass, returns those of this rank's workers.
            place: the number of its first batch among those of all ranks.
            step: how far its batches are apart there.
        """
        if reads_by_index(self.loader) or iterates_by_itself(self.loader):
            return self.batches(number, skip)
        tell_epoch(self.loader, number)
        draws = self.pass_draws()
        indices, seeds = self.begin(draws)
        seeds = seeds_here(seeds)
        if self.is_stream:
            batches = self.reader()(indices, number, seeds, key=draws.key, batches=())
            return marked(without_first(watched(batches, self.loader), skip))
        numbers = itertools.count(place + skip * step, step)
        rest = without_first(indices, skip)
        return marked(self.reader()(rest, number, seeds, key=draws.key, batches=numbers))

    @property
    def generators(self) -> list[torch.Generator]:
        return generators_of(self.loader)


def _without_masks(loader: DataLoader[Any]) -> DataLoader[Any]:
    """Return the loader, refusing masked arrays, of which torch's collate takes the numbers
    underneath.

    Workers that live on belong to the user's own loader, which stays as it is.
    """
    is_plain = type(loader) is DataLoader and loader.collate_fn is default_collate
    if not is_plain or loader.persistent_workers or reads_by_index(loader):
        return loader
    other = copy.copy(loader)
    other.collate_fn = collate_without_masks
    return other


def collate_without_masks(samples: Any) -> Any:
    """Join samples as torch does, and refuse masked arrays, which the first sample shows."""
    refuse_masked(samples[0], "A sample")
    return default_collate(samples)


class IterableSource(Source):
    """The batches of any iterable; one that is its own iterator can be read once."""

    def __init__(self, iterable: Iterable[Any]) -> None:
        self.iterable = iterable
        self.own_state: Any = own_state_of(iterable)
        self.repeatable: bool = not isinstance(iterable, Iterator)
        self.steps: int | None = length_of(iterable)

    def batches(self, number: int, skip: int = 0) -> Iterator[Any]:
        tell_epoch(self.iterable, number)
        if self.own_state is not None and (not skip or self.own_state.waits):
            return marked(self.own_state.batches())
        given = self.iterable
        batches = given.pass_of(number) if isinstance(given, ReadByItself) else iter(given)
        return marked(without_first(batches, skip))


def without_first(batches: Iterator[Any], skip: int) -> Iterator[Any]:
    """Return what is left of an iterator after `skip` entries, which are taken at once."""
    missing = object()
    for _ in range(skip):
        if next(batches, missing) is missing:
            break
    return batches


def for_other_ranks(source: Source | None) -> Source | None:
    """Return a source as other processes get it: a plain iterable stays with rank 0."""
    if not isinstance(source, IterableSource):
        return source
    placeholder = IterableSource(())
    placeholder.steps, placeholder.repeatable = source.steps, source.repeatable
    placeholder.transfer = source.transfer
    return placeholder


def length_of(thing: object) -> int | None:
    """`len(thing)`, or None where it has none."""
    try:
        return len(thing)  # type: ignore[arg-type]
    except (TypeError, NotImplementedError):
        return None


def make_source(
    x: Any,
    y: Any = None,
    sample_weight: Any = None,
    *,
    batch_size: int = DEFAULT_BATCH_SIZE,
    shuffle: bool | str = False,
    float_dtype: torch.dtype = torch.float32,
    name: str = "x",
) -> Source:
    """Return the source for what a user passed as data.

    Args:
        x: a `DataLoader`, a `Dataset`, arrays (or a tuple, list or dict of them), or any
            iterable of batches.
        y: targets, where `x` is arrays.
        sample_weight: (N,) weights, where `x` is arrays.
        batch_size: samples in a batch; not used where `x` makes batches itself.
        shuffle: whether arrays and datasets are read in a new order each pass.
        float_dtype: the dtype that floating numbers of arrays get.
        name: how the caller's argument is called, for messages.

    Raises:
        ArgumentTypeError, ConfigurationError: nothing that fitkit can read, empty, or parts
            that don't go together.
    """
    if _makes_batches(x, y, sample_weight):
        _refuse_parts(name, x, y, sample_weight)
        if not _is_plain_tensors(x):
            source = _batch_source(x, batch_size, shuffle, name)
            if source.steps == 0:
                raise ConfigurationError(f"{name} is empty: the {type(x).__name__} has no batches.")
            return source
        x, y, sample_weight = (*x.tensors, None, None)[:3]
        warn_of_second_target(y, sample_weight)
    batch = array_batch(x, y, sample_weight, float_dtype=float_dtype, name=name)
    check_cuttable(batch[0], name)
    source = ArraySource(batch, batch_size, shuffle)
    source.columns = tuple(column_names(part) for part in (x, y))
    return source


def array_batch(
    x: Any, y: Any, sample_weight: Any, *, float_dtype: torch.dtype, name: str = "x"
) -> tuple[Any, ...]:
    """Arrays as one batch of tensors: `(x,)`, `(x, y)` or `(x, y, weight)`, lengths checked."""
    label = {"x": "y"}.get(name, f"{name}'s y")
    weights = {"x": "sample_weight"}.get(name, f"{name}'s sample_weight")
    parts = {name: as_tensors(x, name, float_dtype)}
    wide = wide_dtype(float_dtype)
    if y is not None:
        parts[label] = as_tensors(y, label, wide, target=True)
    if sample_weight is not None:
        if y is None:
            raise ConfigurationError(f"{weights} needs y: weights multiply each sample's loss.")
        given = as_tensors(sample_weight, weights, wide, target=True)
        parts[weights] = trees.map_leaves(
            lambda leaf: None if leaf is None else leaf.to(wide), given
        )
        check_weights(parts[weights], weights)
    check_lengths(parts)
    return tuple(parts.values())


def _makes_batches(x: Any, y: Any, sample_weight: Any) -> bool:
    """Whether `x` yields batches (or samples) itself, instead of being arrays.

    A tuple or a list of arrays is several inputs. Without `y`, a list of tuples, lists, objects or
    dicts of arrays is an iterable of batches.
    """
    if isinstance(x, DataLoader) or _is_data_set(x):
        return True
    if isinstance(x, list) and any(isinstance(item, (DataLoader, Dataset)) for item in x):
        raise ConfigurationError(
            f"A list of {len(x)} loaders or data sets was given, but fitkit reads one. Join them "
            "(torch.utils.data.ConcatDataset), or evaluate each: fitkit.callbacks.EvaluateEvery."
        )
    if isinstance(x, list) and x and y is None and sample_weight is None:
        return all(_is_batch(item) for item in x)
    return isinstance(x, Iterable) and not (
        is_array(x) or isinstance(x, (list, tuple, dict, str, bytes))
    )


def _is_batch(item: Any) -> bool:
    plain = (numbers.Number, str, bytes, type(None))
    if isinstance(item, (tuple, list, Mapping)):
        has_columns = isinstance(item, Mapping) or type(item) is tuple
        return any(
            not isinstance(leaf, plain) or (has_columns and isinstance(leaf, str))
            for leaf in trees.leaves(item)
        )
    return not (is_array(item) or isinstance(item, plain))


def _refuse_parts(name: str, x: Any, y: Any, sample_weight: Any) -> None:
    """`y` and weights come inside the batches of a loader, dataset or iterable."""
    for part, given, place in (("y", y, "second"), ("sample_weight", sample_weight, "third")):
        if given is not None:
            raise ConfigurationError(
                f"{part} was given together with {name} of type {type(x).__name__}, whose batches "
                f"already have it. Make it the {place} entry of each batch, and leave out {part}."
            )


def _batch_source(x: Any, batch_size: int, shuffle: bool | str, name: str) -> Source:
    """Return the source for what makes batches, or samples, itself."""
    if isinstance(x, DataLoader):
        _warn_unused_batch_size(name, x, batch_size, x.batch_size)
        _warn_of_list_of_indices(name, x.sampler)
        return LoaderSource(x)
    if isinstance(x, IterableDataset):
        return LoaderSource(DataLoader(x, batch_size=batch_size))
    if _is_map_style(x):
        _refuse_lists(x, name)
        if length_of(x) is None:
            raise ConfigurationError(
                f"{name} is a {type(x).__name__} without __len__. Give a Dataset a length, or "
                "make it an IterableDataset."
            )
        if length_of(x) == 0:
            raise ConfigurationError(f"{name} is empty: the {type(x).__name__} has 0 samples.")
        if shuffle == "batch":
            raise ConfigurationError(
                f"shuffle='batch' is for arrays; {name} is a {type(x).__name__}. Write True or "
                "False, or give a DataLoader with a sampler of your own."
            )
        sampler = PermutationSampler(x) if shuffle and len(x) >= permutation.MANY else None
        by_torch = bool(shuffle) and sampler is None
        loader = DataLoader(x, batch_size, shuffle=by_torch, sampler=sampler)
        return LoaderSource(loader, is_ours=True)
    _warn_unused_batch_size(name, x, batch_size, None)
    drawn = x.by_index(_without_masks) if isinstance(x, ReadByItself) else None
    return IterableSource(x) if drawn is None else drawn


def _is_map_style(x: Any) -> bool:
    # Hugging Face's data sets have `__getitems__`.
    return not isinstance(x, (DataLoader, IterableDataset)) and (
        isinstance(x, Dataset) or hasattr(x, "__getitems__")
    )


def _refuse_lists(x: Any, name: str) -> None:
    """Refuse a Hugging Face data set that gives lists of numbers, which torch joins crosswise.

    torch's collate makes of B lists of n numbers n tensors of B numbers.

    Raises:
        ConfigurationError: with what to write.
    """
    given = x.dataset if isinstance(x, Subset) else x
    if not type(given).__module__.startswith("datasets.") or not length_of(given):
        return
    first = given[0]
    columns = [key for key, value in first.items() if _is_list_of_numbers(value)]
    if columns:
        raise ConfigurationError(
            f"{name} is a Hugging Face Dataset whose columns {columns} give Python lists. Write "
            f"{name}.with_format('torch'), which gives tensors. If the lists differ in length, "
            "use a DataLoader with a collate_fn that pads them.",
            code="FK020",
        )


def _is_list_of_numbers(value: Any) -> bool:
    while isinstance(value, list) and value:
        value = value[0]
        if isinstance(value, numbers.Number):
            return True
    return False


def _warn_unused_batch_size(name: str, x: Any, asked: int, own: int | None) -> None:
    if asked not in (DEFAULT_BATCH_SIZE, own):
        warn(
            f"batch_size={asked} is not used: {name} is a {type(x).__name__}, which makes its "
            "own batches."
        )


def _warn_of_list_of_indices(name: str, sampler: Any) -> None:
    samples = length_of(sampler)
    if type(sampler) is RandomSampler and samples is not None and samples >= permutation.MANY:
        warn(
            f"{name} is a DataLoader with shuffle=True over {samples:,} samples: torch's "
            f"RandomSampler puts all indices into memory, some {samples * 40 / 1e9:.1f} GB on each "
            "rank. Write DataLoader(dataset, sampler=fitkit.data.PermutationSampler(dataset), …), "
            "which computes each index when it is needed."
        )


def _is_plain_tensors(x: Any) -> bool:
    # Exactly: a subclass may make other samples of its rows.
    return type(x) is TensorDataset and 1 <= len(x.tensors) <= 3


def split_tail(
    x: Any, y: Any, sample_weight: Any, fraction: float
) -> tuple[tuple[Any, Any, Any], tuple[Any, Any, Any]]:
    """Return the data without its last `fraction` of samples, and that last part.

    As Keras does: the first floor(N · (1 - fraction)) samples train, cut before shuffling.

    Args:
        x: arrays, with `y` and `sample_weight`; or a map-style `Dataset`.
        fraction: between 0 and 1.

    Raises:
        ConfigurationError: data that can't be cut, or a part that would be empty.
    """
    makes_batches = _makes_batches(x, y, sample_weight)
    if makes_batches:
        _refuse_parts("x", x, y, sample_weight)
    if _is_plain_tensors(x):
        x, y, sample_weight = (*x.tensors, None, None)[:3]
        samples: int | None = len(x)
    elif _is_map_style(x):
        _refuse_lists(x, "x")
        samples = length_of(x)
    elif makes_batches:
        samples = None
    else:
        batch = array_batch(x, y, sample_weight, float_dtype=torch.get_default_dtype())
        check_cuttable(batch[0], "x")
        samples = samples_among(batch[0])
    if samples is None:
        raise ConfigurationError(
            f"validation_split needs arrays, tensors or a Dataset; x is a {type(x).__name__}, "
            "which makes its own batches. Give validation_data=(x_val, y_val) or a loader."
        )
    # 10 * (1 - 0.9) is 0.9999999999999998 in binary: a hair must not cost a sample.
    cut = int(samples * (1.0 - fraction) + 1e-9)
    if cut == 0 or cut == samples:
        raise ConfigurationError(
            f"validation_split={fraction:g} of {samples} samples leaves {cut} to train and "
            f"{samples - cut} to validate. Both need at least 1."
        )
    if _is_map_style(x):
        return (Subset(x, range(cut)), None, None), (Subset(x, range(cut, samples)), None, None)
    pieces = (x, y, sample_weight)
    head = tuple(None if piece is None else samples_between(piece, 0, cut) for piece in pieces)
    tail = tuple(
        None if piece is None else samples_between(piece, cut, samples) for piece in pieces
    )
    return (head[0], head[1], head[2]), (tail[0], tail[1], tail[2])


def validation_sets(validation_data: Any, x: Any) -> dict[str, tuple[Any, Any, Any]]:
    """Return the sets in `validation_data` by their names, each as `(x, y, sample_weight)`.

    A single set has the empty name. A dict is several sets if each of its values is one: a tuple,
    or what makes batches itself. A dict of arrays is the inputs of one set.

    Args:
        validation_data: what `fit` was given.
        x: the training's data.

    Raises:
        ConfigurationError, ArgumentTypeError: a set can't be read, or the dict may mean both.
    """
    if not isinstance(validation_data, Mapping) or not validation_data:
        check_data_type(validation_data, "validation_data")
        return {"": validation_parts(validation_data)}
    are_sets = {name: _is_set(value) for name, value in validation_data.items()}
    names_inputs = isinstance(x, Mapping) and set(x) == set(validation_data)
    if not any(are_sets.values()) or (names_inputs and not all(are_sets.values())):
        check_data_type(validation_data, "validation_data")
        return {"": validation_parts(validation_data)}
    if isinstance(x, Mapping) and not set(x).isdisjoint(validation_data):
        names = [repr(name) for name in validation_data if name in x]
        raise ConfigurationError(
            f"validation_data is a dict with the names of inputs of x ({', '.join(names)}). If it "
            "is several sets, give them other names. If it is the inputs of one set, write "
            "(inputs, targets)."
        )
    if not all(are_sets.values()):
        lacking = next(name for name, is_set in are_sets.items() if not is_set)
        raise ConfigurationError(
            f"validation_data is a dict of several sets, but {lacking!r} is a "
            f"{type(validation_data[lacking]).__name__}. Write a tuple (x, y) or (x, y, "
            "sample_weight), a DataLoader or a Dataset for each. If it is the inputs of one set, "
            "write (inputs, targets)."
        )
    for name in validation_data:
        if not isinstance(name, str) or not name:
            raise ArgumentTypeError(
                f"validation_data has the key {describe(name)}. Each set needs a name, which is a "
                "string: {'day': (x, y), 'night': loader}."
            )
    return {
        name: validation_parts(value, set_label(name)) for name, value in validation_data.items()
    }


def set_label(name: str) -> str:
    """Return what messages call a validation set."""
    return f"validation_data[{name!r}]" if name else "validation_data"


def _is_set(value: Any) -> bool:
    """Whether a value of a dict is a data set of its own, not an input."""
    if isinstance(value, Mapping):
        return False
    return type(value) is tuple or _makes_batches(value, None, None)


def check_is_one_set(x: Any) -> None:
    """Refuse a dict of data sets where one is read. Its values aren't inputs, as there are no y.

    Raises:
        ArgumentTypeError: with what to write.
    """
    if isinstance(x, Mapping) and x and all(map(_is_set, x.values())):
        first = f"x[{next(iter(x))!r}]"
        given = f"*{first}" if isinstance(next(iter(x.values())), tuple) else first
        raise ArgumentTypeError(
            f"x is a {type(x).__name__} of {len(x)} data sets, but evaluate takes one set a call. "
            f"Write evaluate({given})."
        )


def validation_parts(validation_data: Any, name: str = "validation_data") -> tuple[Any, Any, Any]:
    """One validation set as `(x, y, sample_weight)`.

    Args:
        validation_data: a tuple `(x, y)` or `(x, y, sample_weight)` of arrays, or anything
            that makes batches itself.
        name: what messages call it.

    Raises:
        ConfigurationError, ArgumentTypeError: anything else.
    """
    if isinstance(validation_data, (tuple, list)) and not _makes_batches(
        validation_data, None, None
    ):
        count = len(validation_data)
        if count == 2:
            return validation_data[0], validation_data[1], None
        if count == 3:
            return validation_data[0], validation_data[1], validation_data[2]
        raise ConfigurationError(
            f"{name} is a {type(validation_data).__name__} of {count} entries; write "
            "(x, y) or (x, y, sample_weight), or give a DataLoader or Dataset."
        )
    return validation_data, None, None


def _is_data_set(x: Any) -> bool:
    return isinstance(x, (Dataset, DataLoader)) or hasattr(x, "__getitems__")


def check_data_type(x: Any, name: str = "x") -> None:
    """Refuse what can't be data at all.

    Raises:
        ArgumentTypeError: None, a string, a number, a class.
    """
    if isinstance(x, torch.Tensor):
        return
    if hasattr(x, "toarray") and not is_array(x):
        raise ArgumentTypeError(f"{name} is a sparse matrix. Write {name}.toarray().")
    if isinstance(x, dict) and x and all(map(_is_data_set, x.values())):
        raise ArgumentTypeError(
            f"{name} is a {type(x).__name__} of {len(x)} data sets. Give one: "
            f"{name}[{next(iter(x))!r}]."
        )
    if isinstance(x, (list, tuple, dict)) and not x:
        raise ConfigurationError(f"{name} is empty: {x!r}.")
    if inspect.isroutine(x) and not is_array(x):
        makes = "a generator function" if inspect.isgeneratorfunction(x) else "a function"
        called = getattr(x, "__name__", "f")
        raise ArgumentTypeError(
            f"{name} is {makes} that hasn't been called. Write {called}() for one epoch; for "
            "several give an object whose __iter__ starts again, or a DataLoader.",
            code="FK018",
        )
    if x is None or isinstance(x, (str, bytes, int, float, range, type)):
        raise ArgumentTypeError(
            f"{name}={describe(x)} is no data. Give a DataLoader, a Dataset, arrays or tensors "
            "(or a tuple, list or dict of them), or an iterable of batches.",
            code="FK017",
        )
