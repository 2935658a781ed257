"""The mean of per-sample losses under sample weights."""

from __future__ import annotations

import torch

from fitkit.errors import ConfigurationError
from fitkit.losses.targets import full


def weighted_mean(
    values: torch.Tensor, weight: torch.Tensor, divisor: torch.Tensor | None = None
) -> torch.Tensor:
    """Σ weight·value / N: Keras's mean, which divides by the number of samples.

    Values beyond the weight's dimensions are averaged first. So a weight for each sample, (N,),
    weighs the sample's mean loss; one for each position, (N, T), weighs positions, and N·T divides.

    Args:
        values: unreduced losses (N, ...).
        weight: (N,) or (N, 1), or as many of the values' first dimensions as it has.
        divisor: what divides the sum over all values, where the mean without weights isn't over
            their number (ignored labels, classes' weights). Weights of 1 give that mean.

    Raises:
        ConfigurationError: the weight's shape isn't the start of the values' shape.
    """
    values = full(values)
    if weight.shape != values.shape:
        weight = _aligned(values, weight)
    if weight.dtype is not values.dtype:
        # float64 weights come down to the values' float32, others go up.
        weight = weight.to(values.dtype)
    if weight.ndim < values.ndim:
        values = values.flatten(weight.ndim)
        values = values.mean(-1) if divisor is None else values.sum(-1)
    if divisor is None:
        return (values * weight).mean()
    return (values * weight).sum() / divisor


def _aligned(values: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The weight in the shape of the values' first dimensions."""
    shape = tuple(weight.shape)
    count = values.shape[0]
    fits = weight.shape == values.shape[: weight.ndim]
    if not fits and weight.ndim > 1 and weight.shape[0] == weight.numel() == count:
        weight = weight.reshape(-1)  # (N, 1) → (N,)
    if weight.ndim == 0 or weight.shape != values.shape[: weight.ndim]:
        raise ConfigurationError(
            f"sample_weight of shape {shape} doesn't fit losses of shape {tuple(values.shape)}. "
            f"Give one weight a sample, shape ({count},), or one a position."
        )
    return weight
