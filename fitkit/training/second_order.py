"""Optimizers that differentiate the gradients once more, such as AdaHessian."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial

import torch
from torch.optim import Optimizer

from fitkit.distributed.strategies import Strategy
from fitkit.errors import ConfigurationError
from fitkit.optimizers import members_of

NEEDS_GRAPH = re.compile(r"create_graph|not have a? ?grad_fn")
"""What such optimizers, and torch in them, say of gradients without a graph."""


def needs_graph(optimizer: Optimizer) -> bool:
    """Whether `optimizer.step` differentiates the gradients, and says so as timm's AdaHessian."""
    return any(getattr(one, "is_second_order", False) for one in members_of(optimizer))


def backward_with_graph(
    optimizer: Optimizer, strategy: Strategy, *, scales: bool, is_compiled: bool
) -> Callable[..., None]:
    """Return what computes gradients that the optimizer can differentiate.

    Args:
        scales: whether a scaler changes losses and gradients.
        is_compiled: whether a compiler computes the gradients.

    Raises:
        ConfigurationError: something acts on gradients through which no graph leads.
    """
    hindrances = {
        "several processes": strategy.world.size > 1,
        f"strategy={strategy.name!r}": strategy.has_engine,
        "a loss scaler (16-bit precision)": scales,
        "jit_compile": is_compiled,
    }
    found = [name for name, hinders in hindrances.items() if hinders]
    if found:
        raise ConfigurationError(
            f"{type(optimizer).__name__} differentiates the gradients (is_second_order), "
            f"which doesn't work with {found[0]}. Leave that out, or use another optimizer."
        )
    return partial(torch.Tensor.backward, create_graph=True)


def explained_step(error: RuntimeError, optimizer: Optimizer) -> ConfigurationError | None:
    """Return a clearer error for a step that needs the gradients' graph; None for any other."""
    if needs_graph(optimizer) or not NEEDS_GRAPH.search(str(error)):
        return None
    kind = type(optimizer).__name__
    return ConfigurationError(
        f"{kind} differentiates the gradients, which needs backward(create_graph=True). Set "
        f"is_second_order = True on it, and fitkit computes them so. torch says: {error}"
    )
