"""Batches and their parts, the base class of sources, and the epochs cut from a source."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch

from fitkit import trees
from fitkit.arguments import dtype_name
from fitkit.batch_kinds import has_entries, kind_of
from fitkit.data.draws import DataDraws, OrderNumbers, key_of_state
from fitkit.errors import ConfigurationError, warn
from fitkit.progress import Progress
from fitkit.random_states import kept_random_numbers, random_state, set_random_state
from fitkit.samples import said_by
from fitkit.samples import samples_of as samples_of

COLLATE_ERRORS = {
    r"can't convert np\.ndarray of type numpy\.c?longdouble": (
        "hold long doubles, which torch doesn't have. Write .astype('float64') ('complex128')"
    ),
    r"sparse tensors are not currently supported by the default collate_fn": (
        "hold sparse tensors, which torch's default collate_fn can't join. Write .to_dense()"
    ),
    r"found <class 'scipy\.sparse": (
        "hold sparse matrices of scipy, which torch's default collate_fn can't join. Write "
        ".toarray()"
    ),
}
"""torch's complaints about samples that it can't join, and what to say instead."""


@dataclasses.dataclass(slots=True)
class Batch:
    """What a rank computes in a step, and how many samples that stands for.

    Attributes:
        data: the batch, as the user's data gave it.
        samples: its samples; 0 if it only fills a rank's place, and doesn't count.
        total: the samples of all ranks in this step.
        is_lent: whether other code may have its memory, such as the user's. A step may write into a
            batch, so it gets a copy of one that is lent.
    """

    data: Any
    samples: int
    total: int
    is_lent: bool = True


class NoRows:
    """Stands for a batch without rows: it keeps its place, and nothing is computed from it.

    The class itself is the marker: it stays the same object when it is sent to another process.
    """


class Source:
    """Yields the user's batches, pass after pass.

    Attributes:
        samples: the samples in one pass; None if unknown.
        batch_size: the samples in a batch; None if unknown.
        steps: the batches in one pass; None if unknown.
        repeatable: whether a second pass starts from the beginning.
        target: all targets as a tree of tensors, if they are in memory.
        own_state: tracks the state that a loader keeps by itself (`OwnState`); otherwise None.
        generators: the data's own random generators, which may determine their order.
        whole: all ranks' data, if this is one rank's shard of them; otherwise the source itself.
        limit: the most batches of a pass that all ranks get, if it ends there by itself.
        transfer: moves a batch to a device in the model's place; None leaves that to the model.
        lends: whether other code may have the memory of its batches.
        pins: whether a pinned tensor in its batches is a new one each time.
        draws: what its passes draw with; None where no fit, and no other rank, reads it too.
        draws_orders: whether its orders are drawn with `draws`. Others come from code of the
            user's, which draws where it likes.
    """

    draws: DataDraws | None = None
    draws_orders = False

    lends = True
    pins = False
    limit: int | None = None
    transfer: Callable[[Any, torch.device], Any] | None = None
    samples: int | None = None
    batch_size: int | None = None
    steps: int | None = None
    repeatable = True
    own_state: Any = None

    @property
    def target(self) -> Any:
        return None

    @property
    def generators(self) -> list[torch.Generator]:
        return []

    @property
    def whole(self) -> Any:
        return self

    @property
    def order_numbers(self) -> OrderNumbers | None:
        """The numbers from which its orders are drawn, if they aren't the process's in any case."""
        draws = self.whole.draws
        return draws.numbers if draws is not None and self.whole.draws_orders else None

    def pass_draws(self) -> DataDraws:
        """Return what a new pass draws with: for one on its own, by the process's state."""
        return DataDraws(key_of_state()) if self.draws is None else self.draws

    def sizes(self, skip: int) -> Iterator[int] | None:
        """Return the samples of each batch after the first `skip`; None if only the batches
        tell.
        """
        return None

    def cut_into(self, batch_size: int) -> None:
        """Make batches of another size from the next pass on. Its readers must be made again.

        Raises:
            ConfigurationError: the data make their own batches.
        """
        raise ConfigurationError(
            "A callback sets the batch size by epoch, but x makes its own batches. Give arrays or "
            "a Dataset with a length, such as your DataLoader's, which fit cuts into batches."
        )

    def batches(self, number: int, skip: int = 0) -> Iterator[Any]:
        """Return the batches of pass `number`, without the first `skip`, which aren't loaded if
        avoidable.

        `NoRows` stands for each batch without rows. It counts among those to skip.

        All that a pass draws before its first batch has been drawn when this returns.
        """
        raise NotImplementedError


def marked(batches: Iterator[Any]) -> Iterator[Any]:
    """Yield the batches, with `NoRows` for each empty one (from an empty shard or a filter).

    Raises:
        ConfigurationError: torch's collate can't join the samples.
    """
    try:
        for batch in batches:
            yield NoRows if is_empty(batch) else batch
    except (TypeError, RuntimeError) as error:
        for pattern, explanation in COLLATE_ERRORS.items():
            if re.search(pattern, str(error)):
                raise ConfigurationError(
                    f"The data's samples {explanation} in the Dataset, or give a DataLoader with "
                    "its own collate_fn."
                ) from error
        raise


def is_empty(batch: Any) -> bool:
    """Whether all arrays of a batch have 0 rows, it says to have no samples, or a collate function
    gave None for it.

    All of them: an image without objects has targets of 0 rows, too.
    """
    found = batch is None or said_by(batch) == 0
    parts = batch if isinstance(batch, (tuple, list)) else (batch,)
    for part in parts:  # the first one decides for most batches, without a walk over a tree
        for leaf in (part,) if isinstance(part, torch.Tensor) else trees.leaves(part):
            if (kind := kind_of(leaf)) is not None:
                if kind.count(leaf):
                    return False
                found = True
            elif isinstance(leaf, (torch.Tensor, np.ndarray)):
                if leaf.ndim and leaf.shape[0]:
                    return False
                found = found or leaf.ndim > 0
    return found


class CountedSource(Source):
    """A source whose batches this rank computes by itself, each as a `Batch`.

    Args:
        source: gives the batches.
        samples_of: counts a batch's samples.
    """

    def __init__(self, source: Source, samples_of: Callable[[Any], int] = samples_of) -> None:
        self._source = source
        self._samples_of = samples_of
        self.samples, self.batch_size = source.samples, source.batch_size
        self.steps, self.repeatable = source.steps, source.repeatable
        self.own_state, self.limit = source.own_state, source.limit
        self.lends = source.lends

    @property
    def target(self) -> Any:
        return self._source.target

    @property
    def generators(self) -> list[torch.Generator]:
        return self._source.generators

    @property
    def whole(self) -> Any:
        return self._source.whole

    def batches(self, number: int, skip: int = 0) -> Iterator[Any]:
        source = self._source
        batches = source.batches(number, skip)
        if (samples := source.sizes(skip)) is None or (total := source.sizes(skip)) is None:
            return self._counted(batches)
        return map(Batch, batches, samples, total, itertools.repeat(self.lends))

    def _counted(self, batches: Iterator[Any]) -> Iterator[Any]:
        samples_of, is_lent = self._samples_of, self.lends
        for data in batches:
            if data is NoRows:
                yield data
            else:
                samples = samples_of(data)
                yield Batch(data, samples, samples, is_lent)


def unpack_batch(batch: Any) -> tuple[Any, Any, Any]:
    """Return the inputs, targets and sample weights of a batch; None for what it doesn't have.

    Args:
        batch: `(x, y)`, `(x, y, sample_weight)` or `(x,)` as a tuple or list. Anything else (a
            tensor, a dict, an entry of its own kind) is the inputs as a whole.

    Raises:
        ConfigurationError: a tuple or list of another length.
    """
    if has_entries(batch):
        count = len(batch)
        if count == 2:
            return batch[0], batch[1], None
        if count == 3:
            return batch[0], batch[1], batch[2]
        if count == 1:
            return batch[0], None, None
        raise ConfigurationError(
            f"A batch is a {type(batch).__name__} of {count} entries. A batch is (x, y) or "
            "(x, y, sample_weight); put several inputs into one tuple or dict: ((a, b), y).",
            code="FK004",
        )
    return batch, None, None


def check_weights(weight: Any, what: str) -> None:
    """Refuse sample weights that are negative or not finite. Reads the values.

    Args:
        weight: a tree of tensors. Other leaves pass.
        what: the weights' name for the message.

    Raises:
        ConfigurationError: names a wrong one.
    """
    for tensor in trees.tensors(weight):
        if tensor.numel() == 0 or tensor.is_complex():
            continue
        low, high = torch.aminmax(tensor)  # both NaN where a weight is
        if low.item() >= 0 and high.item() < float("inf"):
            continue
        wrong = tensor[~((tensor >= 0) & (tensor != float("inf")))]
        negative = (
            " For factors below 0, such as advantages, write a training_step that returns "
            "(factor * losses).mean(), with losses of reduction='none'."
        )
        raise ConfigurationError(
            f"{what} holds {wrong[0].item():g}, but a weight is a finite number from 0."
            f"{negative if wrong[0] < 0 else ''}"
        )


def warn_of_second_target(y: Any, weight: Any) -> None:
    """Warn if a batch's third entry looks like a second target rather than weights."""
    if not isinstance(y, torch.Tensor) or not isinstance(weight, torch.Tensor):
        return
    is_number = weight.is_floating_point() or weight.dtype is torch.bool
    looks_like_labels = not is_number and weight.numel() > 0 and bool((weight > 1).any())
    has_several = weight.ndim > 1 and weight.numel() > weight.shape[0]
    if looks_like_labels or (has_several and y.is_floating_point() and weight.shape == y.shape):
        warn(
            f"The third entry of the batches, of shape {tuple(weight.shape)} and type "
            f"{dtype_name(weight.dtype)}, is taken as sample weights. If it is a "
            "second target, write (x, (y, y2))."
        )


class Stream:
    """Cuts a source into epochs.

    Without `steps`, an epoch is one pass over the source. With it, an epoch is that many batches,
    some of which may have no rows. The next epoch continues where the last one stopped. A source
    that can be read again starts over when it ends, even within an epoch.

    Args:
        source: the source of the batches.
        progress: where the training is. The stream keeps its pass up to date: with `steps` also
            its batches, which otherwise the loop counts.
        steps: batches per epoch; None for one pass.
    """

    def __init__(self, source: Source, progress: Progress, steps: int | None = None) -> None:
        self.source = source
        self.steps: int | None = source.steps if steps is None else steps
        self._progress = progress
        self._limit = steps
        # No reference back to this stream: a reference cycle would keep a loader's workers alive.
        self._endless = _passes(source, progress) if steps is not None else iter(())

    def epoch(self, done: int = 0) -> Iterator[Any]:
        """Return the next epoch's batches.

        Args:
            done: steps of this epoch that were made before the training stopped.
        """
        if self._limit is not None:
            return itertools.islice(self._endless, self._limit - done)
        return _begin(self.source, self._progress)

    def peek(self) -> Any:
        """Read a batch, which is yielded again in its turn; None if there is none.

        Ranks:
            Collective.
        """
        whole, own = self.source.whole, self.source.own_state
        waiting = own.state(ends_pass=False) if own is not None and own.waits else None
        rest = None
        if not whole.repeatable:
            whole.iterable, rest = itertools.tee(whole.iterable)
        numbers = self.source.order_numbers
        kept = contextlib.nullcontext() if numbers is None else numbers.kept()
        with kept, kept_random_numbers(self.generators):
            batch = self._first_with_rows()
            if batch is None and waiting is not None:  # the loader's own state is at its pass's end
                batch = self._first_with_rows()
        if rest is not None:
            whole.iterable = rest
        self.take_loader_state(waiting)
        return batch

    def _first_with_rows(self) -> Any:
        batches = self.source.batches(self._progress.number)
        return next((batch for batch in batches if batch is not NoRows), None)

    def loader_state(self, *, ends_pass: bool) -> dict[str, Any] | None:
        """Return the state of a loader that keeps its own, if one rank reads it alone; otherwise
        None.

        Args:
            ends_pass: whether the next batch belongs to a new pass.
        """
        own = self.source.own_state
        return None if own is None else own.state(ends_pass=ends_pass)

    def take_loader_state(self, state: dict[str, Any] | None) -> None:
        """Restore the state of the data's own loader, if it keeps one."""
        own = self.source.own_state
        if own is not None and state is not None:
            own.take(state)

    @property
    def generators(self) -> list[torch.Generator]:
        """The data's own generators, which may determine their order."""
        return self.source.generators


def _begin(source: Source, progress: Progress) -> Iterator[Any]:
    """Return the rest of the pass's batches. What its beginning draws is drawn again."""
    own, (began,) = source.own_state, progress.began
    if progress.batches and own is not None and own.waits:
        return source.batches(progress.number, progress.batches)
    generators, numbers = source.generators, source.order_numbers
    if progress.batches and began is not None:
        replayed = contextlib.nullcontext() if numbers is None else numbers.replayed()
        with kept_random_numbers(generators), replayed:
            set_random_state(began, generators)
            return source.batches(progress.number, progress.batches)
    with contextlib.nullcontext() if numbers is None else numbers.drawing():
        progress.began = [random_state(generators)]
    return source.batches(progress.number)


def _passes(source: Source, progress: Progress) -> Iterator[Any]:
    """Pass after pass, until the source yields nothing or can't be read again."""
    while True:
        count = progress.batches
        for batch in _begin(source, progress):
            count += progress.shares
            progress.batches = count
            yield batch
        if not source.repeatable or count == 0:
            return
        progress.number += 1
        progress.batches = 0


def limited(source: Source, steps: int | None) -> Iterator[Any]:
    """Return the first `steps` batches of a new pass (None: all). Nothing more is read."""
    batches = source.batches(0)
    return batches if steps is None else itertools.islice(batches, steps)


def in_groups(
    batches: Iterable[Any], size: int, first: int = 0
) -> Iterator[Iterable[tuple[int, Any]]]:
    """Yield batches with their numbers, in groups of `size`. The last may be short.

    A group's batches are read while the caller iterates over it, which it must do to the end.

    Args:
        first: the number of the first batch. A group ends where its size divides the next number.
            So an epoch that stopped within a group continues with the rest of the group.
    """
    numbered = enumerate(batches, first)
    if size == 1:
        return zip(numbered, strict=True)  # the same as below, without a call for each batch
    return (
        itertools.chain([entry], itertools.islice(numbered, size - 1 - entry[0] % size))
        for entry in numbered
    )


def check_readable(source: Source, epochs: int, steps: int | None, name: str = "x") -> None:
    """Refuse a one-pass iterator if several passes are needed.

    Raises:
        ConfigurationError: with what to give instead.
    """
    if epochs > 1 and steps is None and not source.repeatable:
        argument = "steps_per_epoch" if name == "x" else "validation_steps"
        raise ConfigurationError(
            f"{name} is an iterator, which can be read once, but epochs={epochs} needs it "
            f"{epochs} times. Give {argument}=… to cut one long stream into epochs, or "
            "something that can be read again (a list of batches, a DataLoader, a Dataset).",
            code="FK021",
        )
