"""How a step calls the net: as the strategy wraps it, and in the strategy's precision."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import _has_any_global_hook

from fitkit.distributed.strategies import Strategy
from fitkit.distributed.wrapped_model import DividedModel, WrappedModel
from fitkit.module import Module
from fitkit.shortcuts import Shortcut
from fitkit.training.caller import Caller, caller_of
from fitkit.typing import Tree

NO_CAST = Shortcut("no autocast where the precision changes nothing")
NET_ITSELF = Shortcut("the net called without the model around it")


class NetCall:
    """Calls the net with a batch's inputs.

    Args:
        model: the model that has it.
        wrapped: calls the model, as its strategy wants it called.

    Attributes:
        wrapped: as given.
        sequences: the same, if ranks divide each sequence; otherwise None.
        is_plain: whether the precision changes nothing.
        waits_for_ranks: whether ranks must call it equally often.
        caller: finds a forward's arguments in a batch's inputs.
        forward: the call of the net in the right precision, with its arguments.
    """

    def __init__(self, model: Module, wrapped: WrappedModel) -> None:
        strategy: Strategy = model._fitkit.compilation.strategy
        self.wrapped = wrapped
        self.sequences: DividedModel | None = wrapped if isinstance(wrapped, DividedModel) else None
        self.is_plain: bool = strategy.precision.is_plain and NO_CAST.is_on
        self.waits_for_ranks: bool = strategy.evaluates_in_step and strategy.world.size > 1
        self._precision, self._kind = strategy.precision, strategy.device.type
        self.caller: Caller = caller_of(model)
        self.enter_again()

    def enter_again(self) -> None:
        """Call the net as the model is wrapped now."""
        self.forward: Callable[..., Any] = self.in_precision(forward_of(self.wrapped))

    def lend(self, model: Module | None) -> None:
        """Call another model of the same kind from now on; None to refer to none."""
        self.wrapped.module = model  # type: ignore[assignment]
        if model is None:
            self.forward = self._nothing
        else:
            self.enter_again()

    def _nothing(self, *given: Any, **named: Any) -> Any:
        raise RuntimeError("a step was called between two calls of its verb")

    def in_precision(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Return the same call of the net in the strategy's precision; also traced."""
        if self.is_plain:
            return forward

        def call(*given: Any, **named: Any) -> Any:
            with self._precision.autocast(self._kind):
                outputs = forward(*given, **named)
            return self._precision.widen(outputs)

        return call

    def __call__(self, x: Tree, forward: Callable[..., Any] | None = None) -> Any:
        """Return the net's outputs.

        Args:
            x: a batch's inputs, on the device.
            forward: another way to call the net, in the right precision.
        """
        forward = forward or self.forward
        return forward(x) if type(x) is torch.Tensor else self.caller(forward, x)

    def arguments(self, x: Tree) -> tuple[Sequence[Any], Mapping[str, Any]]:
        """Return a forward's arguments for a batch's inputs: by position, and by keyword."""
        return ((x,), {}) if isinstance(x, torch.Tensor) else self.caller.arguments(x)


def forward_of(wrapped: WrappedModel) -> Callable[..., Any]:
    """Return what calls a wrapped model: its network directly, if nothing is around it."""
    if not wrapped.is_bare:
        return partial(wrapped, "")
    model = wrapped.module
    if not (is_plain_wrapper(model) and NET_ITSELF.is_on):
        return model
    parts = model._modules
    before, after = model._forward_pre_hooks, model._forward_hooks
    backward, backward_before = model._backward_hooks, model._backward_pre_hooks

    def forward(*inputs: Any, **named: Any) -> Any:
        if before or after or backward or backward_before or _has_any_global_hook():
            return model(*inputs, **named)
        net: Any = parts["net"]
        return net(*inputs, **named)

    return forward


def is_plain_wrapper(model: nn.Module) -> bool:
    """Whether calling a model returns what its net returns, and does nothing else."""
    kind = type(model)
    is_ours = getattr(kind, "forward", None) is Module.forward
    is_ours = is_ours and kind.__call__ is nn.Module.__call__ and "forward" not in vars(model)
    return is_ours and isinstance(model.net, nn.Module)
