"""Streams that several loader workers read: who doesn't divide one gets each sample from each."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import xxhash
from torch.utils.data import DataLoader, IterableDataset

from fitkit import trees
from fitkit.data.loaders import iterates_by_itself
from fitkit.errors import warn_once
from fitkit.tensors import bytes_of, is_dense

ROUNDS = 2
"""How many batches of each worker are compared."""


def watched(batches: Iterator[Any], loader: DataLoader[Any]) -> Iterator[Any]:
    """Return a pass's batches. Warn if each worker of the loader reads the whole stream.

    The workers give batches by turns. Those of a stream that nobody divides come once from each
    worker, equal to the last bit. Streams that divide themselves, or that draw random numbers, give
    others; in a stream of equal samples nothing can be seen.
    """
    is_stream = isinstance(loader.dataset, IterableDataset) and not iterates_by_itself(loader)
    if not is_stream or loader.num_workers < 2 or not loader.in_order:
        return batches
    return _compared(batches, loader.num_workers, type(loader.dataset).__name__)


def _compared(batches: Iterator[Any], workers: int, name: str) -> Iterator[Any]:
    seen: list[bytes | None] = []
    for batch in itertools.islice(batches, ROUNDS * workers):
        seen.append(_digest(batch))  # before anybody writes into it
        if len(seen) == ROUNDS * workers and _are_given_by_each(seen, workers):
            warn_once(
                f"Each of the loader's {workers} workers reads the whole {name}: their batches are "
                f"equal, so each sample comes {workers} times in a pass. Write "
                "DataLoader(num_workers=1), or divide the samples in its __iter__: info = "
                "torch.utils.data.get_worker_info(), and then "
                "itertools.islice(samples, info.id, None, info.num_workers)."
            )
        yield batch
    batch = None
    yield from batches


def _are_given_by_each(seen: list[bytes | None], workers: int) -> bool:
    """Whether the batches of each round are equal, and no two rounds are."""
    rounds = [set(seen[at : at + workers]) for at in range(0, len(seen), workers)]
    return all(len(one) == 1 for one in rounds) and None not in seen and len({*seen}) == ROUNDS


def _digest(batch: Any) -> bytes | None:
    """Return a digest of a batch's numbers and texts; None if it has anything else."""
    digest = xxhash.xxh3_128()
    for path, leaf in trees.leaves_with_paths(batch):
        if isinstance(leaf, np.ndarray) and leaf.dtype.kind in "biufcU":
            leaf = torch.from_numpy(leaf) if leaf.dtype.kind != "U" else leaf.tolist()
        digest.update(f"{path} {type(leaf)}".encode())
        if isinstance(leaf, torch.Tensor):
            if not is_dense(leaf):
                return None
            digest.update(f"{leaf.dtype} {tuple(leaf.shape)}".encode())
            digest.update(bytes_of(leaf).cpu().numpy().data)
        elif isinstance(leaf, (str, bytes, bool, int, float)) or leaf is None:
            digest.update(repr(leaf).encode())
        else:
            return None
    return digest.digest()
