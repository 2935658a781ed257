"""Losses: names, torch.nn losses and callables as one kind of object, for one output or several.

Users find those that have arguments of their own here.
"""

from typing import TYPE_CHECKING

from fitkit.losses.compiled import CompiledLoss as CompiledLoss
from fitkit.losses.compiled import Term as Term
from fitkit.losses.loss import Ask as Ask
from fitkit.losses.loss import Count as Count
from fitkit.losses.loss import Loss as Loss
from fitkit.losses.loss import checked_count as checked_count
from fitkit.losses.loss import resolve as resolve
from fitkit.registry import imported_on_demand

if TYPE_CHECKING:
    from fitkit.extras.distillation import Distillation
else:
    __getattr__ = imported_on_demand(
        __name__, {"Distillation": "fitkit.extras.distillation:Distillation"}
    )

__all__ = ["Distillation"]


def __dir__() -> list[str]:
    """List the public names only."""
    return __all__
