"""A batch to look at a net with: from an example, or made of the shape of one sample."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

from fitkit import trees
from fitkit.arguments import describe
from fitkit.errors import ConfigurationError


def example_batch(example: Any, input_shape: Any, net: nn.Module) -> Any:
    """The batch that a user described, as tensors on the net's device.

    Args:
        example: a batch of inputs: a tensor or array, or a tree of them; None where a shape is
            given. Its float64 takes the net's number type.
        input_shape: the shape of one sample, as `(1, 28, 28)`; a dict or tuple of shapes for
            several inputs. The batch is one sample of zeros.
        net: whose device and number type count.

    Raises:
        ConfigurationError: both, neither, or nothing that makes a batch.
    """
    if (example is None) == (input_shape is None):
        given = "neither an example nor" if example is None else "an example and"
        raise ConfigurationError(
            f"Got {given} an input_shape; one is needed, not both. Give a batch of inputs as "
            "example=x[:2], or the shape of one sample as input_shape=(1, 28, 28)."
        )
    if example is None:
        example = zeros(input_shape, number_type(net))
    return prepared(example, net)


def zeros(shape: Any, dtype: torch.dtype) -> Any:
    """A batch of one sample of zeros, for a shape or a dict or sequence of shapes."""
    if isinstance(shape, Mapping):
        return {name: zeros(item, dtype) for name, item in shape.items()}
    if isinstance(shape, (tuple, list)):
        if shape and all(isinstance(item, (tuple, list, Mapping)) for item in shape):
            return tuple(zeros(item, dtype) for item in shape)
        if all(isinstance(n, int) and not isinstance(n, bool) and n >= 0 for n in shape):
            return torch.zeros(1, *shape, dtype=dtype)
    raise ConfigurationError(
        f"input_shape={describe(shape)} must be the shape of one sample, without the batch's "
        "dimension, as (1, 28, 28); or a dict or tuple of such shapes."
    )


def number_type(net: nn.Module) -> torch.dtype:
    """The type of the net's first floating-point parameter."""
    types = (tensor.dtype for tensor in net.parameters() if tensor.is_floating_point())
    return next(types, torch.get_default_dtype())


def prepared(example: Any, net: nn.Module) -> Any:
    """The example as tensors on the net's device; float64 takes the net's number type."""
    weights = next(iter([*net.parameters(), *net.buffers()]), None)
    device = None if weights is None else weights.device
    dtype = number_type(net)

    def as_tensor(leaf: Any) -> Any:
        if isinstance(leaf, np.ndarray):
            leaf = torch.as_tensor(leaf)
        if not isinstance(leaf, torch.Tensor):
            return leaf
        return leaf.to(device, dtype if leaf.dtype == torch.float64 else leaf.dtype)

    example = trees.map_leaves(as_tensor, example)
    if not any(isinstance(leaf, torch.Tensor) for leaf in trees.leaves(example)):
        raise ConfigurationError(
            f"example={describe(example)} has no tensor or array. Give a batch of inputs; "
            f"or the shape of one sample, as input_shape=(1, 28, 28)."
        )
    return example
