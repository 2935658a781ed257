"""What metrics of probabilities, distributions and whole columns are given."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from fitkit.seams.metrics import (
    Conversion,
    Pair,
    Task,
    at_least_float32,
    class_labels,
    classes_to_axis_1,
    entry_labels,
    matched,
)


@functools.cache
def columns(dtype: torch.dtype) -> Conversion:
    """Give both as (N,) or (N, D), in the precision in which sums over an epoch are kept."""

    def in_columns(values: Tensor) -> Tensor:
        values = values.to(dtype)
        if values.ndim > 1:
            values = values.flatten(1)  # (N, D)
            values = values.squeeze(1) if values.shape[1] == 1 else values
        return values

    def convert(prediction: Tensor, target: Tensor) -> Pair:
        prediction, target = matched(prediction, target)
        return in_columns(prediction), in_columns(target)

    return convert


@functools.cache
def probabilities_and_labels(task: Task) -> Conversion:
    """Give probabilities with classes in dimension 1, never logits, and labels.

    They lie within [0, 1] always: torchmetrics takes a batch that doesn't for logits.
    """

    def convert(prediction: Tensor, target: Tensor) -> Pair:
        if task.kind == "multiclass":
            labels = class_labels(task, prediction, target)
            scores = _probabilities(classes_to_axis_1(task, prediction, target), task.scale, axis=1)
            return scores, labels
        labels = entry_labels(prediction, target)
        if not prediction.is_floating_point():
            return prediction, labels
        return _probabilities(prediction, task.scale), labels

    return convert


@functools.cache
def distributions(scale: str) -> Conversion:
    """Give probabilities over the last dimension, beside targets that are some too."""

    def convert(prediction: Tensor, target: Tensor) -> Pair:
        prediction, target = matched(prediction, target)
        return _probabilities(prediction, scale, axis=-1), target

    return convert


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
