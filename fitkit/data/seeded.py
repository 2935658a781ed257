"""What `dataset[i]` draws is a function of the key, the pass, i, and how often i came before.

Which worker or rank reads a sample, in which batch and after what, doesn't matter. A pass's key
travels with the indices, so that workers that live on, or read ahead, have the right one.
"""

from __future__ import annotations

import operator
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import xxhash
from torch.utils.data import (
    DataLoader,
    Dataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    get_worker_info,
)

from fitkit.data.generators import (
    OF_THE_PROCESS,
    Numbers,
    OwnNumbers,
    asked_seed,
    generators_in,
    mark_of,
    names_of_alike,
    state_of,
)
from fitkit.data.permutation import PermutationSampler
from fitkit.errors import ArgumentTypeError

_pack = struct.Struct("<QQQQ").pack

_BITS = (1 << 64) - 1

_OF_A_BATCH = 1 << 63
"""Added to how often an index came before: for what a batch as a whole draws."""


class Repeated(NamedTuple):
    """An index that came `again` times before in this pass."""

    index: Any
    again: int


class Keys(NamedTuple):
    """What a sampler gives in place of a batch's indices.

    Attributes:
        key: of the call's data.
        number: of the pass.
        batch: the batch's number in the pass, over all ranks.
        indices: as the user's sampler gives them; `Repeated` for those that came before.
    """

    key: int
    number: int
    batch: int
    indices: Any


def marked_repeats(batches: Iterable[Any], *, by_batch: bool) -> Iterator[Any]:
    """Yield the indices of batches. One that came before in the pass is `Repeated`.

    Args:
        by_batch: whether each entry is a batch of indices, not a single one.
    """
    seen: dict[int, int] = {}

    def marked(index: Any) -> Any:
        number = number_of(index)
        again = seen[number] = seen.get(number, -1) + 1
        return Repeated(index, again) if again else index

    for entry in batches:
        if entry is None:  # no batch: another loader's turn
            yield entry
            continue
        if not by_batch:
            yield marked(entry)
            continue
        found = [marked(index) for index in entry]
        yield found if Repeated in map(type, found) else entry


def may_repeat(loader: DataLoader[Any]) -> bool:
    """Whether a loader's sampler may give an index twice in a pass."""
    sampler: Any = loader.sampler
    own: Any = loader.batch_sampler
    if own is not None and own.__class__.__module__ != "torch.utils.data.sampler":
        return True
    if own is not None:
        sampler = own.sampler
    if type(sampler) is RandomSampler:
        return sampler.replacement or sampler.num_samples > len(sampler.data_source)
    return type(sampler) not in (SequentialSampler, PermutationSampler)


def number_of(index: Any) -> int:
    """Return a number for any index, the same in all processes.

    Raises:
        ArgumentTypeError: it has none.
    """
    try:
        return operator.index(index) & _BITS  # NumPy's and torch's integers, too
    except (TypeError, RuntimeError):
        text = repr(index)
        if " at 0x" in text:  # an address, of this process alone
            raise ArgumentTypeError(
                f"A sampler gives a {type(index).__name__} as index, whose random numbers can't be "
                "told from another one's. Give it a __repr__ that says what it is."
            ) from None
        return xxhash.xxh3_64_intdigest(text.encode())


class _Watch:
    """Seeds generators, and finds those that have moved since."""

    def __init__(self, generators: Sequence[Numbers]) -> None:
        self._generators = generators
        self._marks: list[tuple[Numbers, Any]] = []
        self._moved: list[Numbers] = []

    def seed(self, bits: int) -> None:
        self.moved()
        for one in self._generators:
            one.seed(bits)
        self._marks = [(one, one.look()) for one in self._generators if one not in self._moved]

    def moved(self) -> list[Numbers]:
        self._moved += [one for one, mark in self._marks if one.look() != mark]
        self._marks = []
        return self._moved


class _Own:
    """The generators that a data set keeps itself, as numbers that can be seeded.

    A generator is told from others by where it is. Two that began with the same state belong
    together, such as those of an image and of its mask, and stay alike (`names_of_alike`).
    """

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        self._names: dict[str, str] = {}
        self.found: list[Numbers] = []
        self._objects: list[Any] = []
        self.look()

    def look(self) -> bool:
        """Look for them again; return whether some are there that weren't."""
        generators = generators_in(self._dataset)
        objects = list(generators.values())
        if len(objects) == len(self._objects) and all(map(operator.is_, objects, self._objects)):
            return False
        alike: dict[Any, list[str]] = {}
        for path, one in generators.items():
            if path not in self._names:
                alike.setdefault((type(one).__name__, mark_of(state_of(one))), []).append(path)
        for paths in alike.values():
            self._names |= names_of_alike(paths)
        known = {id(one.one): one for one in self.found if isinstance(one, OwnNumbers)}
        self.found = [
            known.get(id(one)) or OwnNumbers(one, self._names[path])
            for path, one in generators.items()
        ]
        self._objects = objects
        return True


class Seeded(Dataset[Any]):
    """A map-style data set and its collate_fn, read by `Keys`. It is the worker_init_fn as well.

    In a process's first batch all generators are seeded for each sample. Those that moved for none
    are left alone from then on, and looked at once a batch. If one has moved after all, the batch
    is read again with all seeded, and that generator is seeded for each sample from then on. So a
    batch that is returned has no number of a generator that wasn't seeded.

    Args:
        dataset: the user's.
        collate: what joins samples.
        init: the user's worker_init_fn.
        by_batch: whether `Keys` have a batch of indices, not a single one.
    """

    def __init__(
        self, dataset: Any, collate: Callable[[Any], Any], init: Any, *, by_batch: bool
    ) -> None:
        self.dataset = dataset
        self._collate, self._init, self._by_batch = collate, init, by_batch
        self._many = _how_many_are_read(dataset)
        self._own = _Own(dataset)
        self._drawn: list[Numbers] | None = None  # those that are seeded for each sample
        self._quiet: list[Numbers] = []
        self._everyone: list[Numbers] = []
        self._restores = True
        self._pass: tuple[int, int] | None = None

    def __getstate__(self) -> dict[str, Any]:
        # A new process finds out by itself. It has generators of its own.
        return {**vars(self), "_drawn": None, "_quiet": [], "_everyone": [], "_pass": None}

    def __len__(self) -> int:
        return len(self.dataset)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "dataset":
            raise AttributeError(name)
        return getattr(self.dataset, name)

    def __call__(self, worker: int) -> None:
        """Begin a worker: code of the user's finds the user's data set."""
        object.__setattr__(get_worker_info(), "dataset", self.dataset)
        if self._init is not None:
            self._init(worker)

    def __getitem__(self, keys: Keys) -> Any:
        return self.__getitems__(keys)

    def __getitems__(self, keys: Keys) -> Any:
        """Return the batch, joined."""
        if self._pass != (keys.key, keys.number):
            self._pass = keys.key, keys.number
            if self._own.look() or not self._everyone:
                self._drawn, self._quiet = None, []
                self._everyone = [*OF_THE_PROCESS, asked_seed, *self._own.found]
            # Those of a worker serve nothing else.
            self._restores = get_worker_info() is None
        everyone, quiet, drawn = self._everyone, self._quiet, self._drawn
        asked_seed.begin()
        saved = [one.save() for one in (everyone if self._restores else quiet)]
        late: list[Numbers] = []
        try:
            if drawn is None:
                return self._read_first(keys)
            problem: Exception | None = None
            try:
                batch = self._batch(keys, drawn)
            except Exception as error:
                problem = error
            # The quiet ones are the first of all.
            late = [one for one, state in zip(quiet, saved, strict=False) if one.has_moved(state)]
            if late:  # an error may come of numbers that aren't this sample's
                self._seed_from_now_on([*drawn, *late])
                return self._batch(keys, self._everyone)
            if problem is not None:
                raise problem
            return batch
        finally:
            if self._restores:
                asked_seed.end()
                moved = everyone if drawn is None or late else drawn
                for one, state in zip(everyone, saved, strict=True) if moved else ():
                    if one in moved:
                        one.restore(state)

    def _read_first(self, keys: Keys) -> Any:
        watch = _Watch(self._everyone)
        batch = self._batch(keys, [watch])
        if self._own.look():  # made by the first sample
            self._everyone = [*OF_THE_PROCESS, asked_seed, *self._own.found]
            watch = _Watch(self._everyone)
            batch = self._batch(keys, [watch])
        self._seed_from_now_on(watch.moved())
        return batch

    def _seed_from_now_on(self, drawn: list[Numbers]) -> None:
        self._drawn = drawn
        self._quiet = [one for one in self._everyone if one not in drawn]
        self._everyone = [*self._quiet, *drawn]

    def _batch(self, keys: Keys, seeded: Sequence[Any]) -> Any:
        """Return a batch, read with these generators seeded."""
        dataset, indices = self.dataset, keys.indices
        if not self._by_batch:
            samples = dataset[_seed(keys, indices, seeded)]
        elif self._many == "together":
            for index in indices[:1] if seeded else ():
                _seed(keys, index, seeded)
            samples = dataset.__getitems__(_bare(indices))
        elif not seeded:
            bare = _bare(indices)
            samples = dataset.__getitems__(bare) if self._many else [dataset[i] for i in bare]
        elif self._many == "rows":
            samples = [dataset.__getitems__([_seed(keys, i, seeded)])[0] for i in indices]
        else:
            samples = [dataset[_seed(keys, i, seeded)] for i in indices]
        if seeded:
            _seed(keys, keys.batch, seeded, _OF_A_BATCH)
        return self._collate(samples)


def _how_many_are_read(dataset: Any) -> str:
    """Return what `__getitems__` does.

    Returns:
        "each" for torch's Subset, "rows" for Hugging Face's, "" without one; "together" for a
        user's own, which may make samples of one another.
    """
    if not callable(getattr(dataset, "__getitems__", None)):
        return ""
    if type(dataset) is Subset:
        return _how_many_are_read(dataset.dataset) or "each"
    return "rows" if type(dataset).__module__.partition(".")[0] == "datasets" else "together"


def _bare(indices: Any) -> Any:
    """Return a batch's indices as the data set takes them."""
    if Repeated not in map(type, indices):
        return indices
    return [index.index if type(index) is Repeated else index for index in indices]


def _seed(keys: Keys, index: Any, seeded: Sequence[Any], again: int = 0) -> Any:
    """Seed generators for a sample; return its index as the data set takes it."""
    if type(index) is Repeated:
        index, again = index.index, again + index.again
    if seeded:
        number = index if type(index) is int and index >= 0 else number_of(index)
        bits = xxhash.xxh3_128_intdigest(_pack(keys.key, keys.number, number, again))
        for one in seeded:
            one.seed(bits)
    return index


def sample_seed() -> int:
    """Return a seed for random generators of your own, which belongs to the sample being read.

    Call it in a data set's `__getitem__` for generators that `fit` can't reach: those that aren't
    among the data set's attributes, and those of libraries. What torch's and NumPy's functions and
    the module `random` draw needs no seed of yours.

    The seed follows from the seed of the fit, the number of the pass and the sample's index. It is
    the same with any number of loader workers, processes and batch sizes, and after a resume. Two
    calls for one sample give the same. In a `collate_fn` it is the batch's.

    Returns:
        An integer from 0 to 2^31 - 1, which all generators take. Outside of a data set that fitkit
        reads, as in a loop of your own, it is drawn from torch's generator.

    Example:
        >>> import numpy as np, torch, fitkit
        >>> class Noisy(torch.utils.data.Dataset):
        ...     def __len__(self):
        ...         return 8
        ...     def __getitem__(self, index):
        ...         numbers = np.random.default_rng(fitkit.data.sample_seed())
        ...         return torch.tensor(numbers.normal(size=4), dtype=torch.float32)
        >>> model = fitkit.Model(torch.nn.Linear(4, 1))
        >>> model.predict(Noisy(), verbose=0).shape
        (8, 1)
    """
    number = asked_seed.number()
    return int(torch.randint(1 << 31, ())) if number is None else number
