"""Whether a sample's random numbers follow from its seed: it is read twice under one seed."""

from __future__ import annotations

import copy
import math
from typing import Any

from torch.utils.data import ConcatDataset, Subset

from fitkit import trees
from fitkit.extras.verification.cutting import SEED, same_bits
from fitkit.extras.verification.results import Row, cause_of
from fitkit.random_states import set_seed
from fitkit.seams.data import (
    Keys,
    LoaderSource,
    Seeded,
    Source,
    length_of,
    reads_by_index,
    reads_samples,
)

SAMPLES = 4
"""How many samples are read twice."""


def augmentation_row(source: Source) -> Row:
    """Read some samples twice under one seed, in another order, with other numbers drawn before.

    The data set is named that gives something else, the innermost one.
    """
    what = "a sample, read twice"
    loader = source.loader if isinstance(source, LoaderSource) else None
    if loader is None or reads_by_index(loader):
        note = "Nothing draws: the data are read by index, or come as batches."
        return Row("augmentation", what, None, note=note)
    if not reads_samples(loader):
        note = "A stream, or a loader that reads by itself, draws as torch seeds it."
        return Row("augmentation", what, None, note=note)
    count = length_of(loader.dataset) or 0
    indices = sorted({place * (count - 1) // (SAMPLES - 1) for place in range(SAMPLES)})
    try:
        index = next((i for i in indices if not _is_same(loader.dataset, i)), None)
    except Exception as error:  # its indices are others, such as names
        note = f"Samples can't be read by number: {type(error).__name__}."
        return Row("augmentation", what, None, note=note)
    if index is None:
        return Row("augmentation", what, True, math.inf)
    place = f"The data set {type(_innermost(loader.dataset, index)).__name__}"
    causes = (cause_of("augmentation", place),)
    return Row("augmentation", what, False, 0.0, f"sample {index}", causes)


def _is_same(dataset: Any, index: int) -> bool:
    """Whether a sample is the same when it is read again."""
    first = _read(dataset, index, seed=SEED)
    again = _read(dataset, index, seed=SEED + 1)
    pairs = zip(trees.leaves(first), trees.leaves(again), strict=False)
    return all(same_bits(one, other) for one, other in pairs)


def _read(dataset: Any, index: int, seed: int) -> Any:
    """Read a sample as `fit` does, whatever the generators' states are before."""
    set_seed(seed)
    seeded = Seeded(dataset, _copied, None, by_batch=False)
    return seeded[Keys(SEED, 0, 0, index)]


def _copied(sample: Any) -> Any:
    return copy.deepcopy(sample)  # a data set may give the same memory again


def _innermost(dataset: Any, index: int) -> Any:
    """Return the data set that differs, inside of those that wrap it."""
    inner, inside = getattr(dataset, "dataset", None), index
    if isinstance(dataset, Subset):
        inside = dataset.indices[index]
    elif isinstance(dataset, ConcatDataset):
        place = next(n for n, size in enumerate(dataset.cumulative_sizes) if index < size)
        inner = dataset.datasets[place]
        inside = index - (dataset.cumulative_sizes[place - 1] if place else 0)
    try:
        if inner is None or _is_same(inner, inside):
            return dataset
    except Exception:  # it takes other indices
        return dataset
    return _innermost(inner, inside)
