"""The mean of per-sample losses under sample weights."""

from __future__ import annotations

import torch

from fitkit.errors import ConfigurationError


def weighted_mean(values: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Σ weight·value / N: Keras's mean, which divides by the number of samples.

    Values beyond the weight's dimensions are averaged first. So a weight for each sample, (N,),
    weighs the sample's mean loss; one for each position, (N, T), weighs positions, and N·T divides.

    Args:
        values: unreduced losses (N, ...).
        weight: (N,) or (N, 1), or as many of the values' first dimensions as it has.

    Raises:
        ConfigurationError: the weight's shape isn't the start of the values' shape.
    """
    if weight.shape != values.shape:
        values, weight = _aligned(values, weight)
    if weight.dtype is not values.dtype:
        # Half-precision values go up to float32 with their weights; float64 weights come down.
        weight = weight.to(torch.promote_types(values.dtype, torch.float32))
    return (values * weight).mean()


def _aligned(values: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
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
    if weight.ndim < values.ndim:
        values = values.flatten(weight.ndim).mean(weight.ndim)
    return values, weight
