"""Batches that wait for the metrics: one update for many costs about as much as for one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeAlias

from torch import Tensor

from fitkit.metrics.gauges import Batch
from fitkit.trees import concatenate

Parts: TypeAlias = tuple[Tensor, Tensor, "Tensor | None"]

MOST_BATCHES = 20
"""So many batches are joined at most (an accuracy then costs 5 µs a batch in place of 78)."""
MOST_ELEMENTS = 2**18
"""So many numbers wait at most (1 MB in float32): joining large batches gains nothing."""


class Pending:
    """The predictions, targets and weights that no metric has seen yet.

    They are kept as they are, not copied: a net's outputs and a loader's targets are new
    tensors for each batch.

    Args:
        most_batches: how many may wait; 1: none does.
    """

    def __init__(self, most_batches: int = MOST_BATCHES) -> None:
        self._most_batches = most_batches
        self._waiting: list[Parts] = []
        self._elements = 0

    def add(self, prediction: Tensor, target: Tensor, weight: Tensor | None) -> bool:
        """Let a batch wait; returns whether it is time to take them all."""
        if prediction.requires_grad:
            prediction = prediction.detach()  # else its graph would stay in memory with it
        waiting = self._waiting
        waiting.append((prediction, target, weight))
        self._elements += prediction.numel()
        return len(waiting) >= self._most_batches or self._elements >= MOST_ELEMENTS

    def take(self) -> Iterator[Batch]:
        """All that wait, joined where neighbours have the same shapes beyond dimension 0."""
        waiting, self._waiting = self._waiting, []
        self._elements = 0
        start = 0
        for index in range(1, len(waiting) + 1):
            if index == len(waiting) or not _fit(waiting[start], waiting[index]):
                yield _join(waiting[start:index])
                start = index

    def clear(self) -> None:
        """Forget them."""
        self._waiting.clear()
        self._elements = 0


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


def _join(waiting: list[Parts]) -> Batch:
    predictions, targets, weights = zip(*waiting, strict=True)
    prediction = concatenate(list(predictions))
    target = concatenate(list(targets)).to(prediction.device)
    weight = None if weights[0] is None else concatenate(list(weights))
    return Batch(prediction, target, weight)
