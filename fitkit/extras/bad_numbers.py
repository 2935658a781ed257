"""Which samples a batch has, and where numbers in it went bad: asked for when something has."""

from __future__ import annotations

import contextlib
import copy
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    RandomSampler,
    SequentialSampler,
    TensorDataset,
)

from fitkit import trees
from fitkit.random_states import kept_random_numbers, set_random_state
from fitkit.seams.callbacks import ArraySource, from_all_ranks, rank_source
from fitkit.seams.data import Batch, LoaderSource, Source, reads_by_index
from fitkit.tensors import first_spoiled

SEARCHED_S = 5.0
"""So long a data set is searched for a number that isn't finite, where the batch isn't known."""

SHOWN = 8
"""Of more samples than so many, the first are named."""


# ---------------------------------------------------------------------- which samples


class Numbers(Dataset[int]):
    """Each sample's index, in the place of the sample."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: Any) -> Any:
        return index


def indices_of(run: Any, number: int, place: int) -> list[int] | None:
    """Return the indices in the data of the samples that this rank has in a batch of a training.

    The order of a pass is drawn once more, from the state in which it began, so that nothing has
    to be kept while all is well.

    Args:
        run: the running fit.
        number: of the pass over the data.
        place: how many batches of the pass, over all ranks, came before.

    Returns:
        None for data whose order can't be known: streams, generators, loaders of several sets.

    Ranks:
        Collective.
    """
    found = next(_replayed(run, number, place, run.progress.began[0]), None)
    return None if found is None else found.tolist()


def indices_of_pass(run: Any, number: int, began: Any, places: range) -> dict[int, Any]:
    """Return the indices of the samples that this rank has in some batches of a pass: int64 (B,).

    Args:
        run, number: as for `indices_of`.
        began: the random state in which the pass began.
        places: of the batches among this rank's.

    Returns:
        By place; none for data whose order can't be known.

    Ranks:
        Collective.
    """
    batches = _replayed(run, number, places.start * run.progress.shares, began)
    found = zip(places, batches, strict=False)
    return {place: indices for place, indices in found if indices is not None}


def _replayed(run: Any, number: int, place: int, began: Any) -> Iterator[torch.Tensor | None]:
    """Yield the indices of a pass's batches from `place` on; None for one that can't be known."""
    source = _numbered(run.data.source.whole)
    if source is None or began is None:
        return
    generators = run.data.source.generators
    numbers = run.data.source.order_numbers
    with kept_random_numbers(generators), nullcontext() if numbers is None else numbers.kept():
        set_random_state(began, generators)
        if numbers is not None:
            numbers.start_here()
        if run.progress.shares == 1:  # no batch is read, and arrays' are drawn and cut at once
            if isinstance(source, ArraySource):
                yield from source.index_batches(number)[place:]
                return
            if isinstance(source, LoaderSource) and reads_by_index(source.loader):
                yield from map(_known, map(_together, source.index_batches(number, place)))
                return
        mine = rank_source(run.model, source, training=True, samples_of=_rows)
        batches: Iterator[Any] = mine.batches(number, place)
        for batch in batches:
            data = batch.data if type(batch) is Batch else None
            if type(data) is tuple or type(data) is list:
                data = data[0]
            found = _known(data)
            yield None if found is None else found[: batch.samples]


def _rows(data: Any) -> int:
    """Return how many indices a numbered source's batch has."""
    rows: int = (data[0] if isinstance(data, (tuple, list)) else data).shape[0]
    return rows


def _known(indices: Any) -> torch.Tensor | None:
    """Return a batch's indices if they are numbers of samples, (B,)."""
    return indices if isinstance(indices, torch.Tensor) and indices.ndim == 1 else None


def _together(indices: Any) -> torch.Tensor:
    """Return a batch's indices, (B,); those that a sampler of the user's gives as no numbers as
    (B, 1), which stands for batches that aren't known.
    """
    with contextlib.suppress(TypeError, ValueError, RuntimeError):
        return torch.as_tensor(indices)
    return torch.zeros(len(indices), 1)


def _numbered(source: Source) -> Source | None:
    """Return a source whose samples are their indices, in the same order; None if there is none."""
    found: Any = copy.copy(source)
    numbered: Source = found
    if isinstance(source, ArraySource):
        found.batch, found._flat = (torch.arange(source.samples),), True
        return numbered
    if not isinstance(source, LoaderSource) or source.is_stream or source.own_state is not None:
        return None
    loader = source.loader
    if not _may_draw_again(loader) or not hasattr(loader.dataset, "__len__"):
        return None
    count = len(loader.dataset)
    other: DataLoader[Any] = copy.copy(loader)
    by_index = reads_by_index(loader) or (type(loader) is DataLoader and _has_torchs_order(source))
    for name, value in (
        ("dataset", TensorDataset(torch.arange(count)) if by_index else Numbers(count)),
        ("collate_fn", torch.utils.data.default_collate if by_index else _together),
        ("num_workers", 0), ("pin_memory", False), ("timeout", 0), ("worker_init_fn", None),
        ("prefetch_factor", None), ("persistent_workers", False), ("_iterator", None),
    ):  # fmt: skip
        object.__setattr__(other, name, value)
    found.loader, found._reader = other, None
    return numbered


def _may_draw_again(loader: DataLoader[Any]) -> bool:
    """Whether an order can be drawn once more: a sampler of the user's may keep state."""
    kinds = type(loader.sampler), type(loader.batch_sampler)
    return loader.batch_sampler is not None and all(
        kind in (list, tuple, range) or kind.__module__.partition(".")[0] in ("torch", "fitkit")
        for kind in kinds
    )


def named_samples(indices: list[int] | None) -> str:
    """Return samples in words.

    Example:
        >>> from fitkit.extras.bad_numbers import named_samples
        >>> named_samples([17, 4])
        'samples 17, 4'
    """
    if not indices:
        return "samples that can't be named"
    more = f", … ({len(indices)} in all)" if len(indices) > SHOWN else ""
    kind = "sample" if len(indices) == 1 else "samples"
    return f"{kind} {', '.join(map(str, indices[:SHOWN]))}{more}"


# ---------------------------------------------------------------------- a loss


class BadBatch(NamedTuple):
    """The first batch of an epoch whose loss isn't finite.

    Attributes:
        number: in the epoch, from 0.
        rank: the first that had it.
        ranks: how many there are.
        indices: of its samples; None where they can't be known.
        where: its first number that isn't finite, in words; None where all are, or not known.
        before: the samples of the batch before, on all ranks, if this one's data are finite: its
            gradient may be what wasn't.
    """

    number: int
    rank: int
    ranks: int
    indices: list[int] | None
    where: str | None
    before: list[int]

    def __str__(self) -> str:
        samples = "" if self.indices is None else f" ({named_samples(self.indices)})"
        return f"batch {self.number}{samples}" + (f" on rank {self.rank}" if self.ranks > 1 else "")


WHO_FINDS_IT = (
    "fit(…, callbacks=fitkit.callbacks.DetectNonFinite()) names the first module in training whose "
    "output or gradient is NaN or infinite."
)


def words_of_lost(run: Any, lost: str, *, is_first: bool, is_early: bool) -> tuple[str, bool]:
    """Return what to say of losses that aren't finite, and whether that has the samples.

    Args:
        run: the running fit.
        lost: which losses they are.
        is_first: whether nothing was said before. Else samples alone are wanted.
        is_early: whether the epoch still runs. Then other ranks don't take part, and samples are
            named only where no code of the user's draws the order, which may be under way.

    Ranks:
        Collective at an epoch's end.
    """
    alone = run.collectives.world_size == 1
    may_be_now = alone and run.data.passes_are_epochs and _has_torchs_order(run.data.source.whole)
    waits = is_early and not may_be_now
    found = None if waits else bad_batch(run)
    is_named = found is not None and found.indices is not None
    if run.collectives.rank or not (is_first or is_named):  # rank 0 speaks
        return "", is_named
    where = found.where if found is not None and is_named else first_bad_of(run)
    where = _first_bad_held_out(run) if where is None else f"In the data, {where}."
    first = "" if found is None else f", first in {found}"
    if found is not None and found.before:
        first += f". Or a gradient wasn't, in the batch before ({named_samples(found.before)})"
    data = f" {where}" if where else ""
    advice = f" {WHO_FINDS_IT}" if is_first else ""
    return f"{lost}{first}.{advice}{data}", is_named


def words_of_spoiled(run: Any, name: str) -> str:
    """Return what to say after an epoch of a weight of this name that isn't finite.

    Ranks:
        Collective.
    """
    progress = run.progress
    place = max(0, -(-progress.batches // progress.shares) - 1)
    indices = _indices_on_all(run, progress.number, place)
    return (
        f"a gradient wasn't finite, although the loss was: {name} isn't any more. The last batch "
        f"had {named_samples(indices)}. {WHO_FINDS_IT}"
    )


def _indices_on_all(run: Any, number: int, place: int) -> list[int]:
    """As `indices_of`, of the samples of all ranks; `place` counts this rank's batches."""
    found = indices_of(run, number, place * run.progress.shares)
    return [index for some in from_all_ranks(run.model, found) for index in some or ()]


def _has_torchs_order(source: Source) -> bool:
    """Return whether no code of the user's decides the order."""
    if not isinstance(source, LoaderSource):
        return isinstance(source, ArraySource)
    loader = source.loader
    is_usual = type(loader.batch_sampler) is BatchSampler
    return is_usual and type(loader.sampler) in (RandomSampler, SequentialSampler)


def bad_batch(run: Any) -> BadBatch | None:
    """Return the first batch of a running epoch whose loss isn't finite; None where not known.

    Ranks:
        Collective.
    """
    ranks = from_all_ranks(run.model, _number_of_bad(run))
    known = [number for number in ranks if number is not None]
    if not known:
        return None
    number, progress = min(known), run.progress
    rank = ranks.index(number)
    # Epochs of steps may have begun in the pass before, whose order isn't known any more.
    place = -(-progress.batches // progress.shares) - (run.steps_done - number)
    indices = where = None
    if place >= 0:
        indices = indices_of(run, progress.number, place * progress.shares)
    if indices is not None and run.collectives.rank == rank:
        where = first_bad_of(run, indices)
    indices, where = from_all_ranks(run.model, (indices, where))[rank]
    asks = where is None and indices is not None and place > 0
    before = _indices_on_all(run, progress.number, place - 1) if asks else []
    return BadBatch(number, rank, len(ranks), indices, where, before)


def _number_of_bad(run: Any) -> int | None:
    """Return the number in the epoch of this rank's first batch whose loss isn't finite.

    None where losses can't be told from one another: steps wait, or some gave no loss.
    """
    made, state = run.latest, run.model._fitkit.fit_state
    record = made.context.record
    all_in_turn = state.takes_turns and not state.frequencies and run.model.automatic_optimization
    each = len(state.optimizers) if all_in_turn else 1
    steps = record.steps - (record.samples == 0)  # without the last, if it was padding
    means = [mean for mean in (record.loss, *record.parts.values()) if mean.added == steps * each]
    found = [first for mean in means if (first := mean.first_bad()) is not None]
    if not found:
        return None
    number: int = made.done - record.steps - len(made.empty) + min(found) // each
    for empty in made.empty:  # in their order
        number += empty <= number
    return number


# ---------------------------------------------------------------------- where in the data


def first_bad(
    data: Any, indices: list[int] | None = None, columns: Sequence[Sequence[str]] = ()
) -> str | None:
    """Return where the first number of a batch, or of data, is that isn't finite; None if all are.

    Args:
        data: a tree of tensors and arrays whose first dimension is the samples.
        indices: the samples' indices in the data, if they aren't the rows' numbers.
        columns: the names of x's columns and of y's, as far as they have any.

    Example:
        >>> import torch
        >>> from fitkit.extras.bad_numbers import first_bad
        >>> x = torch.zeros(4, 3); x[2, 1] = float("nan")
        >>> first_bad((x, torch.zeros(4)), [8, 3, 17, 5])
        'x of sample 17 is nan at column 1'
    """
    for name, leaf in _named_leaves(data):
        tensor = torch.from_numpy(leaf) if _is_float_array(leaf) else leaf
        if not isinstance(tensor, torch.Tensor) or not trees.is_inexact(tensor) or not tensor.ndim:
            continue
        if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_meta:
            continue
        bad = ~torch.isfinite(tensor.detach())
        if not bool(bad.any()):
            continue
        place = bad.nonzero()[0].tolist()
        value = tensor[tuple(place)].item()
        row = place[0] if indices is None or place[0] >= len(indices) else indices[place[0]]
        inner = place[1:]
        names = dict(zip("xy", columns, strict=False)).get(name) or range(tensor[0].numel())
        at = f" at {inner}" if inner else ""
        if len(inner) == 1:
            at = f" at column {names[inner[0]]!r}"
        return f"{name} of sample {row} is {value}{at}"
    return None


def _is_float_array(leaf: Any) -> bool:
    return isinstance(leaf, np.ndarray) and leaf.dtype.kind in "fc" and leaf.dtype.itemsize <= 16


def _named_leaves(data: Any) -> Iterator[tuple[str, Any]]:
    """Yield the leaves of a batch with the names of its parts."""
    parts = data if isinstance(data, (tuple, list)) else (data,)
    for number, part in enumerate(parts):
        name = ("x", "y", "sample_weight")[number] if len(parts) <= 3 else f"entry {number}"
        for path, leaf in trees.leaves_with_paths(part):
            yield f"{name}{path}", leaf


def _first_bad_held_out(run: Any) -> str:
    """Say where validation data have a number that isn't finite; "" where that isn't known."""
    for name, source in run.arguments.held_out.items():
        if (where := first_bad_in(source)) is not None:
            return f"In the validation data{f' {name!r}' if name else ''}, {where}."
    return ""


def first_bad_of(run: Any, indices: list[int] | None = None) -> str | None:
    """As `first_bad_in`, of the data of a running fit."""
    return first_bad_in(run.data.source.whole, indices)


def first_bad_in(whole: Source, indices: list[int] | None = None) -> str | None:
    """Return where data have a number that isn't finite; None where not known.

    Args:
        whole: the data of all ranks.
        indices: of the samples that are looked at, which a data set reads once more. None for all,
            where they are in memory, or as many as a data set gives in `SEARCHED_S`.
    """
    if indices is None and (held := _in_memory(whole)) is not None:
        return first_bad(*held)
    if isinstance(whole, ArraySource):
        return first_bad(whole.take(torch.tensor(indices)), indices, whole.columns)
    if not isinstance(whole, LoaderSource):
        return None
    dataset: Any = whole.loader.dataset
    if indices is None and (whole.is_stream or not hasattr(dataset, "__len__")):
        return None
    end = time.monotonic() + (SEARCHED_S if indices is None else math.inf)
    with kept_random_numbers(), contextlib.suppress(Exception):  # its indices may be others
        for index in range(len(dataset)) if indices is None else indices:
            sample = trees.map_leaves(_as_row, dataset[index])
            if (found := first_bad(sample, [index])) is not None:
                return found
            if time.monotonic() > end:
                break
    return None


def _in_memory(source: Source) -> tuple[Any, None, Sequence[Sequence[str]]] | None:
    """Return `first_bad`'s arguments for data that are in memory as a whole; None for others."""
    if isinstance(source, ArraySource):
        return source.batch, None, source.columns
    dataset: Any = source.loader.dataset if isinstance(source, LoaderSource) else None
    return (dataset.tensors, None, ()) if type(dataset) is TensorDataset else None


def _as_row(leaf: Any) -> Any:
    if isinstance(leaf, float):
        return torch.tensor([leaf])
    return leaf[None] if isinstance(leaf, (torch.Tensor, np.ndarray)) else leaf


def advice_after_evaluation(model: torch.nn.Module, source: Source) -> str:
    """Return where numbers are that aren't finite, of an evaluation whose loss isn't, and what to
    do.
    """
    if (name := first_spoiled(model.named_parameters())) is not None:
        return (
            f"The net's {name} isn't finite: load weights from before the training that spoiled "
            "them."
        )
    if (where := first_bad_in(source)) is not None:
        return f"In the data, {where}: leave such samples out, or fill what is missing."
    return "model.predict(x) shows the samples for which the net's outputs aren't finite."
