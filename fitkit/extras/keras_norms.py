"""Keras's batch normalisation over the batches of all ranks.

Keras's layers have an argument `synchronized`, which its torch backend passes over.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from fitkit.extras.keras_backend import refusal

# isort: split
import keras
import torch
import torch.distributed as dist
from torch.nn.modules.batchnorm import _BatchNorm

LAYER = keras.layers.BatchNormalization


def check(net: Any) -> None:
    """Refuse layers that can't be synchronised.

    Raises:
        ConfigurationError: with what to write instead.
    """
    for layer in net._flatten_layers():
        if isinstance(layer, LAYER) and type(layer)._moments is not LAYER._moments:
            what = f"{type(layer).__name__}, which computes moments of its own"
        elif any(isinstance(part, _BatchNorm) for part in _torch_parts(layer)):
            what = "torch's batch normalisation inside a Keras layer"
        else:
            continue
        raise refusal(
            f"sync_batchnorm=True can't synchronise {what}. Use keras.layers.BatchNormalization, "
            "or leave sync_batchnorm out."
        )


def _torch_parts(layer: Any) -> Iterator[torch.nn.Module]:
    return (part for part in layer.children() if not isinstance(part, keras.Layer))


@contextlib.contextmanager
def synchronized(net: Any, synchronization: Any) -> Iterator[None]:
    """Let a network's batch normalisations see the batches of all ranks within a block.

    Args:
        synchronization: what the layers of one training share.
    """
    layers = [layer for layer in net._flatten_layers() if isinstance(layer, LAYER)]
    for layer in layers:
        vars(layer)["_moments"] = Moments(layer, synchronization)
    try:
        yield
    finally:
        for layer in layers:
            del vars(layer)["_moments"]


class Moments:
    """The mean and the variance of a layer's inputs over all ranks, in the method's place.

    Args:
        layer: the layer.
        synchronization: as in `synchronized`.
    """

    def __init__(self, layer: Any, synchronization: Any) -> None:
        self._layer, self._shared = layer, synchronization

    def __call__(
        self, inputs: torch.Tensor, mask: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the mean and the (biased) variance of each channel.

        Ranks:
            Collective: two exchanges, and as many in the backward pass.

        Shapes: (B, ..., C, ...), (B, ...) → (C,), (C,).
        """
        axes, epsilon = list(self._layer._reduction_axes), 0.0
        weights = torch.ones_like(inputs[:1, ..., :1]).expand_as(inputs)
        if mask is not None:
            weights = mask.unsqueeze(-1).to(inputs).expand_as(inputs)
            epsilon = keras.config.epsilon()
        if not self._shared.counts:
            weights = weights * 0

        def over_ranks(values: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = Sum.apply(values, self._shared.group)
            return found

        sums = torch.stack([(inputs * weights).sum(axes), weights.sum(axes)])
        total, number = over_ranks(sums)
        mean = total / (number + epsilon)
        along = [1] * inputs.ndim
        along[self._layer.axis] = -1
        squares = ((inputs - mean.view(along)).square() * weights).sum(axes)
        return mean, over_ranks(squares) / (number + epsilon)


class Sum(torch.autograd.Function):
    """The sum over ranks, whose gradient is the sum of all ranks' gradients."""

    @staticmethod
    def forward(context: Any, values: torch.Tensor, group: Any) -> torch.Tensor:
        context.group = group
        found = values.clone()
        dist.all_reduce(found, group=group)
        return found

    @staticmethod
    def backward(context: Any, *gradients: Any) -> Any:
        found = gradients[0].clone()
        dist.all_reduce(found, group=context.group)
        return found, None
