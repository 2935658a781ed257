"""How targets are read as class numbers: known by the loss and by values, never by a shape alone.

Shapes: N samples, C classes; `...` are positions (time, height and width).
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from fitkit.arguments import describe
from fitkit.errors import ConfigurationError
from fitkit.outputs import IGNORED
from fitkit.seams.losses import (
    Definition,
    classes,
    index_lists,
    indices,
    last_axis_indices,
    vectors,
)

ROW_SUM_TOLERANCE = 1e-3
INSTEAD = "Give sample_weight instead."


@dataclasses.dataclass(frozen=True)
class Labels:
    """Gives the class numbers of targets, one for each value of the loss.

    Attributes:
        axis: the dimension of classes, where targets are one-hot or soft; None: each entry is a
            class number.
        exact: whether rows must be one-hot.
        extra: a dimension of one entry that the loss's values lack.
        ignored: the label that is no class.
        rounds: whether entries lie between 0 (no) and 1 (yes).
    """

    axis: int | None = None
    exact: bool = False
    extra: int | None = None
    ignored: int = IGNORED
    rounds: bool = False

    def __call__(self, target: torch.Tensor) -> torch.Tensor:
        """Return the class numbers, int64."""
        if self.axis is not None:
            return target.to(torch.float32).argmax(self.axis)
        if self.extra is not None:
            target = target.squeeze(self.extra)
        return (target.round() if target.is_floating_point() else target).long()

    def misfit(self, target: torch.Tensor) -> torch.Tensor:
        """Whether some entry can't be read so, without dimensions, on the target's device."""
        if self.axis is not None:
            return (
                ~_are_one_hot(target, self.axis) if self.exact else ~_are_shares(target, self.axis)
            )
        wrong = (target < 0) & (target != self.ignored)
        if target.is_floating_point() and not self.rounds:
            wrong = wrong | (target != target.round())
        return wrong.any()

    def refusal(self) -> ConfigurationError:
        """Return the error for targets that don't fit."""
        if self.axis is not None:
            rows = "one-hot" if self.exact else "shares of classes"
            return ConfigurationError(
                f"class_weight reads y's rows as {rows}, as the first batch has them, but a later "
                f"row is something else. {INSTEAD}"
            )
        return ConfigurationError(
            "class_weight needs class numbers from 0, but y has fractions or negative numbers. "
            f"{INSTEAD}"
        )


def known_labels(definition: Definition, prediction: torch.Tensor, target: Any) -> Labels:
    """How a loss that fitkit knows reads its targets as classes.

    Raises:
        ConfigurationError: a sample has no class, or several.
    """
    target = checked(target)
    match, ignored = definition.match, definition.ignore_index
    ignored = IGNORED if ignored is None else ignored
    if match is classes and target.shape == prediction.shape:
        return Labels(axis=1)
    if match in (classes, indices, last_axis_indices):
        extra = None
        if target.ndim == prediction.ndim:
            at_end = match is last_axis_indices and target.shape[-1] == 1
            extra = -1 if at_end else 1
        return Labels(extra=extra, ignored=ignored)
    if match is vectors and definition.hint.task == "classes":
        return Labels(axis=-1)
    if match is index_lists:
        raise several(target)
    if definition.hint.task == "binary":
        if prediction.ndim > 1 and 1 not in (prediction.shape[1], prediction.shape[-1]):
            raise several(target)
        return Labels(rounds=True)
    return labels_by_values(prediction, target)


def labels_by_values(prediction: Any, target: Any) -> Labels:
    """How targets of a loss that says nothing of classes are read, by the first batch's values.

    Raises:
        ConfigurationError: they are no classes, or several for a sample.
    """
    target = checked(target)
    has_columns = target.ndim > 1 and target[:1].numel() != 1
    if not isinstance(prediction, torch.Tensor):
        if has_columns:
            raise unclear(target)
        return Labels()
    if not has_columns or target.shape != prediction.shape:
        return Labels()
    axes = dict.fromkeys((1, target.ndim - 1))
    for are_rows, exact in ((_are_one_hot, True), (_are_shares, False)):
        fitting = [axis for axis in axes if bool(are_rows(target, axis))]
        if len(fitting) == 1:
            return Labels(axis=fitting[0], exact=exact)
    if bool(((target == 0) | (target == 1)).all()):
        raise several(target)
    raise unclear(target)


def checked(target: Any) -> torch.Tensor:
    """Return the target, which must be a tensor."""
    if not isinstance(target, torch.Tensor):
        what = "missing" if target is None else describe(target)
        raise ConfigurationError(
            f"class_weight needs one tensor of labels; the batch's y is {what}. {INSTEAD}"
        )
    return target


def several(target: torch.Tensor) -> ConfigurationError:
    """Return the error for several yes/no labels per sample."""
    return ConfigurationError(
        "class_weight gives a sample the weight of its class, but in y of shape "
        f"{tuple(target.shape)} a sample has several labels. Write "
        "loss=torch.nn.BCEWithLogitsLoss(pos_weight=…), with one factor for each label."
    )


def unclear(target: torch.Tensor) -> ConfigurationError:
    """Return the error for targets in which nothing shows where the classes are."""
    return ConfigurationError(
        f"class_weight needs class numbers or one-hot rows, but y of shape {tuple(target.shape)} "
        f"has other values. {INSTEAD}"
    )


def _are_one_hot(target: torch.Tensor, axis: int) -> torch.Tensor:
    is_one = target == 1
    return (is_one | (target == 0)).all() & (is_one.sum(axis) == 1).all()


def _are_shares(target: torch.Tensor, axis: int) -> torch.Tensor:
    away = (target.sum(axis, dtype=torch.float32) - 1.0).abs()
    return (target >= 0).all() & (away <= ROW_SUM_TOLERANCE).all()
