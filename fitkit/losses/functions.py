"""Loss formulas that torch has no function for: Keras's, by their definitions.

Each takes `(prediction, target)`, already matched (`targets.py`), and gives one value a sample, or
one a position where predictions have more dimensions. The mean of these values is the loss.

Shapes: N samples, D values or C classes each; `...` are positions (time, height and width).
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F

LossFunction = Callable[..., torch.Tensor]

EPSILON = 1e-7
"""`keras.config.epsilon()`: the least probability, the least divisor."""

HALF_TYPES = frozenset({torch.float16, torch.bfloat16})

FOCAL_ALPHA = 0.25
FOCAL_GAMMA = 2.0


class MeanOf:
    """A loss function that gives the mean of what another one gives."""

    def __init__(self, function: LossFunction) -> None:
        self.function = function

    def __call__(self, prediction: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return self.function(prediction, target).mean()


class SumPerSample:
    """A loss function that gives, for each sample, the sum of what another one gives."""

    def __init__(self, function: LossFunction) -> None:
        self.function = function

    def __call__(self, prediction: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        values = self.function(prediction, target)
        return values if values.ndim == 1 else values.flatten(1).sum(1)  # (N,)


def torch_binary_cross_entropy(
    prediction: torch.Tensor, target: torch.Tensor, reduction: str = "mean"
) -> torch.Tensor:
    """`F.binary_cross_entropy`, also within a bfloat16 autocast.

    CUDA's autocast refuses the function because float16 gradients overflow; bfloat16 has
    float32's range, so there the refusal has no ground. A float16 autocast still refuses.
    """
    device = prediction.device.type
    if torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) is torch.bfloat16:
        with torch.autocast(device, enabled=False):
            full, target = prediction.float(), target.float()
            return F.binary_cross_entropy(full, target, reduction=reduction)
    return F.binary_cross_entropy(prediction, target, reduction=reduction)


def _full(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor` in at least float32: `1 - EPSILON` rounds to 1 in the half types."""
    return tensor.float() if tensor.dtype in HALF_TYPES else tensor


def _last_axis_mean(values: torch.Tensor) -> torch.Tensor:
    """Mean over the values of a sample, (N, ..., D) → (N, ...); (N,) stays."""
    return values if values.ndim == 1 else values.mean(-1)


def _clipped(probabilities: torch.Tensor) -> torch.Tensor:
    return probabilities.clamp(EPSILON, 1.0 - EPSILON)


def sparse_categorical_crossentropy(prediction: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """-log of the true class's share of the row.

    Shapes: probabilities (N, ..., C), int64 labels (N, ...) → (N, ...).
    """
    rows = _full(prediction)
    true_class = rows.gather(-1, target.unsqueeze(-1)).squeeze(-1)  # (N, ...)
    return -_clipped(true_class / rows.sum(-1)).log()


def categorical_crossentropy(prediction: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """-Σ t·log p over rows scaled to sum to 1. Shapes: both (N, ..., C) → (N, ...)."""
    rows = _full(prediction)
    shares = _clipped(rows / rows.sum(-1, keepdim=True))
    return -(target * shares.log()).sum(-1)


def categorical_focal_crossentropy(prediction: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """-Σ 0.25·(1-p)²·t·log p over rows scaled to sum to 1. Shapes: both (N, ..., C) → (N, ...).

    Reference: Lin et al., "Focal Loss for Dense Object Detection", 2017, arXiv:1708.02002.
    """
    rows = _full(prediction)
    shares = _clipped(rows / rows.sum(-1, keepdim=True))
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
    return _last_axis_mean(_binary_crossentropy_elements(_full(prediction), target))


def binary_focal_crossentropy(prediction: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Binary cross-entropy times (1 - probability of the truth)^2. Shapes: (N, ..., D) → (N, ...).

    Reference: Lin et al., "Focal Loss for Dense Object Detection", 2017, arXiv:1708.02002.
    """
    probabilities = _full(prediction)
    truth = target * probabilities + (1.0 - target) * (1.0 - probabilities)
    factor = (1.0 - truth).pow(FOCAL_GAMMA)
    return _last_axis_mean(factor * _binary_crossentropy_elements(probabilities, target))


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
    ours = F.normalize(_full(prediction), dim=-1, eps=EPSILON)
    theirs = F.normalize(_full(target), dim=-1, eps=EPSILON)
    return -(ours * theirs).sum(-1)


def kl_divergence(prediction: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Σ t·log(t / p), both clipped to [ε, 1]. Shapes: both (N, ..., C) → (N, ...)."""
    truth = _full(target).clamp(EPSILON, 1.0)
    return (truth * (truth / _full(prediction).clamp(EPSILON, 1.0)).log()).sum(-1)


def poisson(prediction: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """mean(p - t·log(p + ε)). Shapes: both (N, ..., D) → (N, ...)."""
    rate = _full(prediction)
    return _last_axis_mean(rate - target * (rate + EPSILON).log())


def _signs(target: torch.Tensor) -> torch.Tensor:
    """0/1 labels as ±1; other labels as they are."""
    is_binary = ((target == 0) | (target == 1)).all()
    # `where` on a tensor: an `if` would make the host wait for the device at each step.
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
