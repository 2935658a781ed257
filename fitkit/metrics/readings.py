"""Readings: what a metric is given of a prediction and a target.

Each is a frozen dataclass that turns the pair into another: equal readings of a batch are done
once, however many metrics want them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor

from fitkit.metrics.task import Task, mismatch, same_entries, shifted

Reading = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


@dataclasses.dataclass(frozen=True)
class AsGiven:
    """Both as they came."""

    def __call__(self, prediction: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        return prediction, target


@dataclasses.dataclass(frozen=True)
class Shifted:
    """Each place's prediction beside the next place's label; the last prediction has none.

    Attributes:
        reading: how such a pair is read.
    """

    reading: Reading

    def __call__(self, prediction: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        return self.reading(*shifted(prediction, target))


@dataclasses.dataclass(frozen=True)
class Matched:
    """The target in the prediction's shape where (N, 1) met (N,); half precision as float32.

    Attributes:
        strict: whether shapes that don't belong together are refused.
    """

    strict: bool = True

    def __call__(self, prediction: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        if target.shape != prediction.shape:
            if same_entries(prediction, target):
                target = target.reshape(prediction.shape)
            elif self.strict:
                raise mismatch(prediction, target)
        return at_least_float32(prediction), at_least_float32(target)


@dataclasses.dataclass(frozen=True)
class Columns:
    """Both as (N,) or (N, D), in the precision in which sums over an epoch are kept."""

    dtype: torch.dtype

    def __call__(self, prediction: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        prediction, target = Matched()(prediction, target)
        return self._columns(prediction), self._columns(target)

    def _columns(self, values: Tensor) -> Tensor:
        values = values.to(self.dtype)
        if values.ndim > 1:
            values = values.flatten(1)  # (N, D)
            values = values.squeeze(1) if values.shape[1] == 1 else values
        return values


@dataclasses.dataclass(frozen=True)
class Choices:
    """Predictions of whatever scale with classes in dimension 1, and labels.

    Returns: (N, C, ...) and (N, ...).
    """

    task: Task

    def __call__(self, prediction: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        labels = _class_labels(self.task, prediction, target)
        return _classes_to_axis_1(self.task, prediction), labels


@dataclasses.dataclass(frozen=True)
class Labels:
    """The predicted and the right labels, as integers of one shape."""

    task: Task

    def __call__(self, prediction: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        task = self.task
        if task.kind == "multiclass":
            return prediction.argmax(task.axis), _class_labels(task, prediction, target)
        threshold = {"logits": 0.0, "log_probabilities": -0.6931471805599453}.get(task.scale, 0.5)
        chosen = prediction > threshold if prediction.is_floating_point() else prediction
        return chosen.int(), _entry_labels(prediction, target)


@dataclasses.dataclass(frozen=True)
class Scores:
    """Probabilities with classes in dimension 1, never logits, and labels.

    They lie within [0, 1] always: torchmetrics takes a batch that doesn't for logits.
    """

    task: Task

    def __call__(self, prediction: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        task = self.task
        if task.kind == "multiclass":
            labels = _class_labels(task, prediction, target)
            scores = _probabilities(_classes_to_axis_1(task, prediction), task.scale, axis=1)
            return scores, labels
        labels = _entry_labels(prediction, target)
        if not prediction.is_floating_point():
            return prediction, labels
        return _probabilities(prediction, task.scale), labels


@dataclasses.dataclass(frozen=True)
class Distributions:
    """Probabilities over the last dimension, beside targets that are some too."""

    scale: str

    def __call__(self, prediction: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        prediction, target = Matched()(prediction, target)
        return _probabilities(prediction, self.scale, axis=-1), target


def _probabilities(prediction: Tensor, scale: str, axis: int | None = None) -> Tensor:
    """Predictions as probabilities: over an axis that sums to one, or entry by entry."""
    prediction = at_least_float32(prediction)
    if scale == "logits":
        return prediction.sigmoid() if axis is None else prediction.softmax(axis)
    if scale == "log_probabilities":
        return prediction.exp().clamp(max=1)
    if scale == "as_given":
        return prediction
    if scale == "values":
        # Keeps the order, which is all that curves need, and the threshold of 0.5.
        return (prediction - 0.5).sigmoid()
    return prediction.clamp(0, 1)


def _classes_to_axis_1(task: Task, prediction: Tensor) -> Tensor:
    return prediction if task.axis == 1 else prediction.movedim(task.axis, 1)


def _class_labels(task: Task, prediction: Tensor, target: Tensor) -> Tensor:
    """Labels of the prediction's shape without its dimension of classes."""
    if task.one_hot:
        return target.reshape(prediction.shape).argmax(task.axis)
    shape = prediction.shape[: task.axis] + prediction.shape[task.axis + 1 :]
    if target.shape != shape:
        if target.numel() != shape.numel():
            raise mismatch(prediction, target)
        target = target.reshape(shape)
    return target.long()


def _entry_labels(prediction: Tensor, target: Tensor) -> Tensor:
    """0 and 1 for each entry of the prediction; soft targets are rounded."""
    if target.shape != prediction.shape:
        if not same_entries(prediction, target):
            raise mismatch(prediction, target)
        target = target.reshape(prediction.shape)
    return (target.round() if target.is_floating_point() else target).long()


def at_least_float32(values: Tensor) -> Tensor:
    """Integers and half precision as float32; the rest as it is."""
    if values.is_floating_point() and values.dtype.itemsize >= 4:
        return values
    return values.float()
