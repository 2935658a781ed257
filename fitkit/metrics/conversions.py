"""What an output's numbers mean, decided by its first batch, and how metrics are given them.

A conversion is a function that turns a prediction and its target into the pair that a metric is
given. Each is made once a batch, however many metrics want the same.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fitkit.arguments import describe
from fitkit.errors import ConfigurationError, warn
from fitkit.outputs import IGNORED, LossHint, scale_of

Pair = tuple[Tensor, Tensor]
Conversion = Callable[[Tensor, Tensor], Pair]


@dataclasses.dataclass(frozen=True)
class Task:
    """How to read pairs of prediction and target as classification.

    Attributes:
        kind: `"multiclass"` (one of C), `"multilabel"` (C times yes or no) or `"binary"` (each
            entry yes or no).
        columns: C; 1 for binary.
        axis: the prediction's dimension of classes.
        one_hot: whether the targets of a multiclass task have that dimension too.
        scale: what predictions are: `"logits"`, `"probabilities"`, `"log_probabilities"`, or
            `"values"`: numbers around 0 and 1, as a net trained on squared errors gives.
    """

    kind: str
    columns: int = 1
    axis: int = 1
    one_hot: bool = False
    scale: str = "probabilities"


class FirstBatch:
    """The first prediction and target of an output, and what follows from them for the others.

    Everything is decided here, once: deciding batch by batch reads the same logits differently
    where a batch happens to lie within [0, 1].

    Args:
        prediction: the output's tensor.
        target: its target.
        hint: what its loss says about them.
    """

    def __init__(self, prediction: object, target: object, hint: LossHint) -> None:
        if hint.is_shifted:
            prediction, target = shifted(prediction, target)
        self.given: tuple[object, object] = (prediction, target)
        self.hint = hint
        self._tasks: dict[str, Task] = {}
        self._has_guessed = False  # that predictions are probabilities

    @property
    def later(self) -> LaterBatches | None:
        """What the metrics built so far need of later batches; None where that is nothing."""
        tasks = list(self._tasks.values())
        if not tasks and not self._has_guessed:
            return None
        return LaterBatches(tasks, self.hint, is_guess=self._has_guessed)

    @property
    def prediction(self) -> Tensor:
        """The prediction, which must be a tensor."""
        return _tensor(self.given[0], "prediction")

    @property
    def target(self) -> Tensor:
        """The target, which must be a tensor."""
        return _tensor(self.given[1], "target")

    def check_tensors(self) -> None:
        """Refuse a prediction or a target that isn't a tensor."""
        _tensor(self.given[0], "prediction")
        _tensor(self.given[1], "target")

    def task(self, force: str = "") -> Task:
        """Return the classification task.

        Args:
            force: `"classes"`: one of C, whatever the loss says; `"entries"`: each entry yes or
                no; empty: decided by prediction, target and loss.

        Raises:
            ConfigurationError: shapes that don't fit, a task that isn't clear, targets that
                aren't classes.
        """
        if force not in self._tasks:
            task = self.shape_of_task(force)
            _check_targets(task, self.target)
            self._tasks[force] = task
        return self._tasks[force]

    def shape_of_task(self, force: str = "") -> Task:
        """Return the task; the targets' values are read only where their shape isn't enough."""
        prediction, target = self.prediction, self.target
        axis = None if force == "entries" else self._class_axis()
        if axis is not None:
            return self._task("multiclass", prediction.shape[axis], axis)
        if not same_entries(prediction, target):
            raise mismatch(prediction, target)
        columns = prediction.shape[1] if prediction.ndim > 1 else 1
        if force == "entries":
            return self._task("binary")
        several = prediction.ndim > 1 and prediction.shape[self._axes()[0]] > 1
        if force == "classes" or (self.hint.task == "classes" and several):
            return self._one_hot_task()
        if self.hint.task is None and several and _has_shares(target, self._axes()[0]):
            return self._one_hot_task()  # labels that a batch transform has mixed
        if self.hint.task != "binary":
            self._check_yes_or_no()
            if columns > 1 and target.is_floating_point() and _rows_are_one_hot(target):
                return self._one_hot_task()
        # Three dimensions are as likely (N, height, width) as (N, labels, length): each entry
        # counts alike there.
        if columns > 1 and prediction.ndim != 3:
            return self._task("multilabel", columns)
        return self._task("binary")

    def _class_axis(self) -> int | None:
        prediction, target = self.prediction.shape, self.target.shape
        found, other = (class_axis(prediction, target, (axis,)) for axis in self._axes())
        if None not in (found, other) and found != other and self.hint.class_axis is None:
            warn(
                f"The classes in predictions of shape {tuple(prediction)} may be in axis 1 or in "
                f"the last one, for a target of shape {tuple(target)}. Metrics take axis {found}. "
                "Name the loss, or give the first batch another length, to decide it."
            )
        return other if found is None else found

    def _axes(self) -> tuple[int, int]:
        # The loss's first, torch's where it says nothing.
        last = self.prediction.ndim - 1
        return (last, 1) if self.hint.class_axis == -1 else (1, last)

    def _task(self, kind: str, columns: int = 1, axis: int = 1, one_hot: bool = False) -> Task:
        return Task(kind, columns, axis, one_hot, self.scale(kind))

    def _one_hot_task(self) -> Task:
        target = self.target.reshape(self.prediction.shape)
        if target.ndim < 2:
            raise ConfigurationError(
                f"one column per class is needed, but the prediction is {_seen(self.prediction)} "
                f"and the target {_seen(self.target)}."
            )
        axis, other = self._axes()
        if not _sums_to_one(target, axis) and _sums_to_one(target, other):
            axis = other
        return self._task("multiclass", target.shape[axis], axis, one_hot=True)

    def scale(self, kind: str = "binary") -> str:
        """Return what predictions are: as the loss says, else logits or the net's probabilities.

        Logits may lie in [0, 1] by chance, so the net's last operation decides there.
        """
        prediction = self.prediction
        if self.hint.takes is not None:
            return self.hint.takes
        may_be = not prediction.is_floating_point() or _is_between_0_and(1, prediction)
        if may_be and (known := scale_of(prediction)) != "logits":
            self._has_guessed |= known is None and prediction.is_floating_point()
            return "probabilities"
        return "values" if self.hint.task == "regression" and kind != "multiclass" else "logits"

    def _check_yes_or_no(self) -> None:
        target = self.target
        if not bool(((target == 0) | (target == 1)).all()):
            raise ConfigurationError(
                f"the task can't be told from a prediction of {_seen(self.prediction)}, a target "
                f"of {_seen(target)} with values other than 0 and 1, and a loss "
                f"{'for ' + self.hint.task if self.hint.task else 'that fitkit does not know'}. "
                "Pass a torchmetrics object in place of the name, as "
                "torchmetrics.classification.MulticlassAccuracy(num_classes=…), or a callable."
            )


BEYOND = 0.5
"""So far from [0, 1] may values lie that were taken for probabilities: a net that was trained on an
error of its own gives such around 0 and 1."""


class LaterBatches:
    """Refuses a batch that can't be read as the first one was.

    On the CPU that is said at once. On a device only at `finish`: reading numbers would wait.

    Args:
        tasks: how the targets are read.
        hint: what the loss says about predictions and targets.
        is_guess: whether predictions were taken for probabilities, by the first batch alone.

    Attributes:
        kept: the bounds of all labels on a device so far, by the task's place.
    """

    def __init__(self, tasks: list[Task], hint: LossHint, *, is_guess: bool) -> None:
        self._tasks = [task for task in tasks if not task.one_hot]
        self._is_shifted, self._is_guess = hint.is_shifted, is_guess
        self._highest = min(map(_highest, self._tasks), default=-1)  # a label of all of them
        self.kept: dict[int, Tensor] = {}

    def check(self, prediction: Tensor, target: Tensor) -> None:
        """Look at a batch.

        Raises:
            ConfigurationError: its labels aren't classes, or predictions no probabilities.
        """
        if 0 in target.shape:
            return
        if self._is_guess and is_at_hand(prediction) and prediction.is_floating_point():
            self._check_scale(prediction)
        if self._is_shifted:
            target = target[:, 1:]
        at_hand = is_at_hand(target)
        if at_hand and target.dtype is torch.int64 and target.ndim == 1:
            low, high = torch.aminmax(target)  # most batches need no more
            if low >= 0 and high <= self._highest:
                return
        for place, task in enumerate(self._tasks):
            labelled = task.kind == "multiclass"
            if labelled and target.shape == prediction.shape:
                continue  # soft labels
            bounds = _bounds_of(target, labelled=labelled)
            if at_hand:
                _check_bounds(task, bounds)
                continue
            if (before := self.kept.get(place)) is not None:  # one look at the end, however many
                low, rest = before[:1].minimum(bounds[:1]), before[1:].maximum(bounds[1:])
                bounds = torch.cat([low, rest])
            self.kept[place] = bounds

    def finish(self) -> None:
        """Say what is wrong with batches on a device."""
        kept, self.kept = self.kept, {}
        for place, bounds in kept.items():
            _check_bounds(self._tasks[place], bounds)

    def _check_scale(self, prediction: Tensor) -> None:
        low, high = (number.item() for number in torch.aminmax(prediction))
        if low < -BEYOND or high > 1 + BEYOND:
            raise ConfigurationError(
                "the first batch's predictions lay from 0 to 1, and were taken for probabilities, "
                f"but others reach from {low:.4g} to {high:.4g}. Name the loss, which says what "
                "predictions are, or pass a torchmetrics object in place of the name."
            )


def is_at_hand(tensor: Tensor) -> bool:
    """Whether the host may read a tensor without waiting for a device."""
    return tensor.is_cpu


def _bounds_of(target: Tensor, *, labelled: bool) -> Tensor:
    """Return the least and the greatest label that counts, and the largest fraction: (3,)."""
    values = target.where(target != IGNORED, 0) if labelled else target
    fractions = labelled and values.is_floating_point()
    fraction = (values - values.round()).abs().max() if fractions else values.new_zeros(())
    return torch.stack([*torch.aminmax(values), fraction])


def _check_bounds(task: Task, bounds: Tensor) -> None:
    low, high, fraction = bounds.tolist()
    if low < 0 or high > _highest(task) or fraction:
        raise _no_labels(task, low, high)


def _highest(task: Task) -> int:
    return task.columns - 1 if task.kind == "multiclass" else 1


def _no_labels(task: Task, low: float, high: float) -> ConfigurationError:
    """Return the error for targets that aren't a task's labels."""
    whole = "whole numbers " if task.kind == "multiclass" else ""
    return ConfigurationError(
        f"the target has values from {low:g} to {high:g}, but for a {task.kind} task with a "
        f"prediction of {task.columns} column{'s' * (task.columns > 1)} they must be {whole}from "
        f"0 to {_highest(task)}.",
        code="FK009",
    )


def shifted(prediction: Any, target: Any) -> tuple[Any, Any]:
    """Return the predictions (N, T - 1, …) of all places but the last, and the next places'
    labels.
    """
    return prediction[:, :-1], target[:, 1:]


def class_axis(prediction: torch.Size, target: torch.Size, axes: tuple[int, ...]) -> int | None:
    """Return the prediction's dimension of classes where the target has labels; None where none
    fits.

    A target's dimension of one entry in that place is no matter.

    Args:
        axes: the places where the classes may be, the likeliest first.

    Shapes: prediction (N, C, ...) or (N, ..., C), target (N, ...), (N, 1, ...) or (N, ..., 1).
    """
    if len(prediction) < 2:
        return None
    for axis in axes:
        without = prediction[:axis] + prediction[axis + 1 :]
        with_one = (*prediction[:axis], 1, *prediction[axis + 1 :])
        if prediction[axis] > 1 and target in (without, with_one):
            return axis
    return None


def same_entries(prediction: Tensor, target: Tensor) -> bool:
    """Whether shapes are equal but for dimensions of one entry, as (N, 1) and (N,) are."""
    if prediction.shape == target.shape:
        return True
    if not prediction.ndim or not target.ndim or len(prediction) != len(target):
        return False
    return [n for n in prediction.shape[1:] if n != 1] == [n for n in target.shape[1:] if n != 1]


def mismatch(prediction: Tensor, target: Tensor) -> ConfigurationError:
    """Return the error for shapes that torch would broadcast or refuse with less words."""
    return ConfigurationError(
        f"the prediction of shape {tuple(prediction.shape)} and the target of shape "
        f"{tuple(target.shape)} do not belong together: shapes must be equal, (N,) and (N, 1), or, "
        "for class labels, (N, C, ...) and (N, ...)."
    )


def _check_targets(task: Task, target: Tensor) -> None:
    if task.one_hot or not target.numel():
        return
    labelled = task.kind == "multiclass"
    values = target[target != IGNORED] if labelled else target
    fractions = labelled and values.is_floating_point() and bool((values != values.round()).any())
    if fractions or not _is_between_0_and(_highest(task), values):
        raise _no_labels(task, values.min().item(), values.max().item())


def _is_between_0_and(highest: float, values: Tensor) -> bool:
    return bool(((values >= 0) & (values <= highest)).all())


def _sums_to_one(target: Tensor, axis: int) -> bool:
    sums = target.sum(axis, dtype=torch.float32)
    return bool(torch.allclose(sums, torch.ones_like(sums), atol=1e-3))


def _has_shares(target: Tensor, axis: int) -> bool:
    is_number = target.is_floating_point()
    return is_number and _is_between_0_and(1, target) and _sums_to_one(target, axis)


def _rows_are_one_hot(target: Tensor) -> bool:
    return target.ndim == 2 and _sums_to_one(target, 1)


def _seen(tensor: Tensor) -> str:
    return f"shape {tuple(tensor.shape)} ({str(tensor.dtype).removeprefix('torch.')})"


def _tensor(value: object, what: str) -> Tensor:
    if not isinstance(value, Tensor):
        raise ConfigurationError(
            f"the {what} must be a tensor, but is {describe(value)}. For several outputs give "
            "metrics as a dict by output, and for other structures a callable (prediction, target)."
        )
    return value


# ---- conversions: those by a task are made once for equal tasks, so that equal ones are one ----


def as_given(prediction: Tensor, target: Tensor) -> Pair:
    """Both as they came."""
    return prediction, target


@functools.cache
def next_places(conversion: Conversion) -> Conversion:
    """Convert each place's prediction with the next place's label; the last prediction has none."""
    return lambda prediction, target: conversion(*shifted(prediction, target))


def matched(prediction: Tensor, target: Tensor) -> Pair:
    """Return the target in the prediction's shape where (N, 1) met (N,); half precision as float32.

    Raises:
        ConfigurationError: shapes that don't belong together.
    """
    if not same_entries(prediction, target):
        raise mismatch(prediction, target)
    return matched_if_alike(prediction, target)


def matched_if_alike(prediction: Tensor, target: Tensor) -> Pair:
    """As `matched`, but shapes that don't belong together stay as they are."""
    if target.shape != prediction.shape and same_entries(prediction, target):
        target = target.reshape(prediction.shape)
    return at_least_float32(prediction), at_least_float32(target)


@functools.cache
def scores_and_labels(task: Task) -> Conversion:
    """Give predictions of whatever scale with classes in dimension 1, (N, C, ...), and labels
    (N, ...)."""

    def convert(prediction: Tensor, target: Tensor) -> Pair:
        labels = class_labels(task, prediction, target)
        return classes_to_axis_1(task, prediction, target), labels

    return convert


@functools.cache
def chosen_labels(task: Task) -> Conversion:
    """Give the predicted and the right labels, as integers of one shape."""
    threshold = {"logits": 0.0, "log_probabilities": -0.6931471805599453}.get(task.scale, 0.5)

    def convert(prediction: Tensor, target: Tensor) -> Pair:
        if task.kind == "multiclass":
            chosen = prediction.argmax(_axis_in(task, prediction, target))
            return chosen, class_labels(task, prediction, target)
        chosen = prediction > threshold if prediction.is_floating_point() else prediction
        return chosen.int(), entry_labels(prediction, target)

    return convert


def _axis_in(task: Task, prediction: Tensor, target: Tensor) -> int:
    """Return the dimension of classes: in the first batch two may have fitted, and here another
    alone.
    """
    last = prediction.ndim - 1
    if task.one_hot or not task.axis <= last > 1:
        return task.axis
    axes = tuple(a for a in (task.axis, last, 1) if prediction.shape[a] == task.columns)
    return class_axis(prediction.shape, target.shape, axes) or task.axis


def classes_to_axis_1(task: Task, prediction: Tensor, target: Tensor) -> Tensor:
    """Return the prediction with its classes in dimension 1."""
    axis = _axis_in(task, prediction, target)
    return prediction if axis == 1 else prediction.movedim(axis, 1)


def is_one_hot(task: Task, prediction: Tensor, target: Tensor) -> bool:
    """Whether a batch's targets have the dimension of classes. Batches with and without may take
    turns, as where some batches are mixed.
    """
    if task.one_hot:
        return target.numel() == prediction.numel()
    return target.shape == prediction.shape


def class_labels(task: Task, prediction: Tensor, target: Tensor) -> Tensor:
    """Labels of the prediction's shape without its dimension of classes."""
    if is_one_hot(task, prediction, target):
        return target.reshape(prediction.shape).argmax(task.axis)
    axis = _axis_in(task, prediction, target)
    shape = prediction.shape[:axis] + prediction.shape[axis + 1 :]
    if target.shape != shape:
        if target.numel() != shape.numel():
            raise mismatch(prediction, target)
        target = target.reshape(shape)
    return target.long()


def entry_labels(prediction: Tensor, target: Tensor) -> Tensor:
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
