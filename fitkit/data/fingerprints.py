"""Whether the ranks have read the same data, told from little of it.

Where each rank runs the script, each makes its own data. Random data or splits without a seed then
differ, and the ranks would deal out parts of different wholes, which nothing shows.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset

from fitkit import trees
from fitkit.data.arrays import ArraySource
from fitkit.data.sources import LoaderSource, length_of
from fitkit.errors import ConfigurationError

LOOKED_AT = 256
"""How many numbers of each array are looked at, evenly spread."""


class Exchange(Protocol):
    """What the comparison needs of the ranks' collectives."""

    rank: int

    def gather(self, value: Any) -> list[Any]: ...


def check_same_on_all_ranks(source: ArraySource | LoaderSource, exchange: Exchange) -> None:
    """Refuse data that differ between the ranks.

    Arrays (also inside a `TensorDataset`) are compared by shape, dtype and some of their numbers,
    a `Subset` by some of its indices; of other data sets the length is all that is known.

    Ranks:
        Collective.

    Raises:
        ConfigurationError: on every rank, with what two ranks have.
    """
    everyone = exchange.gather(list(_facts(source)))
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
            f"The ranks have different data: {differ}. Every rank runs the script and must come to "
            "the same data, of which fitkit gives each its part: seed what makes, splits or "
            "shuffles them (fitkit.set_seed(0)). If each rank's data are its part already, give a "
            "DataLoader and compile(replace_sampler=False)."
        )


def _facts(source: ArraySource | LoaderSource) -> Iterator[tuple[str, int]]:
    """What can be known of a source for little, in words, each with a checksum."""
    if isinstance(source, ArraySource):
        for name, part in zip(("x", "y", "sample_weight"), source.batch, strict=False):
            for path, leaf in trees.leaves_with_paths(part):
                yield _array(name + path, leaf)
    else:
        yield from _dataset_facts(source.loader.dataset)


def _dataset_facts(dataset: Dataset[Any]) -> Iterator[tuple[str, int]]:
    yield f"a {type(dataset).__name__} of {length_of(dataset)} samples", 0
    if type(dataset) is TensorDataset:
        for index, tensor in enumerate(dataset.tensors):
            yield _array(f"tensors[{index}]", tensor)
    elif type(dataset) is Subset:
        # Its indices may be millions in a list; a slice of it would be made in full.
        step = max(len(dataset.indices) // LOOKED_AT, 1)
        chosen = [int(dataset.indices[at]) for at in range(0, len(dataset.indices), step)]
        yield "a Subset's indices", zlib.crc32(repr(chosen).encode())
        yield from _dataset_facts(dataset.dataset)
    elif type(dataset) is ConcatDataset:
        for part in dataset.datasets:
            yield from _dataset_facts(part)


def _array(name: str, value: Any) -> tuple[str, int]:
    """An array's name, shape and dtype, and the checksum of some of its numbers."""
    if not isinstance(value, torch.Tensor):
        return f"{name} {type(value).__name__}", 0
    words = f"{name} {tuple(value.shape)} {str(value.dtype).removeprefix('torch.')}"
    if value.layout is not torch.strided or value.numel() == 0:
        return words, 0
    positions = torch.linspace(0, value.numel() - 1, LOOKED_AT, dtype=torch.float64).long()
    places = torch.unravel_index(positions.to(value.device), value.shape)
    seen = value.detach()[places].contiguous().cpu().view(torch.uint8)
    return words, zlib.crc32(seen.numpy().tobytes())
