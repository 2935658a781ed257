"""Values entry by entry, whose mean over all samples is a metric.

Each function gives one value an entry or a sample, so sample weights can multiply them.
Shapes: prediction and target of one shape (N, ...) unless said otherwise; returns (N, ...).
"""

from __future__ import annotations

import dataclasses
import math

import torch
from torch import Tensor
from torch.nn import functional

from fitkit.metrics.readings import at_least_float32
from fitkit.metrics.task import IGNORED, Task

SMALLEST = 1e-7
"""Keras's epsilon: what divisors and probabilities are kept above."""


def equal(prediction: Tensor, target: Tensor) -> Tensor:
    """Whether labels agree."""
    return prediction == target


def unequal(prediction: Tensor, target: Tensor) -> Tensor:
    """Whether labels differ; ignored ones don't."""
    return (prediction != target) & (target != IGNORED)


def all_equal(prediction: Tensor, target: Tensor) -> Tensor:
    """Whether all labels of a sample agree, ignored ones apart: (N,)."""
    return ((prediction == target) | (target == IGNORED)).reshape(len(target), -1).all(1)


@dataclasses.dataclass(frozen=True)
class AmongTop:
    """Whether the label is among the k classes that the prediction puts highest.

    Shapes: prediction (N, C, ...), target (N, ...).
    """

    k: int

    def __call__(self, prediction: Tensor, target: Tensor) -> Tensor:
        chosen = prediction.topk(self.k, dim=1).indices
        return (chosen == target.unsqueeze(1)).any(1)


@dataclasses.dataclass(frozen=True)
class CrossEntropy:
    """Minus the logarithm of the probability that the prediction gives to the target.

    Shapes: multiclass: target of labels, or of class probabilities in the prediction's shape.
        Otherwise one shape for both, targets from 0 to 1.
    """

    task: Task

    def __call__(self, prediction: Tensor, target: Tensor) -> Tensor:
        task = self.task
        prediction = at_least_float32(prediction)
        if task.kind != "multiclass":
            target = target.reshape(prediction.shape).to(prediction.dtype)
            return self._each_entry(prediction, target)
        logs = self._logs(prediction.movedim(task.axis, 1))  # (N, C, ...)
        if task.one_hot:
            return -(target.reshape(prediction.shape).movedim(task.axis, 1) * logs).sum(1)
        labels = target.reshape(logs.shape[:1] + logs.shape[2:]).long()
        return functional.nll_loss(logs, labels, reduction="none", ignore_index=IGNORED)

    def _logs(self, prediction: Tensor) -> Tensor:
        if self.task.scale == "probabilities":
            shares = prediction / prediction.sum(1, keepdim=True)
            return shares.clamp(SMALLEST, 1 - SMALLEST).log()
        return prediction.log_softmax(1)

    def _each_entry(self, prediction: Tensor, target: Tensor) -> Tensor:
        if self.task.scale == "logits":
            return functional.binary_cross_entropy_with_logits(prediction, target, reduction="none")
        if self.task.scale == "log_probabilities":
            prediction = prediction.exp()
        prediction = prediction.clamp(SMALLEST, 1 - SMALLEST)
        return functional.binary_cross_entropy(prediction, target, reduction="none")


def squared_error(prediction: Tensor, target: Tensor) -> Tensor:
    """`(prediction - target)²`."""
    return (prediction - target).square()


def absolute_error(prediction: Tensor, target: Tensor) -> Tensor:
    """`|prediction - target|`."""
    return (prediction - target).abs()


def percentage_error(prediction: Tensor, target: Tensor) -> Tensor:
    """The absolute error in percent of the target (Keras; scikit-learn gives the fraction)."""
    return 100 * (prediction - target).abs() / target.abs().clamp(min=SMALLEST)


def symmetric_percentage_error(prediction: Tensor, target: Tensor) -> Tensor:
    """The absolute error in percent of the mean of both sizes: 0 to 200."""
    sizes = (prediction.abs() + target.abs()).clamp(min=SMALLEST)
    return 200 * (prediction - target).abs() / sizes


def squared_log_error(prediction: Tensor, target: Tensor) -> Tensor:
    """The squared error of `log(1 + x)`; negative values count as 0."""
    return (prediction.clamp(min=0).log1p() - target.clamp(min=0).log1p()).square()


def log_cosh(prediction: Tensor, target: Tensor) -> Tensor:
    """`log(cosh(prediction - target))`, written so that large errors don't overflow."""
    error = prediction - target
    return error + functional.softplus(-2 * error) - math.log(2)


def huber(prediction: Tensor, target: Tensor) -> Tensor:
    """Half the squared error up to an error of 1, linear beyond."""
    return functional.huber_loss(prediction, target, reduction="none")


def hinge(prediction: Tensor, target: Tensor) -> Tensor:
    """`max(0, 1 - prediction · target)` with targets -1 and 1; 0 counts as -1."""
    sign = torch.where(target > 0, 1.0, -1.0)
    return (1 - prediction * sign).clamp(min=0)


def squared_hinge(prediction: Tensor, target: Tensor) -> Tensor:
    """The square of `hinge`."""
    return hinge(prediction, target).square()


def poisson(prediction: Tensor, target: Tensor) -> Tensor:
    """`prediction - target · log(prediction)`, as Keras's loss of that name."""
    return prediction - target * (prediction + SMALLEST).log()


def cosine(prediction: Tensor, target: Tensor) -> Tensor:
    """The cosine of the angle between the vectors in the last dimension: (N, ..., D) → (N, ...)."""
    return functional.cosine_similarity(prediction, target, dim=-1)


def divergence(prediction: Tensor, target: Tensor) -> Tensor:
    """Σ target · log(target / prediction) over the last dimension, as Keras's kl_divergence."""
    prediction = prediction.clamp(SMALLEST, 1)
    target = target.clamp(SMALLEST, 1)
    return (target * (target / prediction).log()).sum(-1)
