"""Checks of the first batch against the loss, for mistakes that torch ignores or reports unclearly.

They read values from the device, so they run once per fit, never in a step. They run before a
device assert (labels out of range on CUDA), which would end the process.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch

from fitkit.arguments import describe
from fitkit.errors import (
    DTYPE_ERRORS,
    PAIR_ERRORS,
    SHAPE_ERRORS,
    ConfigurationError,
    FitkitError,
    raised_in_torch,
)
from fitkit.losses import formulas
from fitkit.losses.looks import undone
from fitkit.losses.names import Definition
from fitkit.outputs import last_operation, named_outputs
from fitkit.random_states import random_state, set_random_state
from fitkit.trees import leaves_with_paths

PROBABILITY_TOLERANCE = 1e-3
LOG_PROBABILITY_TOLERANCE = 1e-3
ROW_SUM_TOLERANCE = 1e-2
# Tighter than above: only a softmax makes rows that sum to 1 this well.
SOFTMAX_SUM_TOLERANCE = 1e-4
REMEDIES_FOR_TWO_LABELS = {(1.0, 2.0): "y - 1", (-1.0, 1.0): "(y + 1) / 2", (0.0, 255.0): "y / 255"}


def check_batch(definition: Definition, label: str, prediction: Any, target: Any) -> None:
    """Refuse a first batch that makes no sense for the loss.

    Raises:
        ConfigurationError: with the finding, and what to write instead.
    """
    _check_tensors(label, prediction, target)
    if definition.hint.task in ("classes", "binary"):
        _check_finite(label, target)
    _check_shapes(definition, label, prediction, target)
    if prediction.numel() == 0:
        return
    definition.match(prediction.detach(), target)
    if definition.hint.takes == "probabilities":
        _check_probabilities(definition, label, prediction, target)
    elif definition.hint.takes == "log_probabilities":
        _check_log_probabilities(definition, label, prediction)
    check_labels(definition, label, target, count_classes(definition, prediction, target))


def _check_tensors(label: str, prediction: Any, target: Any) -> None:
    """Refuse a missing target, values that aren't tensors, and batches of different lengths."""
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
                f"{label} needs one {what} per sample, but the {what} is a tensor without "
                "dimensions. Its first dimension must be the batch."
            )
    if prediction.shape[0] != target.shape[0]:
        raise ConfigurationError(
            f"{label} needs a target for each sample, but the net gave {prediction.shape[0]} "
            f"predictions (shape {tuple(prediction.shape)}) and y has {target.shape[0]} targets "
            f"(shape {tuple(target.shape)})."
        )


def _check_shapes(
    definition: Definition, label: str, prediction: torch.Tensor, target: torch.Tensor
) -> None:
    """Refuse predictions without classes, and targets of a shape that the loss doesn't take."""
    if _class_columns(definition, prediction, target) == 1:
        takes_logits = definition.hint.takes != "probabilities"
        binary = "bce_with_logits" if takes_logits else "binary_crossentropy"
        raise ConfigurationError(
            f"{label} needs a column for each class, but predictions of shape "
            f"{tuple(prediction.shape)} have one. For yes/no labels write loss={binary!r}; "
            "for C classes let the net give C values.",
            code="FK013",
        )
    if definition.match is formulas.vectors and prediction.ndim < 2:
        raise ConfigurationError(
            f"{label} takes a vector for each sample, (N, D), but the predictions have shape "
            f"{tuple(prediction.shape)}."
        )
    if definition.match is formulas.classes or definition.match is formulas.indices:
        _check_index_shape(definition, label, prediction, target)
    elif definition.match is formulas.vectors and definition.rows_sum_to_one:
        _check_one_hot_shape(label, prediction, target)
    elif definition.match is formulas.last_axis_indices and target.shape == prediction.shape:
        raise ConfigurationError(
            f"{label} takes class indices, but targets of shape {tuple(target.shape)} look "
            "one-hot. Write loss='categorical_crossentropy', or pass y.argmax(-1).",
            code="FK007",
        )


def _check_index_shape(
    definition: Definition, label: str, prediction: torch.Tensor, target: torch.Tensor
) -> None:
    shape, batch_and_positions = prediction.shape, prediction.shape[:1] + prediction.shape[2:]
    if target.shape in (batch_and_positions, (*shape[:1], 1, *shape[2:])):
        return
    may_be_soft = definition.match is formulas.classes
    if may_be_soft and target.shape == shape:
        return
    ending = f" or class probabilities {tuple(shape)}" if may_be_soft else ""
    if target.shape == shape[:-1]:
        ending += ". The classes seem to be in the last axis: move them with movedim(-1, 1)"
    elif target.shape == shape:
        ending += ". For one-hot labels pass y.argmax(1), or write loss='cross_entropy' on logits"
    raise ConfigurationError(
        f"{label} has classes in axis 1. For predictions of shape {tuple(shape)} it takes class "
        f"indices of shape {tuple(batch_and_positions)}{ending}. y has shape "
        f"{tuple(target.shape)}.",
        code="FK007" if target.shape == shape else None,
    )


def _check_one_hot_shape(label: str, prediction: torch.Tensor, target: torch.Tensor) -> None:
    if target.shape in (prediction.shape[:-1], (*prediction.shape[:-1], 1)):
        raise ConfigurationError(
            f"{label} takes one-hot targets of shape {tuple(prediction.shape)}, but y of shape "
            f"{tuple(target.shape)} looks like class indices. Write "
            "loss='sparse_categorical_crossentropy', or pass one-hot labels.",
            code="FK008",
        )


def _check_probabilities(
    definition: Definition, label: str, prediction: torch.Tensor, target: torch.Tensor
) -> None:
    low, high = _range(prediction)
    tolerance = PROBABILITY_TOLERANCE if definition.clips else 0.0
    if low < -tolerance or high > 1.0 + tolerance:
        raise ConfigurationError(
            f"{label} takes probabilities, but the first batch's predictions reach from {low:.4g} "
            f"to {high:.4g}. {_remedy(definition)}",
            code="FK006",
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
    """How the net's predictions become what the loss takes."""
    ending = "sigmoid" if definition.hint.task == "binary" else "softmax"
    if definition.hint.takes == "log_probabilities":
        ending = "log_softmax"
    if definition.twin is None:
        return f"End the net with a {ending}."
    return f"If the net gives logits, write loss={definition.twin!r}; else end it with a {ending}."


def _check_log_probabilities(definition: Definition, label: str, prediction: torch.Tensor) -> None:
    _, high = _range(prediction)
    if high > LOG_PROBABILITY_TOLERANCE:
        raise ConfigurationError(
            f"{label} takes log-probabilities, which aren't above 0, but the first batch's "
            f"predictions reach {high:.4g}. {_remedy(definition)}"
        )


def check_labels(
    definition: Definition, label: str, target: torch.Tensor, classes: int | None
) -> None:
    """Refuse targets, perhaps those of a whole data set, that can't be the loss's labels.

    Args:
        classes: the number of classes where the targets are class indices, else None.
    """
    if target.numel() == 0:
        return
    if definition.hint.task in ("classes", "binary"):
        _check_finite(label, target)
    if classes is not None:
        check_label_range(target, classes, definition.ignore_index, label)
    elif definition.hint.task == "binary":
        _check_yes_no(label, target)
    elif definition.shares:
        _check_shares(definition, label, target)
    elif definition.signs:
        _check_signs(label, target, definition.zeros)
    elif definition.lists and target.is_floating_point() and bool((target % 1).any()):
        raise ConfigurationError(
            f"{label} takes lists of class indices, ended by -1, but y has fractions, as mixed "
            "labels have. For shares or several yes/no labels write loss='bce_with_logits'."
        )


def takes_any_number(definition: Definition, classes: int | None) -> bool:
    """Whether torch computes the loss for any numbers, where `check_labels` refuses some.

    Args:
        classes: as in `check_labels`.
    """
    meant = definition.hint.task == "binary" or definition.shares or definition.signs
    return classes is None and bool(meant)


def _check_finite(label: str, target: torch.Tensor) -> None:
    """Refuse labels that are missing, which NumPy and pandas write as NaN."""
    if not target.is_floating_point():
        return
    wrong = target[~torch.isfinite(target)]
    if len(wrong):
        rows = "" if target.ndim == 1 else ".reshape(len(y), -1).all(1)"
        raise ConfigurationError(
            f"{label} takes labels, but y holds {len(wrong)} that are {wrong[0].item():g}. Leave "
            f"out the samples without a label: keep = numpy.isfinite(y){rows}, then "
            "fit(x[keep], y[keep]). Or write a number for it, with a sample_weight of 0.",
            code="FK092",
        )


def _check_yes_no(label: str, target: torch.Tensor) -> None:
    low, high = _range(target)
    if low >= -PROBABILITY_TOLERANCE and high <= 1.0 + PROBABILITY_TOLERANCE:
        return
    values = target.unique()
    advice = "Pass 0 and 1, or numbers between them."
    if len(values) <= 2 and (low, high) in REMEDIES_FOR_TWO_LABELS:
        advice = f"Pass {REMEDIES_FOR_TWO_LABELS[low, high]}."
    raise ConfigurationError(
        f"{label} takes targets from 0 (no) to 1 (yes), but y reaches from {low:.4g} to "
        f"{high:.4g}. {advice}",
        code="FK010",
    )


def _check_shares(definition: Definition, label: str, target: torch.Tensor) -> None:
    if definition.ignore_index is not None and definition.ignore_index >= 0:
        raise ConfigurationError(
            f"{label} has ignore_index={definition.ignore_index}, but targets of the predictions' "
            "shape, as mixed labels are, have shares of classes and no label to ignore. Leave "
            "ignore_index out, and rows with that label."
        )
    axis = definition.hint.class_axis or -1
    sums = target.sum(axis, dtype=torch.float32)
    off = (sums - 1.0).abs()
    low, _ = _range(target)
    if low >= -PROBABILITY_TOLERANCE and not bool((off > ROW_SUM_TOLERANCE).any()):
        return
    fault = f"one reaches down to {low:.4g}"
    if low >= -PROBABILITY_TOLERANCE:
        fault = f"the sum of one is {sums.flatten()[off.argmax()].item():.4g}"
    binary = "bce_with_logits" if definition.hint.takes == "logits" else "binary_crossentropy"
    raise ConfigurationError(
        f"{label} takes targets of the predictions' shape as one-hot rows, or as the classes' "
        f"shares that sum to 1 along axis {axis}, but of y's rows (shape {tuple(target.shape)}) "
        f"{fault}. For several yes/no labels per sample write loss={binary!r}. Samples that "
        "must not count need a sample_weight of 0."
    )


def _check_signs(label: str, target: torch.Tensor, zeros: bool) -> None:
    are_zeros = bool(((target == 0) | (target == 1)).all())
    if (zeros and are_zeros) or bool(((target == 1) | (target == -1)).all()):
        return
    low, high = _range(target)
    known = "-1 and 1, or 0 and 1" if zeros else "-1 and 1"
    advice = " Pass 2 * y - 1." if are_zeros else ""
    raise ConfigurationError(
        f"{label} takes labels {known}, but y has others, from {low:.4g} to {high:.4g}.{advice}"
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
    low, high = _bounds(labels)
    if ignore_index is not None and not (low >= 0 and high < classes):
        # Only now: to choose the others takes fifteen times as long as the bounds.
        low, high = _bounds(labels[labels != ignore_index])
    if low >= 0 and high < classes:
        return
    advice = " Labels that start at 1 need y - 1." if low == 1 and high == classes else ""
    marks = labels[(labels < 0) | (labels >= classes)].unique()
    if not advice and len(marks) == 1:
        advice = (
            f" If {int(marks)} marks what doesn't count, write "
            f"loss=torch.nn.CrossEntropyLoss(ignore_index={int(marks)})."
        )
    ignored = "" if ignore_index is None or low >= 0 else f" (or {ignore_index}, ignored)"
    raise ConfigurationError(
        f"{label} takes labels from 0 to {classes - 1}{ignored}, because the net gives {classes} "
        f"classes, but y reaches from {low} to {high}.{advice}",
        code="FK009",
    )


def _bounds(labels: torch.Tensor) -> tuple[int, int]:
    """Return the least and the greatest label; 0 for none."""
    if labels.numel() == 0:
        return 0, 0
    low, high = torch.aminmax(labels)
    return int(low), int(high)


def count_classes(
    definition: Definition, prediction: torch.Tensor, target: torch.Tensor
) -> int | None:
    """Return the number of classes, where the targets are class indices; None where they aren't."""
    if definition.match is formulas.classes and target.shape == prediction.shape:
        return None
    if definition.match in (formulas.classes, formulas.indices):
        return prediction.shape[1]
    if definition.match is formulas.last_axis_indices:
        return formulas.last_axis_indices(prediction.detach(), target)[0].shape[-1]
    return None


def _class_columns(
    definition: Definition, prediction: torch.Tensor, target: torch.Tensor
) -> int | None:
    """Return the predicted classes, 1 where there is no class axis; None for losses without
    classes.
    """
    by_classes = definition.hint.task == "classes" or definition.match is formulas.index_lists
    if not by_classes:
        return None
    if prediction.ndim < 2:
        return 1
    if definition.match in (formulas.classes, formulas.indices):
        return prediction.shape[1]
    # Keras's class axis is the last, but a target may fit axis 1 alone (`last_axis_indices`).
    if definition.match is formulas.last_axis_indices and target.shape != prediction.shape[:-1]:
        return max(prediction.shape[1], prediction.shape[-1])
    return prediction.shape[-1]


def suspicion(definition: Definition, label: str, prediction: torch.Tensor) -> str | None:
    """Return what seems wrong although it may be meant: probabilities where the loss takes
    logits.
    """
    if definition.hint.takes != "logits" or definition.twin is None:
        return None
    if definition.hint.task != "classes" and last_operation(prediction) != "Sigmoid":
        return None  # Logits of a net that hasn't learned may all lie in [0, 1].
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
    return (
        f"{label} takes logits, but the net ends with a sigmoid, which the loss applies again. "
        f"Drop it, or write loss={definition.twin!r}."
    )


def _range(values: torch.Tensor) -> tuple[float, float]:
    if values.dtype is torch.bool:
        return float(values.all()), float(values.any())
    low, high = torch.aminmax(values.detach())
    return float(low), float(high)


def explained(error: Exception, label: str, prediction: Any, target: Any) -> FitkitError | None:
    """Return a clearer error for one that a loss of the user's met; None for what is the user's
    own.

    Without a target that is any error. Else it is one of torch's, about shapes and number types, or
    a tensor's use of an output that is none.
    """
    if target is None:
        return ConfigurationError(
            f"{label} failed without a target ({type(error).__name__}: {error}): y is "
            "missing. Pass y, or give batches of (x, y)."
        )
    text = str(error)
    if not isinstance(prediction, torch.Tensor) and isinstance(error, (AttributeError, TypeError)):
        parts = [name for name in named_outputs(prediction) if isinstance(name, str) and name]
        has = f" with the outputs {parts}" if parts else ""
        return ConfigurationError(
            f"{label} failed ({type(error).__name__}: {error}). It gets what the net returned, a "
            f"{type(prediction).__name__}{has}. Take from it what the loss compares."
        )
    of_torch = isinstance(error, (RuntimeError, IndexError)) or (
        isinstance(error, ValueError) and raised_in_torch(error)
    )
    if of_torch:
        from fitkit.extras.held_tensors import fault_of_loss

        if (fault := fault_of_loss(error)) is not None:
            return fault
    kinds = (SHAPE_ERRORS, DTYPE_ERRORS, PAIR_ERRORS)
    if not of_torch or not any(kind.search(text) for kind in kinds):
        return None
    line = text.strip().splitlines()[0].strip().removesuffix(".")
    advice = "Bring both to what it needs, inside it: for example target.reshape(prediction.shape)."
    if "multi-target" in text and _have_one_shape(prediction, target):
        advice = (
            "The target has a share for each class, as batch transforms such as MixUp make them: "
            "use torch.nn.functional.cross_entropy, which takes those, on logits."
        )
    return ConfigurationError(
        f"{label} can't be computed: {_shapes_of(prediction, 'the prediction')}, "
        f"{_shapes_of(target, 'the target')}. torch says: {line}. "
        f"{advice}"
    )


def _have_one_shape(prediction: Any, target: Any) -> bool:
    return getattr(prediction, "shape", None) == getattr(target, "shape", ())


def _shapes_of(tree: Any, name: str) -> str:
    found = [
        f"{name}{path} has shape {tuple(leaf.shape)} ({str(leaf.dtype).removeprefix('torch.')})"
        if isinstance(leaf, torch.Tensor)
        else f"{name}{path} is {describe(leaf)}"
        for path, leaf in leaves_with_paths(tree)
    ]
    return ", ".join(found)


def check_learns(label: str, loss: torch.Tensor) -> None:
    """Refuse the first loss of a training that no parameter's gradient can come from.

    Raises:
        ConfigurationError: with what may have cut the gradient off.
    """
    if torch.is_grad_enabled() and not loss.requires_grad:
        raise ConfigurationError(
            f"{label} doesn't depend on any parameter that learns, so there is nothing to train. "
            "Either every parameter that it depends on is frozen (requires_grad=False), or the "
            "net or the loss cuts the gradient off: .detach(), .item(), argmax, NumPy, "
            "torch.no_grad().",
            code="FK022",
        )


FEW = 16
"""So many rows are compared, in all pairs of them."""


def check_broadcast(label: str, function: Callable[..., Any], prediction: Any, target: Any) -> None:
    """Refuse a loss that pairs every prediction with every target.

    Only a pair of shapes (N, 1) and (N,) is suspicious. Then the value of some rows is compared
    with that of the same rows in one shape, and with that of all pairs of them. What these calls
    change is undone; what they raise is left to the evaluation that counts.
    """
    if not _is_suspicious(prediction, target):
        return
    order = target.detach().flatten().argsort()
    few = order[torch.linspace(0, len(order) - 1, min(FEW, len(order))).long()]
    some = _varied(prediction.detach()[few.to(prediction.device)], target.detach()[few])
    rows = [one.reshape(-1, 1) for one in some]
    pairs = [rows[0].repeat(len(few), 1), rows[1].repeat_interleave(len(few), 0)]
    drawn = random_state()

    def value(given: Sequence[torch.Tensor]) -> torch.Tensor:
        set_random_state(drawn)
        return torch.as_tensor(function(*(one.clone() for one in given))).double().mean()

    with undone(function), torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            found, of_rows, of_pairs = map(value, (some, rows, pairs))
        except Exception:  # whatever a user's function may raise: the real call shows it
            return
    # A sum over the samples that is divided by their number is so many times as large.
    is_of_pairs = any(_are_close(found, of_pairs * times) for times in (1, len(few)))
    if is_of_pairs and not _are_close(found, of_rows):
        count = prediction.shape[0]
        raise ConfigurationError(
            f"{label} broadcasts a prediction of shape {tuple(prediction.shape)} and a target of "
            f"shape {tuple(target.shape)} to ({count}, {count}): every prediction meets every "
            "target. Bring both to one shape in it, with target.reshape(prediction.shape)."
        )


def _are_close(value: torch.Tensor, other: torch.Tensor) -> bool:
    return bool(torch.isclose(value, other, rtol=1e-4, atol=1e-6))


def _varied(prediction: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a pair in the range of the given one whose values show what meets what.

    Each goes from the least to the greatest value of both. Values that are equal, or predictions
    that are all above the targets, would hide it. Targets that are whole numbers stay.
    """
    both = torch.cat([prediction.flatten(), target.flatten().to(prediction)])
    low, high = both.min(), both.max()
    high = torch.where(high > low, high, torch.where(low > 0.5, low - 0.5, low + 0.5))
    steps = torch.linspace(0, 1, len(target), dtype=low.dtype, device=low.device)
    spread = low + (high - low) * steps
    if target.is_floating_point():
        target = spread.to(target).reshape(target.shape)
    return spread.reshape(prediction.shape), target


def _is_suspicious(prediction: Any, target: Any) -> bool:
    if not isinstance(prediction, torch.Tensor) or not isinstance(target, torch.Tensor):
        return False
    column, row = sorted((prediction.shape, target.shape), key=len, reverse=True)
    return len(row) == 1 and row[0] > 1 and column == (*row, 1)
