"""Parameters, inputs and arithmetic all in one number type."""

from __future__ import annotations

from typing import Any

import torch

from fitkit.distributed.precision.base import (
    Precision,
    cast,
    check_pair,
    restore_layers,
    widened,
)
from fitkit.errors import ConfigurationError


class TruePrecision(Precision):
    """The module is cast, in place, to one dtype.

    Integer, boolean and complex tensors stay as they are. The module keeps that dtype after a run.
    If you compile `"32-true"` or a mixed precision, it gets its own dtype back with the next run,
    but not the digits that were rounded off.
    """

    dtype: torch.dtype

    def __init__(self) -> None:
        self.compute_dtype: torch.dtype = self.dtype

    def check(self, device: torch.device) -> None:
        check_pair(self.name, self.dtype, device)

    def convert(self, module: torch.nn.Module) -> None:
        restore_layers(module)
        cast(module, self.dtype)

    def input_dtype(self, module: torch.nn.Module) -> torch.dtype:
        return self.dtype

    def widen(self, tree: Any) -> Any:
        return widened(tree)


class DoublePrecision(TruePrecision):
    """All in float64."""

    name = "64-true"
    dtype: torch.dtype = torch.float64


class BFloat16Precision(TruePrecision):
    """All in bfloat16: float32's range with 2 to 3 digits, in half the memory.

    An update of less than 1/512 of a weight is rounded off; `"bf16-mixed"` keeps it.
    """

    name = "bf16-true"
    dtype: torch.dtype = torch.bfloat16


class HalfPrecision(TruePrecision):
    """All in float16: numbers from 6e-8 to 65504, and no loss scaling.

    Meant for inference and for nets that are known to train so; `"16-mixed"` keeps the weights
    in float32 and scales the loss.
    """

    name = "16-true"
    dtype: torch.dtype = torch.float16

    def check_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        for group in optimizer.param_groups:
            eps = group.get("eps")
            if not isinstance(eps, float) or eps == 0 or not _vanishes(eps):
                continue
            kind = type(optimizer).__name__
            raise ConfigurationError(
                f"{kind}'s eps={eps:g} is 0 in float16, so precision='16-true' would divide by "
                f"0 and train to NaN. Give compile functools.partial({kind}, eps=1e-4), "
                "or write precision='16-mixed' or 'bf16-true'.",
                code="FK027",
            )


def _vanishes(number: float) -> bool:
    return torch.tensor(number, dtype=torch.float16).item() == 0
