"""Loss formulas that torch has no function for: Keras's, by their definitions.

Each takes `(prediction, target)`, already matched (`targets.py`), which also means in float32 at
least, and gives one value a sample, or one a position where predictions have more dimensions. The
mean of these values is the loss.

Shapes: N samples, D values or C classes each; `...` are positions (time, height and width).
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

LossFunction = Callable[..., torch.Tensor]

EPSILON = 1e-7
"""`keras.config.epsilon()`: the least probability, the least divisor."""

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


class CountedLabels:
    """What torch's mean over class indices divides by: ignored ones don't count, and each of the
    others counts by its class's weight.

    Args:
        ignore_index: the label that doesn't count.
        module: the torch.nn loss whose `weight` holds the classes' weights; None for none.
    """

    def __init__(self, ignore_index: int, module: nn.Module | None = None) -> None:
        self._ignore_index = ignore_index
        self._module = module

    @property
    def has_weights(self) -> bool:
        """Whether labels count by weights of their classes."""
        return getattr(self._module, "weight", None) is not None

    def counts_all(self, target: torch.Tensor) -> bool:
        """Whether each label counts as 1; read from the device."""
        if self.has_weights:
            return False
        if not target.numel():
            return True
        above = bool(target.min() > self._ignore_index)  # which takes a sixth of comparing each
        return above or not bool((target == self._ignore_index).any())

    def __call__(self, target: torch.Tensor) -> torch.Tensor:
        """The sum of the labels' weights, without dimensions. Shapes: int64 (N, ...)."""
        counts = target != self._ignore_index
        weight = getattr(self._module, "weight", None)
        if weight is None:
            return counts.sum()
        labels = torch.where(counts, target, 0).to(weight.device, torch.int64)
        return (weight[labels] * counts.to(weight.device)).sum()


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


def _last_axis_mean(values: torch.Tensor) -> torch.Tensor:
    """Mean over the values of a sample, (N, ..., D) → (N, ...); (N,) stays."""
    return values if values.ndim == 1 else values.mean(-1)


def _clipped(probabilities: torch.Tensor) -> torch.Tensor:
    return probabilities.clamp(EPSILON, 1.0 - EPSILON)


def _shares(prediction: torch.Tensor) -> torch.Tensor:
    """Rows scaled to sum to 1, clipped. Shapes: (N, ..., C) → the same."""
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
