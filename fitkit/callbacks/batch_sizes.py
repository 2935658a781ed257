"""Callbacks that say, by epoch, how many samples a batch has, or how many batches an update."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TypeVar

Value = TypeVar("Value")
Other = TypeVar("Other")


class SetsBatchSize:
    """A callback by which `fit` cuts its data.

    Attributes:
        batch_size: from the epochs (from 0) on which batches have another size: the samples of a
            rank's batch. None stands for `fit`'s argument.
    """

    batch_size: Mapping[int, int | None]


class SetsAccumulation:
    """A callback by which `fit` counts the updates of its epochs.

    Attributes:
        scheduling: from the epochs (from 0) on which updates have another number of batches: that
            number.
    """

    scheduling: Mapping[int, int]


def batch_sizes_among(callbacks: Iterable[object]) -> dict[int, int | None]:
    """Return what callbacks say about batch sizes; nothing if none does."""
    said: dict[int, int | None] = {}
    for callback in callbacks:
        if isinstance(callback, SetsBatchSize):
            said.update(callback.batch_size)
    return dict(sorted(said.items()))


def value_in(by_epoch: Mapping[int, Value], epoch: int, otherwise: Other) -> Value | Other:
    """Return what holds in an epoch, of values that hold from their epochs on, in order.

    Args:
        otherwise: what holds before the first one.
    """
    begun = [value for first, value in by_epoch.items() if first <= epoch]
    return begun[-1] if begun else otherwise
