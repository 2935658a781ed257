"""A loader's samplers: telling them the epoch, and putting others in their place."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader


def tell_epoch(loader: DataLoader[Any], number: int) -> None:
    """Call `set_epoch` of a loader's samplers that have it."""
    for sampler in (loader.sampler, loader.batch_sampler):
        set_epoch = getattr(sampler, "set_epoch", None)
        if callable(set_epoch):
            set_epoch(number)


def draw_as_iterating_does(loader: DataLoader[Any]) -> None:
    """Draw the workers' seed, as iterating a loader does once it has begun to iterate its sampler,
    before the first index is asked for."""
    torch.empty((), dtype=torch.int64).random_(generator=loader.generator)


def iterate(loader: DataLoader[Any]) -> Iterator[Any]:
    """Begin a pass, with the same draws of random numbers whether workers are new or live on.

    torch draws a seed for workers where it starts them, and none where `persistent_workers=True`
    keeps them: the order would hang on which process has begun them, and when.
    """
    if loader.persistent_workers and getattr(loader, "_iterator", None) is not None:
        iter(getattr(loader, sampler_name(loader)))  # torch begins twice there
        draw_as_iterating_does(loader)
    return iter(loader)


def sampler_name(loader: DataLoader[Any]) -> str:
    """Which of a loader's samplers decides on its batches."""
    return "sampler" if loader.batch_sampler is None else "batch_sampler"


def with_sampler(loader: DataLoader[Any], sampler: Any) -> DataLoader[Any]:
    """The loader with another sampler in the deciding one's place."""
    # A shallow copy keeps the user's subclass and attributes; a DataLoader refuses new samplers by
    # its own __setattr__.
    other = copy.copy(loader)
    object.__setattr__(other, sampler_name(loader), sampler)
    object.__setattr__(other, "_iterator", None)  # workers that live on follow the old sampler
    return other


class Once:
    """A sampler that gives what an iterator still has."""

    def __init__(self, remaining: Iterator[Any]) -> None:
        self._remaining = remaining

    def __iter__(self) -> Iterator[Any]:
        return self._remaining
