"""The doors into a module: any of its methods by name, also through a wrapper's `forward`."""

from __future__ import annotations

from typing import Any

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
    """

    weights: list[int] | None = None

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
    """

    def __init__(self, model: nn.Module, door: Door | None = None) -> None:
        super().__init__()
        self.model = model
        self._door = Door(model) if door is None else door

    def forward(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call `model.<method>(*args, **kwargs)`; `""` calls the model itself."""
        return self._door(method, *args, **kwargs)
