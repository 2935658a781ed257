"""The metrics of torchmetrics that have names."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor

from fitkit.accelerators import widest_dtype
from fitkit.errors import ConfigurationError
from fitkit.extras.metric_conversions import columns, probabilities_and_labels
from fitkit.extras.torchmetrics_objects import TorchMetric, torchmetrics_module
from fitkit.outputs import IGNORED
from fitkit.seams.metrics import (
    Conversion,
    FirstBatch,
    Named,
    Task,
    chosen_labels,
)

# ---- torchmetrics' classification ----

Defined: TypeAlias = Callable[[Any, Tensor], Tensor]
"""Says which entries of a metric's values can be computed of what it has counted. torchmetrics
gives 0 or 1 for the others."""


def _has_both_kinds(metric: Any, values: Tensor) -> Tensor:
    """Whether there are samples of a class, and others: a ranking compares them."""
    present = _has_samples(metric, values)
    return present & (_samples_of_classes(metric) < len(torch.cat(list(metric.target))))


def _has_samples(metric: Any, values: Tensor) -> Tensor:
    """Whether there are samples of a class."""
    return _samples_of_classes(metric) > 0


def _samples_of_classes(metric: Any) -> Tensor:
    target = torch.cat(list(metric.target))
    classes = getattr(metric, "num_classes", None)
    return (target == 1).sum(0) if classes is None else target.bincount(minlength=classes)


def _may_agree_by_chance(metric: Any, values: Tensor) -> Tensor:
    """Whether chance alone wouldn't agree on all samples: not with one class on both sides."""
    matrix = metric.confmat
    return matrix.diagonal().max() < matrix.sum()


def _counted(
    suffix: str,
    *,
    conversion: Callable[[Task], Conversion] = chosen_labels,
    kinds: tuple[str, ...] = ("binary", "multiclass", "multilabel"),
    finish: Callable[[Tensor], Any] | None = None,
    defined: Defined | None = None,
    **options: str,
) -> Named:
    """Make a name of torchmetrics' `Binary…`, `Multiclass…` and `Multilabel…`, by their suffix."""

    def build(first: FirstBatch) -> TorchMetric:
        task = first.task()
        if task.kind not in kinds:
            raise ConfigurationError(
                f"it has no {task.kind} form, and the prediction of shape "
                f"{tuple(first.prediction.shape)} beside its target is {task.kind}. Known forms: "
                f"{', '.join(kinds)}."
            )
        settings: dict[str, Any] = {"validate_args": False, "sync_on_compute": False}
        if task.kind == "multiclass":
            settings |= {"num_classes": task.columns, "ignore_index": IGNORED}
        if task.kind == "multilabel":
            settings["num_labels"] = task.columns
        if task.kind != "binary":
            settings |= options
        metric_class = getattr(
            torchmetrics_module("classification"), f"{task.kind.capitalize()}{suffix}"
        )
        metric = metric_class(**settings)
        return TorchMetric(metric, conversion(task), finish=finish, defined=defined)

    return Named(build, weightable=False)


def _count(index: int) -> Callable[[Tensor], Tensor]:
    return lambda counts: counts[index]


def _mean_recall(matrix: Tensor) -> Tensor:
    # From the confusion matrix (C, C): over the classes that have samples.
    found, present = matrix.diagonal(), matrix.sum(1)
    return (found[present > 0] / present[present > 0]).mean()


_ONE_OF = ("binary", "multiclass")
_YES_OR_NO = ("binary", "multilabel")

PRECISION = _counted("Precision", average="macro")
RECALL = _counted("Recall", average="macro")
F1 = _counted("F1Score", average="macro")
SPECIFICITY = _counted("Specificity", average="macro")
NEGATIVE_PREDICTIVE_VALUE = _counted("NegativePredictiveValue", average="macro")
TRUE_POSITIVES = _counted("StatScores", kinds=_YES_OR_NO, finish=_count(0), average="micro")
FALSE_POSITIVES = _counted("StatScores", kinds=_YES_OR_NO, finish=_count(1), average="micro")
TRUE_NEGATIVES = _counted("StatScores", kinds=_YES_OR_NO, finish=_count(2), average="micro")
FALSE_NEGATIVES = _counted("StatScores", kinds=_YES_OR_NO, finish=_count(3), average="micro")
CONFUSION_MATRIX = _counted("ConfusionMatrix")
BALANCED_ACCURACY = _counted("ConfusionMatrix", kinds=_ONE_OF, finish=_mean_recall)
COHEN_KAPPA = _counted(
    "CohenKappa", kinds=_ONE_OF, finish=Tensor.mean, defined=_may_agree_by_chance
)
MATTHEWS_CORRCOEF = _counted("MatthewsCorrCoef")
JACCARD = _counted("JaccardIndex", average="macro")
AUC = _counted(
    "AUROC",
    conversion=probabilities_and_labels,
    average="none",
    finish=Tensor.mean,
    defined=_has_both_kinds,
)
AVERAGE_PRECISION = _counted(
    "AveragePrecision",
    conversion=probabilities_and_labels,
    average="none",
    finish=Tensor.mean,
    defined=_has_samples,
)
CALIBRATION_ERROR = _counted("CalibrationError", kinds=_ONE_OF, conversion=probabilities_and_labels)


# ---- torchmetrics' regression ----


def _varies(metric: Any, values: Tensor) -> Tensor:
    """Whether both predictions and targets vary: ranks of equal numbers have no correlation."""
    numbers = (torch.cat(list(part)) for part in (metric.preds, metric.target))
    spread = [part.amax(0) > part.amin(0) for part in numbers]
    return spread[0] & spread[1]


def _is_no_ratio_of_zeros(metric: Any, values: Tensor) -> Tensor:
    """Whether a correlation is more than 0/0. NaNs of predictions stay."""
    return ~values.isnan() if bool(metric.var_x.isfinite().all()) else torch.ones_like(values) > 0


def _targets_vary(metric: Any, values: Tensor) -> Tensor:
    """Whether targets differ from their mean by more than rounding does."""
    squares = metric.sum_squared_error  # of the targets, in spite of its name
    rounding = 16 * torch.finfo(squares.dtype).eps * squares
    varies: Tensor = squares - metric.sum_error.square() / metric.total > rounding
    return varies.any()


def _fitted(
    class_name: str,
    *,
    columns_argument: bool = True,
    defined: Defined | None = None,
) -> Named:
    """Make a name of a metric of whole columns; several columns give their mean."""

    def build(first: FirstBatch) -> TorchMetric:
        dtype = widest_dtype(first.prediction.device)
        conversion = columns(dtype)
        prediction, _ = conversion(first.prediction, first.target)
        settings: dict[str, Any] = {"sync_on_compute": False}
        if columns_argument and prediction.ndim > 1:
            settings["num_outputs"] = prediction.shape[1]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that Spearman's keeps all samples
            metric = getattr(torchmetrics_module("regression"), class_name)(**settings)
        # Sums of squares in float32 lose all digits where the mean is far from 0.
        metric.set_dtype(dtype)
        return TorchMetric(metric, conversion, finish=Tensor.mean, defined=defined, least_samples=2)

    return Named(build, weightable=False)


R2 = _fitted("R2Score", columns_argument=False)
EXPLAINED_VARIANCE = _fitted("ExplainedVariance", columns_argument=False)
PEARSON = _fitted("PearsonCorrCoef", defined=_is_no_ratio_of_zeros)
SPEARMAN = _fitted("SpearmanCorrCoef", defined=_varies)
CONCORDANCE = _fitted("ConcordanceCorrCoef", defined=_is_no_ratio_of_zeros)
RELATIVE_SQUARED_ERROR = _fitted("RelativeSquaredError", defined=_targets_vary)
