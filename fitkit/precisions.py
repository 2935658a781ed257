"""Precisions as objects: those with options, and the base class for your own.

`compile(precision=…)` takes a name or one of these objects.
"""

from typing import TYPE_CHECKING

from fitkit.distributed.precision import Precision
from fitkit.registry import imported_on_demand

if TYPE_CHECKING:
    from fitkit.extras.float8 import Float8Mixed
else:
    __getattr__ = imported_on_demand(__name__, {"Float8Mixed": "fitkit.extras.float8:Float8Mixed"})

__all__ = ["Float8Mixed", "Precision"]


def __dir__() -> list[str]:
    """List the public names only."""
    return __all__
