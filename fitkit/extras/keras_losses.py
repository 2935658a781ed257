"""Keras's losses, as Keras computes them."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.nn import functional as F

from fitkit.outputs import LossHint
from fitkit.seams.losses import (
    EPSILON,
    Definition,
    LossFunction,
    Match,
    elements,
    last_axis_indices,
    vectors,
)

REGRESSION = LossHint(task="regression")
UNKNOWN = LossHint()
# Keras's axis of classes is the last.
KERAS_LOGITS = LossHint("logits", "classes", class_axis=-1)
KERAS_PROBABILITIES = LossHint("probabilities", "classes", class_axis=-1)
BINARY_PROBABILITIES = LossHint("probabilities", "binary")

FOCAL_ALPHA = 0.25
FOCAL_GAMMA = 2.0


def _last_axis_mean(values: torch.Tensor) -> torch.Tensor:  # (N, ..., D) → (N, ...)
    return values if values.ndim == 1 else values.mean(-1)


def _clipped(probabilities: torch.Tensor) -> torch.Tensor:
    return probabilities.clamp(EPSILON, 1.0 - EPSILON)


def _shares(prediction: torch.Tensor) -> torch.Tensor:
    return _clipped(prediction / prediction.sum(-1, keepdim=True))


def sparse_categorical_crossentropy(prediction: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """-log of the true class's share of the row.

    Shapes: probabilities (N, ..., C), int64 labels (N, ...) → (N, ...).
    """
    true_class = prediction.gather(-1, target.unsqueeze(-1)).squeeze(-1)  # (N, ...)
    return -_clipped(true_class / prediction.sum(-1)).log()


def categorical_crossentropy(prediction: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """-Σ t·log p over rows scaled to sum to 1. Shapes: both (N, ..., C) → (N, ...)."""
    shares = _shares(prediction)
    return -(target * shares.log()).sum(-1)


def categorical_focal_crossentropy(prediction: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """-Σ 0.25·(1-p)²·t·log p over rows scaled to sum to 1. Shapes: both (N, ..., C) → (N, ...).

    Reference: Lin et al., "Focal Loss for Dense Object Detection", 2017, arXiv:1708.02002.
    """
    shares = _shares(prediction)
    factor = FOCAL_ALPHA * (1.0 - shares).pow(FOCAL_GAMMA)
    return -(factor * target * shares.log()).sum(-1)


def _binary_crossentropy_elements(
    probabilities: torch.Tensor, target: torch.Tensor
) -> torch.Tensor:
    # Logarithms rather than F.binary_cross_entropy, which CUDA's autocast refuses.
    clipped = _clipped(probabilities)
    return -(target * clipped.log() + (1.0 - target) * torch.log1p(-clipped))


def binary_crossentropy(prediction: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Mean of -t·log p - (1-t)·log(1-p). Shapes: both (N, ..., D) → (N, ...)."""
    return _last_axis_mean(_binary_crossentropy_elements(prediction, target))


def binary_focal_crossentropy(prediction: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Binary cross-entropy times (1 - probability of the truth)^2. Shapes: (N, ..., D) → (N, ...).

    Reference: Lin et al., "Focal Loss for Dense Object Detection", 2017, arXiv:1708.02002.
    """
    truth = target * prediction + (1.0 - target) * (1.0 - prediction)
    factor = (1.0 - truth).pow(FOCAL_GAMMA)
    return _last_axis_mean(factor * _binary_crossentropy_elements(prediction, target))


def mean_absolute_percentage_error(prediction: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """100·mean(|t - p| / max(|t|, ε)). Shapes: both (N, ..., D) → (N, ...)."""
    share = (target - prediction).abs() / target.abs().clamp_min(EPSILON)
    return 100.0 * _last_axis_mean(share)


def mean_squared_logarithmic_error(prediction: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """mean((log(1 + p) - log(1 + t))²), both at least ε. Shapes: (N, ..., D) → (N, ...)."""
    difference = (prediction.clamp_min(EPSILON) + 1.0).log() - (
        target.clamp_min(EPSILON) + 1.0
    ).log()
    return _last_axis_mean(difference.square())


def log_cosh(prediction: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """mean(log cosh(p - t)), in a form that doesn't overflow. Shapes: (N, ..., D) → (N, ...)."""
    error = prediction - target
    return _last_axis_mean(error + F.softplus(-2.0 * error) - math.log(2.0))


def cosine_similarity(prediction: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Minus the cosine between the two; 0 for a zero vector. Shapes: (N, ..., D) → (N, ...)."""
    ours = F.normalize(prediction, dim=-1, eps=EPSILON)
    theirs = F.normalize(target, dim=-1, eps=EPSILON)
    return -(ours * theirs).sum(-1)


def kl_divergence(prediction: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Σ t·log(t / p), both clipped to [ε, 1]. Shapes: both (N, ..., C) → (N, ...)."""
    truth = target.clamp(EPSILON, 1.0)
    return (truth * (truth / prediction.clamp(EPSILON, 1.0)).log()).sum(-1)


def poisson(prediction: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """mean(p - t·log(p + ε)). Shapes: both (N, ..., D) → (N, ...)."""
    return _last_axis_mean(prediction - target * (prediction + EPSILON).log())


def _signs(target: torch.Tensor) -> torch.Tensor:
    is_binary = ((target == 0) | (target == 1)).all()
    # Others stay. `where` on a tensor: an `if` would make the host wait at each step.
    return torch.where(is_binary, 2.0 * target - 1.0, target)


def hinge(prediction: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """mean(max(1 - t·p, 0)) for ±1 or 0/1 labels. Shapes: both (N, ..., D) → (N, ...)."""
    return _last_axis_mean((1.0 - _signs(target) * prediction).clamp_min(0.0))


def squared_hinge(prediction: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """mean(max(1 - t·p, 0)²) for ±1 or 0/1 labels. Shapes: both (N, ..., D) → (N, ...)."""
    return _last_axis_mean((1.0 - _signs(target) * prediction).clamp_min(0.0).square())


def categorical_hinge(prediction: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """max(best wrong score - true score + 1, 0), one-hot labels. Shapes: (N, ..., C) → (N, ...)."""
    true_score = (target * prediction).sum(-1)
    best_wrong = ((1.0 - target) * prediction).amax(-1)
    return (best_wrong - true_score + 1.0).clamp_min(0.0)


def _definition(
    function: LossFunction,
    match: Match = elements,
    hint: LossHint = REGRESSION,
    **options: Any,
) -> Definition:
    return Definition(function, match, hint, clips=True, **options)


SPARSE_CATEGORICAL_CROSSENTROPY = _definition(
    sparse_categorical_crossentropy,
    match=last_axis_indices,
    hint=KERAS_PROBABILITIES,
    twin="cross_entropy",
    rows_sum_to_one=True,
)
CATEGORICAL_CROSSENTROPY = _definition(
    categorical_crossentropy,
    match=vectors,
    hint=KERAS_PROBABILITIES,
    twin="cross_entropy",
    rows_sum_to_one=True,
    shares=True,
)
CATEGORICAL_FOCAL_CROSSENTROPY = _definition(
    categorical_focal_crossentropy,
    match=vectors,
    hint=KERAS_PROBABILITIES,
    rows_sum_to_one=True,
    shares=True,
)
BINARY_CROSSENTROPY = _definition(
    binary_crossentropy, hint=BINARY_PROBABILITIES, twin="bce_with_logits"
)
BINARY_FOCAL_CROSSENTROPY = _definition(binary_focal_crossentropy, hint=BINARY_PROBABILITIES)
MEAN_ABSOLUTE_PERCENTAGE_ERROR = _definition(mean_absolute_percentage_error)
MEAN_SQUARED_LOGARITHMIC_ERROR = _definition(mean_squared_logarithmic_error)
LOG_COSH = _definition(log_cosh)
COSINE_SIMILARITY = _definition(cosine_similarity, match=vectors)
KL_DIVERGENCE = _definition(kl_divergence, match=vectors, hint=KERAS_PROBABILITIES)
POISSON = _definition(poisson)
# A batch's labels say together whether they are 0 and 1 or -1 and 1.
HINGE = _definition(hinge, hint=UNKNOWN, joins=False, signs=True, zeros=True)
SQUARED_HINGE = _definition(squared_hinge, hint=UNKNOWN, joins=False, signs=True, zeros=True)
CATEGORICAL_HINGE = _definition(categorical_hinge, match=vectors, hint=KERAS_LOGITS, shares=True)
