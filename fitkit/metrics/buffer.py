"""The batches that no metric has seen yet: many small ones are counted as one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fitkit.metrics.sums import Batch

MOST_BATCHES = 256
"""So many batches are joined at most; an update of torchmetrics then costs 2 µs a batch, not 80."""
MOST_ELEMENTS = 2**16
"""So many numbers wait at most, predictions and targets: 0.25 MB in float32, which caches hold."""
GROWTH = 8
"""A block is so many times as large as the one before: few blocks are joined, and copied for it."""
LARGE = 2**15
"""Batches of more numbers don't wait: to copy them takes longer than what joining saves."""


class Buffer:
    """Predictions, targets and weights that wait until there are enough of them.

    What waits is copied: a generator may refill its own buffers with the next batch (also
    through NumPy, of which torch sees nothing), a net may give its input, and one that is
    compiled with `mode="reduce-overhead"` overwrites its outputs. Large batches neither wait
    nor are copied.

    Batches of one shape are copied into a block, memory in one piece that is used again and again:
    a new tensor takes twice a copy's time, and joining them takes no further copy.

    Args:
        keeps: whether what is taken stays with a metric, which then needs its own memory.
    """

    def __init__(self, *, keeps: bool = False) -> None:
        self._keeps = keeps
        self._kind: Any = None  # what batches that are joined have in common
        self._like: Any = None  # the shapes and types of the block's batches
        self._block: tuple[Tensor, Tensor] | None = None
        self._places: Sequence[tuple[Tensor, Tensor]] = ()  # each batch's part of the block
        self._used = 0  # of these
        self._size = 0  # how many numbers one of them has
        self._full: list[tuple[Tensor, Tensor]] = []  # blocks before this one
        self._weights: list[Tensor] = []
        self._waiting = self._elements = 0

    def __bool__(self) -> bool:
        """Whether any wait."""
        return self._waiting > 0

    def add(self, prediction: Tensor, target: Tensor, weight: Tensor | None) -> Sequence[Batch]:
        """Let a batch wait, without its gradients.

        Returns:
            What is to be counted now, before the next `add`, which uses its memory again.
        """
        ready: Sequence[Batch] = ()
        like = (
            prediction.shape, target.shape, prediction.dtype, target.dtype,
            None if weight is None else weight.shape,
        )  # fmt: skip
        if like != self._like or self._used == len(self._places):
            if prediction.numel() + target.numel() > LARGE:
                return *self.take(), self._large(prediction, target, weight)
            ready = self._begin_block(prediction, target, like)
        to_prediction, to_target = self._places[self._used]
        # Asking costs a tenth of detaching.
        to_prediction.copy_(prediction.detach() if prediction.requires_grad else prediction)
        to_target.copy_(target.detach() if target.requires_grad else target)
        if weight is not None:
            self._weights.append(torch.atleast_1d(weight.detach()).clone())
        self._used += 1
        self._waiting += 1
        self._elements += self._size
        if self._waiting >= MOST_BATCHES or self._elements >= MOST_ELEMENTS:
            return *ready, *self.take()
        return ready

    def _large(self, prediction: Tensor, target: Tensor, weight: Tensor | None) -> Batch:
        prediction, target = prediction.detach(), target.detach().to(prediction.device)
        if self._keeps:
            prediction, target = prediction.clone(), target.clone()
        return Batch(prediction, target, weight)

    def _begin_block(self, prediction: Tensor, target: Tensor, like: Any) -> Sequence[Batch]:
        """Make an empty block: larger than the last, if that was of this batch's shape.

        Batches whose shapes change from one to the next so take no more memory than their own.

        Returns:
            What is to be counted, as it can't be joined with such a batch.
        """
        shape, target_shape = prediction.shape or (1,), target.shape or (1,)
        weights = like[4]
        kind = (
            len(shape), shape[1:], len(target_shape), target_shape[1:],
            None if weights is None else (len(weights), weights[1:]),
        )  # fmt: skip
        ready: Sequence[Batch] = ()
        if kind != self._kind:
            ready, self._kind = self.take(), kind
        elif self._used:
            self._full.append(self._used_part())
        self._size = prediction.numel() + target.numel()
        most = -(-MOST_ELEMENTS // max(self._size, 1))
        room = min(GROWTH * len(self._places) if like == self._like else 1, most, MOST_BATCHES)
        with torch.inference_mode(False), torch.no_grad():
            # What is made in inference mode can't be written to outside of it.
            self._block = (
                prediction.new_empty((room, *shape)),
                target.new_empty((room, *target_shape), device=prediction.device),
            )
            self._places = list(zip(*(part.unbind() for part in self._block), strict=True))
        self._like, self._used = like, 0
        return ready

    def _used_part(self) -> tuple[Tensor, Tensor]:
        assert self._block is not None
        predictions, targets = (part[: self._used].flatten(0, 1) for part in self._block)
        return predictions, targets

    def joined(self) -> Batch:
        """All that wait as one batch."""
        blocks = [*self._full, self._used_part()] if self._used else self._full
        predictions, targets = zip(*blocks, strict=True)
        weight = torch.cat(self._weights) if self._weights else None
        return Batch(self._one(predictions), self._one(targets), weight)

    def _one(self, parts: tuple[Tensor, ...]) -> Tensor:
        if len(parts) > 1:
            return torch.cat(parts)
        return parts[0].clone() if self._keeps else parts[0]

    def take(self) -> Sequence[Batch]:
        """All that wait as one batch, if any do, which wait no longer."""
        batches = (self.joined(),) if self._waiting else ()
        self.clear()
        return batches

    def clear(self) -> None:
        """Forget all that wait; the last block is kept for what comes."""
        self._full.clear()
        self._weights.clear()
        self._used = self._waiting = self._elements = 0
