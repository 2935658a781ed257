"""Cut a batch into smaller ones, without asking what fitkit counts in it."""

from __future__ import annotations

import copy
import dataclasses
import itertools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from fitkit import trees
from fitkit.arguments import describe
from fitkit.errors import ConfigurationError
from fitkit.random_states import set_seed
from fitkit.seams.batches import kind_of
from fitkit.seams.data import samples_between

SEED = 20_011


@dataclasses.dataclass
class Kept:
    """The samples that a data set gave for a batch, and what joined them."""

    samples: list[Any]
    collate: Callable[[list[Any]], Any]

    def batch(self, start: int, stop: int) -> Any:
        """Return a batch of some of the samples, which stay as they are."""
        return self.collate(copy.deepcopy(self.samples[start:stop]))


def cut(batch: Any, parts: int, kept: Kept | None = None) -> list[Any]:
    """Cut a batch into parts of uneven sizes, which weigh unlike.

    It counts by itself, since it is there to find what fitkit counts wrongly.

    Args:
        kept: the batch's samples. They are joined again if the batch itself can't be cut.

    Raises:
        ConfigurationError: it can't be cut.
    """
    samples = _rows_of(batch)
    if samples is None and kept is None:
        odd = next((leaf for leaf in trees.leaves(batch) if not _has_rows(leaf)), batch)
        raise ConfigurationError(f"A batch holds {describe(odd)}, which can't be cut.")
    size = samples if samples is not None else len(kept.samples) if kept else 0
    if size < 2 * parts:
        raise ConfigurationError(f"A batch of {size} samples is too small for {parts} parts.")
    bounds = bounds_of(size, parts)
    if samples is None and kept is not None:
        _refuse_random(kept)
        return [kept.batch(start, stop) for start, stop in itertools.pairwise(bounds)]
    return [_sliced(batch, start, stop) for start, stop in itertools.pairwise(bounds)]


def bounds_of(size: int, parts: int) -> list[int]:
    """Return where the parts of a batch of so many samples begin, and where the last one ends."""
    bounds = [round(size * place / parts) for place in range(parts + 1)]
    if size >= 3 * parts:
        bounds[1:-1] = [bound + 1 for bound in bounds[1:-1]]
    return bounds


def size_of(batch: Any, kept: Kept | None) -> int:
    """Return the number of a batch's samples, by its rows or by its data set; 0 if neither shows
    it.
    """
    samples = _rows_of(batch)
    return samples if samples is not None else len(kept.samples) if kept else 0


def _has_rows(leaf: Any) -> bool:
    kind = kind_of(leaf)
    return leaf is None or ((kind is None or kind.has_rows) and bool(_shape(leaf)))


def _shape(leaf: Any) -> Any:
    return getattr(leaf, "shape", None)


def _rows_of(batch: Any) -> int | None:
    """Return the length of all columns of a batch: of tensors and of lists; None if they differ."""
    if _shape(batch) is not None or isinstance(batch, torch.Tensor):
        return _column(batch)
    if not isinstance(batch, (tuple, list, Mapping)) or kind_of(batch) is not None:
        return None
    if not _is_plain_container(batch):
        return None
    if type(batch) is list and len(batch) > 3 and not all(map(_shape, batch)):
        return len(batch)
    found = {_column(child) for child in _parts_of(batch)} - {0}
    return found.pop() if len(found) == 1 and None not in found else None


def _is_plain_container(tree: Any) -> bool:
    """Whether a container is nothing but its entries: one with attributes may say what it is."""
    return not vars(tree) if type(tree) is not dict and hasattr(tree, "__dict__") else True


def _parts_of(tree: Any) -> list[Any]:
    return list(tree.values()) if isinstance(tree, Mapping) else list(tree)


def _column(tree: Any) -> int | None:
    """Return the length of a column, 0 for no column, None for none that can be cut."""
    if tree is None:
        return 0
    if _shape(tree) is not None or isinstance(tree, torch.Tensor):
        return tree.shape[0] if _has_rows(tree) else None
    if kind_of(tree) is not None or not trees.is_container(tree):
        return None
    if isinstance(tree, (tuple, list)) and not all(map(_has_rows, tree)):
        return len(tree)
    if not (isinstance(tree, (tuple, list, Mapping)) and _is_plain_container(tree)):
        return None
    found = {_column(child) for child in _parts_of(tree)} - {0}
    if len(found) == 1:
        return found.pop()
    return len(tree) if isinstance(tree, (tuple, list)) and len(tree) > 3 else None


def _sliced(tree: Any, start: int, stop: int) -> Any:
    """Return some samples of a batch that `_rows_of` could count."""
    if all(_has_rows(leaf) for leaf in trees.leaves(tree)) and len(_lengths(tree)) <= 1:
        return samples_between(tree, start, stop)
    if type(tree) is list and len(tree) > 3 and not all(map(_shape, tree)):
        return tree[start:stop]
    if isinstance(tree, Mapping):
        return {key: _sliced_column(child, start, stop) for key, child in tree.items()}
    return tuple(_sliced_column(child, start, stop) for child in tree)


def _sliced_column(tree: Any, start: int, stop: int) -> Any:
    if tree is None or _shape(tree) is not None:
        return None if tree is None else tree[start:stop]
    if isinstance(tree, (tuple, list)) and (
        not all(map(_has_rows, tree)) or len(_lengths(tree)) > 1
    ):
        return tree[start:stop]
    return _sliced(tree, start, stop)


def _lengths(tree: Any) -> set[int]:
    return {leaf.shape[0] for leaf in trees.leaves(tree) if leaf is not None}


def _refuse_random(kept: Kept) -> None:
    """Refuse a collate_fn that draws, since it would give other batches.

    Raises:
        ConfigurationError: it gives something else with another seed.
    """
    found = []
    for seed in (SEED, SEED + 1):
        set_seed(seed)
        found.append(kept.batch(0, len(kept.samples)))
    if not same_bits(*found):
        raise ConfigurationError("The collate_fn draws random numbers, so batches can't be cut.")


def same_bits(one: Any, other: Any) -> bool:
    """Whether two entries of state dicts or of batches are equal; NaN is NaN."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        kind = kind_of(one)
        if kind is not None and not kind.has_rows:
            return same_bits(one.unbind(), other.unbind())
        return one.shape == other.shape and torch.allclose(
            one, other, rtol=0, atol=0, equal_nan=True
        )
    if type(one) is not type(other):
        return False
    if trees.is_container(one):
        pairs = zip(trees.leaves(one), trees.leaves(other), strict=False)
        return all(same_bits(*pair) for pair in pairs)
    if hasattr(one, "__dict__") and getattr(type(one), "__eq__", None) is object.__eq__:
        return same_bits(vars(one), vars(other))
    return bool(np.all(one == other))
