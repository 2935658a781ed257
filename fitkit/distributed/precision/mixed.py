"""Parameters in their own number type; what gains by it is computed in half precision."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch

from fitkit.distributed.precision.base import Precision, check_pair, widened
from fitkit.errors import ConfigurationError


class MixedPrecision(Precision):
    """Autocast: matrix products and convolutions in a half type, the rest in float32.

    Reference: Micikevicius et al., Mixed Precision Training, 2018, arXiv:1710.03740.
    """

    half: torch.dtype

    def __init__(self) -> None:
        self.compute_dtype: torch.dtype = self.half

    def check(self, device: torch.device) -> None:
        check_pair(self.name, self.half, device)

    def autocast(self, device_type: str) -> AbstractContextManager[Any]:
        # A new one each time: one object can't surround a step within a step.
        return torch.autocast(device_type, self.half)

    def widen(self, tree: Any) -> Any:
        return widened(tree)


class BFloat16Mixed(MixedPrecision):
    """Autocast to bfloat16, which has float32's range: no loss scaling is needed."""

    name = "bf16-mixed"
    half: torch.dtype = torch.bfloat16


class HalfMixed(MixedPrecision):
    """Autocast to float16, with the loss scaled so that small gradients don't vanish."""

    name = "16-mixed"
    half: torch.dtype = torch.float16

    def convert(self, module: torch.nn.Module) -> None:
        super().convert(module)
        for name, parameter in module.named_parameters():
            if parameter.requires_grad and parameter.dtype is torch.float16:
                raise ConfigurationError(
                    f"precision='16-mixed' keeps the weights in float32, but {name} is float16, "
                    "whose gradients can't be unscaled. Call .float() on the net, or write "
                    "precision='16-true' or 'bf16-mixed'."
                )

    def scaler(self, device: torch.device) -> torch.amp.GradScaler:
        return torch.amp.GradScaler(device.type)
