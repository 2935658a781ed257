"""Batches that wait for the metrics: one update for many costs about as much as for one."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any, TypeAlias

import torch
from torch import Tensor

from fitkit.metrics.gauges import Batch

Parts: TypeAlias = tuple[Tensor, Tensor, "Tensor | None"]

MOST_BATCHES = 64
"""So many batches are joined at most; an update of torchmetrics then costs 2 µs a batch, not 80."""
MOST_ELEMENTS = 2**16
"""So many numbers wait at most, predictions and targets: 0.25 MB in float32, which caches hold."""
LARGE = 2**15
"""Batches of more numbers don't wait: to copy them takes longer than what joining saves."""


@dataclasses.dataclass(slots=True)
class _Place:
    """Memory for a batch; used again and again, as a new tensor takes twice a copy's time.

    Attributes:
        prediction, target: the memory; of one dimension where the batch's have none.
        shape, target_shape, dtype, target_dtype: those of the batches that fit.
        size: how many numbers there are.
        kind: what batches that are joined have in common.
    """

    prediction: Tensor
    target: Tensor
    shape: torch.Size
    target_shape: torch.Size
    dtype: torch.dtype
    target_dtype: torch.dtype
    size: int
    kind: tuple[Any, ...]


class Pending:
    """The predictions, targets and weights that no metric has seen yet.

    What waits is copied: a generator may refill its own buffers with the next batch (also
    through NumPy, of which torch sees nothing), a net may give its input, and one replayed as a
    CUDA graph overwrites its outputs. Large batches neither wait nor are copied.

    Args:
        keeps: whether what is taken stays with a metric, which then needs its own memory.
    """

    def __init__(self, keeps: bool = False) -> None:
        self._keeps = keeps
        self._places: list[_Place] = []
        self._made = 0
        self._weights: dict[int, Tensor] = {}
        self._waiting = 0
        self._elements = 0
        self._large: Parts | None = None

    def __bool__(self) -> bool:
        """Whether any wait."""
        return self._waiting > 0

    def add(self, prediction: Tensor, target: Tensor, weight: Tensor | None) -> bool:
        """Let a batch wait, without its gradients.

        Returns:
            Whether it is time to take them all, at once: the last may not be a copy.
        """
        index = self._waiting
        place = self._places[index] if index < self._made else None
        if (
            place is None
            or prediction.shape != place.shape
            or target.shape != place.target_shape
            or prediction.dtype is not place.dtype
            or target.dtype is not place.target_dtype
        ):
            if prediction.numel() + target.numel() > LARGE:
                self._large = prediction.detach(), target.detach(), weight
                return True
            place = self._make_place(index, prediction, target)
        # Asking costs a tenth of detaching.
        place.prediction.copy_(prediction.detach() if prediction.requires_grad else prediction)
        place.target.copy_(target.detach() if target.requires_grad else target)
        if weight is not None:
            self._weights[index] = torch.atleast_1d(weight.detach()).clone()
        self._waiting = index + 1
        self._elements += place.size
        return self._waiting >= MOST_BATCHES or self._elements >= MOST_ELEMENTS

    def _make_place(self, index: int, prediction: Tensor, target: Tensor) -> _Place:
        """The place of this index, for batches like this one."""
        with torch.inference_mode(False), torch.no_grad():
            # What is made in inference mode can't be written to outside of it.
            kept = torch.empty_like(torch.atleast_1d(prediction))
            kept_target = torch.empty_like(torch.atleast_1d(target), device=kept.device)
        place = _Place(
            kept,
            kept_target,
            prediction.shape,
            target.shape,
            prediction.dtype,
            target.dtype,
            prediction.numel() + target.numel(),
            (kept.ndim, kept.shape[1:], kept_target.ndim, kept_target.shape[1:]),
        )
        self._places[index : index + 1] = [place]
        self._made = len(self._places)
        return place

    def take(self) -> Iterator[Batch]:
        """All that wait, as `joined`, and forget them."""
        batches, large, keeps = list(self.joined()), self._large, self._keeps
        self.clear()
        yield from batches
        if large is not None:
            prediction, target, weight = large
            target = target.to(prediction.device)
            if keeps:
                prediction, target = prediction.clone(), target.clone()
            yield Batch(prediction, target, weight)

    def joined(self) -> Iterator[Batch]:
        """All that wait, joined where neighbours have the same shapes beyond dimension 0."""
        for _, indices in itertools.groupby(range(self._waiting), self._kind):
            chosen = list(indices)
            places = [self._places[index] for index in chosen]
            weights = [self._weights[index] for index in chosen if index in self._weights]
            yield Batch(
                torch.cat([place.prediction for place in places]),
                torch.cat([place.target for place in places]),
                torch.cat(weights) if weights else None,
            )

    def _kind(self, index: int) -> tuple[Any, ...]:
        """What neighbours must have in common to be joined."""
        weight = self._weights.get(index)
        return self._places[index].kind, None if weight is None else (weight.ndim, weight.shape[1:])

    def clear(self) -> None:
        """Forget them."""
        self._waiting = self._elements = 0
        self._weights.clear()
        self._large = None
