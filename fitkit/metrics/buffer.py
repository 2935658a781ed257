"""The batches that no metric has seen yet: many small ones are counted as one."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import TypeAlias

import torch
from torch import Tensor

from fitkit.metrics.sums import Batch

Parts: TypeAlias = tuple[Tensor, Tensor, "Tensor | None"]

MOST_BATCHES = 256
"""So many batches are joined at most; an update of torchmetrics then costs 2 µs a batch, not 80."""
MOST_ELEMENTS = 2**16
"""So many numbers wait at most, predictions and targets: 0.25 MB in float32, which caches hold."""
GROWTH = 8
"""A block is so many times as large as the one before: few blocks are joined, and copied for it."""
LARGE = 2**15
"""Batches of more numbers don't wait: to copy them takes longer than what joining saves."""


class _Block:
    """Memory for several batches of one shape, in one piece: joined without being copied again.

    It is used again and again, as a new tensor takes twice a copy's time.

    Attributes:
        size: how many numbers one batch has.
        kind: what blocks that are joined have in common.
        room: how many batches it can hold.
        used: how many it holds.
        predictions, targets: each batch's memory; of one dimension where the batch's have none.
        weights: each batch's weights; none where batches without weights fit.
    """

    __slots__ = (
        "_all_predictions",
        "_all_targets",
        "_dtype",
        "_shape",
        "_target_dtype",
        "_target_shape",
        "_weight_shape",
        "kind",
        "predictions",
        "room",
        "size",
        "targets",
        "used",
        "weights",
    )

    def __init__(
        self, prediction: Tensor, target: Tensor, weight: Tensor | None, room: int
    ) -> None:
        self._shape, self._target_shape = prediction.shape, target.shape
        self._dtype, self._target_dtype = prediction.dtype, target.dtype
        self._weight_shape = None if weight is None else weight.shape
        self.weights: list[Tensor] = []
        self.size = prediction.numel() + target.numel()
        self.room, self.used = room, 0
        with torch.inference_mode(False), torch.no_grad():
            # What is made in inference mode can't be written to outside of it.
            self._all_predictions = prediction.new_empty((room, *(prediction.shape or (1,))))
            self._all_targets = target.new_empty(
                (room, *(target.shape or (1,))), device=prediction.device
            )
            self.predictions = self._all_predictions.unbind()
            self.targets = self._all_targets.unbind()
        rows, target_rows = self._all_predictions, self._all_targets
        kind = rows.ndim, rows.shape[2:], target_rows.ndim, target_rows.shape[2:]
        self.kind = kind, None if weight is None else (weight.ndim, weight.shape[1:])

    def fits(self, prediction: Tensor, target: Tensor, weight: Tensor | None) -> bool:
        """Whether a batch is of this block's shapes and types."""
        return (
            prediction.shape == self._shape
            and target.shape == self._target_shape
            and prediction.dtype is self._dtype
            and target.dtype is self._target_dtype
            and (None if weight is None else weight.shape) == self._weight_shape
        )

    def add(self, prediction: Tensor, target: Tensor, weight: Tensor | None) -> bool:
        """Copy a batch, where it fits and there is room.

        Returns:
            Whether that is so.
        """
        index = self.used
        if index == self.room or not self.fits(prediction, target, weight):
            return False
        # Asking costs a tenth of detaching.
        self.predictions[index].copy_(
            prediction.detach() if prediction.requires_grad else prediction
        )
        self.targets[index].copy_(target.detach() if target.requires_grad else target)
        if weight is not None:
            self.weights.append(torch.atleast_1d(weight.detach()).clone())
        self.used = index + 1
        return True

    def joined(self) -> tuple[Tensor, Tensor]:
        """The predictions and the targets of all batches: the block's own memory."""
        used = self.used
        return self._all_predictions[:used].flatten(0, 1), self._all_targets[:used].flatten(0, 1)

    def clear(self) -> None:
        """Forget all batches."""
        self.used = 0
        self.weights.clear()


class Buffer:
    """The predictions, targets and weights that no metric has seen yet.

    What waits is copied: a generator may refill its own buffers with the next batch (also
    through NumPy, of which torch sees nothing), a net may give its input, and one that is
    compiled with `mode="reduce-overhead"` overwrites its outputs. Large batches neither wait
    nor are copied.

    Args:
        keeps: whether what is taken stays with a metric, which then needs its own memory.
    """

    def __init__(self, keeps: bool = False) -> None:
        self._keeps = keeps
        self._blocks: list[_Block] = []
        self._spare: _Block | None = None
        self._waiting = 0
        self._elements = 0
        self._large: Parts | None = None

    def __bool__(self) -> bool:
        """Whether any wait."""
        return self._waiting > 0

    def add(self, prediction: Tensor, target: Tensor, weight: Tensor | None) -> bool:
        """Let a batch wait, without its gradients.

        Returns:
            Whether it is time to take them all, at once: the last may not be a copy, and the
            memory of the others is that of the next.
        """
        block = self._blocks[-1] if self._blocks else None
        if block is None or not block.add(prediction, target, weight):
            if prediction.numel() + target.numel() > LARGE:
                self._large = prediction.detach(), target.detach(), weight
                return True
            block = self._next_block(prediction, target, weight)
            block.add(prediction, target, weight)
        self._waiting += 1
        self._elements += block.size
        return self._waiting >= MOST_BATCHES or self._elements >= MOST_ELEMENTS

    def _next_block(self, prediction: Tensor, target: Tensor, weight: Tensor | None) -> _Block:
        """An empty block that fits a batch: larger than the last, if that was of its shape.

        Batches whose shapes change from one to the next so take no more memory than their own.
        """
        last = self._blocks[-1] if self._blocks else None
        block, self._spare = self._spare, None
        if block is None or not block.fits(prediction, target, weight):
            grows = last is not None and last.fits(prediction, target, weight)
            most = -(-MOST_ELEMENTS // max(prediction.numel() + target.numel(), 1))
            room = min(GROWTH * last.room if last is not None and grows else 1, most, MOST_BATCHES)
            block = _Block(prediction, target, weight, room)
        self._blocks.append(block)
        return block

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
        for _, neighbours in itertools.groupby(self._blocks, lambda block: block.kind):
            blocks = list(neighbours)
            predictions, targets = zip(*(block.joined() for block in blocks), strict=True)
            weights = [weight for block in blocks for weight in block.weights]
            yield Batch(
                self._one(predictions), self._one(targets), torch.cat(weights) if weights else None
            )

    def _one(self, parts: tuple[Tensor, ...]) -> Tensor:
        if len(parts) > 1:
            return torch.cat(parts)
        return parts[0].clone() if self._keeps else parts[0]

    def clear(self) -> None:
        """Forget them; the largest block of the last shape is kept for what comes."""
        if self._blocks:
            self._spare = self._blocks[-1]
            self._spare.clear()
            self._blocks.clear()
        self._waiting = self._elements = 0
        self._large = None
