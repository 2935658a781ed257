"""Checks of a first batch against its loss: mistakes that torch computes with, or reports oddly.

They read values back from the device, so they run once a fit, never in a step. A device assert
(labels out of range on CUDA) would end the process; these come before it.
"""

from __future__ import annotations

from typing import Any

import torch

from fitkit.arguments import describe
from fitkit.errors import ConfigurationError
from fitkit.losses import targets
from fitkit.losses.definitions import Definition

PROBABILITY_TOLERANCE = 1e-3
LOG_PROBABILITY_TOLERANCE = 1e-3
ROW_SUM_TOLERANCE = 1e-2
# Tighter than above: only a softmax makes rows that sum to 1 this well.
SOFTMAX_SUM_TOLERANCE = 1e-4
# Fewer logits may all lie in [0, 1] by chance.
LEAST_VALUES_FOR_SIGMOID = 32


def check_tensors(label: str, prediction: Any, target: Any) -> None:
    """Refuse a missing target, what isn't a tensor, and batches of different lengths."""
    if target is None:
        raise ConfigurationError(
            f"{label} compares predictions with targets, but y is missing. Pass y, or give "
            "batches of (x, y)."
        )
    for what, value in (("prediction", prediction), ("target", target)):
        if not isinstance(value, torch.Tensor):
            raise ConfigurationError(
                f"{label} takes tensors, but the {what} is {describe(value)}. For several outputs "
                "give a list or dict of losses, or a callable (prediction, target)."
            )
        if value.ndim == 0:
            raise ConfigurationError(
                f"{label} needs one {what} a sample, but the {what} is a tensor without "
                "dimensions. Its first dimension must be the batch."
            )
    if prediction.shape[0] != target.shape[0]:
        raise ConfigurationError(
            f"{label} needs a target for each sample, but the net gave {prediction.shape[0]} "
            f"predictions (shape {tuple(prediction.shape)}) and y has {target.shape[0]} targets "
            f"(shape {tuple(target.shape)})."
        )


def check_shapes(
    definition: Definition, label: str, prediction: torch.Tensor, target: torch.Tensor
) -> None:
    """Refuse predictions without classes, and targets of a shape that the loss doesn't take."""
    if _class_columns(definition, prediction, target) == 1:
        takes_logits = definition.hint.takes != "probabilities"
        binary = "bce_with_logits" if takes_logits else "binary_crossentropy"
        raise ConfigurationError(
            f"{label} needs a column for each class, but predictions of shape "
            f"{tuple(prediction.shape)} have one. For yes/no labels write loss={binary!r}; "
            "for C classes let the net give C values."
        )
    if definition.match is targets.vectors and prediction.ndim < 2:
        raise ConfigurationError(
            f"{label} takes a vector for each sample, (N, D), but the predictions have shape "
            f"{tuple(prediction.shape)}."
        )
    if definition.match is targets.classes or definition.match is targets.indices:
        _check_index_shape(definition, label, prediction, target)
    elif definition.match is targets.vectors and definition.rows_sum_to_one:
        _check_one_hot_shape(label, prediction, target)
    elif definition.match is targets.last_axis_indices and target.shape == prediction.shape:
        raise ConfigurationError(
            f"{label} takes class indices, but targets of shape {tuple(target.shape)} look "
            "one-hot. Write loss='categorical_crossentropy', or pass y.argmax(-1)."
        )


def _check_index_shape(
    definition: Definition, label: str, prediction: torch.Tensor, target: torch.Tensor
) -> None:
    shape, batch_and_positions = prediction.shape, prediction.shape[:1] + prediction.shape[2:]
    if target.shape in (batch_and_positions, (*shape[:1], 1, *shape[2:])):
        return
    may_be_soft = definition.match is targets.classes
    if may_be_soft and target.shape == shape:
        if not target.is_floating_point():
            _check_one_hot(label, target)
        return
    ending = f" or class probabilities {tuple(shape)}" if may_be_soft else ""
    if target.shape == shape[:-1]:
        ending += ". The classes seem to be in the last axis: move them with movedim(-1, 1)"
    elif target.shape == shape:
        ending += ". For one-hot labels pass y.argmax(1), or write loss='cross_entropy' on logits"
    raise ConfigurationError(
        f"{label} has classes in axis 1. For predictions of shape {tuple(shape)} it takes class "
        f"indices of shape {tuple(batch_and_positions)}{ending}. y has shape "
        f"{tuple(target.shape)}."
    )


def _check_one_hot(label: str, target: torch.Tensor) -> None:
    counts = target.to(torch.int64)
    if bool(((counts < 0) | (counts > 1)).any()) or bool((counts.sum(1) != 1).any()):
        raise ConfigurationError(
            f"{label} got integer targets of the predictions' shape {tuple(target.shape)}, which "
            "must then be one-hot along axis 1, but some rows don't have exactly one 1. For "
            "several yes/no labels a sample write loss='bce_with_logits'."
        )


def _check_one_hot_shape(label: str, prediction: torch.Tensor, target: torch.Tensor) -> None:
    if target.shape in (prediction.shape[:-1], (*prediction.shape[:-1], 1)):
        raise ConfigurationError(
            f"{label} takes one-hot targets of shape {tuple(prediction.shape)}, but y of shape "
            f"{tuple(target.shape)} looks like class indices. Write "
            "loss='sparse_categorical_crossentropy', or pass one-hot labels."
        )


def check_values(
    definition: Definition, label: str, prediction: torch.Tensor, target: torch.Tensor
) -> None:
    """Refuse numbers that can't be what the loss takes: probabilities, logarithms, labels."""
    if definition.hint.takes == "probabilities":
        _check_probabilities(definition, label, prediction, target)
    elif definition.hint.takes == "log_probabilities":
        _check_log_probabilities(definition, label, prediction)
    if definition.signs:
        _check_signs(label, target)
    class_count = count_classes(definition, prediction, target)
    if class_count is not None:
        check_label_range(target, class_count, definition.ignore_index, label)


def _check_probabilities(
    definition: Definition, label: str, prediction: torch.Tensor, target: torch.Tensor
) -> None:
    low, high = _range(prediction)
    tolerance = PROBABILITY_TOLERANCE if definition.clips else 0.0
    if low < -tolerance or high > 1.0 + tolerance:
        raise ConfigurationError(
            f"{label} takes probabilities, but the first batch's predictions reach from {low:.4g} "
            f"to {high:.4g}. {_remedy(definition)}"
        )
    if definition.rows_sum_to_one:
        rows = definition.match(prediction.detach(), target)[0]  # classes last
        sums = rows.float().sum(-1)
        if bool(((sums - 1.0).abs() > ROW_SUM_TOLERANCE).any()):
            worst = sums.flatten()[(sums - 1.0).abs().argmax()].item()
            raise ConfigurationError(
                f"{label} takes probabilities of classes, whose sum is 1, but a row of the first "
                f"batch's predictions (shape {tuple(prediction.shape)}) sums to {worst:.4g}. "
                f"{_remedy(definition)}"
            )


def _remedy(definition: Definition) -> str:
    ending = "sigmoid" if definition.hint.task == "binary" else "softmax"
    if definition.twin is None:
        return f"End the net with a {ending}."
    return f"If the net gives logits, write loss={definition.twin!r}; else end it with a {ending}."


def _check_log_probabilities(definition: Definition, label: str, prediction: torch.Tensor) -> None:
    _, high = _range(prediction)
    if high > LOG_PROBABILITY_TOLERANCE:
        logits = f"If the net gives logits, write loss={definition.twin!r}; else end"
        start = logits if definition.twin else "End"
        it = "it" if definition.twin else "the net"
        raise ConfigurationError(
            f"{label} takes log-probabilities, which aren't above 0, but the first batch's "
            f"predictions reach {high:.4g}. {start} {it} with a log_softmax."
        )


def _check_signs(label: str, target: torch.Tensor) -> None:
    if bool(((target == 0) | (target == 1)).all()) and bool((target == 0).any()):
        raise ConfigurationError(
            f"{label} takes labels -1 and 1, but the first batch's are 0 and 1. Pass 2 * y - 1."
        )


def check_label_range(
    target: torch.Tensor, classes: int, ignore_index: int | None = None, label: str = "The loss"
) -> None:
    """Refuse class indices that aren't whole numbers from 0 to `classes` - 1.

    Args:
        target: labels of any shape and number type; may be all labels of a data set.
        classes: the number of classes, C.
        ignore_index: a label that passes although it is no class.
        label: what takes the labels, for the message.

    Raises:
        ConfigurationError: with the least and greatest label.
    """
    if target.is_floating_point() and bool((target != target.round()).any()):
        raise ConfigurationError(
            f"{label} takes class indices, but y of type {target.dtype} holds fractions. Pass "
            "whole numbers, or class probabilities in the predictions' shape where the loss "
            "takes them."
        )
    labels = target.to(torch.int64)
    if ignore_index is not None:
        labels = labels[labels != ignore_index]
    if labels.numel() == 0:
        return
    low, high = (int(bound) for bound in torch.aminmax(labels))
    if low >= 0 and high < classes:
        return
    shift = " Labels that start at 1 need y - 1." if low == 1 and high == classes else ""
    ignored = "" if ignore_index is None or low >= 0 else f" (or {ignore_index}, ignored)"
    raise ConfigurationError(
        f"{label} takes labels from 0 to {classes - 1}{ignored}, because the net gives {classes} "
        f"classes, but y reaches from {low} to {high}.{shift}"
    )


def count_classes(
    definition: Definition, prediction: torch.Tensor, target: torch.Tensor
) -> int | None:
    """The number of classes, where the targets are class indices; None where they aren't."""
    if definition.match is targets.classes and target.shape == prediction.shape:
        return None
    if definition.match in (targets.classes, targets.indices):
        return prediction.shape[1]
    if definition.match is targets.last_axis_indices:
        return targets.last_axis_indices(prediction.detach(), target)[0].shape[-1]
    return None


def _class_columns(
    definition: Definition, prediction: torch.Tensor, target: torch.Tensor
) -> int | None:
    """The predicted classes, 1 where there is no class axis; None for losses without classes."""
    by_classes = definition.hint.task == "classes" or definition.match is targets.index_lists
    if not by_classes:
        return None
    if prediction.ndim < 2:
        return 1
    if definition.match in (targets.classes, targets.indices):
        return prediction.shape[1]
    # Keras's class axis is the last, but a target may fit axis 1 alone (`last_axis_indices`).
    if definition.match is targets.last_axis_indices and target.shape != prediction.shape[:-1]:
        return max(prediction.shape[1], prediction.shape[-1])
    return prediction.shape[-1]


def suspicion(definition: Definition, label: str, prediction: torch.Tensor) -> str | None:
    """What seems wrong although it may be meant: probabilities where the loss takes logits."""
    if definition.hint.takes != "logits" or definition.twin is None:
        return None
    values = prediction.detach().float()
    if definition.hint.task == "classes":
        sums_to_one = ((values.sum(1) - 1.0).abs() < SOFTMAX_SUM_TOLERANCE).all()
        if not bool((values >= 0).all() & sums_to_one):
            return None
        return (
            f"{label} takes logits, but the first batch's predictions are all positive and each "
            "row sums to 1: the net seems to end with a softmax, which the loss applies again. "
            f"Drop it, or write loss={definition.twin!r}."
        )
    low, high = _range(values)
    if values.numel() < LEAST_VALUES_FOR_SIGMOID or low < 0.0 or high > 1.0 or low == high:
        return None
    return (
        f"{label} takes logits, but all of the first batch's predictions lie from {low:.4g} to "
        f"{high:.4g}: the net seems to end with a sigmoid, which the loss applies again. "
        f"Drop it, or write loss={definition.twin!r}."
    )


def _range(values: torch.Tensor) -> tuple[float, float]:
    low, high = torch.aminmax(values.detach())
    return float(low), float(high)
