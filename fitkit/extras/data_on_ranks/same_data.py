"""The same data on all ranks: checked by a few facts, before each rank reads its part."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset

from fitkit import trees
from fitkit.arguments import dtype_name
from fitkit.errors import ConfigurationError
from fitkit.seams.batches import kind_of
from fitkit.seams.callbacks import ArraySource
from fitkit.seams.data import DrawnSource, LoaderSource, Source, length_of
from fitkit.seams.strategies import Collectives
from fitkit.tensors import bytes_of, is_dense

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
    elif isinstance(source, DrawnSource):
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


def batch_facts(batch: Any) -> Iterator[tuple[str, int]]:
    """Yield the same facts about a batch."""
    for path, leaf in trees.leaves_with_paths(batch):
        leaf = torch.from_numpy(np.ascontiguousarray(leaf)) if _is_numbers(leaf) else leaf
        is_plain = isinstance(leaf, (str, bytes, int, float))
        yield (f"{path} {leaf!r}", 0) if is_plain else _array_facts(path, leaf)


def _is_numbers(leaf: Any) -> bool:
    return isinstance(leaf, np.ndarray) and leaf.dtype.kind in "fiub" and leaf.dtype.isnative


def _array_facts(name: str, value: Any) -> tuple[str, int]:
    """Return an array's name, shape and dtype, and the checksum of some of its numbers."""
    kind = kind_of(value)
    if not isinstance(value, torch.Tensor) or (kind is not None and not kind.has_rows):
        return f"{name} {type(value).__name__}", 0
    words = f"{name} {tuple(value.shape)} {dtype_name(value.dtype)}"
    if not is_dense(value) or value.numel() == 0:
        return words, 0
    positions = torch.linspace(0, value.numel() - 1, LOOKED_AT, dtype=torch.float64).long()
    places = torch.unravel_index(positions.to(value.device), value.shape)
    return words, zlib.crc32(bytes_of(value[places].cpu()).numpy().tobytes())
