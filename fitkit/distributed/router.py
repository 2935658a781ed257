"""The one door into a wrapped module: any of its methods enters through `forward`."""

from __future__ import annotations

from typing import Any

from torch import nn


class StepRouter(nn.Module):
    """Stands between a wrapper (DDP, FSDP) and the model, and calls the method that is named.

    Wrappers arm the exchange of gradients in their own `forward`. A step that went past it
    would train each rank apart, silently.

    Args:
        model: whose methods are called.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call `model.<method>(*args, **kwargs)`; `""` calls the model itself."""
        target = getattr(self.model, method) if method else self.model
        return target(*args, **kwargs)
