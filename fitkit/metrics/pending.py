"""Batches that wait for the metrics: one update for many costs about as much as for one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from fitkit.metrics.gauges import Batch
from fitkit.trees import concatenate

Parts: TypeAlias = tuple[Tensor, Tensor, "Tensor | None"]
_Place: TypeAlias = tuple[Tensor, Tensor, torch.Size, torch.Size, torch.dtype, torch.dtype]
"""Memory for a prediction and a target, and their shapes and dtypes."""

MOST_BATCHES = 20
"""So many batches are joined at most (an accuracy then costs 5 µs a batch in place of 78)."""
MOST_ELEMENTS = 2**18
"""So many numbers wait at most (1 MB in float32): joining large batches gains nothing."""


class Pending:
    """The predictions, targets and weights that no metric has seen yet.

    What waits is copied: a generator may refill its own buffers with the next batch (also
    through NumPy, of which torch sees nothing), a net may give its input, and one replayed as a
    CUDA graph overwrites its outputs. Batches too large to wait aren't copied.

    Args:
        keeps: whether what `take` gives stays with a metric, which then needs its own memory.
    """

    def __init__(self, keeps: bool = False) -> None:
        self._keeps = keeps
        self._waiting: list[Parts] = []
        self._elements = 0
        # Memory for what waits, used again and again: a new tensor takes twice a copy's time.
        self._places: list[_Place] = []

    def add(self, prediction: Tensor, target: Tensor, weight: Tensor | None) -> bool:
        """Let a batch wait; returns whether it is time to take them all, at once.

        Call it without gradients, so that no graph stays in memory with what waits.
        """
        waiting = self._waiting
        index = len(waiting)
        self._elements += prediction.numel()
        if index + 1 >= MOST_BATCHES or self._elements >= MOST_ELEMENTS:
            waiting.append((prediction, target, weight))
            return True
        if index == len(self._places):
            self._places.append(_place_for(prediction, target))
        kept, kept_target, shape, target_shape, dtype, target_dtype = self._places[index]
        if (
            prediction.shape != shape
            or target.shape != target_shape
            or prediction.dtype is not dtype
            or target.dtype is not target_dtype
        ):
            kept, kept_target, *_ = self._places[index] = _place_for(prediction, target)
        copies = kept.copy_(prediction), kept_target.copy_(target)
        waiting.append((*copies, None if weight is None else weight.clone()))
        return False

    def take(self) -> Iterator[Batch]:
        """All that wait, joined where neighbours have the same shapes beyond dimension 0."""
        waiting, self._waiting = self._waiting, []
        self._elements = 0
        start = 0
        for index in range(1, len(waiting) + 1):
            if index == len(waiting) or not _fit(waiting[start], waiting[index]):
                yield self._join(waiting[start:index])
                start = index

    def clear(self) -> None:
        """Forget them."""
        self._waiting.clear()
        self._elements = 0

    def _join(self, waiting: list[Parts]) -> Batch:
        predictions, targets, weights = zip(*waiting, strict=True)
        prediction = self._joined(predictions)
        target = self._joined(targets).to(prediction.device)
        return Batch(prediction, target, None if weights[0] is None else self._joined(weights))

    def _joined(self, parts: Sequence[Tensor]) -> Tensor:
        if len(parts) == 1 and parts[0].ndim and not self._keeps:
            return parts[0]  # it may be large
        joined: Tensor = concatenate(list(parts))
        return joined


def _place_for(prediction: Tensor, target: Tensor) -> _Place:
    with torch.inference_mode(False):  # what is made within it can't be written to later
        memory = torch.empty_like(prediction), torch.empty_like(target)
    return *memory, prediction.shape, target.shape, prediction.dtype, target.dtype


def _fit(parts: Parts, others: Parts) -> bool:
    """Whether two batches can be joined."""
    for part, other in zip(parts, others, strict=True):
        if part is None or other is None:
            if part is not other:
                return False
        elif part.shape != other.shape and (
            part.ndim != other.ndim or part.shape[1:] != other.shape[1:]
        ):
            return False
    return True
