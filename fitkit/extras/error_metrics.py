"""Metrics of errors that few trainings ask for: of shares, logarithms, margins and directions."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from fitkit.errors import ConfigurationError
from fitkit.extras import keras_losses
from fitkit.extras.metric_conversions import distributions
from fitkit.seams.losses import EPSILON
from fitkit.seams.metrics import FirstBatch, Mean, Named, Values, matched


def symmetric_percentage_error(prediction: Tensor, target: Tensor) -> Tensor:
    """Return the absolute error in percent of the mean of both sizes: 0 to 200."""
    sizes = (prediction.abs() + target.abs()).clamp(min=EPSILON)
    return 200 * (prediction - target).abs() / sizes


def hinge(prediction: Tensor, target: Tensor) -> Tensor:
    """`max(0, 1 - prediction · target)` with targets -1 and 1; 0 counts as -1."""
    sign = torch.where(target > 0, 1.0, -1.0)
    return (1 - prediction * sign).clamp(min=0)


def squared_hinge(prediction: Tensor, target: Tensor) -> Tensor:
    """Return the square of `hinge`."""
    return hinge(prediction, target).square()


def cosine(prediction: Tensor, target: Tensor) -> Tensor:
    """Return the cosine of the angle between the vectors in the last dimension: (N, ..., D) → (N,
    ...).
    """
    return functional.cosine_similarity(prediction, target, dim=-1)


def _error_mean(values: Values) -> Named:
    return Named(lambda first: Mean(matched, values), weightable=True)


def _cosine_similarity(first: FirstBatch) -> Mean:
    _need_columns(first)
    return Mean(matched, cosine)


def _kl_divergence(first: FirstBatch) -> Mean:
    _need_columns(first)
    return Mean(distributions(first.scale("multiclass")), keras_losses.kl_divergence)


def _need_columns(first: FirstBatch) -> None:
    shape = tuple(first.prediction.shape)
    if len(shape) < 2 or shape[-1] == 1:
        raise ConfigurationError(
            f"it compares vectors, but a prediction of shape {shape} has one number per sample."
        )


MAPE = _error_mean(keras_losses.mean_absolute_percentage_error)
SMAPE = _error_mean(symmetric_percentage_error)
MSLE = _error_mean(keras_losses.mean_squared_logarithmic_error)
LOG_COSH = _error_mean(keras_losses.log_cosh)
HINGE = _error_mean(hinge)
SQUARED_HINGE = _error_mean(squared_hinge)
POISSON = _error_mean(keras_losses.poisson)
COSINE_SIMILARITY = Named(_cosine_similarity, weightable=True)
KL_DIVERGENCE = Named(_kl_divergence, weightable=True)
