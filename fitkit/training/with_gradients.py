"""Evaluations of nets whose outputs are gradients of their inputs, such as forces.

Evaluations compute no gradients, and in that such a net fails. The first batch shows it. From then
on the model's forward is called with gradients, and its outputs are detached.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import torch

from fitkit import trees
from fitkit.data.batches import Batch
from fitkit.distributed.wrapped_model import WrappedModel
from fitkit.errors import ConfigurationError
from fitkit.module import Module

NO_GRAPH = re.compile(r"does not require grad")
"""What torch says where a gradient is asked for and there is no graph."""


def wrapped_for_evaluation(model: Module) -> WrappedModel:
    """Return the model as its strategy evaluates it, with gradients if it is known to need them."""
    wrapped: WrappedModel = model._fitkit.compilation.strategy.wrap_for_evaluation(model)
    if model._fitkit.needs_gradients and wrapped.is_bare:
        wrapped.wrapper = WithGradients(wrapped.call)
    return wrapped


def first_step(
    model: Module,
    step: Any,
    batch: Batch,
    index: int = 0,
    make: Callable[[Any, int], Any] | None = None,
) -> Any:
    """Make an evaluation's first step, with gradients if it fails without them.

    Args:
        step: the pass's step.
        make: makes it; None for the step itself.

    Raises:
        ConfigurationError: it needs them, and replicas or shards stand around the net.
    """
    make = make or step
    if not batch.is_lent:
        batch = dataclasses.replace(batch, is_lent=True)  # a second try gets it as it came
    try:
        return make(batch, index)
    except RuntimeError as error:
        if torch.is_grad_enabled() or not NO_GRAPH.search(str(error)):
            raise
        caller: Any = getattr(step, "net", step)
        wrapped: WrappedModel = step.wrapped
        if model._fitkit.needs_gradients and wrapped.wrapper is not None:
            raise  # with gradients it fails, too
        if not wrapped.is_bare:
            raise ConfigurationError(
                "The net computes gradients in its forward, but evaluations compute none under "
                f"strategy={model._fitkit.compilation.strategy.name!r}. Write "
                "`with torch.enable_grad():` around that part of forward."
            ) from error
        wrapped.wrapper = WithGradients(wrapped.call)
        caller.enter_again()
        try:
            found = make(batch, index)
        except RuntimeError:
            wrapped.wrapper = None
            caller.enter_again()
            raise error from None
    model._fitkit.needs_gradients = True
    return found


class WithGradients:
    """Calls a model's methods with gradients, and detaches what they return."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call

    def __call__(self, method: str, *args: Any, **kwargs: Any) -> Any:
        with torch.inference_mode(False), torch.enable_grad():
            outputs = self._call(method, *args, **kwargs)
        return trees.map_leaves(_detached, outputs)


def _detached(leaf: object) -> object:
    return leaf.detach() if isinstance(leaf, torch.Tensor) else leaf
