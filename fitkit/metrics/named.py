"""The metrics that have names: their formulas, and what builds each at the first batch.

Where the name alone leaves an average open, accuracy is the share of right entries (as in
Keras) and all others are the mean over the classes or labels (`average="macro"`). For another
average, threshold or number of bins pass the torchmetrics object.
"""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional

from fitkit.accelerators import widest_dtype
from fitkit.errors import ConfigurationError, FitkitError
from fitkit.losses.formulas import EPSILON
from fitkit.metrics.conversions import (
    Conversion,
    FirstBatch,
    Task,
    as_given,
    at_least_float32,
    chosen_labels,
    classes_to_axis_1,
    columns,
    is_one_hot,
    matched,
    probabilities_and_labels,
    scores_and_labels,
)
from fitkit.metrics.sums import Mean, Values
from fitkit.metrics.torchmetrics_adapter import (
    TorchMetric,
    is_torchmetric_class,
    torchmetrics_module,
)
from fitkit.outputs import IGNORED
from fitkit.registry import Registry


def equal(prediction: Tensor, target: Tensor) -> Tensor:
    """Whether labels agree."""
    return prediction == target


def unequal(prediction: Tensor, target: Tensor) -> Tensor:
    """Whether labels differ; ignored ones don't."""
    return (prediction != target) & (target != IGNORED)


def all_equal(prediction: Tensor, target: Tensor) -> Tensor:
    """Whether all labels of a sample agree, ignored ones apart: (N,). Not if all are ignored."""
    counts = target != IGNORED
    agree = ((prediction == target) | ~counts).reshape(len(target), -1).all(1)
    return agree & counts.reshape(len(target), -1).any(1)


def among_top(prediction: Tensor, target: Tensor, k: int) -> Tensor:
    """Whether the label is among the k classes that the prediction puts highest.

    Shapes: prediction (N, C, ...), target (N, ...).
    """
    chosen = prediction.topk(k, dim=1).indices
    return (chosen == target.unsqueeze(1)).any(1)


def cross_entropy(prediction: Tensor, target: Tensor, task: Task) -> Tensor:
    """Minus the logarithm of the probability that the prediction gives to the target.

    Shapes: multiclass: target of labels, or of class probabilities in the prediction's shape.
        Otherwise one shape for both, targets from 0 to 1.
    """
    prediction = at_least_float32(prediction)
    if task.kind != "multiclass":
        target = target.reshape(prediction.shape).to(prediction.dtype)
        return _binary_cross_entropy(prediction, target, task.scale)
    by_class = classes_to_axis_1(task, prediction, target)  # (N, C, ...)
    if task.scale == "probabilities":
        shares = by_class / by_class.sum(1, keepdim=True)
        logs = shares.clamp(EPSILON, 1 - EPSILON).log()
    else:
        logs = by_class.log_softmax(1)
    if is_one_hot(task, prediction, target):
        return -(target.reshape(prediction.shape).movedim(task.axis, 1) * logs).sum(1)
    labels = target.reshape(logs.shape[:1] + logs.shape[2:]).long()
    return functional.nll_loss(logs, labels, reduction="none", ignore_index=IGNORED)


def _binary_cross_entropy(prediction: Tensor, target: Tensor, scale: str) -> Tensor:
    if scale == "logits":
        return functional.binary_cross_entropy_with_logits(prediction, target, reduction="none")
    if scale == "log_probabilities":
        prediction = prediction.exp()
    prediction = prediction.clamp(EPSILON, 1 - EPSILON)
    return functional.binary_cross_entropy(prediction, target, reduction="none")


def squared_error(prediction: Tensor, target: Tensor) -> Tensor:
    """`(prediction - target)²`."""
    return (prediction - target).square()


def absolute_error(prediction: Tensor, target: Tensor) -> Tensor:
    """`|prediction - target|`."""
    return (prediction - target).abs()


Build: TypeAlias = Callable[[FirstBatch], Mean | TorchMetric]


@dataclasses.dataclass(frozen=True)
class Named:
    """What a name stands for.

    Attributes:
        build: makes the metric, from the first batch.
        weightable: whether it is a mean over samples, which sample weights can change.
    """

    build: Build
    weightable: bool


NamedMetric: TypeAlias = Named | Callable[..., Any]
"""What a metric's name may stand for: a `Named`, a function, or torchmetrics' class or object."""


def _can_have_a_name(entry: Any) -> bool:
    if isinstance(entry, type):
        return is_torchmetric_class(entry)
    return isinstance(entry, Named) or callable(entry)


NAMES: Registry[NamedMetric] = Registry(
    "metric",
    "A torchmetrics object or a callable (prediction, target) is accepted too.",
    group="fitkit.metrics",
    page="docs/losses-and-metrics.md",
    accepts=_can_have_a_name,
    expected="a function (prediction, target), torchmetrics' class or object, "
    "or a Named (fitkit.seams)",
)


def weightable_names() -> list[str]:
    """Return the names that weighted_metrics can have."""
    return sorted(filter(_is_weightable, NAMES))


def _is_weightable(name: str) -> bool:
    try:
        named = NAMES[name]
    except FitkitError:  # an installed package's mistake, which its own name tells
        return False
    return isinstance(named, Named) and named.weightable


# ---- means over entries: own code, because torchmetrics has no sample weights, costs more a
# batch than a small net's step, and 1.5 s at its import ----


def _mean(name: str, *aliases: str) -> Callable[[Build], Build]:
    def register(build: Build) -> Build:
        NAMES.add(name, Named(build, weightable=True), *aliases)
        return build

    return register


def _label_mean(first: FirstBatch, values: Values, force: str = "") -> Mean:
    task = first.task(force)
    ignores = task.kind == "multiclass"
    return Mean(chosen_labels(task), values, skip_ignored=ignores)


@_mean("accuracy", "acc")
def _accuracy(first: FirstBatch) -> Mean:
    return _label_mean(first, equal)


@_mean("binary_accuracy")
def _binary_accuracy(first: FirstBatch) -> Mean:
    return _label_mean(first, equal, "entries")


@_mean("categorical_accuracy", "sparse_categorical_accuracy")
def _categorical_accuracy(first: FirstBatch) -> Mean:
    return _label_mean(first, equal, "classes")


@_mean("exact_match", "subset_accuracy")
def _exact_match(first: FirstBatch) -> Mean:
    return _label_mean(first, all_equal)


@_mean("hamming_distance", "hamming_loss")
def _hamming_distance(first: FirstBatch) -> Mean:
    return _label_mean(first, unequal)


def _top_k(k: int) -> Build:
    def build(first: FirstBatch) -> Mean:
        task = first.task("classes")
        values = partial(among_top, k=min(k, task.columns))
        return Mean(scores_and_labels(task), values, skip_ignored=True)

    return build


_mean(
    "top_k_categorical_accuracy",
    "sparse_top_k_categorical_accuracy",
    "top_k_accuracy",
    "top_5_accuracy",
)(_top_k(5))
for _k in (2, 3, 10):
    _mean(f"top_{_k}_accuracy")(_top_k(_k))


def _cross_entropy(force: str = "", finish: Callable[[float], float] | None = None) -> Build:
    def build(first: FirstBatch) -> Mean:
        task = first.task(force)
        ignores = task.kind == "multiclass"
        values = partial(cross_entropy, task=task)
        return Mean(as_given, values, skip_ignored=ignores, finish=finish)

    return build


_mean("cross_entropy", "log_loss")(_cross_entropy())
_mean("binary_crossentropy")(_cross_entropy("entries"))
_mean("categorical_crossentropy", "sparse_categorical_crossentropy")(_cross_entropy("classes"))
_mean("perplexity")(_cross_entropy("classes", finish=math.exp))


def _error_mean(
    name: str, *aliases: str, values: Values, finish: Callable[[float], float] | None = None
) -> None:
    _mean(name, *aliases)(lambda first: Mean(matched, values, finish=finish))


_error_mean("mse", "mean_squared_error", values=squared_error)
_error_mean("rmse", "root_mean_squared_error", values=squared_error, finish=math.sqrt)
_error_mean("mae", "mean_absolute_error", values=absolute_error)
_error_mean("huber", values=partial(functional.huber_loss, reduction="none"))

for _name, *_aliases in (
    ("mape", "mean_absolute_percentage_error"),
    ("smape", "symmetric_mean_absolute_percentage_error"),
    ("msle", "mean_squared_logarithmic_error"),
    ("log_cosh", "log_cosh_error"),
    ("hinge",),
    ("squared_hinge",),
    ("poisson",),
    ("cosine_similarity",),
    ("kl_divergence", "kld", "kullback_leibler_divergence"),
):
    NAMES.promise(f"fitkit.extras.error_metrics:{_name.upper()}", _name, *_aliases)

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
    *aliases: str,
    conversion: Callable[[Task], Conversion] = chosen_labels,
    kinds: tuple[str, ...] = ("binary", "multiclass", "multilabel"),
    finish: Callable[[Tensor], Any] | None = None,
    defined: Defined | None = None,
    **options: str,
) -> None:
    """Register torchmetrics' `Binary<suffix>`, `Multiclass<suffix>` and `Multilabel<suffix>`."""

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

    name, *others = aliases
    NAMES.add(name, Named(build, weightable=False), *others)


def _count(index: int) -> Callable[[Tensor], Tensor]:
    return lambda counts: counts[index]


def _mean_recall(matrix: Tensor) -> Tensor:
    # From the confusion matrix (C, C): over the classes that have samples.
    found, present = matrix.diagonal(), matrix.sum(1)
    return (found[present > 0] / present[present > 0]).mean()


_ONE_OF = ("binary", "multiclass")
_YES_OR_NO = ("binary", "multilabel")

_counted("Precision", "precision", average="macro")
_counted("Recall", "recall", "sensitivity", average="macro")
_counted("F1Score", "f1", "f1_score", "dice", average="macro")
_counted("Specificity", "specificity", average="macro")
_counted("NegativePredictiveValue", "negative_predictive_value", average="macro")
_counted("StatScores", "true_positives", kinds=_YES_OR_NO, finish=_count(0), average="micro")
_counted("StatScores", "false_positives", kinds=_YES_OR_NO, finish=_count(1), average="micro")
_counted("StatScores", "true_negatives", kinds=_YES_OR_NO, finish=_count(2), average="micro")
_counted("StatScores", "false_negatives", kinds=_YES_OR_NO, finish=_count(3), average="micro")
_counted("ConfusionMatrix", "confusion_matrix")
_counted("ConfusionMatrix", "balanced_accuracy", kinds=_ONE_OF, finish=_mean_recall)
_counted(
    "CohenKappa",
    "cohen_kappa",
    "kappa",
    kinds=_ONE_OF,
    finish=Tensor.mean,
    defined=_may_agree_by_chance,
)
_counted("MatthewsCorrCoef", "matthews_corrcoef", "mcc")
_counted("JaccardIndex", "jaccard", "jaccard_index", "iou", "mean_iou", average="macro")
_counted(
    "AUROC",
    "auc",
    "auroc",
    "roc_auc",
    conversion=probabilities_and_labels,
    average="none",
    finish=Tensor.mean,
    defined=_has_both_kinds,
)
_counted(
    "AveragePrecision",
    "average_precision",
    "pr_auc",
    "auprc",
    conversion=probabilities_and_labels,
    average="none",
    finish=Tensor.mean,
    defined=_has_samples,
)
_counted(
    "CalibrationError",
    "calibration_error",
    "ece",
    kinds=_ONE_OF,
    conversion=probabilities_and_labels,
)


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
    *aliases: str,
    columns_argument: bool = True,
    defined: Defined | None = None,
) -> None:
    """Register a metric of whole columns; several columns give their mean."""

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

    name, *others = aliases
    NAMES.add(name, Named(build, weightable=False), *others)


_fitted("R2Score", "r2", "r2_score", columns_argument=False)
_fitted("ExplainedVariance", "explained_variance", columns_argument=False)
_fitted(
    "PearsonCorrCoef",
    "pearson",
    "pearson_correlation",
    "pearson_corrcoef",
    defined=_is_no_ratio_of_zeros,
)
_fitted(
    "SpearmanCorrCoef",
    "spearman",
    "spearman_correlation",
    "spearman_corrcoef",
    defined=_varies,
)
_fitted(
    "ConcordanceCorrCoef",
    "concordance",
    "concordance_correlation",
    "concordance_corrcoef",
    defined=_is_no_ratio_of_zeros,
)
_fitted("RelativeSquaredError", "relative_squared_error", defined=_targets_vary)
