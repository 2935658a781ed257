"""The doors into a module: any of its methods by name, also through a wrapper's `forward`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn


class Door:
    """A way into a module: any of its methods by name.

    Args:
        module: whose methods are called.

    Attributes:
        net: the module, which error messages describe.
        weights: None where a call returns what the method returned. Where several replicas
            compute parts of a batch, the number of samples of each in the last call: its outputs
            are gathered then.
        weigh: gives what a replica's own loss is the mean over, from its outputs and its inputs;
            None where that is its samples.
    """

    weights: list[int] | None = None
    weigh: Callable[[Any, Any], float | torch.Tensor | None] | None = None

    def __init__(self, module: nn.Module) -> None:
        self.net = module

    def __call__(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """What the named method returns; `""` calls the module itself."""
        target = getattr(self.net, method) if method else self.net
        return target(*args, **kwargs)


class StepRouter(nn.Module):
    """Stands between a wrapper (DDP, FSDP) and the model, and calls the method that is named.

    Wrappers arm the exchange of gradients in their own `forward`. A step that went past it
    would train each rank apart, silently.

    Args:
        model: whose methods are called.
        door: the way into it; None for the methods themselves.
        carrier: a parameter more that the wrapper averages (`Strategy.count_carrier`).
    """

    def __init__(
        self, model: nn.Module, door: Door | None = None, carrier: nn.Parameter | None = None
    ) -> None:
        super().__init__()
        self.model = model
        # After the model's, so that theirs keep their numbers; wrappers name parameters by these.
        self.carrier = nn.ParameterList([] if carrier is None else [carrier])
        self._door = Door(model) if door is None else door

    def forward(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call `model.<method>(*args, **kwargs)`; `""` calls the model itself."""
        return self._door(method, *args, **kwargs)
