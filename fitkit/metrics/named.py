"""The metrics that have names: their formulas, and what builds each at the first batch.

Where the name alone leaves an average open, accuracy is the share of right entries (as in
Keras) and all others are the mean over the classes or labels (`average="macro"`). For another
average, threshold or number of bins pass the torchmetrics object.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

from torch import Tensor
from torch.nn import functional

from fitkit.errors import FitkitError
from fitkit.losses.formulas import EPSILON
from fitkit.metrics.conversions import (
    FirstBatch,
    Task,
    as_given,
    at_least_float32,
    chosen_labels,
    classes_to_axis_1,
    is_one_hot,
    matched,
    scores_and_labels,
)
from fitkit.metrics.sums import Mean, Values
from fitkit.metrics.torchmetrics_adapter import is_torchmetric_class
from fitkit.outputs import IGNORED
from fitkit.registry import Registry

if TYPE_CHECKING:
    from fitkit.extras.torchmetrics_objects import TorchMetric


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


Build: TypeAlias = "Callable[[FirstBatch], Mean | TorchMetric]"


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

for _name, *_aliases in (
    ("precision",),
    ("recall", "sensitivity"),
    ("f1", "f1_score", "dice"),
    ("specificity",),
    ("negative_predictive_value",),
    ("true_positives",),
    ("false_positives",),
    ("true_negatives",),
    ("false_negatives",),
    ("confusion_matrix",),
    ("balanced_accuracy",),
    ("cohen_kappa", "kappa"),
    ("matthews_corrcoef", "mcc"),
    ("jaccard", "jaccard_index", "iou", "mean_iou"),
    ("auc", "auroc", "roc_auc"),
    ("average_precision", "pr_auc", "auprc"),
    ("calibration_error", "ece"),
    ("r2", "r2_score"),
    ("explained_variance",),
    ("pearson", "pearson_correlation", "pearson_corrcoef"),
    ("spearman", "spearman_correlation", "spearman_corrcoef"),
    ("concordance", "concordance_correlation", "concordance_corrcoef"),
    ("relative_squared_error",),
):
    NAMES.promise(f"fitkit.extras.torchmetrics_names:{_name.upper()}", _name, *_aliases)
